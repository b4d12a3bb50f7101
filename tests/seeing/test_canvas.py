"""Colours and ink are seen on white and on black; pictures leave pyplot alone."""

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardlib as sl
from shardlib.seeing.canvas import INK, PALETTE, Picture, Shown, canvas, colours, tint


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


def picture() -> Picture:
    return Picture(canvas("draw", 1, 1, (2.0, 2.0))[0], "empty")


def drawn(file: str) -> None:
    with sl.simulate(x=2):
        sl.seeing.draw({"a": sl.shard(torch.zeros(2), "x")}, file)


def film(file: str) -> None:
    with sl.simulate(x=2):
        sl.seeing.frames(torch.neg, sl.shard(torch.zeros(2), "x")).save(file)


WRITERS: dict[str, Callable[[str], None]] = {
    "a.png": lambda file: picture().save(file),
    "a.svg": lambda file: picture().save(file),
    "a.pdf": lambda file: picture().save(file),
    "t.json": lambda file: sl.seeing.Timeline().save(file),
    "t.png": lambda file: sl.seeing.Timeline().save(file),
    "d.png": drawn,
    "f.svg": film,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_replaced_only_if_we_wrote_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which is an extra")
    write, mine = WRITERS[name], b"\x89PNG mine" * 20_000
    here, there = tmp_path / name, tmp_path / "disk" / f"of{name}"
    there.parent.mkdir()
    write(str(here))
    ours = here.read_bytes()
    assert ours
    write(str(here))  # ours
    here.write_bytes(b"")
    write(str(here))  # empty
    assert here.read_bytes()
    for text in (mine, b"mine", ours[: len(ours) // 2].replace(b"shardlib", b"matlib")):
        here.write_bytes(text)
        with pytest.raises(sl.ShardError, match="is not replaced"):
            write(str(here))
        assert here.read_bytes() == text
    here.unlink()
    here.symlink_to(there)
    write(str(here))  # through a link, which stays one
    assert here.is_symlink() and there.read_bytes()
    there.write_bytes(mine)
    with pytest.raises(sl.ShardError, match="is not replaced"):
        write(str(here))
    assert here.is_symlink() and there.read_bytes() == mine
    here.unlink()
    here.mkdir()
    (here / "thesis").write_bytes(mine)
    with pytest.raises(OSError):
        write(str(here))
    assert (here / "thesis").read_bytes() == mine
    assert sorted(p.name for p in tmp_path.rglob("*")) == sorted(
        [name, "disk", there.name, "thesis"]
    )


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which is an extra")
    file = tmp_path / "a.png"
    picture().save(file)
    old, broken = file.read_bytes(), picture()
    broken.figure.savefig = lambda f, **_: f.write(b"half") and 1 / 0
    with contextlib.suppress(ZeroDivisionError):
        broken.save(file)
    assert file.read_bytes() == old and os.listdir(tmp_path) == ["a.png"]
    with pytest.raises(sl.ShardError, match=r"is no \.png, \.svg or \.pdf"):
        picture().save(tmp_path / "a.jpg")
