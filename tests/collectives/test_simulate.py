"""A torch function on Stacked is that function once per rank."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.collectives import Stacked, unwrap, wrap

RANKS = 3


def r(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        RANKS, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def i(top: int, *shape: int) -> Tensor:
    return torch.randint(top, (RANKS, *shape), generator=torch.Generator().manual_seed(5))


def addmm(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    out = c.clone()
    return out.addmm_(a, b)


def in_place(f: Callable[..., Any]) -> Callable[..., Tensor]:
    def g(x: Tensor, *others: Tensor) -> Tensor:
        out = x.clone()
        f(out, *others)
        return out

    return g


CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "matmul": (lambda a, b: a @ b, [r(4, 5), r(5, 2)]),
    "matmul rows": (lambda a, b: a @ b, [r(2, 4, 5), r(5, 2)]),
    "matmul batched": (torch.matmul, [r(2, 4, 5), r(2, 5, 3)]),
    "matvec": (torch.matmul, [r(4, 5), r(5)]),
    "linear": (F.linear, [r(2, 4, 5), r(3, 5), r(3)]),
    "addmm_": (addmm, [r(4, 3), r(4, 5), r(5, 3)]),
    "broadcast": (lambda a, b: a * b + 1, [r(2, 4, 5), r(5)]),
    "plain": (lambda a: a + torch.arange(5.0), [r(4, 5)]),
    "where": (lambda a, b: torch.where(a > b, a, 2 * b), [r(4, 5), r(4, 5, seed=1)]),
    "gather": (lambda a, b: a.gather(1, b), [r(4, 5), i(5, 4, 2)]),
    "gather last": (lambda a, b: a.gather(-1, b.unsqueeze(-1)), [r(4, 5), i(5, 4)]),
    "scatter_add": (lambda a, b, c: torch.scatter_add(a, 1, b, c), [r(4, 5), i(5, 4, 2), r(4, 2)]),
    "index_select": (lambda a, b: a.index_select(0, b), [r(4, 5), i(4, 3)]),
    "index_add": (lambda a, b, c: torch.index_add(a, 0, b, c), [r(4, 5), i(4, 3), r(3, 5)]),
    "embedding": (lambda b, a: F.embedding(b, a), [i(4, 2, 3), r(4, 5)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [r(2, 2, 4, 3, seed=s) for s in range(3)]),
    "gelu": (F.gelu, [r(4, 5)]),
    "softmax": (lambda a: F.softmax(a, dim=0), [r(4, 5)]),
    "layer_norm": (lambda a, w: F.layer_norm(a, (5,), w), [r(4, 5), r(5)]),
    "masked_fill": (lambda a: a.masked_fill(a > 0, 3.0), [r(4, 5)]),
    "masked_fill by a tensor": (lambda a: a.masked_fill(a > 0, a[0, 0]), [r(4, 5)]),
    "masked_fill of a scalar": (lambda a: a.masked_fill(a > 0, value=a * 2), [r()]),
    "masked_fill_": (in_place(lambda a, b: a.masked_fill_(a > 0, b)), [r(4, 5), r()]),
    "cumsum": (lambda a: a.cumsum(0), [r(4, 5)]),
    "topk": (lambda a: a.topk(2, dim=0)[0], [r(4, 5)]),
    "sort": (lambda a: a.sort(0)[0], [r(4, 5)]),
    "index none": (lambda a: a[:, None, 1:], [r(4, 5)]),
    "index int": (lambda a: a[1, ..., 2], [r(4, 5, 3)]),
    "index tensor": (lambda a, b: a[b], [r(4, 5), i(4, 3)]),
    "chunk": (lambda a: a.chunk(2, 0)[1], [r(4, 5)]),
    "split": (lambda a: a.split([2, 3], dim=1)[1], [r(4, 5)]),
    "narrow": (lambda a: a.narrow(1, 2, 3), [r(4, 5)]),
    "cat": (lambda a, b: torch.cat([a, b], 1), [r(4, 5), r(4, 2)]),
    "stack": (lambda a, b: torch.stack([a, b], 1), [r(4, 5), r(4, 5, seed=2)]),
    "sum": (lambda a: a.sum(0, keepdim=True) + a.sum(), [r(4, 5)]),
    "amax": (lambda a: a.amax((0, 1)), [r(4, 5)]),
    "prod": (lambda a: a.prod(0), [r(4, 5)]),
    "permute": (lambda a: a.permute(2, 0, 1), [r(4, 5, 3)]),
    "transpose": (lambda a: a.transpose(0, -1).T, [r(4, 5)]),
    "reshape": (lambda a: a.reshape(2, -1, 5).flatten(1), [r(4, 5)]),
    "view": (lambda a: a.view(20), [r(4, 5)]),
    "squeeze": (lambda a: a.unsqueeze(1).squeeze(1).unsqueeze(-1), [r(4, 5)]),
    "expand": (lambda a: a.unsqueeze(0).expand(3, 4, 5), [r(4, 5)]),
    "unbind": (lambda a: a.unbind(1)[2], [r(4, 5)]),
    "diagonal": (lambda a: a.diagonal(), [r(4, 5)]),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ki", a, b), [r(4, 5), r(5, 2)]),
    "norm": (lambda a: torch.linalg.vector_norm(a, dim=1), [r(4, 5)]),
    "cast": (lambda a: a.float().to(torch.float64), [r(4, 5)]),
    "new_zeros": (lambda a: a.new_zeros(2, 3) + a[:2, :3], [r(4, 5)]),
    "one_hot": (lambda b: F.one_hot(b, 4) * 1.0, [i(4, 3)]),
    "addmm_ scaled": (in_place(lambda c, a, b: c.addmm_(a, b, beta=0.5, alpha=2)), [r(4, 3), r(4, 5), r(5, 3)]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, alpha=2), [r(4, 3), r(4, 5), r(5, 3)]),
    "baddbmm": (torch.baddbmm, [r(2, 4, 3), r(2, 4, 5), r(2, 5, 3)]),
    "flip": (lambda a: a.flip(1, 0), [r(4, 5)]),
    "flip one": (lambda a: a.flip((1,)), [r(4, 5)]),
    "roll": (lambda a: a.roll((1, 2), (0, 1)), [r(4, 5)]),
    "topk smallest": (lambda a: a.topk(2, 0, False)[0], [r(4, 5)]),
    "sort descending": (lambda a: a.sort(0, True)[0], [r(4, 5)]),
    "argsort": (lambda a: a.argsort(0, True) * a, [r(4, 5)]),
    "max": (lambda a: a.max(dim=1).values, [r(4, 5)]),
    "prod of a dim": (lambda a: a.prod(dim=0), [r(4, 5)]),
    "all": (lambda a: (a > 0).all(dim=1) * a[:, 0], [r(4, 5)]),
    "sum of a scalar": (lambda a: a.sum(-1) + a.mean(0), [r()]),
    "softmax of a scalar": (lambda a: a.softmax(0) * a, [r()]),
    "cumsum of a scalar": (lambda a: a.cumsum(-1), [r()]),
    "sum axis": (lambda a: a.sum(axis=0), [r(4, 5)]),
    "std": (lambda a: a.std(1), [r(4, 5)]),
    "lower rank": (lambda a, b: a + b * b.sum(), [r(4), r(3, 4)]),
    "iadd": (in_place(lambda a, b: a.__iadd__(b)), [r(4, 5), r(5)]),
    "index_add_": (in_place(lambda a, b, c: a.index_add_(0, b, c)), [r(4, 5), i(4, 3), r(3, 5)]),
    "setitem": (in_place(lambda a, b: a.__setitem__((slice(1, 3),), b)), [r(4, 5), r(5)]),
    "setitem index": (in_place(lambda a, b: a.__setitem__(b, 7.0)), [r(4, 5), i(4, 3)]),
    "setitem mask": (in_place(lambda a: a.__setitem__(a > 0, 0.0)), [r(4, 5)]),
    "setitem rows": (in_place(lambda a, b: a.__setitem__(b > 0, 0.0)), [r(4, 5), r(4)]),
    "getitem two": (lambda a, b: a[b, torch.arange(3)], [r(4, 5), i(4, 3)]),
    "plain table": (lambda b: torch.arange(4.0)[b], [i(4, 3)]),
    "attention 3d": (F.scaled_dot_product_attention, [r(2, 4, 3, seed=s) for s in range(3)]),
    "attention mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m > 0),
        [*(r(2, 2, 4, 3, seed=s) for s in range(3)), r(4, 4).abs().add(1).tril()],
    ),
    "attention plain mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(2, 1, 4, 4).tril().bool()),
        [r(2, 2, 4, 3, seed=s) for s in range(3)],
    ),
    "attention grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [r(2, 4, 4, 3), r(2, 2, 4, 3, seed=1), r(2, 2, 4, 3, seed=2)],
    ),
    "embedding padding": (lambda b, a: F.embedding(b, a, padding_idx=0), [i(4, 2, 3), r(4, 5)]),
    "cross_entropy": (F.cross_entropy, [r(3, 5), i(5, 3)]),
    "rms_norm": (lambda a, w: F.rms_norm(a, (5,), w), [r(4, 5), r(5)]),
    "permute names": (lambda a: torch.permute(a, dims=(1, 0)), [r(4, 5)]),
    "squeeze scalar": (lambda a: a.squeeze(0) * a, [r()]),
    "data": (lambda a: a * 2 + a.data, [r(4, 5)]),
    "deepcopy": (lambda a: copy.deepcopy(a.detach()) + a, [r(4, 5)]),
    "empty": (lambda a: (a @ a.mT).sum(0), [r(0, 5)]),
    "no rule of vmap": (lambda a: a.cov(), [r(4, 5)]),
    "no rule of vmap, a tuple": (lambda a: a.tensor_split(torch.tensor([1, 3], device="cpu"))[1], [r(4, 5)]),
    "as many on each rank": (lambda a: a[torch.nonzero(a == a.amax())[:, 0]], [r(4)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_functions_run_once_per_rank(name: str) -> None:
    f, tensors = CASES[name]
    want = torch.stack([f(*[t[k] for t in tensors]) for k in range(RANKS)])
    with sl.simulate(x=RANKS) as m:
        got = f(*[wrap(t, m) for t in tensors])
    assert isinstance(got, Stacked) and got.shape == want.shape[1:]
    torch.testing.assert_close(unwrap(got), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [n for n, (_, ts) in CASES.items() if ts[0].is_floating_point()])
def test_gradients_run_once_per_rank(name: str) -> None:
    f, tensors = CASES[name]
    a, b = tensors[0].clone().requires_grad_(), tensors[0].clone().requires_grad_()
    with sl.simulate(x=RANKS) as m:
        unwrap(f(wrap(a, m), *[wrap(t, m) for t in tensors[1:]])).sum().backward()
    torch.stack([f(b[k], *[t[k] for t in tensors[1:]]) for k in range(RANKS)]).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_equal_ranks_print_as_one_block_and_have_a_value() -> None:
    with sl.simulate(x=2) as m:
        same, other = wrap(torch.ones(2), m), wrap(torch.tensor([1.0, 2.0]), m)
        assert repr(wrap(torch.ones(2, 1), m)) == "tensor([1.])"
        assert same.item() == 1.0
        assert repr(other) == "x=0: tensor(1.)\nx=1: tensor(2.)"
        with pytest.raises(sl.ShardError, match="one side of a branch"):
            bool(other > 1)


OUT_OF_RANGE: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda a: a.sum(2),
    "sum from the end": lambda a: a.sum(-3),
    "softmax": lambda a: a.softmax(2),
    "transpose": lambda a: a.transpose(0, 2),
    "transpose from the end": lambda a: a.transpose(0, -3),
    "permute": lambda a: a.permute(1, 2),
    "chunk": lambda a: a.chunk(3, 2),
    "split": lambda a: a.split(1, 2),
    "select": lambda a: a.select(2, 0),
    "squeeze": lambda a: a.squeeze(2),
    "unsqueeze": lambda a: a.unsqueeze(-4),
    "flatten": lambda a: a.flatten(0, 2),
    "cat": lambda a: torch.cat([a, a], -3),
    "stack": lambda a: torch.stack([a, a], -4),
    "mT of a vector": lambda a: a[0].mT,
    "t of a batch": lambda a: a[None].t(),
    "mm of a batch": lambda a: torch.mm(a[None], a),
    "bmm of a matrix": lambda a: torch.bmm(a, a),
    "index": lambda a: a[0, 0, 0],
    "embedding": lambda a: F.embedding((a[0, :1] == 0) * 3, a),  # on the first rank alone
    "embedding below": lambda a: F.embedding((a[0, :1] == 9) * -1, a),  # on the second
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_the_rank_dimension_is_out_of_reach(name: str) -> None:
    """What torch refuses on a block is refused on all of them, and never reads another rank's."""
    blocks = torch.arange(27.0).reshape(RANKS, 3, 3)
    with pytest.raises((IndexError, RuntimeError)):
        for one in blocks:
            OUT_OF_RANGE[name](one)
    with sl.simulate(x=RANKS) as m, pytest.raises((IndexError, RuntimeError)):
        OUT_OF_RANGE[name](wrap(blocks, m))


INTO_PLAIN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda p, a: p.add_(a),
    "+=": lambda p, a: p.__iadd__(a),
    "copy_": lambda p, a: p.copy_(a),
    "addmm_": lambda p, a: p.addmm_(a, a),
    "setitem": lambda p, a: p.__setitem__(0, a[0]),
}


@pytest.mark.parametrize("name", INTO_PLAIN)
def test_a_plain_tensor_cannot_take_each_ranks_value(name: str) -> None:
    target = torch.zeros(3, 3)
    with sl.simulate(x=RANKS) as m:
        block = wrap(torch.arange(27.0).reshape(RANKS, 3, 3), m)
        with pytest.raises(sl.errors.PlainTensor, match="plain tensor") as caught:
            INTO_PLAIN[name](target, block)
        assert torch.equal(target, torch.zeros(3, 3))
        scope: dict[str, Any] = {"block": block, "torch": torch}
        exec(caught.value.fix, scope)
        INTO_PLAIN[name](scope["target"], block)


def test_results_of_other_shapes_on_other_ranks_are_refused_with_them() -> None:
    with sl.simulate(x=2) as m:
        block = wrap(torch.tensor([[0.0, 1.0], [1.0, 2.0]]), m)
        with pytest.raises(sl.errors.Unsupported, match=r"nonzero.*\[1, 1\], \[2, 1\]"):
            torch.nonzero(block)
        with pytest.raises(sl.errors.Unsupported, match="as_strided_: the memory of a simulated"):
            block.as_strided_((2,), (1,))


def test_metadata_is_the_blocks() -> None:
    with sl.simulate(x=RANKS) as m:
        x = wrap(torch.randn(RANKS, 4, 6), m)
        for view in (x, x.mT, x[:, 1:3], x.chunk(2, 0)[1], x[None]):
            one = unwrap(view)[0]
            assert (view.shape, view.stride(), view.is_contiguous()) == (
                one.shape,
                one.stride(),
                one.is_contiguous(),
            )
            assert (view.nbytes, view.dtype, view.device, len(view)) == (
                one.nbytes,
                one.dtype,
                one.device,
                len(one),
            )


def test_python_takes_a_value_only_where_ranks_agree() -> None:
    with sl.simulate(x=2) as m:
        same, other = wrap(torch.tensor([1.5, 1.5]), m), wrap(torch.tensor([1.0, 2.0]), m)
        assert (
            f"{same:.2f}" == "1.50"
            and float(same) == 1.5
            and same.numpy() == 1.5
            and int(same) == 1
        )
        assert (
            torch.equal(same, torch.tensor(1.5))
            and torch.allclose(other, other)
            and not torch.equal(same, other)
        )
        for f in (
            lambda: f"{other:.2f}",
            lambda: torch.equal(other, torch.tensor(1.0)),
            other.tolist,
            other.numpy,
        ):
            with pytest.raises(sl.ShardError, match="different values"):
                f()


def test_gradients_land_on_the_ranks() -> None:
    with sl.simulate(x=2) as m:
        x = wrap(torch.ones(2, 3), m).requires_grad_()
        seen: list[torch.Size] = []
        y = x * wrap(torch.tensor([[2.0], [3.0]]), m)
        y.register_hook(lambda g: seen.append(g.shape))
        y.retain_grad()
        y.backward(torch.ones(3))
        assert isinstance(x.grad, Stacked) and seen == [torch.Size([3])] and y.grad is not None
        assert torch.equal(unwrap(x.grad), torch.tensor([[2.0] * 3, [3.0] * 3]))
        x.grad = None
        assert unwrap(x).grad is None


def test_dropout_draws_once_for_all_ranks() -> None:
    with sl.simulate(x=2) as m:
        out = unwrap(F.dropout(wrap(torch.ones(2, 64), m), 0.5))
    assert torch.equal(out[0], out[1]) and 0 < (out[0] == 0).sum() < 64


def test_a_padding_row_has_no_gradient_on_any_rank() -> None:
    """torch's vmap honours padding_idx on the first rank alone."""
    with sl.simulate(x=3):
        table = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
        mine = sl.collectives.pvary(table, "x")
        ids = torch.tensor([[0, 1, 1], [3, 0, 2]])
        out = torch.nn.functional.embedding(ids + 0 * sl.axis_index("x"), mine, padding_idx=0)
        sl.psum(out, "x").sum().backward()
        with pytest.raises(IndexError, match="out of range"):
            torch.nn.functional.embedding(ids + sl.axis_index("x"), mine)
    assert (
        table.grad is not None
        and bool((table.grad[0] == 0).all())
        and bool((table.grad[1:] != 0).all())
    )


@pytest.mark.parametrize("ask", [lambda b: 3.0 in b, lambda b: torch.is_nonzero(b[:1])])
def test_an_answer_that_differs_between_ranks_is_refused(ask: Any) -> None:
    with sl.simulate(x=2):
        x = sl.shard(torch.tensor([0.0, 1.0, 2.0, 3.0]), "x")
        same = sl.shard(torch.tensor([3.0, 1.0, 3.0, 2.0]), "x")

        def body(b: Any) -> Any:
            return b + 1 if ask(b) else b

        run = sl.shard_map(body, in_layouts="x", out_layouts="x")
        assert sl.unshard(run(same)).tolist() == [4.0, 2.0, 4.0, 3.0]
        with pytest.raises(sl.ShardError, match="one side of a branch"):
            run(x)
