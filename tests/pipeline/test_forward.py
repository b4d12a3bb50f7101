import gc
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.out(self.gate(x).tanh())


class _Collects(nn.Module):
    """Collects outputs inside its blocks by hooks, as transformers does with router logits."""

    def __init__(self, reads_input: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.reads_input = reads_input

    def forward(self, x: Any) -> Any:
        gates: list[Any] = []

        def hook(m: nn.Module, args: Any, out: Any) -> None:
            gates.append(args[0] if self.reads_input else out)

        handles = [b.gate.register_forward_hook(hook) for b in self.blocks]
        for b in self.blocks:
            x = b(x)
        for h in handles:
            h.remove()
        return x.square().mean() + sum(g.square().mean() for g in gates)


def test_hooks_in_blocks_of_other_stages_get_their_outputs() -> None:
    torch.manual_seed(0)
    net, x = _Collects().double(), torch.randn(4, 4, dtype=torch.float64)
    want = net(x)
    want.backward()
    with sl.simulate(pipe=4):
        apply, params = sl.parallelize(net, [("*", "...")], stages=sl.Stages("pipe", example=(x,)))
        loss, grads = sl.value_and_grad(lambda p, x: apply(p, x))(params, x)
    assert abs(loss.item() - want.item()) < 1e-12
    for n, p in net.named_parameters():
        assert p.grad is not None and (sl.unshard(grads[n]) - p.grad).abs().max() < 1e-12


def test_a_hook_that_reads_the_input_of_another_stages_module_is_refused() -> None:
    x = torch.randn(4, 4)
    with sl.simulate(pipe=2), pytest.raises(sl.ShardError, match="did not return"):
        sl.parallelize(_Collects(True), [("*", "...")], stages=sl.Stages("pipe", example=(x,)))


def test_dropout_draws_what_the_whole_would() -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)])
    x, found = torch.randn(8, 4), []
    for axes in ({"data": 2}, {"pipe": 2, "data": 2}, {"pipe": 4, "data": 2}):
        with sl.simulate(**axes):
            stages = {"stages": sl.Stages("pipe")} if "pipe" in axes else {}
            apply, params = sl.parallelize(
                net, [("*", "...")], inputs={"input": "data ."}, **stages
            )
            sl.random.seed(1)
            step = sl.value_and_grad(lambda p, x: apply(p, x).square().mean(), microbatches=2)  # noqa: B023
            found.append([step(params, x)[0].item() for _ in range(2)])
    sl.random.seed(None)
    assert found[0] == found[1] == found[2] and found[0][0] != found[0][1]


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
@pytest.mark.parametrize("remat", ["full", "products"])
def test_a_step_leaves_nothing_behind(schedule: str, remat: str) -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4)])
    x, counts = torch.randn(4, 4), []
    with sl.simulate(pipe=2):
        stages = sl.Stages("pipe", schedule=schedule)
        apply, params = sl.parallelize(net, [("*", "...")], remat=[("*", remat)], stages=stages)
        step = sl.value_and_grad(lambda p, x: apply(p, x).square().mean(), microbatches=4)
        for _ in range(3):
            step(params, x)
            gc.collect()
            counts.append(sum(type(o) is torch.Tensor for o in gc.get_objects()))
    assert counts[1] == counts[2]
