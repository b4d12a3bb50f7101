"""Pages of the site that are made of the library itself: ``make docs`` runs this within mkdocs.

- the start page is README.md, and CHANGELOG.md and CONTRIBUTING.md are pages;
- the reference has a page for each module, which mkdocstrings fills with the signatures and
  docstrings of its public names; ``Labels`` turns their labels (Shapes, Moves, Grad, Raises,
  Source), arguments and examples into Markdown;
- the page of errors runs the example of each error class and shows what it says, with its fix;
- notebooks are pages with the outputs that they hold.

Nothing is downloaded, and every page is made anew.
"""

import contextlib
import doctest
import html
import inspect
import io
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import shardlib as sl

ROOT = Path(__file__).parent.parent
LABELS = ("Shapes", "Moves", "Grad", "Raises", "Source", "Gives")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the reference of the navigation, and add the pages of docs/ that it does not name."""
    nav: Any = config.nav
    sections = {title: entries for item in nav for title, entries in item.items()}
    sections["Reference"] += [
        {("sl" if name == "sl" else f"sl.{name}"): f"reference/{name}.md"} for name in modules()
    ]
    named = set(re.findall(r"[\w./]+\.md", str(nav)))
    rest = sorted(p.name for p in (ROOT / "docs").glob("*.md") if p.name not in named)
    sections["Explanation"] += rest
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of docs/."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Path within the site -> Markdown."""
    found = {"index.md": from_root("README.md"), "changelog.md": from_root("CHANGELOG.md")}
    found["contributing.md"] = from_root("CONTRIBUTING.md")
    found["errors.md"] = errors()
    for name, module in modules().items():
        found[f"reference/{name}.md"] = reference(name, module)
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        found[f"notebooks/{file.stem}.md"] = notebook(file)
    return found


def from_root(name: str) -> str:
    """A file of the repository's root, whose links go to pages instead."""
    text = (ROOT / name).read_text()
    text = re.sub(r"\]\(docs/([\w./-]+)\)", r"](\1)", text)
    text = re.sub(r"\]\((notebooks/\w+)\.ipynb\)", r"](\1.md)", text)
    text = re.sub(r"\]\(CHANGELOG\.md\)", "](changelog.md)", text)
    return re.sub(r"\]\(CONTRIBUTING\.md\)", "](contributing.md)", text)


# ---------------------------------------------------------------- reference


def modules() -> dict[str, Any]:
    """``sl`` and the modules of its face, by the names of their pages."""
    below = {n: getattr(sl, n) for n in sl.__all__ if isinstance(getattr(sl, n), types.ModuleType)}
    return {"sl": sl, **dict(sorted(below.items()))}


def reference(name: str, module: Any) -> str:
    """The page of a module: what it is for, then each of its names, which mkdocstrings documents."""
    title = "sl" if name == "sl" else f"sl.{name}"
    names = [n for n in module.__all__ if not isinstance(getattr(module, n), types.ModuleType)]
    out = [f"# {title}", *described(inspect.cleandoc(module.__doc__ or ""))]
    return "\n".join(out + [f"\n::: {module.__name__}.{n}" for n in names])


class Labels(griffe.Extension):
    """Read the labels, arguments and examples of docstrings for mkdocstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(described(inspect.cleandoc(obj.docstring.value)))


def described(doc: str) -> list[str]:
    """A docstring as Markdown: arguments and labels as lists, examples as code, the rest as text."""
    out: list[str] = []
    for block in blocks(re.sub(r" {2,}(Grad|Raises): ", r"\n\1: ", doc).splitlines()):
        first = block[0]
        if first.startswith(">>> "):
            shown = re.sub(r" *# doctest: .*", "", "\n".join(block))
            out.append(f"\n```pycon\n{shown}\n```\n")
        elif first.startswith("    "):
            out.append("\n```text\n" + inspect.cleandoc("\n".join(block)) + "\n```\n")
        elif item := re.match(r"``(.+?)``(?:, ``(.+?)``)*  +", first):
            names = ", ".join(f"`{n}`" for n in re.findall(r"``(.+?)``", item[0]))
            out.append(f"- {names} — {joined([first[item.end() :], *block[1:]])}")
        elif item := re.match(rf"({'|'.join(LABELS)}):\s*", first):
            out.append(f"- **{item[1]}** {joined([first[item.end() :], *block[1:]])}")
        else:
            out.append(("" if first.startswith("- ") else "\n") + "\n".join(block) + "\n")
    return out


def blocks(lines: list[str]) -> Iterator[list[str]]:
    """Lines that belong together: an example, an argument, a label, a paragraph."""
    block: list[str] = []
    starts = re.compile(rf"``.+?``(, ``.+?``)*  +|({'|'.join(LABELS)}):|>>> ")
    for line in [*lines, ""]:
        example = bool(block) and block[0].startswith(">>> ")
        if not line.strip() or (block and not example and starts.match(line)):
            if block:
                yield block
            block = []
        if line.strip():
            block.append(line)


def joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)


# ---------------------------------------------------------------- errors


def errors() -> str:
    """Every error: when it is raised, an example, and what it then says, with its fix."""
    out = [
        "# Errors",
        "",
        "Every error here is a `ShardError`: its first line says what failed and why; below it are the "
        "operands, the mesh, your line, and one line that would do. This page is made by running the "
        "example of each class. What to do when a job fails is in "
        "[troubleshooting](troubleshooting.md).",
    ]
    for name in sl.errors.__all__:
        kind = getattr(sl.errors, name)
        cause, _, example = inspect.cleandoc(kind.__doc__ or "").partition(">>> ")
        shown = doctest.DocTestParser().get_examples(inspect.cleandoc(kind.__doc__ or ""))
        code = re.sub(r" *# doctest: .*", "", "\n".join(e.source.rstrip() for e in shown))
        said, fix = what_it_says(code, ">>> " + example)
        above = [b.__name__ for b in kind.__mro__[1:] if b.__name__ in sl.errors.__all__]
        also = f" It is a `{above[0]}` too." if above and above[0] != "ShardError" else ""
        out += [f"\n## {name}\n", cause.strip() + also, f"\n```python\n{code}\n```\n"]
        out += [f"```text\n{said}\n```\n"]
        out += [f"**Fix** `{fix}`\n"] if fix else []
    return "\n".join(out)


def what_it_says(code: str, example: str) -> tuple[str, str]:
    """The error's text and its fix; where processes would start, what the example expects."""
    if "launch(" in code:
        expected = [line for line in example.splitlines() if not line.startswith((">>>", "..."))]
        return "\n".join(expected), ""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "train.py", "exec"), {})
    except sl.ShardError as e:
        return f"{type(e).__name__}: {e}", e.fix
    return printed.getvalue().rstrip(), ""


# ---------------------------------------------------------------- notebooks


def notebook(file: Path) -> str:
    """Cells and the outputs that they hold."""
    out: list[str] = []
    for cell in json.loads(file.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            out.append(f"{source}\n")
            continue
        out.append(f"```python\n{source}\n```\n")
        out += [shown for o in cell["outputs"] if (shown := output(o))]
    return "\n".join(out)


def output(found: dict[str, Any]) -> str:
    if found["output_type"] == "stream":
        return "```text\n" + "".join(found["text"]).rstrip() + "\n```\n"
    data = found.get("data", {})
    if "image/png" in data:
        png = "".join(data["image/png"]).strip()
        title = html.escape("".join(data.get("text/plain", [])))
        return f'<p><img alt="{title}" src="data:image/png;base64,{png}"></p>\n'
    if "text/html" in data:
        return f"<div>{''.join(data['text/html'])}</div>\n".replace("\n\n", "\n")
    return "```text\n" + "".join(data.get("text/plain", [])) + "\n```\n"
