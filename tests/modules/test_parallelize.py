"""Parameters are placed by rules; what cannot be placed is refused by its name."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import shardlib as sl
from examples.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab=32, ctx=8, layers=2, heads=4, embed=16)
IDS = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))


def dense() -> tuple[GPT, torch.Tensor, dict[str, torch.Tensor]]:
    m = GPT(CONFIG).double()
    loss = m(IDS, IDS.roll(-1, 1))
    loss.backward()
    return m, loss.detach(), {n: p.grad for n, p in m.named_parameters()}


@pytest.mark.parametrize("layout", ["q .", "x x", "(x .", None, ("q", None), [Shard(0), Shard(1)]])
def test_an_inputs_layout_that_cannot_be_names_the_input_and_the_fix_runs(layout: Any) -> None:
    space: dict[str, Any] = {
        "sl": sl,
        "module": nn.Linear(4, 5),
        "rules": [("*", "...")],
        "inputs": {"input": layout},
    }
    with sl.simulate(x=2):
        with pytest.raises(
            sl.ShardError, match=r"^parallelize: the layout of input 'input'"
        ) as caught:
            sl.parallelize(space["module"], space["rules"], inputs=space["inputs"])
        eval(caught.value.fix, space)
        space["inputs"] = [("input", "x .")]
        with pytest.raises(sl.errors.RuleLint, match="a mapping") as caught:
            sl.parallelize(space["module"], space["rules"], inputs=space["inputs"])
        eval(caught.value.fix, space)


def test_tied_parameters_are_one_leaf() -> None:
    m = GPT(CONFIG)
    with sl.simulate(x=2, y=2):
        apply, params = sl.parallelize(m, sl.recipes.optimus2d(m))
    assert "lm_head.weight" not in params and apply.tied == {"lm_head.weight": "wte.weight"}


def test_meta_modules_materialise_shard_by_shard(tmp_path: Any) -> None:
    """Blocks are NaN until a checkpoint fills them: using them early cannot go unseen."""
    real = GPT(CONFIG)
    with torch.device("meta"):
        m = GPT(CONFIG)
    with sl.simulate(x=2, y=2):
        _, values = sl.parallelize(real, sl.recipes.optimus2d(real))
        sl.save(tmp_path / "a", values)
        apply, blank = sl.parallelize(m, sl.recipes.optimus2d(m), inputs={"idx": "x ."})
        assert (
            blank["wte.weight"].local.shape == (16, 8)
            and sl.unshard(blank["wte.weight"]).isnan().all()
        )
        params = sl.load(tmp_path / "a", like=blank)
        assert torch.equal(sl.unshard(apply(params, IDS)), sl.unshard(apply(values, IDS)))
    with sl.record(x=2):
        _, p = sl.parallelize(nn.Linear(4, 4, device="meta"), [("*", "...")])
        assert p["weight"].shape == (4, 4)


def test_the_loss_is_the_modules_own() -> None:
    m, loss, _ = dense()
    with sl.simulate(x=2, y=2):
        apply, params = sl.parallelize(m, sl.recipes.optimus2d(m), inputs={"idx": "x ."})
        logits = apply(params, IDS)
        assert logits.shape == (8, 8, 32)
        whole = sl.unshard(logits)
    assert abs(F.cross_entropy(whole.view(-1, 32), IDS.roll(-1, 1).view(-1)) - loss) < 1e-12
