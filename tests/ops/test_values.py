"""What torch refuses is refused: ids, dimensions, shapes, dtypes and
probabilities out of range; nothing changes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.ops.cases import r
from tests.ops.test_calls import IDS, IMAGE, TARGET, P, W, X, Y, layouts
from tests.workers import Pool

I64, Q = torch.int64, r(2, 4, 6, 4).float()


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


BAD: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    # ids, targets, indices
    "target of no class": (lambda x, t: F.cross_entropy(x, t), (X, ids(0, 77, 5, 1))),
    "negative target": (lambda x, t: F.cross_entropy(x, t), (X, ids(0, -1, 5, 1))),
    "target of no class, many": (lambda x, t: F.cross_entropy(x, t), (r(4, 20000), ids(0, 20000, 5, 1))),
    "int32 targets": (lambda x, t: F.cross_entropy(x, t), (X, TARGET.int())),
    "too few targets": (lambda x, t: F.cross_entropy(x, t), (X, ids(0, 1))),
    "logits of integers": (lambda x, t: F.cross_entropy(x, t), (IDS, TARGET)),
    "an unknown reduction": (lambda x, t: F.cross_entropy(x, t, reduction="avg"), (X, TARGET)),
    "smoothing above one": (lambda x, t: F.cross_entropy(x, t, label_smoothing=1.5), (X, TARGET)),
    "likelihood of no class": (lambda x, t: F.nll_loss(x, t), (X, ids(0, 77, 5, 1))),
    "id of no row": (lambda w, i: F.embedding(i, w), (W, ids(9, 0))),
    "negative id": (lambda w, i: F.embedding(i, w), (W, ids(-1, 0))),
    "ids of floats": (lambda w, i: F.embedding(i, w), (W, P)),
    "padding_idx of no row": (lambda w, i: F.embedding(i, w, padding_idx=9), (W, IDS)),
    "class of none": (lambda i: F.one_hot(i, 5), (ids(9, 0, 1, 1),)),
    "negative class": (lambda i: F.one_hot(i, 5), (ids(-1, 0, 1, 1),)),
    "gather beyond": (lambda x, i: x.gather(1, i), (X, IDS + 6)),
    "gather before": (lambda x, i: x.gather(0, i), (X, IDS - 6)),
    "index_select beyond": (lambda x, i: x.index_select(0, i), (X, ids(4, 0))),
    "index_add beyond": (lambda x, i, y: x.index_add(0, i, y), (X, ids(0, 9, 1, 1), Y)),
    "take beyond": (lambda x, i: torch.take(x, i), (X, ids(99, 0))),
    "a number beyond": (lambda x: x[:, -7], (X,)),
    "a tensor beyond": (lambda x, i: x[i], (X, ids(9, 0))),
    "a tensor of floats": (lambda x, p: x[p], (X, P[:2, 0])),
    "too many indices": (lambda x: x[0, 0, 0], (X,)),
    # dimensions
    **{f"{n} along no dimension": (lambda x, n=n: getattr(x, n)(9), (X,)) for n in
       "sum mean amax any all var std logsumexp cumsum sort argmax unsqueeze squeeze unbind softmax max".split()},
    "permute twice": (lambda x: x.permute(0, 0), (X,)),
    "permute too few": (lambda x: x.permute(0), (X,)),
    "sum twice": (lambda x: x.sum((0, 0)), (X,)),
    "t of three": (lambda x: x[None].t(), (X,)),
    "transpose of none": (lambda x: x.transpose(0, 9), (X,)),
    # shapes
    "a view of another size": (lambda x: x.view(5, 5), (X,)),
    "a view of two unknowns": (lambda x: x.view(-1, -1), (X,)),
    "a view of a transpose": (lambda x: x.T.view(-1), (X,)),
    "reshape to nothing": (lambda x: x.reshape(0, -1), (X,)),
    "flatten backwards": (lambda x: x.flatten(1, 0), (X,)),
    "unflatten of another size": (lambda x: x.unflatten(1, (2, 2)), (X,)),
    "expand of six": (lambda x: x.expand(4, 7), (X,)),
    "expand a new unknown": (lambda x: x.expand(-1, 4, 6), (X,)),
    "no chunks": (lambda x: x.chunk(0), (X,)),
    "pieces of another size": (lambda x: x.split([1, 2], 1), (X,)),
    "narrow beyond": (lambda x: x.narrow(1, 4, 9), (X,)),
    "cat of other sizes": (lambda x: torch.cat([x, x[:, :4]]), (X,)),
    "cat of one along no dimension": (lambda x: torch.cat([x], 5), (X,)),
    "stack of other sizes": (lambda x: torch.stack([x, x[:, :4]]), (X,)),
    "repeats below zero": (lambda x: x.repeat_interleave(-1, 0), (X,)),
    "padding of three sides": (lambda x: F.pad(x, (1, 1, 1)), (X,)),
    "sums of other shapes": (lambda x, y: x + y[:, :4], (X, Y)),
    "a larger operand in place": (lambda x, y: (x[0] * 1).add_(y), (X, Y)),
    "mm of three": (lambda x, w: torch.mm(x[None], w.T), (X, W)),
    "bmm of four": (lambda x, w: torch.bmm(x[None, None], w.T[None, None]), (X, W)),
    "bmm of other batches": (lambda x: torch.bmm(x[:2, :4], x[1:, :, :1]), (Q,)),
    "a product of other sizes": (lambda x, w: x @ w, (X, W)),
    "einsum of other sizes": (lambda x, w: torch.einsum("ij,jk->ik", x, w), (X, W)),
    "layer_norm of another shape": (lambda x: F.layer_norm(x, (5,)), (X,)),
    "layer_norm by one number": (lambda x, w: F.layer_norm(x, (6,), w), (X, W[0, :1])),
    "rms_norm by one number": (lambda x, w: F.rms_norm(x, (6,), w), (X, W[0, :1])),
    "attention of other sizes": (lambda q: F.scaled_dot_product_attention(q, q[..., :3], q[..., :3]), (Q,)),
    "conv2d of other channels": (lambda x, w: F.conv2d(x, w), (IMAGE, r(4, 3, 3, 3))),
    "topk of more": (lambda x: x.topk(99), (X,)),
    # dtypes
    "a mean of integers": (lambda x: x.mean(), (IDS,)),
    "softmax of integers": (lambda x: x.softmax(0), (IDS,)),
    "a norm of integers": (lambda x: x.norm(), (IDS,)),
    "a variance of integers": (lambda x: x.var(0), (IDS,)),
    "layer_norm of two dtypes": (lambda x, w: F.layer_norm(x, (6,), w), (X, W[0].float())),
    "linear of two dtypes": (lambda x, w: F.linear(x, w), (X, W.float())),
    "a bias of another dtype": (lambda x, w, b: F.linear(x, w, b), (X, W, W[:, 0].float())),
    "batch_norm of two dtypes": (lambda x, m: F.batch_norm(x, m, m), (X, P[0].float())),
    "attention of two dtypes": (lambda q: F.scaled_dot_product_attention(q, q.double(), q), (Q,)),
    "floats into integers": (lambda x, y: (x * 1).add_(y), (IDS, Y)),
    "an extreme of complex": (lambda x: x.amax(), (torch.complex(X, Y),)),
    # values
    "a probability of two": (lambda x, y: F.binary_cross_entropy(x, y), (P * 3, P)),
    "a target below zero": (lambda x, y: F.binary_cross_entropy(x, y), (P, P - 2)),
    "dropout of two": (lambda x: F.dropout(x, 2.0), (X,)),
    "dropout below zero": (lambda x: F.dropout(x, -0.1, False), (X,)),
    "attention's dropout of two": (lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=1.5), (Q,)),
    "rounding up": (lambda x: torch.div(x, 2, rounding_mode="up"), (X,)),
    "a gelu of no kind": (lambda x: F.gelu(x, approximate="no"), (X,)),
}  # fmt: skip


def accepted(names: list[str], implicit: bool) -> list[str]:
    """Calls that torch refuses and the mesh in scope does not,
    or not with a kind of error that says so.
    """
    out = []
    for name in names:
        f, tensors = BAD[name]
        with pytest.raises(Exception):  # noqa: B017 - torch has many kinds
            f(*[t.clone() for t in tensors])
        for k in range(3):
            how = layouts(tensors, k)
            ours = [sl.shard(t.clone(), lay) for t, lay in zip(tensors, how, strict=True)]
            before = [x.raw.clone() for x in ours]
            try:
                if implicit:
                    with sl.implicit():
                        got = f(*ours)
                else:
                    got = f(*ours)
                out.append(f"{name} {how}: {got}")
            except (sl.ShardError, IndexError, ValueError, RuntimeError):
                pass
            if any(not torch.equal(x.raw, b) for x, b in zip(ours, before, strict=True)):
                out.append(f"{name} {how}: an operand changed")
    return out


@pytest.mark.parametrize("implicit", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_what_torch_refuses_is_refused(name: str, implicit: bool) -> None:
    with sl.simulate(x=2, y=2):
        assert accepted([name], implicit) == []


def test_real_ranks_refuse_alike(pool: Pool) -> None:
    """Ids that only some ranks hold are left out: there one rank raises
    and the others wait for it, as in torch.
    """
    alone = {
        "target of no class",
        "negative target",
        "target of no class, many",
        "likelihood of no class",
    }
    names = [n for n in BAD if n not in alone and BAD[n][1][-1].dtype != I64]
    assert pool.run(accepted, names, False, x=2, y=2) == [[]] * 4


@pytest.mark.parametrize("f", [
    lambda c, x: c / x,
    lambda c, x: c * x.log(),
    lambda c, x: (c + x).sum() + (c * x.rsqrt()).sum(),
    lambda c, x: (1 - x).log() * c,
    lambda c, x: torch.where(x > 0.5, c, x.rsqrt()),
], ids=["div", "log", "rsqrt", "log of less", "where"])  # fmt: skip
@pytest.mark.parametrize(
    ("own", "shape"), [("", ()), (".", (1,)), (". .", (5, 1)), (". .", (5, 11))]
)
def test_no_gradient_comes_out_of_the_padding(
    f: Callable[..., Any], own: str, shape: tuple[int, ...]
) -> None:
    c, x = r(*shape), r(5, 11).sigmoid() * 0.9
    c1, x1 = c.clone().requires_grad_(), x.clone().requires_grad_()
    f(c1, x1).sum().backward()
    with sl.simulate(x=2, y=2):
        lay = ". y" if shape == (5, 11) else own
        c2 = sl.shard(c, lay, pad=shape == (5, 11)).requires_grad_()
        x2 = sl.shard(x, ". y", pad=True).requires_grad_()
        f(c2, x2).sum().backward()
        assert torch.allclose(sl.unshard(c2.grad), c1.grad) and torch.allclose(
            sl.unshard(x2.grad), x1.grad
        )


def test_products_take_no_gradient_out_of_the_padding() -> None:
    w, x = r(5, 3), r(5, 11).sigmoid()
    w1 = w.clone().requires_grad_()
    (w1.T @ x.log()).sum().backward()
    with sl.simulate(x=2, y=2):
        w2 = sl.shard(w, ". .").requires_grad_()
        (w2.T @ sl.shard(x, ". y", pad=True).log()).sum().backward()
        assert torch.allclose(sl.unshard(w2.grad), w1.grad) and not w1.grad.isnan().any()
        total = sl.shard(x, ". y", pad=True).sum(0, dtype=torch.float32)
        assert total.dtype == torch.float32 and torch.allclose(
            sl.unshard(total), x.sum(0, dtype=torch.float32)
        )
