"""Laws of the pretend device itself, and of a training step on it; run by test_accelerator.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from tests.accelerator import pretend
from tests.accelerator.pretend import DEVICE


def test_operands_of_two_devices_are_refused() -> None:
    x = torch.ones(3, device=DEVICE)
    for mixed in (
        lambda: x + torch.ones(3, device="cpu"),
        lambda: torch.cat([x, torch.ones(3, device="cpu")]),
        lambda: x.gather(0, torch.zeros(3, dtype=torch.int64, device="cpu")),
        lambda: x.index_select(0, torch.zeros(1, dtype=torch.int64, device="cpu")),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()


def test_numbers_and_indices_of_the_host_are_taken() -> None:
    x = torch.arange(5.0, device=DEVICE)
    assert (x * torch.tensor(2.0, device="cpu")).tolist() == [0, 2, 4, 6, 8]
    assert x[torch.tensor([1, 3], device="cpu")].tolist() == [1, 3]


def test_convolutions_and_their_gradients_are_the_hosts() -> None:
    made = nn.Conv2d(3, 4, 3, device="cpu")
    x = torch.randn(2, 3, 8, 8, device="cpu")
    made(x).square().sum().backward()
    want = [p.grad.clone() for p in made.parameters()]
    made.zero_grad()
    there = made.to(DEVICE)
    there(x.to(DEVICE)).square().sum().backward()
    for p, g in zip(there.parameters(), want, strict=True):
        assert torch.equal(p.grad.cpu(), g)


def test_autocast_computes_in_the_dtypes_that_are_said() -> None:
    x = torch.ones(2, 2, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16 and (x @ x).exp().dtype == torch.float32


def test_a_generator_is_the_devices_own() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(3, device=DEVICE), torch.randn(3, device=DEVICE)
    torch.manual_seed(0)
    torch.randn(3, device="cpu")  # another stream
    assert torch.equal(first, torch.randn(3, device=DEVICE)) and not torch.equal(first, second)
    g = torch.Generator(device=DEVICE).manual_seed(5)
    again = torch.Generator(device=DEVICE).manual_seed(5)
    a, b = (torch.rand(4, device=DEVICE, generator=one) for one in (g, again))
    assert torch.equal(a, b)


def test_what_makes_the_host_wait_is_counted_and_what_does_not_is_not() -> None:
    x = torch.ones(4, device=DEVICE)
    pinned = torch.ones(4, device="cpu").pin_memory()
    for waits, call in (
        (1, lambda: x.sum().item()),
        (1, lambda: x.nonzero()),
        (1, lambda: x.cpu()),
        (1, lambda: torch.ones(4, device="cpu").to(DEVICE)),
        (0, lambda: pinned.to(DEVICE, non_blocking=True)),
        (0, lambda: x + 1),
        (0, lambda: x.clone().view(2, 2).mT.contiguous()),
    ):
        with pretend.counting() as counts:
            call()
        assert sum(counts.waits.values()) == waits, (waits, counts)


def test_a_trace_counts_as_the_device_does() -> None:
    x, ids = torch.ones(4, device=DEVICE), torch.tensor([1, 3], device="cpu")
    pinned = torch.ones(4, device="cpu").pin_memory()
    calls: tuple[Callable[[], Any], ...] = (
        lambda: x.sum().item(), lambda: bool((x > 0).all()), lambda: x.nonzero(), lambda: x[x > 0],
        lambda: x.cpu(), lambda: torch.ones(4, device="cpu").to(DEVICE), lambda: x.unique(),
        lambda: pinned.to(DEVICE), lambda: pinned.to(DEVICE, non_blocking=True),
        lambda: torch.tensor([1.0, 2.0], device=DEVICE), lambda: torch.equal(x, x),
        lambda: x.clone().copy_(pinned), lambda: pinned.clone().pin_memory().copy_(x, True),
        lambda: x + 1, lambda: x.masked_fill(x > 0, 2.0), lambda: x.view(2, 2).mT.contiguous(),
        lambda: x[ids], lambda: torch.full((3,), 2.0, device=DEVICE), lambda: x.where(x > 0, 0.0),
    )  # fmt: skip
    for n, call in enumerate(calls):
        with pretend.counting() as counts:
            call()
        with sl.trace(waits=True) as t:
            call()
        kinds = [w.kind for w in t.waits]
        seen = kinds.count("wait"), kinds.count("upload")
        assert seen == (sum(counts.waits.values()), sum(counts.uploads.values())), (n, counts, t)
        assert all(w.line.startswith("laws.py:") and not w.library for w in t.waits)


def late(body: Callable[[], Any]) -> Any:
    pretend.late(True)
    try:
        return body()
    finally:
        pretend.late(False)


def test_late_kernels_compute_what_eager_ones_do() -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
        steps = torch.optim.AdamW(net.parameters(), 1e-2)
        for _ in range(3):
            steps.zero_grad()
            net(torch.ones(4, 8)).square().mean().backward()
            steps.step()
        return [p.detach().cpu() for p in net.parameters()]

    with torch.device(DEVICE):
        for a, b in zip(trained(), late(trained), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait_between_streams_is_a_wrong_number(waits: bool) -> None:
    def ask() -> list[float]:
        side, main = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
        x = torch.ones(64, device=DEVICE)
        torch.accelerator.synchronize()
        with side:
            y = x * 2
        if waits:
            main.wait_stream(side)
        return (y + 1).cpu().tolist()

    assert (late(ask) == [3.0] * 64) == waits


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_given_back_too_early_is_overwritten(recorded: bool) -> None:
    def ask() -> list[float]:
        side, main = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
        x = torch.full((64,), 7.0, device=DEVICE)
        torch.accelerator.synchronize()
        side.wait_stream(main)
        with side:
            y = x + 1
        if recorded:
            x.record_stream(side)
        del x  # the main stream may use its memory again
        z = torch.zeros(64, device=DEVICE)
        main.synchronize()
        side.synchronize()
        assert not z.any()
        return y.cpu().tolist()

    assert (late(ask) == [8.0] * 64) == recorded


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(
        vocab_size=96,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.1,
        attn_pdrop=0.1,
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


RECIPES: dict[str, tuple[str, dict[str, int], int]] = {
    "megatron1d": ("megatron1d", {"data": 2, "x": 2}, 1),
    "optimus2d": ("optimus2d", {"data": 2, "x": 2, "y": 2}, 2),
    "fsdp": ("fsdp", {"data": 2, "x": 2}, 0),
    "zero3": ("ddp", {"data": 4}, 3),
}


def steps(make: Any, recipe: str, device: Any) -> tuple[list[float], pretend.Counts]:
    """Losses of three steps of training, and what the third made the host wait for."""
    name, mesh, stage = RECIPES[recipe]
    torch.manual_seed(0)
    with torch.device("cpu"):
        model, ids = make(), torch.randint(0, 96, (8, 16))
    with sl.simulate(device=device, **mesh):
        rules = getattr(sl.recipes, name)(model)
        apply, params = sl.parallelize(
            model, rules, inputs={"input_ids": rules.tokens, "labels": rules.tokens}
        )
        tx = sl.optim.adamw(1e-2)
        if stage:
            tx = sl.optim.zero(tx, axis="data", stage=stage)
        params = tx.shard(params) if stage == 3 else params
        state, batch = tx.init(params), {"input_ids": ids.to(device), "labels": ids.to(device)}
        into = {"into": tx} if stage else {}
        step = sl.value_and_grad(lambda p: apply(p, **batch).loss, **into)
        sl.random.seed(1)
        losses = []
        for _ in range(3):
            with pretend.counting() as counts:
                loss, grads = step(params)
                params, state, _ = sl.optim.step(tx, params, grads, state)
            losses.append(loss)
        return [float(x) for x in losses], counts


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_a_step_waits_for_nothing_and_its_loss_is_the_hosts(make: Any, recipe: str) -> None:
    there, counts = steps(make, recipe, DEVICE)
    here, _ = steps(make, recipe, torch.device("cpu"))
    assert not counts.waits and not counts.uploads and not counts.downloads, counts
    assert there == pytest.approx(here, rel=1e-5), (there, here)


def test_every_mask_and_dropout_goes_round_the_ring() -> None:
    torch.manual_seed(0)
    whole = [torch.randn(2, h, 24, 8, device="cpu") for h in (4, 2, 2)]
    masks = sl.masks
    for schedule in ("contiguous", "zigzag", "striped"):
        for kw in (
            {"dropout": 0.2},
            {"mask": masks.Bias(torch.linspace(0, 1, 4 * 24 * 24).reshape(1, 4, 24, 24))},
            {"mask": masks.Padding([20, 17])},
            {"mask": masks.ALiBi((0.5, 0.25, 0.125, 0.0625))},
            {"mask": masks.Causal() & masks.Documents((0, 9, 15, 24))},
            {"canonical": True},
        ):
            found = []
            for device in (DEVICE, torch.device("cpu")):
                with sl.simulate(s=4, device=device):
                    sl.random.seed(3)
                    ring = sl.Ring("s", dim=2, schedule=schedule)
                    q, k, v = (sl.shard(x.to(device), ring).requires_grad_() for x in whole)
                    given = {
                        n: masks.Bias(m.values.to(device)) if isinstance(m, masks.Bias) else m
                        for n, m in kw.items()
                    }
                    sl.ring_attention(q, k, v, **given).square().sum().backward()
                    found.append([sl.unshard(x.grad).cpu() for x in (q, k, v)])
            for a, b in zip(*found, strict=True):
                torch.testing.assert_close(a, b)


def test_calls_of_every_day_stay_on_the_device() -> None:
    def calls(device: Any) -> list[Tensor]:
        torch.manual_seed(0)
        with torch.device("cpu"):
            a, ids, mask = torch.randn(8, 16), torch.randint(0, 16, (8, 6)), torch.randn(8, 16) > 0
        with sl.simulate(x=2, y=2, device=device):
            sl.random.seed(1)
            s = lambda t, layout: sl.shard(t.to(device), layout)  # noqa: E731
            x = s(a, "x y").requires_grad_()
            w, i = s(a.mT.contiguous(), "y ."), s(ids, "x .")
            picked = torch.tensor([1, 3], device=device)
            out = [
                x @ w, F.embedding(i, w), F.cross_entropy(x, i[:, 0]), F.dropout(x, 0.3),
                torch.randn_like(x), torch.bernoulli(x.sigmoid()), torch.multinomial(x.detach().abs(), 2),
                x.argmax(-1), x.topk(3)[0], x[picked], x.index_select(0, picked), x[3], x.norm(),
                torch.softmax(x, -1), F.layer_norm(x, (16,)), x.masked_fill(s(mask, "x y"), 0.0),
                sl.reshard(x, "zigzag(x) ."), sl.shard(a[:7, :5].to(device), "x y", pad=True).sum(),
                nn.init.trunc_normal_(s(torch.zeros(8, 16, device="cpu"), "x y")), F.one_hot(i, 16),
            ]  # fmt: skip
            sum(t.float().sum() for t in out if t.requires_grad).backward()
            out.append(x.grad)
            assert all(t.device.type == device.type for t in out)
            return [sl.unshard(t.detach()).cpu() for t in out]

    for n, (a, b) in enumerate(zip(calls(DEVICE), calls(torch.device("cpu")), strict=True)):
        torch.testing.assert_close(a, b, msg=lambda m, n=n: f"result {n}: {m}")
