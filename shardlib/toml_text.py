"""Text of keys and values in TOML, which Python reads and does not write."""

import json
import re
from collections.abc import Mapping


def key(name: str) -> str:
    """Format a key: bare, or in quotes.

    >>> key("data"), key("h.0")
    ('data', '"h.0"')
    """
    if re.fullmatch(r"[A-Za-z0-9_-]+", name):
        return name
    return _quoted(name)


def value(x: object) -> str:
    """Format a value.

    >>> value({"pad": True, "rules": [("*", "...")]})
    '{pad = true, rules = [["*", "..."]]}'
    """
    if isinstance(x, str):
        return _quoted(x)
    if isinstance(x, bool):
        return str(x).lower()
    if isinstance(x, list | tuple):
        return f"[{', '.join(map(value, x))}]"
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{key(k)} = {value(v)}' for k, v in x.items())}}}"
    return str(x)


def _quoted(text: str) -> str:
    """Quote a text as JSON does, but for a character that JSON keeps, and pairs that TOML refuses."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
