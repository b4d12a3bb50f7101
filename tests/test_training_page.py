"""The blocks of docs/training.md run as they stand."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "training.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_page_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS[number], "training.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_what_the_page_names_exists() -> None:
    import shardlib as sl

    for name in set(re.findall(r"`(?:sl\.)?optim\.(\w+)", PAGE)):
        assert hasattr(sl.optim, name), name
    for name in set(re.findall(r"`sl\.(\w+)", PAGE)) - {"optim"}:
        assert hasattr(sl, name), name
