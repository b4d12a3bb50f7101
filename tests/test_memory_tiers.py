"""Memory tiers as docs/memory_tiers.md describes them: what its blocks print."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "memory_tiers.md"
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE.read_text(), re.S)


@pytest.mark.parametrize("number", range(4))
def test_the_page_prints_what_stands_below_its_blocks(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    block, printed = BLOCKS[number]
    exec(compile(block, "cell", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == printed
