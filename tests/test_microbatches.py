from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.microbatches import MicroBatches


def test_parts_together_are_the_batch() -> None:
    x, row = torch.arange(12).reshape(6, 2), torch.ones(1, 2)
    batch = MicroBatches((x, 3), {"row": row}, 3)
    parts = [batch[k] for k in range(3)]
    assert torch.equal(torch.cat([args[0] for args, _ in parts]), x)
    assert all(args[1] == 3 and kwargs["row"] is row for args, kwargs in parts)


def test_a_part_of_a_split_batch_has_rows_of_each_rank() -> None:
    with sl.simulate(data=2):
        x = sl.shard(torch.arange(8.0), "data")
        batch = MicroBatches((x,), {}, 2)
        assert [sl.unshard(batch[k][0][0]).tolist() for k in range(2)] == [
            [0, 1, 4, 5],
            [2, 3, 6, 7],
        ]


@pytest.mark.parametrize(("rows", "count", "fits"), [(16, 7, 4), (6, 4, 3), (5, 2, 1)])
def test_sizes_that_do_not_split_are_refused_with_one_that_does(
    rows: int, count: int, fits: int
) -> None:
    with pytest.raises(sl.errors.UnevenSplit) as caught:
        MicroBatches((torch.zeros(rows, 2),), {}, count)
    assert f"microbatches={fits})" in (caught.value.fix or "")


@pytest.mark.parametrize("axes", [{}, {"pipe": 2}], ids=["plain", "stages"])
def test_weights_make_the_mean_over_tokens_that_of_the_whole(axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 5)).double()
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 5, (8,))
    y[[0, 3, 6]] = -100

    def loss(run: Any, x: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(run(x), y)

    want = loss(net, x, y)
    want.backward()
    with sl.simulate(**axes or {"data": 1}):
        stages = {"stages": sl.Stages("pipe")} if axes else {}
        apply, params = sl.parallelize(net, [("*", "...")], **stages)
        step = sl.value_and_grad(
            lambda p, x, y: loss(lambda x: apply(p, x), x, y),
            microbatches=4,
            weigh=lambda x, y: (y != -100).sum(),
        )
        with sl.constants():
            got, grads = step(params, x, y)
    assert abs(got.item() - want.item()) < 1e-12
    for n, p in net.named_parameters():
        assert p.grad is not None and (sl.unshard(grads[n]) - p.grad).abs().max() < 1e-12


@pytest.mark.parametrize("axes", [{"data": 1}, {"pipe": 2}], ids=["plain", "stages"])
def test_a_weighed_loss_has_the_dtype_of_the_loss(axes: dict[str, int]) -> None:
    """On every rank alike: the others wait for a loss as shapes alone say it."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with sl.simulate(**axes):
        stages = sl.Stages("pipe") if "pipe" in axes else None
        apply, params = sl.parallelize(net, [("*", "...")], stages=stages)
        step = sl.value_and_grad(
            lambda p, x: apply(p, x).mean(), microbatches=2, weigh=lambda x: x.sum()
        )
        assert step(params, sl.shard(torch.ones(4, 4), "..."))[0].dtype == torch.float32


@pytest.mark.parametrize("reached", [True, False], ids=["reached", "unreached"])
def test_the_last_micro_batch_sums_gradients_while_its_backward_runs(reached: bool) -> None:
    """Also those that it alone does not reach: their sums are of the others."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)]).double()
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)
    if not reached:
        y[-2:] = -100

    def loss(run: Any, x: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(run(x), y)

    loss(net, x, y).backward()
    with sl.simulate(data=2):
        apply, params = sl.parallelize(net, [("*", "...")])
        tx = sl.optim.zero(sl.optim.sgd(1.0), axis="data", stage=2, bucket_mb=1e-6)
        step = sl.value_and_grad(
            lambda p, x, y: loss(lambda x: apply(p, x), x, y),
            into=tx,
            microbatches=4,
            weigh=lambda x, y: (y != -100).sum(),
        )
        with sl.seeing.timeline() as line, sl.constants():
            _, grads = step(params, x, y)
        backward = [s for s in line.operations if s.backward]
        first = min(s.start for s in line.collectives if s.name == "psum_scatter")
        assert (first < max(s.start for s in backward)) == reached
        updates, _ = tx.update(grads, tx.init(params), params)
        for n, p in net.named_parameters():
            assert p.grad is not None and (sl.unshard(updates[n]) + p.grad).abs().max() < 1e-12


class _Shifts(torch.nn.Linear):
    """A product with two vectors added to it."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.a, self.b = (torch.nn.Parameter(torch.randn(4)) for _ in "ab")

    def forward(self, input: Any) -> Any:
        return super().forward(input) + self.a + self.b


@pytest.mark.parametrize("axes", [{"data": 1}, {"pipe": 2}], ids=["plain", "stages"])
def test_micro_batches_of_one_row_have_sums_of_their_own(axes: dict[str, int]) -> None:
    """Gradients of what is added are views of one tensor, which no sum is made in."""
    torch.manual_seed(0)
    net, x = torch.nn.Sequential(_Shifts(), _Shifts()).double(), torch.randn(3, 4).double()
    net(x).square().mean().backward()
    with sl.simulate(**axes):
        stages = {"stages": sl.Stages("pipe", example=(x,))} if "pipe" in axes else {}
        apply, params = sl.parallelize(net, [("*", "...")], **stages)
        step = sl.value_and_grad(lambda p, x: apply(p, x).square().mean(), microbatches=3)
        _, grads = step(params, x)
    for n, p in net.named_parameters():
        torch.testing.assert_close(sl.unshard(grads[n]), p.grad)
