"""What one run on meta tensors shows of a module's dimensions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db

import shardlib as sl
from shardlib.modules.dim_factors import leaves, root
from shardlib.modules.dim_trace import _RULES, Dimensions, trace_dimensions
from shardlib.modules.param_roles import kinds


class Fused(nn.Module):
    """One weight for query, key and value, cut as ``cut`` says."""

    def __init__(self, cut: str, heads: int = 4, keys: int = 4) -> None:
        super().__init__()
        self.cut, self.heads, self.keys = cut, heads, keys
        self.table = nn.Embedding(16, 32)
        self.qkv = nn.Linear(32, 8 * (heads + 2 * keys))
        self.out = nn.Linear(8 * heads, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        rows, length = ids.shape
        y, h, k = self.qkv(x), self.heads, self.keys
        if self.cut == "3 heads":
            parts = list(y.view(rows, length, 3, h, 8).unbind(2))
        elif self.cut == "heads 3":
            parts = list(y.view(rows, length, h, 3 * 8).chunk(3, -1))
        elif self.cut == "grouped":
            y = y.view(rows, length, k, h // k + 2, 8)
            parts = [y[..., :-2, :].reshape(rows, length, h, 8), y[..., -2, :], y[..., -1, :]]
        elif self.cut == "slices":
            q, kk, v = y[..., : 8 * h], y[..., 8 * h : 8 * (h + k)], y[..., 8 * (h + k) :]
            parts = [p.reshape(rows, length, -1, 8) for p in (q, kk, v)]
        else:
            parts = [p.reshape(rows, length, -1, 8) for p in y.split([8 * h, 8 * k, 8 * k], -1)]
        q, kk, v = (p.transpose(1, 2) for p in parts)
        kk, v = (p.repeat_interleave(h // k, 1) for p in (kk, v))
        seen = F.scaled_dot_product_attention(q, kk, v).transpose(1, 2).reshape(rows, length, -1)
        return x + self.out(seen)


def sizes(found: Dimensions, name: str, dim: int) -> list[str]:
    return [repr(a) for a in leaves(found.params[name][dim])]


@pytest.mark.parametrize(
    ("cut", "keys", "said"),
    [
        ("3 heads", 4, ["3", "4", "8"]),
        ("heads 3", 4, ["4", "3", "8"]),
        ("grouped", 2, ["2", "[2+2]", "8"]),
        ("slices", 2, ["[32+16+16]"]),
        ("split", 2, ["[32+16+16]"]),
    ],
)
def test_a_fused_weight_reads_as_its_output_is_cut(cut: str, keys: int, said: list[str]) -> None:
    found = trace_dimensions(Fused(cut, keys=keys))
    assert sizes(found, "qkv.weight", 0) == sizes(found, "qkv.bias", 0) == said
    assert not found.unknown


def test_what_is_added_is_one_stream_and_what_is_multiplied_in_between_is_not() -> None:
    found = trace_dimensions(Fused("3 heads"))
    (stream,) = leaves(found.params["table.weight"][1])
    for name, dim in (("qkv.weight", 1), ("out.weight", 0), ("out.bias", 0)):
        assert [root(a) for a in leaves(found.params[name][dim])] == [stream]
    heads = {id(a) for a in leaves(found.params["out.weight"][1])}
    assert (
        heads < {id(a) for a in leaves(found.params["qkv.weight"][0])} and id(stream) not in heads
    )
    assert [(r.name, r.kind) for r in found.reads] == [
        ("table.weight", "lookup"),
        ("qkv.weight", "product"),
        ("out.weight", "product"),
    ]


class Shared(nn.Module):
    """Two heads of keys for four of queries, by the kernel's own sharing."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, n) for n in (16, 8, 8, 16))

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (
            f(hidden).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        out = self.o(out.transpose(1, 2).flatten(2))
        # so that it cannot run on shapes alone
        return out if bool(out.isfinite().all()) else hidden


def test_fewer_heads_of_keys_are_heads_where_the_kernel_shares_them() -> None:
    found = trace_dimensions(Shared(), {"hidden": torch.randn(2, 6, 16)})
    roles = kinds(found)
    assert {n: roles.of(found.params[f"{n}.weight"][0]) for n in "qkv"} == dict.fromkeys(
        "qkv", "inner"
    )


def test_the_dimensions_that_are_rolled_are_whole_and_no_other() -> None:
    class Rolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x).roll((1, 1), (1, 2))

    found = trace_dimensions(Rolled(), (torch.zeros(2, 4, 6, 4),))
    assert not any("bound" in a.seen for a in leaves(found.params["up.weight"][0]))
    assert not found.unknown


def test_a_view_is_followed_by_the_strides_that_it_gives() -> None:
    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.up.weight.t().unsqueeze(0).expand(1, 4, 8)[0].permute(1, 0).squeeze()
            return F.linear(x, weight)

    found = trace_dimensions(Moved(), (torch.zeros(2, 6, 4),))
    assert [(r.name, r.inputs, r.outputs) for r in found.reads] == [("up.weight", (1,), (0,))]


def test_the_run_changes_nothing() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.drop(self.norm(x))
            return y if bool((y == y).all()) else x  # hangs on values: runs on its own ones

    module = Counting()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    torch.manual_seed(0)
    want = torch.get_rng_state()
    trace_dimensions(module, {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(0))})
    assert torch.equal(want, torch.get_rng_state())
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


def test_a_module_nobody_knows_inputs_of_is_refused_and_the_example_helps() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4, 16)), nn.Parameter(torch.ones(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x @ self.a) @ self.b

    with pytest.raises(sl.errors.Unsupported, match="what feeds what in Odd is not known"):
        trace_dimensions(Odd())
    found = trace_dimensions(Odd(), (torch.zeros(2, 4),))
    assert [(r.name, r.inputs, r.outputs) for r in found.reads] == [
        ("a", (0,), (1,)),
        ("b", (0,), (1,)),
    ]
    with sl.simulate(x=2):
        with pytest.raises(sl.errors.Unsupported, match="what feeds what in Odd is not known"):
            sl.recipes.megatron1d(Odd())
        assert sl.recipes.megatron1d(Odd(), inputs=(torch.zeros(2, 4),)) == [
            ("a", ". x"),
            ("b", "x ."),
        ]


class Calls(nn.Module):
    """A module whose forward is one call of an operator."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> object:
        return self.call()


RULED = [op for op in op_db if op.name in {*_RULES, "unflatten"}]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", RULED, ids=lambda op: op.formatted_name)
def test_no_operand_of_torchs_database_stops_a_trace(op: Any) -> None:
    """What runs, on tensors of no dimension or without elements too, is traced."""
    traced = 0
    for sample in op.sample_inputs("cpu", torch.float32):
        call = partial(op.op, sample.input, *sample.args, **sample.kwargs)
        try:
            call()
        except Exception:  # some samples are of dtypes that this build lacks
            continue
        trace_dimensions(Calls(call), torch.zeros(1))
        traced += 1
    assert traced


def test_complex_numbers_viewed_as_pairs_are_traced() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(self.w(x).reshape(*x.shape[:-1], 4, 2))
            return x + torch.view_as_real(pairs * 1j).flatten(-2)

    found = trace_dimensions(Turned(), torch.zeros(2, 8))
    assert [(r.name, r.inputs, r.outputs) for r in found.reads] == [("w.weight", (1,), (0,))]
