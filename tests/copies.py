"""Copies of sharded models, drawn: each holds what the same copy of a plain model holds.

    python -m tests.copies [--count 500] [--seed 0]

One to six operations on a small model under a drawn recipe and mesh, and the same on the plain one:
copies by deepcopy, pickle, torch.save and state dicts in every direction, steps in place of any of
them, averages, snapshots that are kept and written to.  At the end values, gradients, flags, ties
and outputs of every object are equal, and memory is shared where torch shares it.
"""

import argparse
import copy
import io
import pickle
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardlib as sl

MESHES = [{"x": 2, "y": 2}, {"x": 4, "y": 1}, {"x": 1, "y": 4}]


class Net(nn.Module):
    """Two linear layers that may be tied, a norm with buffers, an embedding that may be frozen."""

    def __init__(self, width: int, tied: bool, frozen: bool, norm: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        if tied:
            self.down.weight = self.up.weight
        self.embed.weight.requires_grad_(not frozen)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x + self.down(torch.tanh(self.up(self.norm(x))))


IDS = torch.tensor([0, 3, 5, 7, 1, 1, 2, 6])
MATRICES, VECTORS = ["x .", ". x", "x y", "y x", "(x y) .", "...", ". (y x)"], ["x", "y", "..."]


def models(draw: random.Random) -> tuple[nn.Module, Any]:
    """A plain model, and what shards a copy of it by drawn rules."""
    torch.manual_seed(draw.randrange(100))
    width, pad = (8, False) if draw.random() < 0.8 else (6, True)
    flags = [draw.random() < p for p in (0.3, 0.3, 0.3)]
    plain = Net(width, *flags).double()
    inputs = {"ids": draw.choice(["...", "x"])}

    def sharded() -> nn.Module:
        rules = [
            (n, draw.choice(MATRICES if p.ndim == 2 and n.split(".")[0] != "embed" else VECTORS))
            for n, p in plain.named_parameters()
            if p.ndim < 2 or not n.startswith("embed")
        ]
        rules.append(
            ("embed.weight", draw.choice(["...", "x ."] if pad else ["...", "x .", ". x"]))
        )
        return sl.as_module(*sl.parallelize(plain, rules, inputs=inputs, pad=pad))

    return plain, sharded


class Objects:
    """Pairs of a plain model and a sharded one, which are to be alike."""

    def __init__(self, draw: random.Random, real: bool) -> None:
        self.draw, self.real = draw, real
        plain, self.make = models(draw)
        self.plain, self.mine = [plain], [self.make()]
        self.steps: dict[int, tuple[Any, Any]] = {}
        self.averages: list[tuple[AveragedModel, AveragedModel]] = []
        self.kept: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def add(self, plain: nn.Module, mine: nn.Module) -> None:
        self.plain.append(plain)
        self.mine.append(mine)

    def one(self) -> int:
        return self.draw.randrange(len(self.plain))

    def deepcopy(self) -> None:
        i = self.one()
        self.add(copy.deepcopy(self.plain[i]), copy.deepcopy(self.mine[i]))

    def pickled(self) -> None:
        i = self.one()
        if self.real:  # a block is not the tensor
            try:
                pickle.dumps(self.mine[i])
                raise AssertionError("blocks of a running job were pickled")
            except sl.ShardError as e:
                assert "sl.unshard" in str(e) or "mesh" in str(e)
            return
        self.add(*(pickle.loads(pickle.dumps(m[i])) for m in (self.plain, self.mine)))

    def saved(self) -> None:
        """``torch.save`` of a state dict, into another or the same."""
        i, j = self.one(), self.one()
        for mine, m in ((False, self.plain), (True, self.mine)):
            state, file = m[i].state_dict(), io.BytesIO()
            torch.save(sl.unshard(state) if self.real and mine else state, file)
            file.seek(0)
            m[j].load_state_dict(torch.load(file))

    def loaded(self) -> None:
        """From one to the other, or from the plain one."""
        i, j, full = self.one(), self.one(), self.draw.random() < 0.5
        state = self.plain[i].state_dict() if full else self.mine[i].state_dict()
        self.mine[j].load_state_dict(state)
        self.plain[j].load_state_dict(self.plain[i].state_dict())

    def assigned(self) -> None:
        i, j = self.one(), self.one()
        state = copy.deepcopy(self.mine[i].state_dict())
        self.mine[j].load_state_dict(state, assign=True)
        self.plain[j].load_state_dict(copy.deepcopy(self.plain[i].state_dict()), assign=True)
        self.steps.pop(j, None)

    def resharded(self) -> None:
        """Into a new one under other rules."""
        i, other = self.one(), self.make()
        other.load_state_dict(self.mine[i].state_dict())
        plain = copy.deepcopy(self.plain[0]).requires_grad_(True)
        for p, q in zip(plain.parameters(), other.parameters(), strict=True):
            p.requires_grad_(q.requires_grad)
        plain.load_state_dict(self.plain[i].state_dict())
        self.add(plain, other.train(plain.training))

    def step(self) -> None:
        i = self.one()
        if i not in self.steps:
            kind: Any = self.draw.choice([torch.optim.SGD, torch.optim.AdamW])
            self.steps[i] = tuple(  # type: ignore[assignment]
                kind([p for p in m[i].parameters() if p.requires_grad], lr=0.1)
                for m in (self.plain, self.mine)
            )
        keep = self.draw.random() < 0.5
        for m, tx in zip((self.plain, self.mine), self.steps[i], strict=True):
            tx.zero_grad()
            with sl.implicit(2**20):  # drawn layouts need not meet well
                m[i](IDS).pow(3).sum().backward()
            tx.step()
            if not keep:
                tx.zero_grad()

    def optimizer(self) -> None:
        """Its state by state_dict, deepcopied, into one made anew."""
        for i, both in list(self.steps.items()):
            new = []
            for m, tx in zip((self.plain, self.mine), both, strict=True):
                again = type(tx)([p for p in m[i].parameters() if p.requires_grad], lr=1.0)
                again.load_state_dict(copy.deepcopy(tx.state_dict()))
                new.append(again)
            self.steps[i] = tuple(new)  # type: ignore[assignment]

    def average(self) -> None:
        i = self.one()
        ema = get_ema_multi_avg_fn(0.5)
        both = [AveragedModel(m[i], multi_avg_fn=ema) for m in (self.plain, self.mine)]
        self.averages.append((both[0], both[1]))
        for (old, mine), j in zip(self.averages, [self.one() for _ in self.averages], strict=True):
            old.update_parameters(self.plain[j])
            with sl.implicit(2**20):  # of another recipe
                mine.update_parameters(self.mine[j])

    def snapshot(self) -> None:
        """One that is kept, and one that is written to."""
        i = self.one()
        whole = sl.unshard(dict(self.mine[i].named_parameters()))
        self.kept.append(
            (
                {n: p.detach().clone() for n, p in self.plain[i].named_parameters()},
                sl.unshard(dict(self.mine[i].named_parameters())),
            )
        )
        with torch.no_grad():
            for t in whole.values():
                t.zero_()

    def mode(self) -> None:
        i, flag = self.one(), self.draw.random() < 0.5
        self.plain[i].train(flag)
        self.mine[i].train(flag)

    def check(self) -> None:
        for old, new in self.kept:
            for n, t in old.items():
                _close(n, new[n].detach(), t)
        pairs = [*zip(self.plain, self.mine, strict=True), *self.averages]
        for plain, mine in pairs:
            theirs, ours = dict(plain.named_parameters()), dict(mine.named_parameters())
            assert list(theirs) == list(ours)  # ties are ties
            for n, p in theirs.items():
                q = ours[n]
                assert isinstance(q, nn.Parameter) and isinstance(q, sl.ShardedTensor), n
                assert p.requires_grad == q.requires_grad and (p.grad is None) == (
                    q.grad is None
                ), n
                _close(n, sl.unshard(q).detach(), p.detach())
                if p.grad is not None:
                    _close(f"{n}.grad", sl.unshard(q.grad), p.grad)  # type: ignore[arg-type]
            for n, b in plain.named_buffers():
                found = dict(mine.named_buffers())[n]
                found = sl.unshard(found) if isinstance(found, sl.ShardedTensor) else found
                _close(n, found.to(b.dtype), b)
        assert _shared([p for p, _ in pairs]) == _shared([m for _, m in pairs])
        for plain, mine in pairs:
            with torch.no_grad(), sl.implicit(2**20):
                _close("output", mine(IDS), plain(IDS))


def _shared(models: list[nn.Module]) -> list[int]:
    """The first place of each parameter's memory."""
    raws = [getattr(p, "raw", p) for m in models for p in m.parameters()]
    at = [r.untyped_storage().data_ptr() for r in raws]
    return [at.index(a) for a in at]


def _close(name: str, a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9, msg=lambda m: f"{name}: {m}")


OPERATIONS = [
    Objects.deepcopy, Objects.deepcopy, Objects.pickled, Objects.saved, Objects.loaded,
    Objects.assigned, Objects.resharded, Objects.step, Objects.step, Objects.step,
    Objects.optimizer, Objects.average, Objects.snapshot, Objects.mode,
]  # fmt: skip


def run(seed: int, real: bool) -> None:
    """One drawn sequence on the mesh in scope."""
    draw = random.Random(seed)
    objects = Objects(draw, real)
    done = []
    try:
        for _ in range(draw.randint(1, 6)):
            operation = draw.choice(OPERATIONS)
            done.append(operation.__name__)
            operation(objects)
        objects.check()
    except Exception as e:
        raise AssertionError(f"seed {seed}: {', '.join(done)}: {type(e).__name__}: {e}") from e


def run_real(seeds: list[int]) -> None:
    """The same on every rank of a running job."""
    for seed in seeds:
        run(seed, real=True)


def run_simulated(seeds: list[int]) -> None:
    """Each on one of the meshes."""
    for seed in seeds:
        with sl.simulate(**MESHES[seed % len(MESHES)]):
            run(seed, real=False)


def load_by_rank() -> None:
    """Load a plain state that is another on each rank; refused, and nothing is changed."""
    torch.manual_seed(0)
    plain = nn.Linear(2, 2)
    mine = sl.as_module(*sl.parallelize(plain, [("*", "...")]))
    before = {n: p.raw.clone() for n, p in mine.named_parameters()}  # type: ignore[attr-defined]
    state = {"weight": torch.zeros(2, 2), "bias": torch.full((2,), float(sl.axis_index("x")))}
    try:
        mine.load_state_dict(state)
    except sl.ShardError:
        for n, p in mine.named_parameters():
            assert torch.equal(p.raw, before[n])  # type: ignore[attr-defined]
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    seeds = list(range(given.seed, given.seed + given.count))
    run_simulated(seeds)
    third = max(1, len(seeds) // 3)
    for k, axes in enumerate(MESHES):
        sl.launch(run_real, seeds[k * third : (k + 1) * third], device="cpu", **axes)
    print(f"{len(seeds)} sequences simulated, {3 * third} on four processes: all as plain")


if __name__ == "__main__":
    main()
