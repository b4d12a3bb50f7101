"""torch.optim, gradient clipping and the gradient scaler on
sharded parameters, as on plain ones.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib import errors

LAYOUTS = {"w": "x y", "b": "x", "s": "y ."}
# what they keep or index lies otherwise than the parameters
IMPLICIT = {"LBFGS", "Adafactor", "Rprop"}

Clip = Callable[[list[Tensor]], Any]


def start(dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"w": (8, 6), "b": (8,), "s": (6, 4)}
    return {n: torch.randn(s, dtype=dtype, generator=g) for n, s in shapes.items()}, torch.randn(
        4, 6, dtype=dtype, generator=g
    )


def trained(
    name: str, options: dict[str, Any], sharded: bool, clip: Clip | None = None
) -> dict[str, Tensor]:
    """Three steps of torch.optim.<name> on two matrices and a vector."""
    plain, x = start()
    if name == "Muon":
        del plain["b"]
    params = {
        n: (sl.shard(p, LAYOUTS[n]) if sharded else p).requires_grad_() for n, p in plain.items()
    }
    x = sl.shard(x, ". y") if sharded else x
    optimizer = getattr(torch.optim, name)(list(params.values()), lr=0.01, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (params["s"] ** 2).sum() + (x @ params["w"].T).tanh().square().sum()
        loss = loss + (params["b"] ** 3).sum() if "b" in params else loss
        loss.backward()
        return loss

    for _ in range(3):
        if name == "LBFGS":
            optimizer.step(closure)
            continue
        closure()
        if clip is not None:
            clip(list(params.values()))
        optimizer.step()
    return {n: (sl.unshard(p) if sharded else p).detach() for n, p in params.items()}


def gap(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(float((got[n] - p).abs().max()) for n, p in want.items())


NAMES = [
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "Adagrad",
    "ASGD",
    "RMSprop",
    "Rprop",
    "Adafactor",
]
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    *((n, {"foreach": f}) for n in NAMES for f in (False, True)),
    *((n, {"fused": True}) for n in ("SGD", "Adam", "AdamW", "Adagrad")),
    ("SGD", {"foreach": True, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"fused": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("AdamW", {"fused": True, "amsgrad": True}),
    ("AdamW", {"foreach": True, "amsgrad": True, "maximize": True}),
    ("RMSprop", {"foreach": True, "momentum": 0.9, "centered": True}),
    ("LBFGS", {"max_iter": 3}),
    ("LBFGS", {"max_iter": 3, "line_search_fn": "strong_wolfe"}),
]


def optimizers(some: slice = slice(None)) -> list[str]:
    """Those of torch.optim that end elsewhere than on plain parameters, on the mesh in scope."""
    wrong = []
    for name, options in OPTIMIZERS[some]:
        want = trained(name, options, False)
        with sl.implicit(2**20 if name in IMPLICIT else 0):
            error = gap(trained(name, options, True), want)
        # whose small differences of gradients lose digits
        if not error < (1e-7 if name == "LBFGS" else 1e-12):
            wrong.append(f"{name} {options}: {error:.1e}")
    return wrong


CLIPS: dict[str, Clip] = {
    **{f"norm {p} {f}": lambda ps, p=p, f=f: nn.utils.clip_grad_norm_(ps, 0.1, norm_type=p, foreach=f)
       for p in (2.0, 1.0, 3.0, float("inf")) for f in (None, True, False)},
    **{f"value {f}": lambda ps, f=f: nn.utils.clip_grad_value_(ps, 0.1, foreach=f) for f in (None, True, False)},
}  # fmt: skip


def clips(some: slice = slice(None)) -> list[str]:
    wrong = []
    for name, clip in [*CLIPS.items()][some]:
        error = gap(trained("SGD", {}, True, clip), trained("SGD", {}, False, clip))
        if not error < 1e-13:
            wrong.append(f"{name}: {error:.1e}")
    return wrong


# of vmap, in whose place simulation runs
@pytest.mark.filterwarnings("ignore:There is a performance drop because")
@pytest.mark.parametrize("axes", [{"x": 2, "y": 2}])
def test_torch_optimizers_step_as_on_plain_parameters(axes: dict[str, int]) -> None:
    with sl.simulate(**axes):
        assert optimizers() == []


@pytest.mark.parametrize("axes", [{"x": 2, "y": 2}, {"x": 4, "y": 1}])
def test_clipping_counts_each_element_once(axes: dict[str, int]) -> None:
    with sl.simulate(**axes):
        assert clips() == []


def test_optimizers_and_clipping_on_processes(pool: Any) -> None:
    """Every optimizer's foreach, all other kinds, and each norm: simulated ranks run all."""
    assert pool.run(optimizers, slice(1, None, 2), x=2, y=2) == [[]] * 4
    assert pool.run(clips, slice(1, None, 3), x=2, y=2) == [[]] * 4


def scaled(spoil: bool) -> tuple[float, float]:
    """Scale after a step, and how far the parameter moved; one
    rank's gradient overflows where ``spoil``.
    """
    p = nn.Parameter(sl.shard(torch.ones(4, 4), "x y"))
    optimizer, scaler = torch.optim.SGD([p], 0.5), torch.amp.GradScaler("cpu", init_scale=8.0)
    weights = torch.ones(4, 4)
    weights[0, 0] = float("inf") if spoil else 1.0
    scaler.scale((p * sl.shard(weights, "x y")).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), float((sl.unshard(p.detach()) - 1).abs().max())


def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: Any) -> None:
    with sl.simulate(x=2, y=2):
        assert scaled(False) == (8.0, 0.5) and scaled(True) == (4.0, 0.0)
    assert pool.run(scaled, False, x=2, y=2) == [(8.0, 0.5)] * 4
    assert pool.run(scaled, True, x=2, y=2) == [(4.0, 0.0)] * 4


def test_many_norms_take_one_collective_for_each_set_of_axes() -> None:
    plain, _ = start()
    xs = [p * k for p in plain.values() for k in (1.0, 2.0)]
    with sl.simulate(x=2, y=2):
        given = [
            sl.shard(x, LAYOUTS[n]) for x, n in zip(xs, ("w", "w", "b", "b", "s", "s"), strict=True)
        ]
        with sl.trace() as t:
            total = nn.utils.get_total_norm(given, foreach=True)
        want = nn.utils.get_total_norm(xs)
        assert len(t.events) == 3 and abs(total.item() - want.item()) < 1e-13
        for p, kind in ((2.0, torch.float64), (1.0, None), (float("inf"), None)):
            for got, x in zip(torch._foreach_norm(given, p, dtype=kind), xs, strict=True):
                ref = torch.linalg.vector_norm(x, p, dtype=kind)
                assert got.dtype == ref.dtype and abs(got.item() - ref.item()) < 1e-13
        for got, x in zip(
            torch._foreach_norm([x.float() for x in given], 2, torch.float64), xs, strict=True
        ):
            assert got.dtype == torch.float64 and abs(got.item() - x.norm().item()) < 1e-6


def test_a_pending_gradient_has_no_norm_yet_and_no_step() -> None:
    with sl.simulate(x=2, y=2):
        w = sl.shard(torch.ones(4, 4), ". x")
        v = sl.shard(torch.ones(4, 4), "y x")
        grads = sl.grad(lambda w: (w * v).sum(), pending="y")(w)
        assert grads.sharding.partial == ("y",)
        with pytest.raises(errors.PartialEscape, match="still pending"):
            nn.utils.get_total_norm([grads, grads])
        with pytest.raises(errors.PartialEscape, match="still pending"):
            nn.utils.get_total_norm([grads], foreach=False)
        with pytest.raises(errors.PartialEscape, match="still pending"):
            torch._fused_sgd_([w], [grads], [], weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0, nesterov=False,
                              maximize=False, is_first_step=True)  # fmt: skip


FOREACH: dict[str, tuple[Any, ...]] = {
    "abs": (), "add": ("ys",), "addcdiv": ("ys", "zs"), "addcmul": ("ys", "zs"), "ceil": (),
    "clamp_max": (0.5,),
    "clamp_min": ("ys",), "clone": (), "div": ("ys",), "exp": (), "frac": (), "lerp": ("ys", 0.3),
    "max": (),
    "maximum": ("ys",), "minimum": ([0.1, 0.2, 0.3],), "mul": ([2.0, 3.0, 4.0],), "neg": (),
    "norm": (),
    "pow": (2,), "reciprocal": (), "round": (), "sigmoid": (), "sign": (), "sqrt": (),
    "sub": ("ys",), "tanh": (),
}  # fmt: skip


def spelled(name: str, public: bool) -> Any:
    """torch.foreach.NAME, which 2.15 brought, or torch._foreach_NAME; None where torch has none."""
    return (
        getattr(getattr(torch, "foreach", None), name, None)
        if public
        else getattr(torch, f"_foreach_{name}", None)
    )


@pytest.mark.parametrize("public", [False, True])
def test_products_of_lists(public: bool) -> None:
    func = spelled("mm", public)
    if func is None:
        pytest.skip("this torch has none: _foreach_mm came in 2.13, torch.foreach in 2.15")
    (x,), y = [torch.ones(4, 6).cumsum(0)], torch.ones(6, 4).cumsum(1)
    with sl.simulate(x=2, y=2):
        (got,) = func([sl.shard(x, "x y")], [sl.shard(y, "y .")])
        assert torch.equal(sl.unshard(got), x @ y)


# 2.11 has no clone
@pytest.mark.parametrize(
    "name, public", [(n, p) for p in (False, True) for n in FOREACH if spelled(n, p) is not None]
)
def test_lists_are_mapped_entry_by_entry(name: str, public: bool) -> None:
    plain, _ = start()
    lists = {"xs": [p.abs() + 0.1 for p in plain.values()], "ys": [p.abs() + 0.3 for p in plain.values()],
             "zs": [p.abs() + 0.5 for p in plain.values()]}  # fmt: skip
    func, write = spelled(name, public), spelled(f"{name}_", public)

    def call(given: dict[str, list[Tensor]]) -> Any:
        return func(given["xs"], *[given[a] if isinstance(a, str) else a for a in FOREACH[name]])

    want = call(lists)
    with sl.simulate(x=2, y=2):
        for lay in (LAYOUTS, {"w": ". x", "b": ".", "s": ". y"}):
            placed = {
                k: [sl.shard(p, lay[n]) for p, n in zip(v, plain, strict=True)]
                for k, v in lists.items()
            }
            for got, ref in zip(call(placed), want, strict=True):
                assert float((sl.unshard(got) - ref).abs().max()) < 1e-14
            if write is not None:
                assert write(
                    placed["xs"], *[placed[a] if isinstance(a, str) else a for a in FOREACH[name]]
                )
                for got, ref in zip(placed["xs"], want, strict=True):
                    assert float((sl.unshard(got) - ref).abs().max()) < 1e-14


def test_lists_record_gradients_and_refuse_what_lies_otherwise() -> None:
    plain, _ = start()
    with sl.simulate(x=2, y=2):
        xs = [sl.shard(p, LAYOUTS[n]).requires_grad_() for n, p in plain.items()]
        sum(t.sum() for t in torch._foreach_mul(xs, xs)).backward()
        for x, p in zip(xs, plain.values(), strict=True):
            assert torch.allclose(sl.unshard(x.grad), 2 * p)
        a, b = sl.shard(torch.ones(4, 4), "x ."), sl.shard(torch.ones(4, 4), "y .")
        with pytest.raises(sl.ShardError):
            torch._foreach_add_([a], [b])
        with pytest.raises(errors.PlainTensor):
            torch._foreach_add_([a], [torch.ones(4, 4)])
        with pytest.raises(sl.ShardError, match="lies otherwise"):
            torch._fused_sgd_([a], [b], [], weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0, nesterov=False,
                              maximize=False, is_first_step=True)  # fmt: skip
        assert torch.equal(sl.unshard(a), torch.ones(4, 4))


def test_muon_is_as_near_as_its_bfloat16_allows() -> None:
    want, twin = (trained("Muon", {"ns_steps": n}, False) for n in (5, 5))
    assert gap(want, twin) == 0
    with sl.simulate(x=2, y=2):
        # its products round at 2**-8, of steps of 1e-2
        assert gap(trained("Muon", {}, True), want) < 5e-3


def test_vectors_of_parameters() -> None:
    plain, _ = start()
    with sl.simulate(x=2, y=2):
        params = [sl.shard(p, LAYOUTS[n]) for n, p in plain.items()]
        with pytest.raises(sl.ShardError):
            nn.utils.parameters_to_vector(params)
        with sl.implicit():
            vector = nn.utils.parameters_to_vector(params)
        assert torch.equal(sl.unshard(vector), nn.utils.parameters_to_vector(plain.values()))
