"""A module whose parameters are sharded does what it did: generate,
train under torch.optim and Trainer, save.
"""

import copy
import os
import pickle
import random
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

import shardlib as sl
from benchmarks.zoo import ZOO
from tests import copies

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


GRIDS: tuple[tuple[str, dict[str, int]], ...] = (
    ("megatron1d", {"data": 2, "x": 2}),
    ("optimus2d", {"x": 2, "y": 2}),
    ("optimus2d", {"data": 2, "x": 3, "y": 2}),
    ("tesseract", {"d": 2, "x": 2, "y": 1}),
    ("cube3d", {"x": 2, "y": 2, "z": 2}),
    ("cube3d", {"x": 2, "y": 1, "z": 2}),
    ("fsdp", {"x": 2, "data": 2}),
    ("ddp", {"data": 3}),
)
MANNERS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": True},
    {"do_sample": True, "num_return_sequences": 2},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": False, "num_beams": 2, "num_return_sequences": 2},
)


def differing(
    model: Any, seed: int, grids: Sequence[tuple[str, dict[str, int]]] = GRIDS, mesh: Any = None
) -> str:
    """Generate as drawn, dense and sharded; the case where the tokens differ, else nothing."""
    draw = random.Random(seed)
    recipe, axes = draw.choice(grids)
    ids = IDS[: draw.randint(1, 8), : draw.randint(1, 8)]
    how: dict[str, Any] = dict(draw.choice(MANNERS), max_new_tokens=3, pad_token_id=0)
    if draw.random() < 0.5:
        how["attention_mask"] = LEFT[: len(ids), -ids.shape[1] :].clone()
        how["attention_mask"][:, -1] = 1
    torch.manual_seed(seed)
    want = model.generate(ids, **how)
    with sl.simulate(**axes) if mesh is None else sl.use_mesh(mesh):
        rules = getattr(sl.recipes, recipe)(model)
        given = draw.choice([{}, {"input_ids": rules.tokens}])
        apply, params = sl.parallelize(model, rules, inputs=given)
        torch.manual_seed(seed)
        got = sl.as_module(apply, params).generate(ids, **how)
    same = torch.equal(got, want)
    return "" if same else f"{seed}: {recipe} {axes} {list(ids.shape)} {how} {given}"


@pytest.mark.parametrize("name", ["gpt2", "llama (two heads of keys)"])
def test_any_number_of_prompts_generates_under_every_recipe_that_can(
    name: str, plain: dict[str, Any]
) -> None:
    """With ``inputs=`` and without, one prompt and several, greedy, sampled and by beams."""
    assert not [case for seed in range(10) if (case := differing(plain[name], seed))]


def one_prompt() -> list[str]:
    model = made("gpt2")
    grid = [("optimus2d", {"x": 2, "y": 2})]
    return [case for seed in range(4) if (case := differing(model, seed, grid, sl.current_mesh()))]


def test_one_prompt_generates_on_real_ranks(pool: Any) -> None:
    assert pool.run(one_prompt, x=2, y=2) == [[]] * 4


@pytest.mark.parametrize(
    ("recipe", "given"),
    [("ring", {}), ("ring", {"inputs": None}), ("megatron1d", {"sequence": True})],
)
def test_a_recipe_that_splits_the_sequence_says_under_which_to_generate(
    recipe: str, given: dict[str, Any], plain: dict[str, Any]
) -> None:
    module = plain["gpt2"]
    axis = "s" if recipe == "ring" else "x"
    with sl.simulate(**{"data": 2, axis: 2}):
        own = {k: v for k, v in given.items() if k != "inputs"}
        rules = getattr(sl.recipes, recipe)(module, **own)
        inputs = None if "inputs" in given else {"input_ids": rules.tokens}
        apply, params = sl.parallelize(module, rules, inputs=inputs)
        model: Any = sl.as_module(apply, params)
        with pytest.raises(sl.errors.UnevenSplit, match="a token at a time") as caught:
            model.generate(IDS[:1], max_new_tokens=2)
        names: dict[str, Any] = {"sl": sl, "module": module, "params": params}
        exec(caught.value.fix, names)
        how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(names["model"].generate(IDS[:1], **how), module.generate(IDS[:1], **how))


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


def test_every_copy_is_as_a_plain_models() -> None:
    """Drawn sequences of copies, steps and loads; tests/copies.py draws more."""
    copies.run_simulated(list(range(24)))


@pytest.mark.parametrize("axes", copies.MESHES[:2])
def test_every_copy_on_real_ranks_is_as_a_plain_models(pool: Any, axes: dict[str, int]) -> None:
    pool.run(copies.run_real, list(range(100, 108)), **axes)


X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
HALVES = [("0.weight", "x ."), ("0.bias", "x"), ("2.weight", ". x"), ("2.bias", "...")]
WHOLE = [("*", "...")]


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).double()


def of(module: nn.Module, rules: Any = HALVES, **how: Any) -> Any:
    return sl.as_module(*sl.parallelize(module, rules, **how))


def a_copy_is_apart() -> None:
    """A deep copy computes and trains with its own parameters; a part of it too."""
    plain, mine = small(), of(small())
    theirs, ours = copy.deepcopy(plain), copy.deepcopy(mine)
    part, block = copy.deepcopy(mine[2]), copy.deepcopy(plain[2])
    for model in (plain, mine, theirs, ours):
        steps = torch.optim.SGD(model.parameters(), 0.5 if model in (plain, mine) else 5.0)
        for _ in range(2):
            steps.zero_grad()
            model(X).square().mean().backward()
            steps.step()
    for a, b in ((plain, mine), (theirs, ours)):
        assert torch.allclose(a(X), b(X), atol=1e-12)
    assert not torch.allclose(mine(X), ours(X))
    x = torch.ones(2, 8, dtype=torch.float64)
    assert torch.allclose(part(x), block(x))


def an_average_is_the_average() -> None:
    rate = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    found = []
    for model in (small(), of(small())):
        mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=rate)
        best, steps = copy.deepcopy(model), torch.optim.SGD(model.parameters(), 1.0)
        for _ in range(3):
            steps.zero_grad()
            model(X).square().mean().backward()
            steps.step()
            mean.update_parameters(model)
        found.append([mean(X), best(X), model(X)])
        model.load_state_dict(best.state_dict())
        assert torch.equal(model(X), best(X))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def a_module_reads_its_own() -> None:
    """Whatever torch has to change a module's parameters with."""
    double = lambda m: [p.mul_(2) for p in m.parameters(recurse=False)]  # noqa: E731
    changes: dict[str, Any] = {
        "apply": lambda m: m.apply(torch.no_grad()(double)),
        "half": lambda m: m.bfloat16().double(),
        "requires_grad_": lambda m: m.requires_grad_(False),
        "setattr": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach() * 3)),
        "assign": lambda m: m.load_state_dict(small(3).state_dict(), assign=True),
        "plain state": lambda m: m.load_state_dict(small(4).state_dict()),
        "frozen": lambda m: m[0].requires_grad_(False),
        "parametrize": lambda m: parametrize.register_parametrization(m[0], "weight", Thrice()),
    }
    for name, change in changes.items():
        plain, mine = small(), of(small())
        again = copy.deepcopy(mine)
        change(plain), change(mine)
        assert torch.allclose(plain(X), mine(X), atol=1e-12), name
        assert torch.equal(again(X), of(small())(X)), name
        flags = [[p.requires_grad for p in m.parameters()] for m in (plain, mine)]
        assert flags[0] == flags[1], name
        for p in mine.parameters():
            assert isinstance(p, sl.ShardedTensor), name
    plain, mine = small(), of(small())
    given = [{n: p.detach() * 2 for n, p in m.named_parameters()} for m in (plain, mine)]
    a, b = (
        torch.func.functional_call(m, p, (X,)) for m, p in zip((plain, mine), given, strict=True)
    )
    assert torch.allclose(a, b, atol=1e-12)
    vector = torch.arange(76.0, dtype=torch.float64) / 76
    nn.utils.vector_to_parameters(vector, plain.parameters())
    nn.utils.vector_to_parameters(sl.shard(vector, "..."), mine.parameters())
    with sl.implicit(2**20):
        joined = nn.utils.parameters_to_vector(mine.parameters())
    assert torch.equal(sl.unshard(joined).detach(), vector) and torch.allclose(plain(X), mine(X))


class Thrice(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 3 * w


def states_go_anywhere() -> None:
    """A state dict of one recipe, or of none, into another; of another size: refused by torch."""
    a, b = of(small(1)), of(small(2), WHOLE)
    b.load_state_dict(a.state_dict())
    assert torch.allclose(b(X), small(1)(X), atol=1e-12)
    assert {sl.typeof(p) for p in b[2].parameters()} == {"f64[4, 8]", "f64[4]"}
    a.load_state_dict(small(2).state_dict())
    assert torch.allclose(a(X), small(2)(X), atol=1e-12)
    a[2].load_state_dict(small(1)[2].state_dict())
    assert torch.equal(sl.unshard(a[2].weight), small(1)[2].weight)
    with pytest.raises(RuntimeError, match="size mismatch"):
        a.load_state_dict(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)).state_dict())
    padded = of(nn.Linear(4, 7).double(), [("weight", "x ."), ("bias", "x")], pad=True)
    with torch.no_grad():
        want = nn.Linear(4, 7).double()
    padded.load_state_dict(want.state_dict())
    assert torch.allclose(padded(X), want(X), atol=1e-12)
    assert torch.allclose(copy.deepcopy(padded)(X), want(X), atol=1e-12)
    whole = of(nn.Linear(4, 7).double(), WHOLE)
    whole.load_state_dict(padded.state_dict())
    assert torch.allclose(whole(X), want(X), atol=1e-12)


LAWS = [a_copy_is_apart, an_average_is_the_average, a_module_reads_its_own, states_go_anywhere]


@pytest.mark.parametrize("law", LAWS)
def test_a_copy_computes_with_its_own_parameters(law: Any) -> None:
    for axes in ({"x": 2}, {"x": 2, "y": 2}):
        with sl.simulate(**axes):
            law()


@pytest.mark.parametrize("law", LAWS)
def test_a_copy_on_real_ranks_computes_with_its_own(pool: Any, law: Any) -> None:
    pool.run(law, x=2, y=2)


@pytest.mark.parametrize("remat", ["full", "products", "host"])
def test_a_copy_makes_its_own_values_again(remat: str) -> None:
    with sl.simulate(x=2):
        mine = of(small(), remat=[("0", remat)])
        ours = copy.deepcopy(mine)
        with torch.no_grad():
            mine[0].weight.zero_()
        ours(X).square().mean().backward()
        plain = small()
        plain(X).square().mean().backward()
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(sl.unshard(p.grad), q.grad, atol=1e-12)
        assert mine[0].weight.grad is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantisation_of_blocks_is_refused_by_name() -> None:
    with sl.simulate(x=2), pytest.raises(sl.ShardError, match="quantize_per_tensor"):
        torch.ao.quantization.quantize_dynamic(of(small().float()), {nn.Linear})


def test_a_saved_state_is_loaded_on_any_mesh(tmp_path: Path) -> None:
    with sl.simulate(x=2):
        mine = of(small())
        torch.save(mine.state_dict(), tmp_path / "state")
        state = torch.load(tmp_path / "state")  # weights_only
        assert {n: sl.typeof(t) for n, t in state.items()} == {
            n: sl.typeof(t) for n, t in mine.state_dict().items()
        }
        assert sl.typeof(state["0.bias"] + mine[0].bias) == "f64[8@x]"  # on the mesh in scope
        again = pickle.loads(pickle.dumps(mine))
        assert torch.equal(again(X), mine(X))
    for axes in ({"x": 4}, {"x": 2, "y": 2}):
        with sl.simulate(**axes):
            other = of(small(5))
            other.load_state_dict(torch.load(tmp_path / "state"))
            assert torch.allclose(other(X), small()(X), atol=1e-12)


def saves_what_is_whole(path: str) -> None:
    mine = of(small())
    for thing in (mine, mine.state_dict(), mine[0].weight):
        with pytest.raises(sl.ShardError, match="pickle"):
            pickle.dumps(thing)
    torch.save(sl.unshard(mine.state_dict()), f"{path}.{torch.distributed.get_rank()}")
    with torch.no_grad():
        mine[0].weight.zero_()
    mine.load_state_dict(torch.load(f"{path}.{torch.distributed.get_rank()}"))
    assert torch.allclose(mine(X), small()(X), atol=1e-12)
    mine.load_state_dict(torch.load(path))  # of simulated ranks
    assert torch.allclose(mine(X), small(7)(X), atol=1e-12)


def test_real_ranks_load_what_was_whole_or_simulated(pool: Any, tmp_path: Path) -> None:
    with sl.simulate(x=2):
        torch.save(of(small(7)).state_dict(), tmp_path / "state")
    pool.run(saves_what_is_whole, str(tmp_path / "state"), x=2, y=2)


@pytest.mark.parametrize("ours", [True, False])
def test_an_assigned_state_shares_the_memory_that_it_shares_in_torch(ours: bool) -> None:
    class Tied(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            if tied:
                self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    with sl.simulate(x=2):
        source: nn.Module = Tied(True)
        if ours:
            source = sl.as_module(*sl.parallelize(source, [("*weight", ". x"), ("*", "...")]))
        rules = [("*weight", "x ."), ("*bias", "...")]
        model = sl.as_module(*sl.parallelize(Tied(False), rules))
        model.load_state_dict(source.state_dict(), assign=True)
        assert torch.equal(sl.unshard(model.a.weight), sl.unshard(model.b.weight))
        with torch.no_grad():
            model.a.weight.zero_()
        assert not sl.unshard(model.b.weight).any()


def test_a_plain_state_that_differs_by_rank_is_refused(forked: None) -> None:
    with pytest.raises(sl.ShardError, match="different values of bias"):
        sl.launch(copies.load_by_rank, x=2)


TRACERS: dict[str, Any] = {
    "make_fx": lambda f, x: make_fx(f)(x),
    "make_fx(tracing_mode='symbolic')": lambda f, x: make_fx(f, tracing_mode="symbolic")(x),
    "torch.jit.trace": lambda f, x: torch.jit.trace(f, x),
    "torch.jit.script": lambda f, x: torch.jit.script(f),
    "torch.export": lambda f, x: torch.export.export(f, (x,), strict=False),
}


def no_tracer_keeps_a_block() -> None:
    mine, a = of(small()), sl.shard(torch.arange(4.0), "x")
    for name, trace in TRACERS.items():
        with pytest.raises(sl.errors.Unsupported) as caught, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            trace(mine, X)
        assert name.partition("(")[0] in str(caught.value), name
    for made in (lambda: make_fx(lambda x: x * 2)(a), lambda: make_fx(lambda _: a * 2)(X)):
        with pytest.raises(sl.errors.Unsupported, match="make_fx"):
            made()
    with pytest.raises(sl.errors.Unsupported, match="make_fx"):
        make_fx(lambda x: sl.unshard(sl.shard(x, "x .")))(X)
    with pytest.raises(sl.ShardError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(lambda x: x * 2, a)
    assert torch.equal(make_fx(lambda x: x * 2)(X)(X + 1), 2 * X + 2)
    assert torch.equal(sl.unshard(a * 2), 2 * torch.arange(4.0))  # and after it all is as before


def test_no_tracer_keeps_a_sharded_value_as_a_constant() -> None:
    with sl.simulate(x=2):
        no_tracer_keeps_a_block()


def test_no_tracer_keeps_a_block_of_real_ranks(pool: Any) -> None:
    pool.run(no_tracer_keeps_a_block, x=2, y=2)
