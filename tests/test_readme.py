"""The pictures, commands, versions and figures of README.md are those of the library and its pages."""

import argparse
import contextlib
import io
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_picture_is_what_visualize_draws() -> None:
    with sl.simulate(x=2, y=2):
        assert sl.visualize(sl.shard(torch.zeros(4, 6), "x y")) in README


def test_the_example_prints_what_stands_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    block, printed = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.S)[0]
    exec(block, {})
    assert capsys.readouterr().out == printed


def test_the_commands_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"make (\w+)", README):
        assert f"\n{command}:" in makefile


def printed_by(program: str) -> str:
    """What a program prints on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program, {})
    return out.getvalue()


def test_the_ten_lines_run_on_four_processes_as_they_are(pool: Any) -> None:
    """There ``make_mesh`` stands for ``simulate``, every process is seeded alike, and that is all.

    That ``make_mesh`` meets under torchrun is in tests/mesh/test_process.py.
    """
    block = re.findall(r"```python\n(.*?)```", README, re.S)[0]
    seeded = block.replace("\nwith", "\ntorch.manual_seed(0)\nwith", 1)
    printed = pool.run(printed_by, seeded.replace("simulate(", "make_mesh("), x=4)
    assert len(printed) == 4 and len(set(printed)) == 1, printed
    assert re.search(r"moved \d+ bytes per rank, gradient \S+", printed[0]), printed


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Version {'.'.join(project['version'].split('.')[:2])}," in README
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert f"Python {' and '.join(pythons)}," in README
    assert any(d == "torch>=2.11" for d in project["dependencies"]) and "torch 2.11" in README
    forge = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "torch==2.11.0" in forge and all(f'"{python}"' in forge for python in pythons)


def test_figures_have_their_command() -> None:
    """A table of README.md names what measures each row; so does each section of the measurements."""
    table = README[README.index("| measured on") :].split("\n\n")[0].splitlines()[2:]
    for row in table:
        assert re.search(r"`(python -m benchmarks\.\w+|make \w+)`", row), row
    page = (ROOT / "docs" / "measurements.md").read_text()
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        found = re.findall(r"python -m (benchmarks|tests|shardlib)((?:\.\w+)*)", section)
        assert found or re.search(r"`make \w+|`shardlib \w+|torchrun|pytest", section), section[:80]
        for room, name in found:
            file = ROOT / room / Path(*name.removeprefix(".").split("."))
            assert room == "shardlib" or file.with_suffix(".py").exists() or file.is_dir(), file


def measured() -> list[str]:
    """The commands of each section of the measurements, also with options that it names alone."""
    page = (ROOT / "docs" / "measurements.md").read_text()
    found = set()
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", section)]
        bare = ""
        for span in spans:
            if re.match(r"python -m (benchmarks|tests)\.", span):
                bare = span.partition(" --")[0]
                found.add(span)
            elif bare and span.startswith("--"):
                found.add(f"{bare} {span}")
    return sorted(found)


class Parsed(Exception):
    """The arguments were taken: what is measured is not run."""


@pytest.mark.parametrize("command", measured())
def test_a_command_of_the_measurements_takes_its_options(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *given: Any) -> None:
        taken(self, *given)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    _, _, module, *options = shlex.split(command)
    program = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
    if "ArgumentParser" not in program:  # it reads a word, or nothing
        assert all(f'"{word}"' in program for word in options), options
        return
    monkeypatch.setattr("sys.argv", [module, *options])
    monkeypatch.delitem(sys.modules, module, raising=False)  # another test may have imported it
    with pytest.raises(Parsed):
        runpy.run_module(module, run_name="__main__")


def test_what_make_measures_is_in_the_makefile() -> None:
    page = (ROOT / "docs" / "measurements.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make (\w+)", page))
    assert named >= {"bench", "demo", "test"}
    assert not [n for n in named if f"\n{n}:" not in makefile]
