import torch
from torch import Tensor, nn

import shardlib as sl


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
    cut = apply.stages.cuts["first"]
    crossing = [[str(k.call) for k in row] for row in cut.needs]
    assert crossing == [[], ["blocks.0"], ["blocks.1"], ["embed", "blocks.3"]]
    held = [sorted({n.split(".")[1] for n in row if "blocks" in n}) for row in cut.params]
    assert held == [["0"], ["1"], ["2", "3"], ["3"]]
    assert cut.holders("embed.weight", range(4)) == [0, 3]


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
