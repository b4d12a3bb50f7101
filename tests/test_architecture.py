"""docs/architecture.md and docs/glossary.md name files that exist, rooms stand in import order."""

import re
from pathlib import Path

from tests.test_imports import room

ROOT = Path(__file__).parent.parent
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
