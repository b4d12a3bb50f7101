"""Every python block of README.md runs as it stands; its pictures are what the library draws."""

import re
from pathlib import Path

import pytest
import torch

import shardlib as sl

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize(
    "block", BLOCKS, ids=[b.split("\n")[0] + str(i) for i, b in enumerate(BLOCKS)]
)
def test_blocks_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_picture_is_what_visualize_draws() -> None:
    with sl.simulate(x=2, y=2):
        assert sl.visualize(sl.shard(torch.zeros(4, 6), "x y")) in README


def test_the_commands_are_in_the_makefile() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for command in re.findall(r"make (\w+)", README):
        assert f"\n{command}:" in makefile
