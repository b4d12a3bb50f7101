"""Colours and ink are seen on white and on black; pictures leave pyplot alone."""

import itertools

import pytest

from shardlib.seeing.canvas import INK, PALETTE, Shown, canvas, colours, tint


def lightness(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: float, b: float) -> float:
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


@pytest.mark.parametrize("colour", [INK, *PALETTE])
def test_a_colour_is_seen_on_white_and_on_a_dark_page(colour: str) -> None:
    light = lightness(colour)
    assert contrast(light, 1.0) > 2.4 and contrast(light, lightness("#111111")) > 2.4


def test_colours_that_stand_beside_each_other_differ() -> None:
    assert len(set(PALETTE)) == len(PALETTE)
    assert all(a != b for a, b in itertools.pairwise(colours(20)))
    assert tint(0) != tint(1)


def test_figures_have_no_background() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which is an extra")
    figure, panels = canvas("draw", 2, 3, (3.0, 2.0))
    assert panels.shape == (2, 3)
    assert figure.get_facecolor()[3] == 0 and panels[0][0].get_facecolor()[3] == 0


def test_what_is_shown_is_printed_plain_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Two(Shown):
        def pieces(self) -> list[tuple[str, int | None]]:
            return [("a", 0), ("b", None)]

        def __str__(self) -> str:
            return "ab"

    Two().show()
    assert capsys.readouterr().out == "ab\n"
