# pyright: strict
"""A user's program, for pyright: every verb has the type
that this file says (tests/test_public.py).
"""

from typing import Literal, assert_type

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardlib as sl


class Dealt:
    """A layout of one's own."""

    def __init__(self, axis: str) -> None:
        self.axis = axis

    @property
    def layout(self) -> sl.Layout:
        return sl.Layout.parse(f"(2 {self.axis}) ...")


def mine(case: sl.extend.MatmulCase) -> sl.extend.Match | str:
    return "it is only an example"


def wrong(case: sl.extend.MatmulCase) -> int:
    return 0


def registers() -> None:
    sl.extend.algorithm("matmul", "mine")(mine)
    sl.extend.algorithm("matmul", "mine")(wrong)  # pyright: ignore[reportArgumentType]
    sl.shard(torch.ones(4), 3)  # pyright: ignore[reportCallIssue, reportArgumentType]


def places(x: Tensor, ours: sl.Mesh, theirs: DeviceMesh) -> None:
    layouts: list[sl.LayoutLike] = [
        "x y", sl.Layout2D("x", "y"), sl.Ring("s"), sl.Layout3D("x", "y", "z"),
        sl.Layout25D("x", "y", "d"),
    ]  # fmt: skip
    for layout in layouts:
        a = assert_type(sl.shard(x, layout, ours), sl.ShardedTensor)
        assert_type(sl.reshard(a, layout), sl.ShardedTensor)
        assert_type(sl.constrain(a, layout), sl.ShardedTensor)
        assert_type(sl.layout_of(a), sl.Layout)
        assert_type(sl.typeof(a), str)
    assert_type(sl.unshard(sl.shard(x, "x", theirs, pad=True)), Tensor)
    tree = assert_type(sl.shard({"w": x}, {"w": "x"}, src=0), dict[str, sl.ShardedTensor])
    assert_type(sl.reshard(tree, "..."), dict[str, sl.ShardedTensor])
    assert_type(sl.unshard(tree), dict[str, Tensor])
    assert_type(sl.matmul(x, x, out=sl.Row("x")), sl.ShardedTensor)
    assert_type(sl.shard(x, Dealt("x")), sl.ShardedTensor)
    assert_type(sl.from_local(x, Dealt("x")), sl.ShardedTensor)
    assert_type(sl.from_local(lambda: x, "x ..."), sl.ShardedTensor)
    assert_type(sl.from_local({"w": x}, {"w": "x ..."}), dict[str, sl.ShardedTensor])
    assert_type(sl.data([x, x], 2, {"ids": Dealt("x")}).batch, int)
    assert_type(sl.visualize(sl.shard(x, "x")).show(), None)
    ids, targets = sl.shard_sequence(x, sl.Ring("s"))
    assert_type((ids, targets), tuple[sl.ShardedTensor, sl.ShardedTensor])


def attends(q: sl.ShardedTensor, block: Tensor, either: bool) -> None:
    mask = sl.masks.Causal() & sl.masks.Window(4)
    assert_type(sl.ring_attention(q, q, q, mask=mask), sl.ShardedTensor)
    assert_type(
        sl.ring_attention(q, q, q, return_lse=True), tuple[sl.ShardedTensor, sl.ShardedTensor]
    )
    assert_type(sl.ring_attention(block, block, block, layout=sl.Ring("s", dim=2)), Tensor)
    assert_type(
        sl.ring_attention(q, q, q, return_lse=either),
        sl.ShardedTensor | tuple[sl.ShardedTensor, sl.ShardedTensor],
    )


def loss(params: dict[str, sl.ShardedTensor], x: Tensor) -> Tensor:
    return (params["w"] * x).sum()


def loss_and_note(params: dict[str, sl.ShardedTensor], x: Tensor) -> tuple[Tensor, str]:
    return loss(params, x), "seen"


def trains(model: nn.Module, x: Tensor) -> None:
    apply, params = sl.parallelize(model, sl.recipes.megatron1d(model), inputs={"input": "data ."})
    assert_type(params, dict[str, sl.ShardedTensor])
    assert_type(sl.init(model, [("*", "...")], seed=0)[1], dict[str, sl.ShardedTensor])
    value, grads = sl.value_and_grad(loss)(params, x)
    assert_type((value, grads), tuple[Tensor, dict[str, sl.ShardedTensor]])
    (_, note), again = sl.value_and_grad(loss_and_note, has_aux=True)(params, x=x)
    assert_type((note, again), tuple[str, dict[str, sl.ShardedTensor]])
    assert_type(sl.grad(loss)(params, x), dict[str, sl.ShardedTensor])
    assert_type(sl.grad(loss, (0, 1))(params, x), tuple[dict[str, sl.ShardedTensor], Tensor])
    tx = sl.optim.zero(
        sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(1e-3)), axis="data"
    )
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)
    assert_type(sl.optim.apply_updates(params, updates), dict[str, sl.ShardedTensor])
    params, state, _ = sl.optim.step(tx, params, grads, state)
    assert_type(params, dict[str, sl.ShardedTensor])
    assert_type(sl.optim.state_dict(state), dict[str, Tensor | int | float])
    assert_type(sl.explain(apply, params, x, mesh={"x": 2}).forward.messages, int)
    assert_type(str(sl.summary(params, state)), str)
    sl.check_model(model, sl.recipes.megatron1d, {"x": 2}, x, inputs={0: Dealt("x")})
    sl.load("run", layouts=[("w", Dealt("x"))])
    apply(params, x)


def runs() -> None:
    kinds: list[Literal["stacked"]] = []
    with (
        sl.simulate(x=2) as mesh,
        sl.trace() as seen,
        sl.saving(),
        sl.implicit(1024),
        sl.algorithm(matmul="oned"),
    ):
        assert_type(mesh, sl.Mesh)
        places(
            torch.ones(4, 4), mesh, mesh.device_mesh
        ) if mesh.device_mesh is not None else kinds.clear()
    print(seen.bytes, seen.messages)
