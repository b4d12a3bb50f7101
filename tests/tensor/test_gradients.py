"""The calculus: where a gradient is summed, and what it looks like in the global view."""

import torch

import shardlib as sl


def test_a_factor_of_a_pending_sum_has_the_same_gradient_on_every_rank() -> None:
    with sl.simulate(x=3):
        for f in (lambda a, b: a * b, lambda a, b: b * a, lambda a, b: a / b):
            p = sl.shard(torch.arange(4.0) + 1, ". + sum(x)")
            s = sl.shard(torch.tensor(2.0), "...").requires_grad_()
            (grad,) = torch.autograd.grad(f(p, s), s, sl.shard(torch.ones(4), "."))
            assert torch.equal(grad.raw, grad.raw[:1].expand(3))
            dense = torch.tensor(2.0, requires_grad=True)
            f(torch.arange(4.0) + 1, dense).sum().backward()
            assert torch.equal(sl.unshard(grad), dense.grad)
