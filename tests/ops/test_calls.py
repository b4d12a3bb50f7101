"""Every form of a call means what torch means by it: positions,
keywords in any order, defaults, out=, in place.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.tensor import TABLE
from tests.ops.cases import r
from tests.workers import Pool

X, Y, W, P = r(4, 6), r(4, 6, seed=1), r(8, 6, seed=2), r(4, 6, seed=3).sigmoid()
IDS = torch.randint(0, 6, (4, 6), generator=torch.Generator().manual_seed(0))
TARGET, Q, IMAGE = torch.tensor([0, 2, 5, 1]), r(2, 4, 6, 4, seed=4), r(4, 6, 8, 8, seed=5)
INF, NAN = float("inf"), float("nan")


def row(value: float) -> Tensor:
    return X.index_fill(0, torch.tensor([1]), value)


def after(x: Any, write: Callable[[Any], Any]) -> Any:
    """What a write to a view of a copy leaves in the copy."""
    y = x * 1
    write(y)
    return y


def into(x: Any, y: Any) -> Any:
    z = x * 0
    assert torch.add(x, y, out=z) is z
    return z


def replaced(x: Any, y: Any) -> Any:
    z = x * 1
    z.data = sl.reshard(y, sl.layout_of(x)) if isinstance(x, sl.ShardedTensor) else y
    return z


FORMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    # by keyword alone
    "adjoint by keyword": (lambda x: torch.adjoint(input=x), (X,)),
    "multi_dot by keyword": (lambda x, y: torch.linalg.multi_dot(tensors=[x, y.mT]), (X, Y)),
    "rmatmul by keyword": (lambda x, y: x.__rmatmul__(other=y.mT), (X, Y)),
    "split_copy by keyword": (
        lambda x: torch.split_copy(dim=1, split_size=2, input=x)[1],
        (X,),
    ),
    "expand_copy by keyword": (lambda x: torch.expand_copy(size=[-1, -1], input=x), (X,)),
    "reshape to a list by keyword": (lambda x: torch.reshape(input=x, shape=[2, 12]), (X,)),
    "places by keyword": (lambda x: torch.where(condition=x > 0)[0], (X,)),
    "a scalar tensor as alpha": (lambda x, y: torch.add(x, y, alpha=torch.tensor(0.5)), (X, Y)),
    "std by keyword alone": (lambda x: torch.std(dim=-1, input=x), (X,)),
    "fftn of one size": (lambda x: torch.fft.fftn(x, s=4), (X,)),
    "what is empty promotes": (
        lambda x: torch.cat([torch.zeros_like(x[:0, 0]).to(torch.complex128), x]),
        (X,),
    ),
    # found by sizes: of the whole tensor, not of a block
    "cross of the dimension of three": (torch.cross, (r(6, 3), r(6, 3, seed=1))),
    "kron": (torch.kron, (X, P)),
    "a conversion to its own dtype": (lambda x: x.double() is x and x.conj() is x, (X,)),
    "equal to nothing": (lambda x: (x == None, x != None), (X,)),  # noqa: E711
    # reductions
    "std by position": (lambda x: torch.std(x, -1, False, True), (X,)),
    "std of all, biased": (lambda x: x.std(unbiased=False), (X,)),
    "var with a correction": (lambda x: x.var(0, correction=2), (X,)),
    "var of complex": (lambda x: x.var(0), (torch.complex(X, Y),)),
    "std of complex": (lambda x: x.std(), (torch.complex(X, Y),)),
    "sum in another dtype": (lambda x: x.sum(0, dtype=torch.float64), (X.float(),)),
    "sum by keyword": (lambda x: torch.sum(input=x, dim=1, keepdim=True), (X,)),
    "any of no dimension": (lambda x: torch.any(x, dim=[]), (X,)),
    "all by position": (lambda x: (x > 0).all(0, True), (X,)),
    "any of bytes": (lambda x: x.any(0), ((X * 3).abs().to(torch.uint8),)),
    "logsumexp of infinity": (lambda x: x.logsumexp(1), (row(INF),)),
    "logsumexp of nothing": (lambda x: x.logsumexp(1), (row(-INF),)),
    "logsumexp of complex": (lambda x: x.logsumexp(1), (torch.complex(X, Y),)),
    "softmax of half in double": (lambda x: x.softmax(-1, torch.float64), (X.half(),)),
    "log_softmax by keyword": (lambda x: torch.log_softmax(dim=0, input=x), (X,)),
    "softmax of no dimension": (lambda x: F.softmax(x, None, 3, torch.float64), (X.float(),)),
    "amin of the least number": (lambda x: x.amin(0), (torch.tensor([[3], [-(2**63)], [7], [9]]),)),
    "amax of bytes": (lambda x: x.amax(0), ((X * 3).abs().to(torch.uint8),)),
    "amin of bools": (lambda x: x.amin(), (X > 0,)),
    "amax of int16": (lambda x: x.amax(1), ((X * 3).to(torch.int16),)),
    "NaN in a maximum": (lambda x: x.amax(0), (row(NAN),)),
    "NaN in a minimum": (lambda x: x.min(), (row(NAN),)),
    # views
    "reshape by keyword": (lambda x: torch.reshape(shape=(2, 2, 6), input=x), (X,)),
    "flatten by keyword": (lambda x: x.flatten(end_dim=1, start_dim=0), (X,)),
    "unflatten": (lambda x: torch.unflatten(x, -1, (2, -1)), (X,)),
    "permute by keyword": (lambda x: x.permute(dims=(1, 0)), (X,)),
    "swapaxes": (lambda x: x.swapaxes(axis1=0, axis0=1), (X,)),
    "unsqueeze by keyword": (lambda x: torch.unsqueeze(dim=1, input=x), (X,)),
    "squeeze of several": (lambda x: x[None].squeeze((0, 1)), (X,)),
    "squeeze of several, spread": (lambda x: x[None].squeeze(0, -2), (X,)),
    "count_nonzero, spread": (lambda x: x.count_nonzero(0, 1), (X,)),
    "count_nonzero of all": (lambda x: torch.count_nonzero(x, dim=None), (X,)),
    "count_nonzero of one": (lambda x: torch.count_nonzero(x, 1), (X,)),
    "expand": (lambda x: x[None].expand(size=(3, -1, -1), implicit=False), (X,)),
    "split by keyword": (
        lambda x: torch.split(dim=1, split_size_or_sections=[2, 4], tensor=x),
        (X,),
    ),
    "select by keyword": (lambda x: x.select(index=-2, dim=1), (X,)),
    "pad by keyword": (lambda x: F.pad(pad=(1, 2), input=x, value=3.0), (X,)),
    "repeat_interleave": (lambda x: torch.repeat_interleave(x, 2, dim=1, output_size=12), (X,)),
    "stack by keyword": (lambda x: torch.stack(dim=1, tensors=[x, x]), (X,)),
    "cat of several dtypes": (lambda x, y: torch.cat((x, y), axis=-1), (X, Y.float())),  # type: ignore[call-overload]
    "channels last": (lambda x: x.clone(memory_format=torch.channels_last).contiguous(), (IMAGE,)),
    # what a write reaches
    "a piece's contiguous": (lambda x: after(x, lambda y: y[:3].contiguous().zero_()), (X,)),
    "a transpose's contiguous": (lambda x: after(x, lambda y: y.T.contiguous().zero_()), (X,)),
    "a transpose's reshape": (lambda x: after(x, lambda y: y.T.reshape(-1).exp_()), (X,)),
    "a flat view": (lambda x: after(x, lambda y: y.flatten().exp_()), (X,)),
    "cat of one": (lambda x: after(x, lambda y: torch.cat([y]).zero_()), (X,)),
    "the same dtype": (lambda x: after(x, lambda y: y.to(torch.float64).zero_()), (X,)),
    "other data": (replaced, (X, Y)),
    "out=": (into, (X, Y)),
    # elementwise
    "operands by keyword": (lambda x, y: torch.add(other=y, input=x, alpha=3), (X, Y)),
    "numpy's names": (lambda x, y: torch.mul(x, x2=y), (X, Y)),  # type: ignore[call-overload]
    "where by keyword": (lambda x, y: torch.where(condition=x > 0, input=x, other=y), (X, Y)),
    "clamp between": (lambda x, y: torch.clamp(max=y, input=x), (X, Y)),
    "rounding_mode": (lambda x, y: torch.div(x, y, rounding_mode="floor"), (X, Y)),
    "as another's dtype": (lambda x, y: x.to(y), (X, W.float())),
    "alpha, in place": (lambda x, y: (x * 1).add_(other=y, alpha=3), (X, Y)),
    "addcmul_": (lambda x, y, p: (x * 1).addcmul_(y, p, value=2), (X, Y, P)),
    "a broadcast in place": (lambda x, y: (x * 1).__isub__(y), (X, Y[0])),
    "sigmoid_": (lambda x: (x * 1).sigmoid_(), (X,)),
    "lgamma_": (lambda x: (x * 1).lgamma_(), (X,)),
    "fill_ with a number": (lambda x, v: (x * 1).fill_(v.sum()), (X, Y)),
    "masked_fill of a scalar": (lambda x, v: x.masked_fill(x > 0, v.sum()), (X, Y)),
    "inplace=": (lambda x: after(x, lambda y: F.relu(input=y, inplace=True)), (X,)),
    # products, norms, losses, lookups
    "matmul by keyword": (lambda x, w: torch.matmul(other=w.T, input=x), (X, W)),
    "linear by keyword": (lambda x, w: F.linear(weight=w, input=x), (X, W)),
    "addmm without its input": (
        lambda c, x, w: torch.addmm(c, x, w.T, beta=0),
        (torch.full((4, 8), NAN).double(), X, W),
    ),
    "layer_norm by keyword": (
        lambda x, w: F.layer_norm(normalized_shape=(6,), input=x, eps=0.1, weight=w),
        (X, W[0]),
    ),
    "layer_norm, shift alone": (
        lambda x, b: torch.layer_norm(x, (6,), None, b, 0.1, False),
        (X, W[1]),
    ),
    "rms_norm by position": (lambda x, w: torch.rms_norm(x, [6], w, 0.1), (X, W[0])),
    "embedding by keyword": (lambda w, i: F.embedding(weight=w, input=i, padding_idx=-1), (W, IDS)),
    "attention by keyword": (
        lambda q: F.scaled_dot_product_attention(value=q, key=q, query=q, is_causal=True),
        (Q,),
    ),
    "size_average": (lambda x, y: F.mse_loss(x, y, size_average=False), (X, Y)),
    "weights of squares": (lambda x, y, w: F.mse_loss(x, y, weight=w), (X, Y, P)),
    "reduce": (lambda x, t: F.cross_entropy(x, t, reduce=False), (X, TARGET)),
    "loss of half": (lambda x, t: F.cross_entropy(x, t), (X.half(), TARGET)),
    # what leaves the mesh
    "a formatted number": (lambda x: f"{x.sum():.3f}", (X,)),
    "an array": (lambda x: round(float(x.sum().detach().cpu().numpy()), 9), (X,)),
}
LAYOUTS = {0: [""], 1: ["y", "."], 2: ["x y", ". x", "(x y) .", "x ."], 4: ["x . . .", ". x . ."]}


def layouts(tensors: tuple[Tensor, ...], k: int) -> list[str]:
    """The ``k``-th choice that divides."""
    out = []
    for j, t in enumerate(tensors):
        found = [
            lay
            for lay in LAYOUTS[t.ndim]
            if all(n % w == 0 for n, w in zip(t.shape, widths(lay), strict=True))
        ]
        out.append(found[(k + j * (k > 1)) % len(found)])
    return out


def widths(layout: str) -> list[int]:
    return [{".": 1, "x": 2, "y": 2}.get(t, 4) for t in layout.replace("(x y)", "both").split()]


def fault(got: Any, want: Any) -> str:
    """Why ``got`` is not ``want``: dtype, shape or value."""
    if isinstance(want, tuple | list):
        return "".join(fault(a, b) for a, b in zip(got, want, strict=True))
    if not isinstance(want, Tensor):
        return "" if got == want else f"{got!r} for {want!r}"
    got = sl.unshard(got).detach()
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{got.dtype} {list(got.shape)} for {want.dtype} {list(want.shape)}"
    near = {torch.float16: 2e-3, torch.float32: 1e-5}.get(want.dtype, 1e-11)
    return "" if torch.allclose(got, want, near, near, equal_nan=True) else f"{got} for {want}"


def faults(names: list[str] | None = None) -> list[str]:
    """All forms on the mesh in scope, compared with dense."""
    out = []
    for name in names or list(FORMS):
        f, tensors = FORMS[name]
        want = f(*[t.clone() for t in tensors])
        for k in range(3):
            how = layouts(tensors, k)
            try:
                got = f(*[sl.shard(t.clone(), lay) for t, lay in zip(tensors, how, strict=True)])
            except sl.errors.Unsupported as e:  # a view of what was gathered
                assert "share memory" in str(e), e
                continue
            if wrong := fault(got, want):
                out.append(f"{name} {how}: {wrong}")
    return out


IGNORED = pytest.mark.filterwarnings(
    "ignore:Implicit dimension choice",
    "ignore:Using torch.cross without",
    "ignore:size_average and reduce",
    "ignore:An output with one or more",
)


@IGNORED
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_call_equals_dense(name: str) -> None:
    with sl.simulate(x=2, y=2), sl.implicit():
        assert faults([name]) == []


def on_ranks() -> list[str]:
    import warnings

    with sl.implicit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return faults()


def test_real_ranks_read_calls_alike(pool: Pool) -> None:
    assert pool.run(on_ranks, x=2, y=2) == [[]] * 4


def test_out_is_written_where_it_lies_or_refused_with_a_line_that_does() -> None:
    with sl.simulate(x=2, y=2):
        x, y = sl.shard(X, "x y"), sl.shard(torch.zeros_like(X), ". .")
        with pytest.raises(sl.ShardError) as caught:
            torch.add(x, 1, out=y)
        exec(caught.value.fix, {"torch": torch, "sl": sl, "x": x, "y": y})
        assert torch.equal(sl.unshard(y), X + 1)
        assert torch.add(y, 1, out=x) is x and torch.equal(sl.unshard(x), X + 1 + 1)
        w = sl.shard(X, "x y").requires_grad_()
        with pytest.raises(sl.ShardError, match="have no gradient"):
            torch.add(w, 1, out=x)


def test_a_size_that_is_padded_does_not_broadcast() -> None:
    one, six = r(1, 4), r(6, 4, seed=1)
    with sl.simulate(x=3, y=2):
        x, y = sl.shard(one, "(x y) .", pad=True), sl.shard(six, "(x y) .")
        assert x.padded_shape == y.shape
        for f in (torch.add, torch.atan2, torch.copysign, torch.logaddexp2):
            with pytest.raises(sl.ShardError):
                f(y, x)
            with sl.implicit():
                assert torch.allclose(sl.unshard(f(y, x)), f(six, one)), f
        assert torch.equal(sl.unshard(x + x), one + one)


def test_padded_blocks_with_a_gradient_are_not_written_in_place_wherever_the_flag_stands() -> None:
    with sl.simulate(x=3):
        for flag in ({"inplace": True}, (True,)):
            x = sl.shard(r(4, 2), "x .", pad=True).requires_grad_() * 1
            with pytest.raises(sl.ShardError, match="in place"):
                F.relu(x, **flag) if isinstance(flag, dict) else F.relu(x, *flag)


def test_a_sum_of_parts_scaled_in_place_has_second_derivatives() -> None:
    def seconds(w: Any, z: Any) -> Any:
        y = w * 1
        y.mul_(z)
        (g,) = torch.autograd.grad((y * y).sum(), w, create_graph=True)
        return torch.autograd.grad((g * g).sum(), (w, z))

    a, b = r(4).requires_grad_(), r(4, seed=1).requires_grad_()
    want = seconds(a, b)
    with sl.simulate(x=2, y=2):
        x, y = sl.shard(a.detach(), "x"), sl.shard(b.detach(), "x").requires_grad_()
        x = sl.reshard(x, "x + sum(y)").requires_grad_()

        def scaled(w: Any, z: Any) -> Any:
            v = w * 1
            v.mul_(z)
            return sl.reshard(v, "x")

        v = scaled(x, y)
        (g,) = torch.autograd.grad((v * v).sum(), x, create_graph=True)
        g = sl.reshard(g, "x")
        got = torch.autograd.grad((g * g).sum(), (x, y))
        for one, other in zip(got, want, strict=True):
            assert torch.allclose(sl.unshard(one), other)


def test_masks_have_the_sizes_of_what_they_mask() -> None:
    x, mask = r(2, 4), torch.tensor([True, False])
    with pytest.raises(IndexError):
        x[..., mask]
    with sl.simulate(x=2), sl.implicit(), pytest.raises(IndexError, match="mask"):
        sl.shard(x, "x .")[..., sl.shard(mask, ".")]


def test_a_mistake_in_an_implementation_is_no_request_for_whole_operands() -> None:
    def mistaken(func: Any, args: Any, kwargs: Any) -> Any:
        return args[0].no_such_field

    with sl.simulate(x=2), sl.implicit(), pytest.MonkeyPatch.context() as patch:
        x = sl.shard(X, "x .")
        patch.setitem(TABLE, torch.sin, mistaken)
        with pytest.raises(AttributeError, match="no_such_field"):
            torch.sin(x)
        patch.setitem(TABLE, torch.roll, mistaken)
        with pytest.raises(sl.ShardError, match="torch refuses"):
            torch.roll(x, 1, 9)


def test_products_do_not_broadcast_what_they_sum_over() -> None:
    one, v = r(4, 1), r(4, seed=2)
    forms: list[Callable[[Any, Any], Any]] = [
        lambda a, b: a @ b,
        lambda a, b: torch.mv(a, b),
        lambda a, b: torch.addmv(b, a, b),
        lambda a, b: F.linear(b, a.expand(4, 1)),
        lambda a, b: torch.inner(a[:, 0][:1], b),
    ]
    for f in forms:
        with pytest.raises(RuntimeError):
            f(one, v)
        with sl.simulate(x=2), pytest.raises((sl.ShardError, RuntimeError)):
            f(sl.shard(one, ". ."), sl.shard(v, "x"))
    with sl.simulate(x=2):
        got = torch.einsum("ij,j->i", sl.shard(one, "x ."), sl.shard(v, "."))
        assert torch.allclose(sl.unshard(got), torch.einsum("ij,j->i", one, v))


def test_nothing_is_cut_into_as_many_pieces_as_torch_cuts() -> None:
    empty = torch.zeros(0, 4)
    with sl.simulate(x=2):
        for layout in ("x .", ". x"):
            y = sl.shard(empty, layout)
            for cut in (
                lambda t: t.chunk(3),
                lambda t: t.unsafe_chunk(2),
                lambda t: t.split(2),
                lambda t: t.unbind(0),
            ):
                assert [p.shape for p in cut(y)] == [p.shape for p in cut(empty)]


def test_a_weight_that_torch_does_not_hand_on_counts() -> None:
    weight = r(4, 6, seed=7).abs()
    with sl.simulate(x=2, y=2):
        x, y, w = (sl.shard(t, "x y") for t in (X, Y, weight))
        for how in ("mean", "sum", "none"):
            got = sl.unshard(F.l1_loss(x, y, reduction=how, weight=w))
            assert torch.allclose(got, F.l1_loss(X, Y, reduction=how, weight=weight))
        w = sl.shard(weight[:3], "x .", pad=True)  # refused by the implementation, and run whole
        with sl.implicit():
            got = F.l1_loss(sl.shard(X[:3], ". y"), sl.shard(Y[:3], ". y"), weight=w)
        assert torch.allclose(sl.unshard(got), F.l1_loss(X[:3], Y[:3], weight=weight[:3]))


def test_inference_mode_computes_what_no_grad_does() -> None:
    for under in (torch.inference_mode, torch.no_grad):
        with sl.simulate(x=2, y=2), sl.implicit(), under():
            x = sl.shard(X, "x y") * 1
            assert torch.allclose(sl.unshard(x.logcumsumexp(0)), X.logcumsumexp(0))
            assert torch.equal(
                sl.unshard(x.arccosh_().nan_to_num_(5.0)), X.arccosh().nan_to_num(5.0)
            )
            x.index_put_(
                (sl.shard(torch.tensor([1]), "."),), sl.shard(torch.zeros((), dtype=X.dtype), "...")
            )
            assert not sl.unshard(x)[1].any()


def test_what_has_no_derivative_is_refused_as_torch_refuses_it() -> None:
    with sl.simulate(x=2), sl.implicit():
        x = sl.shard(X.abs(), "... .").requires_grad_()
        for f in (lambda: torch.igammac(x, x), lambda: (x * 1).arcsinh_()):
            with pytest.raises(NotImplementedError, match="derivative"):
                torch.autograd.grad(f().sum(), x)


def test_an_argument_that_is_not_understood_is_refused() -> None:
    with sl.simulate(x=2, y=2):
        x = sl.shard(X, "x y")
        calls: list[Callable[[], Any]] = [
            lambda: x.sum(colour=1), lambda: F.layer_norm(x, (6,), colour=1), lambda: F.pad(x, (1, 1), colour=1),
            lambda: torch.cat([x, x], colour=1), lambda: x.reshape(4, 6, colour=1), lambda: x.clone(colour=1),
            lambda: F.mse_loss(x, x, colour=1), lambda: x.add_(x, colour=1), lambda: torch.neg(x, colour=1),
            lambda: F.embedding(sl.shard(IDS, "x ."), x, colour=1), lambda: x.softmax(0, colour=1),
            lambda: F.linear(x, x, colour=1), lambda: F.dropout(x, colour=1),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises((sl.ShardError, TypeError), match=r"colour|keyword"):
                call()


def test_factors_and_summands_that_torch_refuses_are_refused() -> None:
    calls: list[Callable[[Tensor, Tensor], Any]] = [
        lambda x, v: torch.addmm(x, x, x, beta=1j),
        lambda x, v: torch.baddbmm(x[None], x[None], x[None], alpha=2j),
        lambda x, v: torch.addr(x, v, v, alpha=True),
        lambda x, v: torch.addmm(x[:, :2], x, x, beta=0),
        lambda x, v: torch.addmm(x[None], x, x),
    ]
    x, v = r(4, 4), r(4)
    for call in calls:
        with pytest.raises(RuntimeError):
            call(x, v)
        with (
            sl.simulate(x=2),
            sl.implicit(2**20),
            pytest.raises((sl.ShardError, RuntimeError), match=r"converted|Boolean|expand"),
        ):
            call(sl.shard(x, "x ."), sl.shard(v, "."))


REPEATED: list[Callable[..., Any]] = [
    lambda x, y: torch.cumsum(x, 1),
    lambda x, y: torch.cumsum(x, 1, dtype=torch.float32).double(),
    lambda x, y: torch.sort(x, 1, True),
    lambda x, y: torch.sort(x, 1, False)[0],
    lambda x, y: F.glu(x, 1) * torch.sort(y, dim=1).values[:, :3],
    lambda x, y: torch.logcumsumexp(x, dim=1),
    lambda x, y: torch.cross(x[:, :3], y[:, 3:], dim=1),
    lambda x, y: torch.cumsum(x, 1.0),  # type: ignore[call-overload]
    lambda x, y: torch.sort(x, True),  # type: ignore[call-overload]
]


def repeated(x: Tensor, y: Tensor, layout: str | None) -> list[list[Any]]:
    """Each call three times, first as planned, then from its plan: values
    and gradients; nothing where torch refuses.
    """
    rounds = []
    for _ in range(3):
        found: list[Any] = []
        for f in REPEATED:
            a, b = (
                (t if layout is None else sl.shard(t, layout)).requires_grad_()
                for t in (x.clone(), y.clone())
            )
            try:
                out = f(a, b)
            except (TypeError, RuntimeError, sl.ShardError):
                found.append([])
                continue
            value = out if isinstance(out, Tensor) else out[0]
            value.square().sum().backward()
            grads = [t.grad for t in (a, b) if t.grad is not None]
            found.append(
                [sl.unshard(t).detach() if layout else t.detach() for t in (value, *grads)]
            )
        rounds.append(found)
    return rounds


def test_a_call_met_again_on_real_ranks_equals_dense_and_numbers_are_told_apart_by_type(
    pool: Pool,
) -> None:
    (want, *_) = repeated(r(8, 6), r(8, 6, seed=1), None)
    assert want.count([]) == 2, "neither 1.0 nor True is a dimension"
    for rounds in pool.run(repeated, r(8, 6), r(8, 6, seed=1), "x .", x=4):
        for got in rounds:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_an_outer_product_of_what_is_true_is_one_whatever_lies_where() -> None:
    """What a refusal says to write runs."""
    t = torch.tensor([True, False])
    with sl.simulate(x=2):
        x = sl.shard(t, "x")
        with pytest.raises(sl.errors.ImplicitCommunication) as refused:
            torch.outer(x, x)
        y = eval(refused.value.fix, {"torch": torch, "sl": sl, "x": x, "y": x})
        assert torch.equal(sl.unshard(y), torch.outer(t, t))
