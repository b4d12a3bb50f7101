"""``shardlib completion bash``: a script that completes commands, options and keys of ``--set``."""

import argparse

from shardlib.command.config import answer
from shardlib.command.keys import listed
from shardlib.command.main import COMMANDS, parser_of

_SCRIPT = """\
_shardlib() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} words=""
    if [[ $COMP_CWORD == 1 ]]; then
        words="{commands}"
    elif [[ $before == --set ]]; then
        words="{keys}"
        compopt -o nospace 2>/dev/null
    else
        case ${{COMP_WORDS[1]}} in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _shardlib shardlib"""


def script() -> str:
    """Return the script for bash; zsh runs it after ``bashcompinit``.

    Files are completed too.  ``--set`` takes a dotted key, whose ``=`` ends the word for bash.

    >>> script().splitlines()[-1]
    'complete -o default -F _shardlib shardlib'
    """
    cases = [f'            {c}) words="{" ".join(_words(parser_of(c)))}" ;;' for c in COMMANDS]
    keys = [k for k in listed() if k.name.islower()]
    names = {f"{k.table.partition(',')[0]}.{k.name}".removeprefix(".") for k in keys}
    return _SCRIPT.format(
        commands=" ".join(COMMANDS),
        keys=" ".join(sorted(names)),
        cases="\n".join(cases),
    )


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """List the options of a command, and the choices of its arguments."""
    found: dict[str, None] = {}
    for action in parser._actions:
        found |= dict.fromkeys(o for o in action.option_strings if o.startswith("--"))
        if action.option_strings or not action.choices:
            continue
        found |= dict.fromkeys(map(str, action.choices))
        inner = action.choices.values() if isinstance(action.choices, dict) else ()
        for one in inner:
            found |= dict.fromkeys(_words(one))
    return list(found)


def add(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("shell", choices=["bash"], help="write it into ~/.bash_completion")


def main(given: argparse.Namespace) -> int:
    """Run the command."""
    return answer(given, {"script": script()}, script())
