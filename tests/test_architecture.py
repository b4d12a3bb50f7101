"""docs/architecture.md and docs/glossary.md name files that exist, rooms stand in import order."""

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from tests.test_imports import room

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardlib"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_every_file_that_is_named_exists() -> None:
    named = {
        p
        for p in re.findall(r"`([\w./]+)`", PAGE)
        if p.startswith(("shardlib/", "tests/", "docs/"))
    }
    assert len(named) > 25
    assert not [p for p in sorted(named) if not (ROOT / p).exists()]
    links = re.findall(r"\]\(([\w./-]+\.md)\)", PAGE)
    assert links and all((ROOT / "docs" / link).exists() for link in links)


def test_every_word_of_the_glossary_has_a_home() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    rows = re.findall(r"^\| (\w+) \| .+ \| (?:`([\w./]+)`|\[\w+\]\(([\w./]+)\)) \|$", text, re.M)
    words = [word for word, *_ in rows]
    assert len(rows) == text.count("\n| ") - 2 and words == sorted(set(words))
    homes = [ROOT / file if file else ROOT / "docs" / page for _, file, page in rows]
    assert len(homes) >= 40 and not [h for h in homes if not h.exists()]


def test_the_rooms_stand_in_the_order_of_imports() -> None:
    table = re.findall(r"^\| `(shardlib/[\w./]+)` \|", PAGE, re.M)
    places = [room(p.removesuffix(".py").strip("/").replace("/", ".")) for p in table]
    assert len(places) >= 18 and places == sorted(places), list(zip(table, places, strict=True))


def test_no_way_is_longer_than_five_files() -> None:
    for section in PAGE.split("\n## The way of ")[1:]:
        assert 3 <= len(re.findall(r"^\d\. ", section, re.M)) <= 5, section.splitlines()[0]


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    assert {p.name for p in folder.glob("0*.md")} == set(re.findall(r"\]\((0[\w-]+\.md)\)", index))


def entered(call: Callable[[], Any]) -> list[str]:
    """List the files of the library whose functions a call enters, in order, on all threads."""
    found: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            found.append(f"shardlib/{file.relative_to(PACKAGE)}")

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


def product(_: Path) -> list[str]:
    with sl.simulate(x=2, y=2), sl.algorithm(matmul="summa"):
        a, b = (sl.shard(torch.randn(4, 4), "x y") for _ in range(2))
        return entered(lambda: a @ b)


def attention(_: Path) -> list[str]:
    with sl.simulate(s=4):
        q = sl.shard(torch.randn(1, 2, 16, 4), sl.Ring("s", 2, "zigzag"))
        return entered(lambda: sl.ring_attention(q, q, q, algorithm="ring"))


def zero(_: Path) -> list[str]:
    with sl.simulate(data=2):
        tx = sl.optim.zero(sl.optim.adamw(1e-3), "data", stage=2)
        x, params = sl.shard(torch.randn(4, 8), "data ."), {"w": sl.shard(torch.randn(8, 8), "...")}
        state, loss = tx.init(params), lambda p: (x @ p["w"]).square().mean()

        def step() -> None:
            _, gradients = sl.value_and_grad(loss, into=tx)(params)
            sl.optim.step(tx, params, gradients, state)

        return entered(step)


def pipelined(_: Path) -> list[str]:
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(2)])
    with sl.simulate(pipe=2):
        apply, params = sl.parallelize(model, [("*", "...")], stages=sl.Stages("pipe"))
        step = sl.value_and_grad(lambda p, x: apply(p, x).mean(), microbatches=2)
        return entered(lambda: step(params, torch.ones(4, 4)))


def saved(folder: Path) -> list[str]:
    with sl.simulate(x=2):
        tree = {"w": sl.shard(torch.randn(4, 4), "x .")}
        return entered(lambda: sl.save(folder / "saved", tree))


WAYS = {
    "`a @ b`": (product, "shardlib/collectives/backends/stacked.py"),
    "`ring_attention`": (attention, "shardlib/collectives/posted.py"),
    "`zero` at stage 2": (zero, "shardlib/collectives/in_place.py"),
    "a pipelined step": (pipelined, "shardlib/collectives/point_to_point.py"),
    "a checkpoint": (saved, "shardlib/checkpoint/folder.py"),
}


@pytest.mark.parametrize("title", WAYS)
def test_a_way_is_the_way_of_a_call_down_to_its_transfer(title: str, tmp_path: Path) -> None:
    """The numbered files are entered in their order, and then the file that transfers."""
    section = PAGE.split(f"\n## The way of {title}\n")[1].partition("\n## ")[0]
    files = re.findall(r"^\d\. `([\w./]+)`", section, re.M)
    call, transfer = WAYS[title]
    left = iter(call(tmp_path))
    for file in (*files, transfer):
        assert file in left, f"{file} is not entered after those before it"
