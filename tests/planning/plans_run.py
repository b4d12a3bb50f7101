"""Plans of drawn models, meshes and budgets: confirmed by explain, and their steps are one process's.

    python -W ignore -m tests.planning.plans_run --count 60 --seed 0
    python -W ignore -m tests.planning.plans_run --count 20 --real
    python -W ignore -m tests.planning.plans_run --count 20 --rows 1 --model "llama of 3"

A model of ``benchmarks.zoo`` or of ``MODELS`` is planned on a drawn cluster without a budget, then
within a drawn share of what it takes; where it is little, ZeRO, remat and micro-batches are planned.
Five steps of AdamW in fp64 on simulated ranks must lose what one process loses; the plan must fit;
``sl.explain`` of what ``plan.apply`` returns must say what the plan says; and a step must receive the
bytes and messages that it says.  On four processes (``--real``) the most bytes of tensors that are
alive in a later step must be those that the plan says, within 1 %, and its bytes and messages too;
as on paper, as many rows are routed to each expert.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shardlib as sl
from benchmarks.zoo import BART, GPT2, SMALL, T5, TEXT, VIT, ZOO, B, D, V, _ids, _seeded
from shardlib.planning.candidates import PIPE
from shardlib.planning.joint import placed
from shardlib.planning.plan import Plan
from tests.planning.test_explain import later_step
from tests.workers import Pool

Link, Cluster = sl.planning.Link, sl.planning.Cluster

CLUSTERS = {
    "fast": Cluster(1e12, 2e10, 1, between=Link(1e-4, 1e-8), bandwidth=5e9),
    # all ranks are worth using for the smallest of models, and what they send is cheap
    "slow": Cluster(1e12, 1e8, 1, between=Link(1e-7, 1e-10), bandwidth=1e8),
    "slow behind slow links": Cluster(
        1e12, 1e8, 2, Link(1e-6, 1e-9), Link(1e-5, 1e-8), bandwidth=1e8
    ),
}


# its updates depend on the scale of gradients, as AdamW's with a small eps do not
OPTIMIZER = sl.optim.adamw(1e-3, eps=1e-2)

IN_FP32 = ("llama", "mixtral", "qwen3", "t5", "mamba")
"""Models whose norms compute in fp32, which the order of sums in fp64 rounds otherwise."""


class Case(NamedTuple):
    """A drawn plan: the model's name, the mesh or the ranks, and the share of a free plan's bytes.

    ``micros``  micro-batches, or None: as many as are planned; ``rows`` of a batch, 0 for all.
    """

    model: str
    axes: tuple[int, ...]
    share: float
    cluster: str = "fast"
    micros: int | None = None
    rows: int = 0

    @property
    def where(self) -> dict[str, Any]:
        """The mesh as ``sl.plan`` takes it."""
        if len(self.axes) == 1:
            return {"ranks": self.axes[0]}
        return {"mesh": dict(zip("abc", self.axes, strict=False))}


class MLP(nn.Module):
    """Layers of four widths: nothing repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.ModuleList(nn.Linear(a, b) for a, b in [(32, 64), (64, 96), (96, 48), (48, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.fc:
            x = layer(x).tanh()
        return x


def _hf(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**settings)
        if "experts" in settings:
            made._experts_implementation = settings["experts"]
        return getattr(transformers, model)(made).eval()

    return make


def _text() -> dict[str, Tensor]:
    return {"input_ids": _ids()}


def _pair() -> dict[str, Tensor]:
    return {"input_ids": _ids(), "decoder_input_ids": _ids(seed=1)}


_BART = {**BART, "encoder_layers": 2, "decoder_layers": 3}
_SOUND = {
    **_BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32,
    "vocab_size": V, "pad_token_id": 0, "begin_suppress_tokens": None, "suppress_tokens": None,
}  # fmt: skip

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "gpt2 of 4": (_hf("GPT2LMHeadModel", "GPT2Config", **{**GPT2, "n_layer": 4}), _text),
    "llama of 3": (
        _hf("LlamaForCausalLM", "LlamaConfig", **{**SMALL, **TEXT, "num_hidden_layers": 3}),
        _text,
    ),
    "vit of 3": (
        _hf("ViTForImageClassification", "ViTConfig", **{**VIT, "num_hidden_layers": 3}),
        lambda: {"pixel_values": _seeded(B, 3, 16, 16)},
    ),
    "t5 of 2 and 3": (
        _hf("T5ForConditionalGeneration", "T5Config", **{**T5, "num_decoder_layers": 3}), _pair,
    ),
    "bart of 2 and 3": (_hf("BartForConditionalGeneration", "BartConfig", **_BART), _pair),
    "whisper of 2 and 3": (
        _hf("WhisperForConditionalGeneration", "WhisperConfig", **_SOUND),
        lambda: {"input_features": _seeded(B, 8, 32), "decoder_input_ids": _ids()},
    ),
    "mlp": (lambda: MLP(), lambda: {"x": _seeded(B, D)}),
}  # fmt: skip

NAMES = (
    *MODELS, "bert", "mamba", "DiT block", "mixtral (eager)", "mixtral (batched_mm)",
    "qwen3_moe (eager)", "qwen3_moe (batched_mm)", "nn.Transformer", "experts (masked)", "MLP-Mixer",
    "blocks of nn.Sequential", "relative position bias",
)  # fmt: skip


def made(name: str, rows: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model in fp64, with so many rows of its inputs by name, or all."""
    torch.manual_seed(0)
    if name in MODELS:
        make, inputs = MODELS[name]
        module, given = make(), inputs()
    else:
        module, given = ZOO[name]()
    return module.double(), {n: x[: rows or len(x)] for n, x in given.items()}


def loss_over(names: tuple[str, ...]) -> Callable[..., Tensor]:
    """Return the mean of squares of all outputs, of inputs given by these names."""

    def loss(apply: Any, params: Any, *inputs: Any) -> Tensor:
        fixed = {"use_cache": False} if "use_cache" in dict(apply.arguments) else {}
        out = apply(params, **dict(zip(names, inputs, strict=True)), **fixed)
        found = getattr(out, "logits", getattr(out, "last_hidden_state", out))
        return found.square().mean()

    return loss


def draw(seed: int, real: bool = False) -> Case:
    """Draw a case; on four ranks if they are real."""
    rng = random.Random(seed)
    axes = rng.choice([(4,), (2, 2)] if real else [(2,), (4,), (8,), (2, 2), (4, 2), (2, 2, 2)])
    share = rng.choice([1.0, 0.9, 0.75, 0.6, 0.0])
    return Case(
        rng.choice(NAMES), axes, share, rng.choice([*CLUSTERS]), rng.choice([None, None, 1, 2, 4])
    )


def planned(case: Case) -> tuple[nn.Module, dict[str, Tensor], Plan, float]:
    """Return the model, its inputs, its plan and the budget; the least plan where none fits."""
    module, inputs = made(case.model, case.rows)
    given = tuple(inputs.values())

    def plan(memory: float) -> Plan:
        return sl.plan(
            module, given, optimizer=OPTIMIZER, **case.where, memory=memory, cluster=CLUSTERS[case.cluster],
            loss=loss_over((*inputs,)), microbatches=case.micros,
        )  # fmt: skip

    free = plan(1e12)
    budget = case.share * free.peak
    try:
        return module, inputs, plan(budget), budget
    except sl.errors.NoPlanFits as e:
        return module, inputs, plan(e.least), e.least


def stepped(
    module: nn.Module, inputs: Mapping[str, Tensor], plan: Plan | None, steps: int = 5
) -> tuple[list[float], tuple[float, int]]:
    """Return the losses of some steps, by a plan or on one rank; bytes and messages of the last."""
    loss = loss_over((*inputs,))
    with sl.simulate(**(plan.mesh if plan else {"a": 1})):
        tx = OPTIMIZER
        texts = ("...",) * len(inputs)
        if plan is None:
            apply, params = sl.parallelize(module, [("*", "...")])
        else:
            apply, params, tx = plan.apply(module)
            texts = plan.inputs
        given = [sl.shard(x, text) for x, text in zip(inputs.values(), texts, strict=True)]
        how: dict[str, Any] = {"into": tx} if tx.sink else {}
        if plan is not None and plan.microbatches > 1:
            how["microbatches"] = plan.microbatches
        step = sl.value_and_grad(lambda p, *x: loss(apply, p, *x), **how)
        state, out, received = tx.init(params), [], (0.0, 0)
        for _ in range(steps):
            with sl.trace() as moved:
                value, grads = step(params, *given)
                params, state, _ = sl.optim.step(tx, params, grads, state)
            out.append(value.item())
            received = float(moved.bytes), moved.messages
    return out, received


def confirm(inputs: Mapping[str, Tensor], module: nn.Module, plan: Plan) -> str:
    """Explain what a plan applies, and return in what it differs from what the plan says."""
    loss = loss_over((*inputs,))
    with sl.record(**plan.mesh):
        apply, params, tx = plan.apply(module)
        given = tuple(
            sl.shard(x.to("meta"), t) for x, t in zip(inputs.values(), plan.inputs, strict=True)
        )
        count = plan.microbatches if plan.microbatches > 1 else None
        found = sl.explain(
            lambda p, *x: loss(apply, p, *x), params, given, tx=tx, microbatches=count
        )
    if abs(found.peak - plan.peak) > 0.01 * plan.peak:
        return f"peak {plan.peak}, explained {found.peak}"
    return ""


def judge(case: Case) -> tuple[str, Plan]:
    """Return what is wrong with a case's plan, "" if nothing is, and the plan."""
    module, inputs, plan, budget = planned(case)
    if plan.peak > budget:
        return f"{plan.peak} bytes of {budget:.0f}", plan
    differs = confirm(inputs, module, plan)
    if differs:
        return differs, plan
    want, _ = stepped(module, inputs, None)
    got, received = stepped(module, inputs, plan)
    off = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(got, want, strict=True))
    if off > (1e-6 if case.model.startswith(IN_FP32) else 1e-9):
        return f"losses {got}, of one process {want}", plan
    counted = ("bytes", "messages")
    if plan.pipe > 1:
        # simulated ranks add up the bytes inside of all places, which send some as one; they have
        # one gradient of a tied parameter, of which each place sums its own
        named = [n for n, _ in module.named_parameters(remove_duplicate=False)]
        counted = counted[: len(named) == len([*module.parameters()])]
    for i, what in enumerate(counted):
        said = sum(m[i] * (1 if a == PIPE else plan.pipe) for a, m in plan.along.items())
        if abs(said - received[i]) > 0.01 * max(said, received[i]):
            return f"{received[i]:.0f} {what} received, said {said:.0f}", plan
    return "", plan


def evenly_routed(router: nn.Module, given: object, out: tuple[Any, ...]) -> None:
    """Route as many rows to each expert, as on paper, where routing has no values."""
    index = out[-1].raw if isinstance(out[-1], sl.ShardedTensor) else out[-1]
    numbers = torch.arange(index.numel()) % router.num_experts
    # backward of the weights has saved the numbers
    index.data.copy_(numbers.view_as(index))


def taken(name: str, rows: int, how: Mapping[str, Any]) -> tuple[int, float, int]:
    """Run by each of four ranks: the most bytes alive in a later step, bytes and messages."""
    torch.set_num_threads(1)
    module, inputs = made(name, rows)
    for router in (m for m in module.modules() if type(m).__name__.endswith("TopKRouter")):
        router.register_forward_hook(evenly_routed)
    apply, params = placed(module, 1, how["rules"], how["remat"])
    tx = sl.optim.zero(OPTIMIZER, **how["zero"]) if how["zero"] else OPTIMIZER
    given = [sl.shard(x, t) for x, t in zip(inputs.values(), how["inputs"], strict=True)]
    many: dict[str, Any] = {"into": tx} if tx.sink else {}
    if how["microbatches"] > 1:
        many["microbatches"] = how["microbatches"]
    loss = loss_over((*inputs,))
    step = sl.value_and_grad(lambda p, *x: loss(apply, p, *x), **many)
    moved, most, _ = later_step(tx, step, params, *given)
    return most, float(moved.bytes), moved.messages


def judge_real(case: Case, pool: Pool) -> tuple[str, Plan]:
    """Return what differs on four processes from what a case's plan says, and the plan."""
    _, _, plan, _ = planned(case)
    if plan.pipe > 1:
        return "", plan
    said = plan.json()
    found = pool.run(taken, case.model, case.rows, said, seconds=200.0, **plan.mesh)
    # the most of any rank: what rows of a table's gradient a rank has depends on the words
    most = plan.explained.peak - plan.explained.transient + max(peak for peak, *_ in found)
    if abs(most / plan.explained.peak - 1) > 0.01:
        return f"{most} bytes at the most, said {plan.explained.peak}", plan
    for _, *received in found:
        for i, what in enumerate(("bytes", "messages")):
            # up to the end of backward
            told = sum(m[i] for m in plan.explained.work.along.values())
            if abs(told - received[i]) > 0.01 * max(told, received[i]):
                return f"{received[i]:.0f} {what} received, said {told:.0f}", plan
    return "", plan


def main(argv: list[str] | None = None) -> int:
    """Judge drawn cases; return how many are wrong."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--count", type=int, default=60)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--model", default="")
    asked.add_argument("--rows", type=int, default=0, help="of a batch; 0: all that a model has")
    asked.add_argument("--real", action="store_true", help="on four processes")
    options = asked.parse_args(argv)
    wrong, used, pool = 0, Counter[str](), Pool(4) if options.real else None
    for seed in range(options.seed, options.seed + options.count):
        case = draw(seed, options.real)
        case = case._replace(model=options.model or case.model, rows=options.rows)
        if case.rows:
            case = case._replace(micros=None)
        began = time.process_time()
        try:
            what, plan = judge(case) if pool is None else judge_real(case, pool)
            told = f"{dict(plan.mesh)} zero={dict(plan.zero)} remat={len(plan.remat)}"
            told += f" microbatches={plan.microbatches}"
            split = any(a in text for _, text, *_ in plan.rules for a in plan.mesh)
            has = {
                "layouts": split, "zero": plan.zero, "remat": plan.remat,
                "micro-batches": plan.microbatches > 1, "stages": plan.pipe > 1,
                "sequences": "zigzag" in " ".join(plan.inputs),
            }  # fmt: skip
            used.update(name for name, x in has.items() if x)
        except Exception as e:
            what, told = f"{type(e).__name__}: {e}", ""
        wrong += bool(what)
        took = time.process_time() - began
        print(f"{seed} {case}: {what or 'right'}; {told} {took:.1f} s", flush=True)
    if pool is not None:
        pool.close()
    print(f"{options.count - wrong} of {options.count} plans are right; of them use {dict(used)}")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main()))
