from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib.pipeline.flow import BYTE


class _Skips(nn.Module):
    """A skip over all stages, a tied weight, a block called twice, a table of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embed(ids)
        angles = torch.arange(ids.shape[1], dtype=x.dtype)[:, None]
        for block in self.blocks:
            x = block(x) + angles.cos()
        return self.head(self.blocks[3](x) + first)


def test_stages_get_what_they_need_and_nothing_else() -> None:
    with sl.simulate(pipe=4):
        apply, _ = sl.parallelize(_Skips(), [("*", "...")], stages=sl.Stages("pipe"))
    cut = apply.stages.first
    crossing = [[str(k.call) for k, to in cut.users.items() if s in to] for s in range(4)]
    assert crossing == [[], ["blocks.0"], ["blocks.1"], ["embed", "blocks.3"]]
    held = [sorted({n.split(".")[1] for n in row if "blocks" in n}) for row in cut.params]
    assert held == [["0"], ["1"], ["2", "3"], ["3"]]
    assert apply.stages.holders["embed.weight"] == (0, 3)


def test_a_cut_into_stages_has_the_gradients_of_one_process() -> None:
    torch.manual_seed(0)
    net, ids = _Skips().double(), torch.randint(0, 8, (4, 3))
    net(ids).square().mean().backward()
    for size in (1, 2, 4):
        with sl.simulate(pipe=size):
            apply, params = sl.parallelize(net, [("*", "...")], stages=sl.Stages("pipe"))
            step = sl.value_and_grad(lambda p, x: apply(p, x).square().mean(), microbatches=2)  # noqa: B023
            _, grads = step(params, ids)
        for n, p in net.named_parameters():
            assert p.grad is not None and (sl.unshard(grads[n]) - p.grad).abs().max() < 1e-12


class _Passes(nn.Module):
    """A block that keeps, or takes, a tensor other than its argument and its result."""

    def __init__(self, kept: dict[str, Any], number: int, way: str) -> None:
        super().__init__()
        self.linear, self.kept, self.number, self.way = nn.Linear(4, 4), [kept], number, way

    def forward(self, x: Tensor) -> Tensor:
        (kept,) = self.kept
        if self.way == "writes" and self.number == 1:
            x.add_(1)
        h = self.linear(x)
        if self.number == 0:
            kept.update(
                {
                    "keeps its result": {"x": h},
                    "keeps its argument": {"x": x},
                    "between": {"between": h},
                }.get(self.way, {})
            )
        kept.setdefault("squares", []).append(h.square().mean())
        # silent where another stage kept it
        return h + kept["x"] if self.number == 3 and "x" in kept else h


class _Around(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}
        self.embed, self.way = nn.Embedding(8, 4), way
        self.blocks = nn.ModuleList(_Passes(self.kept, i, way) for i in range(4))
        if way == "hook":
            for b in self.blocks:
                b.linear.register_forward_pre_hook(
                    lambda m, args: self.kept["squares"].append(args[0].mean())
                )

    def forward(self, ids: Tensor) -> Tensor:
        self.kept.clear()
        self.kept["squares"] = []
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            first, x = x, block(x)
            if self.way == "writes" and i == 1:
                x = x + first
            if self.way == "between" and i == 0:
                # all stages run this, and only the first has it
                x = x + self.kept["between"]
        return x + sum(self.kept["squares"]) if self.way in ("squares", "hook") else x


@pytest.mark.parametrize(
    "way", ["keeps its result", "keeps its argument", "writes", "squares", "hook", "between"]
)
def test_tensors_that_pass_otherwise_than_as_results_are_refused(way: str) -> None:
    net, whole = _Around(way).double(), [("*", "...")]
    with sl.simulate(pipe=2), pytest.raises(sl.ShardError, match="did not return"):
        sl.parallelize(net, whole, stages=sl.Stages("pipe"))
    with sl.simulate(pipe=1):
        # one stage makes them all
        apply, params = sl.parallelize(net, whole, stages=sl.Stages("pipe"))
        ids = torch.arange(8).reshape(2, 4)
        loss, _ = sl.value_and_grad(lambda p, x: apply(p, x).square().mean())(params, ids)
    assert abs(loss.item() - net(ids).square().mean().item()) < 1e-12


class _Branches(nn.Module):
    """A forward that takes another branch where its mask has no zeros."""

    def __init__(self, holes: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.embed, self.holes = nn.Embedding(8, 4), holes
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.masked = nn.Linear(4, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            if i == 2 and self.holes(mask):
                x = self.masked(x) * mask[..., None]
            x = x + block(x).tanh()
        return x


@pytest.mark.parametrize(
    "holes",
    # the second is transformers' question whether ids are padded
    [lambda mask: not mask.bool().all(), lambda mask: 0 in mask[:, [-1, 0]]],
    ids=["all", "listed"],
)
def test_a_forward_that_branches_on_values_is_cut_for_each_branch(
    holes: Callable[[Tensor], Any],
) -> None:
    torch.manual_seed(0)
    net, ids = _Branches(holes).double(), torch.randint(0, 8, (4, 3))
    ones = torch.ones(4, 3, dtype=torch.long)
    zeros = ones.index_fill(1, torch.tensor(2), 0)
    stages = sl.Stages("pipe", example=(ids, zeros))
    with sl.simulate(pipe=2):
        apply, params = sl.parallelize(net, [("*", "...")], stages=stages)
        step = sl.value_and_grad(lambda p, *b: apply(p, *b).square().mean(), microbatches=2)
        for mask in (ones, zeros, ones, zeros, torch.cat([ones[:2], zeros[:2]])):
            net.zero_grad()
            sum(
                net(*b).square().mean() / 2 for b in zip(ids.chunk(2), mask.chunk(2), strict=True)
            ).backward()
            _, grads = step(params, ids, mask)
            for n, p in net.named_parameters():
                assert (
                    sl.unshard(grads[n]) - (0 if p.grad is None else p.grad)
                ).abs().max() < 1e-12


class _Repeats(nn.Linear):
    """A block that multiplies with its weight several times."""

    def __init__(self, times: int) -> None:
        super().__init__(8, 8)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = super().forward(x)
        return x


class _Worded(nn.Module):
    def __init__(self, times: list[int], words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 8)
        self.blocks = nn.ModuleList(map(_Repeats, times))
        self.head = nn.Linear(8, words)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("times", "words"), [([1, 1, 1, 1, 1, 1], 24), ([5, 1, 1, 1], 8), ([1, 1, 1, 3], 8)]
)
def test_the_slowest_stage_is_as_fast_as_a_cut_makes_it(times: list[int], words: int) -> None:
    """As explained, of products and of bytes in memory, where a byte takes as long as in a cut."""
    where = sl.planning.Cluster(1e9, BYTE * 1e6, bandwidth=1e6)
    blocks = [f"blocks.{i}" for i in range(1, len(times))]

    def forwards(cut: Any) -> tuple[list[str], float]:
        with sl.simulate(pipe=2):
            net, how = _Worded(times, words), sl.Stages("pipe", cut=cut)
            apply, params = sl.parallelize(net, [("*", "...")], stages=how)
            ids = sl.shard(torch.zeros(2, 8, dtype=torch.int64), "...")
            f = lambda p, i: F.cross_entropy(apply(p, i).flatten(0, 1), i.flatten())  # noqa: E731
            found = sl.explain(f, params, ids, microbatches=1, cluster=where)
        seconds = [s.seconds["F"] for s in found.stages]
        return list(map(str, apply.stages.first.begins)), max(seconds)

    begins, slowest = forwards("auto")
    each = {b: forwards(["blocks.0", b])[1] for b in blocks}
    # the cut knows neither the loss nor the bytes of weights
    assert slowest <= 1.1 * min(each.values()), (begins, each)


def test_blocks_without_products_are_dealt_evenly() -> None:
    with sl.simulate(pipe=2):
        model = nn.Sequential(*[nn.LayerNorm(8) for _ in range(4)])
        apply, _ = sl.parallelize(model, [("*", "...")], stages=sl.Stages("pipe"))
    assert [str(c) for c in apply.stages.first.begins] == ["0", "2"]
