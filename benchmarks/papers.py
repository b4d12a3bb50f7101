"""The settings of the papers that shardlib follows, priced on shapes beside what they published.

    python -m benchmarks.papers            the tables, which docs/papers.md holds
    python -m benchmarks.papers --write    into docs/papers.md, each below the line that names it
    python -m benchmarks.papers --only eight

Each scheme is a recipe on a mesh, explained on shapes (``sl.explain``) and priced by the file of a
machine in benchmarks/clusters.  Layers are alike: what 1 and 2 of them hold and do is continued to as
many as the setting has, which ``tests/benchmarks/test_papers.py`` compares with running them all.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import shardlib as sl
from benchmarks import sequence_paper
from examples.gpt import GPT, GPTConfig
from shardlib.planning.explanation import Explanation
from shardlib.planning.work import StepWork

__all__: list[str] = []

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "papers.md"
FEW = 1, 2
"""Layers that are explained; what one more of them adds, each further one does."""


def cluster(name: str) -> sl.planning.Cluster:
    return sl.planning.Cluster.load(HERE / "clusters" / f"{name}.toml")


@dataclass(frozen=True)
class Shape:
    """A model's layers, trained in fp32 with each layer computed again; ``rows`` of a step."""

    layers: int
    width: int
    heads: int
    length: int
    rows: int

    def model(self, layers: int = 0) -> GPT:
        how = GPTConfig(
            ctx=self.length, layers=layers or self.layers, heads=self.heads, embed=self.width
        )
        with torch.device("meta"):
            return GPT(how)


@dataclass(frozen=True)
class Scheme:
    """A recipe on a mesh; ``pinned`` is the algorithm of all its products, else the cheapest are."""

    recipe: str
    mesh: tuple[tuple[str, int], ...]
    pinned: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    def explained(self, shape: Shape, rows: int, layers: int = 0) -> Explanation:
        """Explain forward and backward."""
        model = shape.model(layers)
        with sl.record(**dict(self.mesh)):
            rules = getattr(sl.recipes, self.recipe)(model, **dict(self.options))
            inputs = {"idx": rules.tokens, "targets": rules.labels}
            apply, params = sl.parallelize(
                model, rules, inputs=inputs, pad=True, remat=[("h.*", "full")]
            )
            ids = torch.empty(rows, shape.length, dtype=torch.int64, device="meta")
            with sl.algorithm(matmul=self.pinned) if self.pinned else nullcontext():
                return sl.explain(apply, params, (ids, ids))

    def __str__(self) -> str:
        axes = " ".join(f"{a}={n}" for a, n in self.mesh)
        text = "".join(f", {k}" for k, _ in self.options) + ", as published" * bool(self.pinned)
        return f"`{self.recipe}` {axes}{text}"


@cache
def step(scheme: Scheme, shape: Shape, rows: int) -> tuple[float, StepWork]:
    """Return the most bytes that a rank holds in a step, and its work."""
    less, more = (scheme.explained(shape, rows, n) for n in FEW)
    times = shape.layers - FEW[1]
    work = StepWork()
    work.join(more.work, 1 + times)
    work.join(less.work, -times)
    return more.peak + times * (more.peak - less.peak), work


def largest(scheme: Scheme, shape: Shape, memory: float) -> int:
    """Return the most rows, in units of 8, that fit."""

    def need(rows: int) -> int:
        return round(step(scheme, shape, rows)[0])

    return sequence_paper.most(need, round(memory), 8, 2)


ONE = Scheme("megatron1d", (("x", 64),))
SPLIT = Scheme("megatron1d", (("x", 64),), options=(("sequence", True),))
TWO = Scheme("optimus2d", (("x", 8), ("y", 8)), "summa_y")
TWO_AND_HALF = Scheme("tesseract", (("d", 4), ("x", 4), ("y", 4)), "summa_y")
THREE = Scheme("cube3d", (("x", 4), ("y", 4), ("z", 4)))
OURS = [Scheme(s.recipe, s.mesh) for s in (TWO, TWO_AND_HALF)]
WIDE = Shape(24, 8192, 128, 512, 32)

LINES = Iterator[str]


def priced(machine: str, shape: Shape, schemes: Sequence[Scheme], fits: bool = False) -> LINES:
    """Yield a table: bytes that a rank receives, seconds of a step, and the most rows that fit."""
    where = cluster(machine)
    heads = [
        f"on `{machine}`",
        "GB received",
        f"s a step of {shape.rows} rows",
        "speed over the first",
    ]
    yield _row([*heads, *["the most rows"] * fits])
    yield _row(["---"] * (len(heads) + fits))
    first = 0.0
    for scheme in schemes:
        _, work = step(scheme, shape, shape.rows)
        seconds = where.rates(dict(scheme.mesh)).seconds(work)
        first = first or seconds
        moved = sum(nbytes for nbytes, _ in work.along.values()) / 1e9
        cells = [str(scheme), f"{moved:.1f}", f"{seconds:.2f}", f"{first / seconds:.2f}"]
        if fits:
            cells.append(str(largest(scheme, shape, where.memory)))
        yield _row(cells)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def optimus() -> LINES:
    """Yield Optimus's table."""
    yield from priced("frontera", WIDE, [ONE, SPLIT, TWO, OURS[0]], fits=True)


def tesseract() -> LINES:
    """Yield Tesseract's table."""
    yield from priced("meluxina", WIDE, [ONE, TWO, TWO_AND_HALF, OURS[1]])


def cube() -> LINES:
    """Yield the table of 3D."""
    yield from priced("longhorn", WIDE, [ONE, TWO, THREE])


EIGHT = Shape(24, 2048, 16, 512, 64)


EIGHT_RANKS = [
    Scheme("megatron1d", (("x", 8),)),
    Scheme("optimus2d", (("data", 2), ("x", 2), ("y", 2)), "summa_y"),
    Scheme("tesseract", (("d", 2), ("x", 2), ("y", 2)), "summa_y"),
    Scheme("cube3d", (("x", 2), ("y", 2), ("z", 2))),
    Scheme("ddp", (("data", 8),)),
]


def eight() -> LINES:
    """Yield the table of eight ranks of one machine."""
    yield from priced("eight_a100", EIGHT, EIGHT_RANKS)


def planned() -> LINES:
    """Yield what ``sl.plan`` finds for the same on one axis, with AdamW's state."""
    ids = torch.empty(EIGHT.rows, EIGHT.length, dtype=torch.int64)
    found = sl.plan(
        EIGHT.model(),
        (ids, ids),
        mesh={"a": 4, "b": 2},
        microbatches=1,
        cluster=cluster("eight_a100"),
    )
    yield "| `sl.plan` | |"
    yield "| --- | --- |"
    yield f"| s a step, with AdamW's update | {found.seconds:.2f} |"
    yield f"| GB of a rank, AdamW's state among them | {found.peak / 1e9:.1f} |"
    kept = EIGHT.layers - len(found.remat)
    yield f"| layers computed again, ZeRO | {EIGHT.layers - kept}, {found.zero or 'none'} |"


def bert_bytes(
    mesh: dict[str, int], recipe: sequence_paper.Recipe, algorithm: str, rows: int
) -> int:
    """Return the bytes of a rank in a step of BERT on rows of 512 tokens, all layers explained."""
    return sequence_paper.needs(mesh, recipe, rows, 512, algorithm)


def sequence() -> LINES:
    """Yield the table of BERT base on a ring of 64, beside tensor parallelism over 12."""
    room = round(cluster("piz_daint").memory)
    yield "| BERT base, rows of 512 tokens on `piz_daint` | the most rows | over the first |"
    yield "| --- | --- | --- |"
    first = 0
    for name, mesh, recipe, algorithm, guess in (
        ("`megatron1d` x=12", {"x": 12}, sl.recipes.megatron1d, "", 4),
        ("`ring` s=64, attention `rsa`, as published", {"s": 64}, sequence_paper.ring, "rsa", 64),
        ("`ring` s=64", {"s": 64}, sequence_paper.ring, "ring", 64),
    ):
        need = partial(bert_bytes, mesh, recipe, algorithm)
        rows = sequence_paper.most(need, room, 16, guess)
        first = first or rows
        yield f"| {name} | {rows} | {rows / first:.1f} |"


TABLES: dict[str, Callable[[], LINES]] = {
    "optimus": optimus, "tesseract": tesseract, "cube": cube, "sequence": sequence,
    "eight": eight, "planned": planned,
}  # fmt: skip


def written(page: str, name: str, table: str) -> str:
    """Return the page with a table in place of the one below the line that names it."""
    mark = f"<!-- python -m benchmarks.papers --only {name} -->\n\n"
    before, _, after = page.partition(mark)
    return f"{before}{mark}{table}\n\n{after.partition(chr(10) * 2)[2]}"


def main(argv: Sequence[str] | None = None) -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--only", nargs="*", choices=[*TABLES], default=[*TABLES])
    asked.add_argument("--write", action="store_true", help="into docs/papers.md")
    given = asked.parse_args(argv)
    for name in given.only:
        table = "\n".join(TABLES[name]())
        print(f"{name}\n\n{table}\n", flush=True)
        if given.write:
            PAGE.write_text(written(PAGE.read_text(), name, table))


if __name__ == "__main__":
    main()
