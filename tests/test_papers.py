"""The tables of docs/papers.md are what the command prints."""

import pytest

from benchmarks import papers
from benchmarks.papers import Scheme, Shape

SMALL = Shape(4, 256, 8, 32, 16)


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("megatron1d", (("x", 4),), options=(("sequence", True),)),
        Scheme("optimus2d", (("x", 2), ("y", 2)), "summa_y"),
    ],
    ids=str,
)
def test_few_layers_continued_are_all_of_them(scheme: Scheme) -> None:
    """Bytes that a rank holds and receives, and its operations, of one and two layers and of four."""
    whole = scheme.explained(SMALL, SMALL.rows)
    peak, work = papers.step(scheme, SMALL, SMALL.rows)
    assert peak == whole.peak and work.flops == whole.work.flops
    assert work.touched == whole.work.touched
    assert work.along == whole.work.along


def test_a_row_of_the_page_is_what_the_command_prints() -> None:
    page = papers.PAGE.read_text()
    for row in papers.priced("eight_a100", papers.EIGHT, papers.EIGHT_RANKS[:2]):
        assert f"{row}\n" in page
    assert all(f"--only {name} -->\n\n|" in page for name in papers.TABLES)


def test_a_table_is_written_in_place_of_the_one_before() -> None:
    page = "a\n\n<!-- python -m benchmarks.papers --only cube -->\n\n| old |\n| row |\n\nb\n\nc\n"
    once = papers.written(page, "cube", "| new |")
    assert once == page.replace("| old |\n| row |", "| new |")
    assert papers.written(once, "cube", "| old |\n| row |") == page


@pytest.mark.parametrize(
    "file", sorted((papers.HERE / "clusters").glob("*.toml")), ids=lambda p: p.stem
)
def test_a_machine_is_one_that_a_table_names(file: object) -> None:
    name = getattr(file, "stem", "")
    assert papers.cluster(name).memory > 1e9 and f"`{name}`" in papers.PAGE.read_text()
