"""A module whose parameters are sharded does what it did: generate,
train under torch.optim and Trainer, save.
"""

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from benchmarks.zoo import ZOO

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
transformers.logging.set_verbosity_error()
# of transformers and peft
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

MESHES = {
    "megatron1d": {"data": 2, "x": 2},
    "optimus2d": {"x": 2, "y": 2},
    "cube3d": {"x": 2, "y": 2, "z": 2},
}
IDS = torch.randint(3, 64, (8, 8), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones(8, 8, dtype=torch.int64)
LEFT[1, :3] = LEFT[4, :5] = 0
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.9},
    "beams": {"num_beams": 2},
    "a static cache": {"cache_implementation": "static"},
    "left padding": {"attention_mask": LEFT},
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ZOO[name]()[0].double().eval()


def sharded(module: nn.Module, recipe: str, **options: Any) -> nn.Module:
    rules = getattr(sl.recipes, recipe)(module)
    places = {"input_ids": rules.tokens, "decoder_input_ids": rules.tokens, "labels": rules.labels}
    return sl.as_module(*sl.parallelize(module, rules, inputs=places), **options)


@pytest.fixture(scope="module")
def plain() -> Iterator[dict[str, nn.Module]]:
    yield {name: made(name) for name in ("gpt2", "llama (two heads of keys)")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", MESHES)
def test_generate_gives_the_same_tokens(recipe: str, way: str, plain: dict[str, Any]) -> None:
    """Eight prompts, and five, which do not divide."""
    model = plain["gpt2" if way in ("beams", "sampling") else "llama (two heads of keys)"]
    with sl.simulate(**MESHES[recipe]):
        mine: Any = sharded(model, recipe)
        for count in (8, 5):
            how = {k: v[:count] if isinstance(v, Tensor) else v for k, v in WAYS[way].items()}
            how = {
                "do_sample": False,
                "max_new_tokens": 4,
                "min_new_tokens": 4,
                "pad_token_id": 0,
            } | how
            torch.manual_seed(1)
            want = model.generate(IDS[:count], **how)
            torch.manual_seed(1)
            assert torch.equal(mine.generate(IDS[:count], **how), want)


def test_a_ring_cannot_generate_a_token_at_a_time(plain: dict[str, Any]) -> None:
    with sl.simulate(s=2), pytest.raises(sl.ShardError) as caught:
        model: Any = sharded(plain["gpt2"], "ring")
        model(IDS[:, :1])
    assert "a token at a time" in str(caught.value) and "megatron1d" in (caught.value.fix or "")


def rows(step: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def test_torch_optim_trains_it_as_dense() -> None:
    dense = made("gpt2").train()
    with sl.simulate(data=2, x=2):
        mine = sharded(copy.deepcopy(dense), "megatron1d")
        for model in (dense, mine):
            steps = torch.optim.AdamW(model.parameters(), 1e-2)
            for k in range(3):
                steps.zero_grad()
                model(**rows(k)).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                steps.step()
        theirs = dict(dense.named_parameters())
        for name, p in mine.named_parameters():
            # losses are in fp32
            assert torch.allclose(sl.unshard(p.detach()), theirs[name], atol=1e-6), name


def test_a_batch_to_train_on_must_divide() -> None:
    with sl.simulate(data=2, x=2):
        mine = sharded(made("gpt2"), "megatron1d")
        with pytest.raises(sl.errors.UnevenSplit, match="a batch of 3 rows"):
            mine(input_ids=IDS[:3])
        with torch.no_grad():  # labels that are filled in are ignored
            have = mine(input_ids=IDS[:3], labels=IDS[:3])
            want = made("gpt2")(input_ids=IDS[:3], labels=IDS[:3])
        assert have.logits.shape == want.logits.shape
        assert torch.allclose(have.loss, want.loss, atol=1e-6)


@pytest.mark.parametrize("steps", ["adamw_torch", "adamw_torch_fused"])
def test_trainer_trains_evaluates_and_saves_it(tmp_path: Path, steps: str) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate, which is not installed")
    data = [{"input_ids": i, "labels": i} for i in IDS]
    how = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, per_device_eval_batch_size=3, max_steps=2, learning_rate=1e-2,
        report_to=[], save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True, optim=steps,
        seed=0,
    )  # fmt: skip
    dense = made("gpt2")
    with sl.simulate(data=2, x=2):
        mine = sharded(copy.deepcopy(dense), "megatron1d")
        found = []
        for model in (dense, mine):
            # 7: 3, 3 and 1
            trainer = transformers.Trainer(model, how, train_dataset=data, eval_dataset=data[:7])
            trainer.train()
            found.append([h["loss"] for h in trainer.state.log_history if "loss" in h])
            found[-1].append(trainer.evaluate()["eval_loss"])
            trainer.save_model(str(tmp_path / "saved"))
        assert found[0] == pytest.approx(found[1], abs=1e-5)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    for name, p in again.named_parameters():
        assert torch.allclose(p, dict(dense.named_parameters())[name], atol=1e-5), name


def test_accelerate_prepares_it() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    with sl.simulate(data=2, x=2):
        mine = sharded(made("gpt2"), "megatron1d")
        runner = accelerate.Accelerator(cpu=True)
        model, steps = runner.prepare(mine, torch.optim.SGD(mine.parameters(), 0.1))
        before = sl.unshard(mine.lm_head.weight.detach()).clone()
        runner.backward(model(**rows(0)).loss)
        runner.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        assert float((sl.unshard(mine.lm_head.weight.detach()) - before).abs().max()) > 0


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
def test_frozen_weights_get_no_gradient(kind: str) -> None:
    """Adapters are trained by either way; what they adapt has no gradient and stays as it is."""
    pytest.importorskip("peft", reason="peft is not installed")
    dense = made(f"llama + {kind}").train()
    with sl.simulate(data=2, x=2):
        rules = sl.recipes.megatron1d(dense)
        apply, params = sl.parallelize(dense, rules, inputs={"input_ids": rules.tokens})
        with sl.implicit(2**20):
            mine = sl.as_module(apply, params)
            mine(input_ids=IDS).logits.square().mean().backward()
            _, grads = sl.value_and_grad(
                lambda p: sl.unshard(apply(p, input_ids=IDS).logits).square().mean()
            )(params)
        dense(input_ids=IDS).logits.square().mean().backward()
        for (name, p), q in zip(mine.named_parameters(), dense.parameters(), strict=True):
            assert p.requires_grad == q.requires_grad == ("lora_" in name)
            if not p.requires_grad:
                assert p.grad is None
                assert grads.get(name) is None or not float(sl.unshard(grads[name]).abs().max())
            else:
                for g in (p.grad, grads[name]):
                    assert torch.allclose(sl.unshard(g), q.grad, rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize("kind", ["simulated", "one rank"])
def test_calls_do_not_change_buffers(kind: str) -> None:
    """``apply`` is pure; ``apply.mutable`` gives new buffers;
    the module keeps its own, as torch's does.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double().train()
    x = torch.randn(8, 4, dtype=torch.float64)
    rules = [("*", "...")]
    with sl.simulate(data=2, x=2) if kind == "simulated" else sl.simulate(data=1, x=1):
        apply, params = sl.parallelize(net, rules, inputs={"input": "data ."})
        mine = sl.as_module(apply, params)
        start = {n: sl.unshard(b).clone() for n, b in apply.buffers.items()}
        for _ in range(2):
            apply(params, x)
        _, new = apply.mutable(params, apply.buffers, x)
        mine(x), mine(x)
        want = copy.deepcopy(net)
        want(x)
        for name, b in want.named_buffers():
            assert torch.equal(sl.unshard(apply.buffers[name]), start[name]), name
            assert torch.allclose(sl.unshard(new[name]).to(b.dtype), b), name
        want(x)
        for name, b in want.named_buffers():
            assert torch.allclose(sl.unshard(dict(mine.named_buffers())[name]).to(b.dtype), b), name
        assert all(torch.equal(dict(net.named_buffers())[n], b) for n, b in start.items())


def on_ranks() -> float:
    """Tokens as dense's by greedy search, beams and a static cache; the weights after a step."""
    dense = made("gpt2")
    mine: Any = sharded(copy.deepcopy(dense), "megatron1d")
    how = {"do_sample": False, "max_new_tokens": 3, "min_new_tokens": 3, "pad_token_id": 0}
    for more in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        want = dense.generate(IDS[:5], **how, **more)  # type: ignore[operator]
        assert torch.equal(mine.generate(IDS[:5], **how, **more), want), more
    for model in (dense, mine):
        steps = torch.optim.SGD(model.parameters(), 0.1)
        model(**rows(0)).loss.backward()
        steps.step()
    theirs = dict(dense.named_parameters())
    return max(
        float((sl.unshard(p.detach()) - theirs[n].detach()).abs().max())
        for n, p in mine.named_parameters()
    )


def test_real_processes_generate_and_train_alike(pool: Any) -> None:
    assert max(pool.run(on_ranks, data=2, x=2)) < 1e-6
