"""A trace lists what would make the host wait, with the user's line and the library's."""

import torch

import shardlib as sl


def waited(f: object) -> list[str]:
    with sl.trace(waits=True) as t:
        f()  # type: ignore[operator]
    return [w.what.split(".")[1] for w in t.waits]


def test_operators_whose_result_the_host_must_know_are_listed() -> None:
    x, counts, rows = torch.arange(4.0), torch.tensor([1, 2, 1, 1]), torch.tensor([1, 2])
    assert waited(lambda: x.sum().item()) == ["_local_scalar_dense"]
    assert waited(lambda: x.nonzero()) == ["nonzero"]
    assert waited(lambda: x[x > 1]) == ["index"]
    assert waited(lambda: x.repeat_interleave(counts)) == ["repeat_interleave"]
    assert not waited(lambda: x.masked_fill(x > 1, 0.0) + x[rows].sum())
    y = torch.ones(4)
    assert not waited(lambda: y.__setitem__(x > 1, 2.0))  # a mask that is filled


def test_a_wait_has_the_users_line_and_the_librarys() -> None:
    with sl.simulate(x=2):
        a = sl.shard(torch.ones(4), "x")
        with sl.trace(waits=True) as t:
            a.sum().item()
    (wait,) = t.waits
    assert wait.line.startswith("test_waits.py:") and wait.library.startswith("ops/metadata.py:")
    assert str(t).splitlines()[-1].startswith("      1 times  wait for aten._local_scalar_dense")


def test_a_backward_is_looked_at_and_nothing_is_unless_asked() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * float(grads[0].sum())

    x = torch.ones(3, requires_grad=True)
    assert waited(lambda: Reads.apply(x).sum().backward()) == ["_local_scalar_dense"]
    with sl.trace() as t:
        Reads.apply(x).sum().backward()
    assert not t.waits
