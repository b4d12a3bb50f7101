import gc
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardlib as sl
from shardlib.collectives import scatter_into
from shardlib.errors import MeshError, NoMesh, UnknownAxis
from shardlib.mesh import Mesh, as_mesh, bind
from tests import fixes
from tests.ops.matmul.test_matmul2d import relative


def test_the_mesh_in_scope_nests_and_ends() -> None:
    with sl.simulate(x=2) as outer:
        with sl.simulate(y=3) as inner:
            assert sl.current_mesh() is inner
        assert sl.current_mesh() is outer
        with pytest.raises(KeyError), outer, bind(inner):
            raise KeyError
        assert sl.current_mesh() is outer
    with pytest.raises(sl.ShardError, match="no mesh is in scope"):
        sl.current_mesh()


def test_a_mesh_is_a_mapping_that_knows_its_axes() -> None:
    with sl.simulate(data=2, x=3) as m:
        assert dict(m) == {"data": 2, "x": 3} and m.size == 6 and str(m) == "data=2 x=3"
        assert m.axis_size(("data", "x")) == 6
        with pytest.raises(sl.ShardError, match="did you mean 'data'"):
            m.axis_size("dat")


@pytest.mark.parametrize("axes", [{"x": 0}, {"x": -2}, {}, {"x": 1.5}])
def test_sizes_that_are_none_are_refused(axes: dict[str, Any]) -> None:
    for make in (sl.simulate, sl.record, sl.make_mesh):
        with pytest.raises(sl.ShardError):
            make(**axes)
    with pytest.raises(sl.ShardError, match="only one axis can be inferred"):
        sl.make_mesh(x=-1, y=-1)
    with pytest.raises(sl.ShardError, match="not a mesh"):
        as_mesh("x=2")  # type: ignore[arg-type]


def test_plain_device_meshes_are_accepted_everywhere(pool: Any) -> None:
    assert pool.run(_plain_mesh, x=4) == [[True] * 6] * 4


def _plain_mesh() -> list[bool]:
    kind = torch.get_default_device().type
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("x", "y"))
    a = sl.shard(torch.eye(4), "x y", mesh=mesh)
    _, params = sl.parallelize(torch.nn.Linear(4, 4), [("*", "...")], mesh=mesh)
    with sl.use_mesh(mesh):
        b = sl.shard(torch.eye(4), "x y")
    inferred = sl.make_mesh(device=kind, x=2, y=-1)
    nameless = init_device_mesh(kind, (4,))
    try:
        sl.shard(torch.eye(4), "x .", mesh=nameless)
        refused = False
    except sl.ShardError as e:
        refused = "no axis names" in str(e)
    f = sl.shard_map(lambda v: sl.psum(v, "x"), in_layouts="...", out_layouts="...", mesh=mesh)
    return [
        torch.equal(sl.unshard(a @ b), torch.eye(4)), params["weight"].mesh is a.mesh, a.mesh.device_mesh == mesh,
        inferred.sizes == (2, 2), refused, float(sl.unshard(f(a.sum()))) == 8.0,
    ]  # fmt: skip


def test_sixty_four_simulated_ranks_multiply() -> None:
    x, w = torch.randn(16, 32, dtype=torch.float64), torch.randn(32, 16, dtype=torch.float64)
    x.requires_grad_(), w.requires_grad_()
    (x @ w).square().sum().backward()
    with sl.simulate(x=8, y=8):
        for rule in ("summa", "cannon"):
            with sl.algorithm(matmul=rule):
                a, b = (sl.shard(t.detach(), "x y").requires_grad_() for t in (x, w))
                (a @ b).square().sum().backward()
                assert (
                    relative(sl.unshard(a.grad), x.grad) < 1e-12
                    and relative(sl.unshard(b.grad), w.grad) < 1e-12
                )


def test_recorded_meshes_of_any_size_count_what_simulated_ones_move() -> None:
    prices = []
    for kind in (sl.record, sl.simulate):
        with kind(x=4, y=4), sl.trace() as t:
            a, b = (sl.shard(torch.zeros(16, 16), "x y").requires_grad_() for _ in range(2))
            (a @ b).sum().backward()
        prices.append((t.bytes, t.messages, t.by_axis()))
    assert prices[0] == prices[1]
    with sl.record(x=32, y=16), sl.trace() as t:
        a = sl.shard(torch.empty(8192, 8192, device="meta"), "x y")
        _ = a @ a
    assert t.bytes == 4 * 8192 * 8192 * (31 + 15) // 512


def test_recorded_ranks_choose_as_those_of_the_device_that_is_named() -> None:
    chosen = {}
    for device in ("cpu", "cuda", torch.device("xpu", 1), None):
        with sl.record(x=2, y=2, device=device):
            w = sl.shard(torch.empty(4096, 1024, device="meta"), "x y")
            assert w.device.type == "meta"
            chosen[str(device)] = re.search(r"^-> (\w+)", str(sl.why("muon", w)), re.M)[1]  # type: ignore[index]
            with torch.autocast("cpu", torch.bfloat16):  # which casts nothing on another device
                cast = (w.mT @ w).dtype == torch.bfloat16
            assert cast == (device in ("cpu", None))
    assert chosen == {"cpu": "blocks", "cuda": "owners", "xpu:1": "owners", "None": "blocks"}
    for device in ("quux", 3.5):
        with pytest.raises(sl.errors.MeshError, match="none of torch's devices"):
            sl.record(x=2, device=device)  # type: ignore[call-overload]


def test_meshes_are_equal_only_to_themselves() -> None:
    one, other = sl.simulate(x=2), sl.simulate(x=2)
    assert one == one and one != other and {one: 1, other: 2}[one] == 1


@pytest.mark.parametrize(
    ("axis", "says"), [("dat", "did you mean 'data'"), (("x", "dta"), "'data'"), ("q", "'q'")]
)
def test_an_unknown_axis_is_named_with_its_neighbour(axis: Any, says: str) -> None:
    mesh = sl.simulate(data=2, x=3)
    with pytest.raises(UnknownAxis, match="this mesh has data, x") as caught:
        mesh.axis_size(axis)
    assert says in str(caught.value)
    eval(caught.value.fix, {"mesh": mesh})


@pytest.mark.parametrize("make", [sl.simulate, sl.record])
@pytest.mark.parametrize("axes", [{}, {"x": 0}, {"x": 2, "y": -1}, {"x": 2.0}, {"x": "2"}])
def test_played_meshes_refuse_sizes_that_are_not_positive_integers(make: Any, axes: Any) -> None:
    with pytest.raises(MeshError, match="positive integers") as caught:
        make(**axes)
    assert isinstance(eval(caught.value.fix), Mesh)


def test_no_mesh_names_a_line_that_runs() -> None:
    with pytest.raises(NoMesh) as caught:
        sl.current_mesh()
    exec(caught.value.fix, {"sl": sl})


def test_the_scope_belongs_to_the_thread() -> None:
    seen: list[Any] = []

    def other() -> None:
        try:
            seen.append(sl.current_mesh())
        except NoMesh:
            seen.append(None)

    with sl.simulate(x=2):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [None]


def _made(*wanted: dict[str, int]) -> list[Any]:
    out: list[Any] = []
    for axes in wanted:
        try:
            mesh = sl.make_mesh(device="cpu", **axes)
            out.append((mesh.names, mesh.sizes))
        except sl.ShardError as e:
            fixes.caught(e)
            out.append((type(e).__name__, e.message, e.fix))
    return out


def test_make_mesh_fits_the_world_exactly(pool: Any) -> None:
    fits = [{"x": 4}, {"x": 2, "y": 2}, {"x": -1}, {"x": 2, "y": -1}, {"a": 1, "x": -1, "b": 1}]
    too_large, too_small, uneven = {"x": 4, "y": 2}, {"x": 2}, {"x": 3, "y": -1}
    for got in pool.run(_made, *fits, too_large, too_small, uneven, x=4):
        assert got[:5] == [
            (("x",), (4,)), (("x", "y"), (2, 2)), (("x",), (4,)), (("x", "y"), (2, 2)),
            (("a", "x", "b"), (1, 4, 1)),
        ]  # fmt: skip
        for (name, message, fix), ranks in zip(got[5:], (8, 2, 3), strict=True):
            assert (
                name == "MeshError" and f"needs {ranks} ranks, 4 processes are running" in message
            )
            run, simulated = fix.split("#")
            assert f"--nproc-per-node {ranks} " in run
            assert eval(simulated.partition(": ")[2]).size == ranks


def test_make_mesh_refuses_sizes_that_mean_nothing(pool: Any) -> None:
    for got in pool.run(_made, {"x": -1, "y": -1}, {"x": 0}, {"x": -2}, {}, x=4):
        assert [row[0] for row in got] == ["MeshError"] * 4
        assert "only one axis can be inferred, not x, y" in got[0][1]
        assert all(row[2] for row in got)


def _views() -> list[bool]:
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    view = as_mesh(named)
    with sl.use_mesh(named) as used:
        same = sl.current_mesh() is used is view is as_mesh(named) is as_mesh(view) is as_mesh(None)
    coordinate = named.get_coordinate()
    placed = view.coord == dict(zip("xy", coordinate or (), strict=True))
    try:
        as_mesh(init_device_mesh("cpu", (2, 2)))
    except MeshError as e:
        scope: dict[str, Any] = {"init_device_mesh": init_device_mesh}
        unnamed = as_mesh(eval(e.fix, scope)).axes == {"x": 2, "y": 2}
    return [
        same,
        placed,
        view.kind == "dist",
        view.axes == {"x": 2, "y": 2},
        view.device.type == "cpu",
        unnamed,
    ]


def test_a_named_device_mesh_has_one_view(pool: Any) -> None:
    assert all(all(row) for row in pool.run(_views, x=4))


def _made_over() -> list[Any]:
    """Make one mesh again and again; each rank's garbage collector comes at its own time."""
    groups, sums, kind = set(), [], torch.get_default_device().type
    for turn in range(4):
        grid = None if turn % 2 else init_device_mesh(kind, (2, 2), mesh_dim_names=("over", "x"))
        mesh = sl.make_mesh(device=kind, over=2, x=2) if grid is None else as_mesh(grid)
        with mesh:
            whole = sl.shard(torch.ones(4), "(over x)").sum()
            sums.append(float(sl.unshard(whole)))
        groups.add(id(mesh.device_mesh.get_group("over")) if mesh.device_mesh else None)
        del mesh, grid, whole
        if (dist.get_rank() + turn) % 2:
            gc.collect()
    return [sums, len(groups)]


def test_a_mesh_made_again_meets_in_the_same_groups(pool: Any) -> None:
    assert pool.run(_made_over, x=4) == [[[4.0] * 4, 1]] * 4


def _crossed() -> list[float]:
    """Two meshes whose axes are one process group, a transfer of each on its way."""
    kind = torch.get_default_device().type
    mesh = sl.make_mesh(device=kind, a=4)
    other = sl.make_mesh(device=kind, b=2, c=2)
    size = 4 << 16
    one, two = torch.full((size,), 1.0), torch.full((size,), 10.0)
    sums = torch.empty(2, size // 4)
    first = scatter_into(one, sums[0], mesh, ("a",))
    second = scatter_into(two, sums[1], other, ("b", "c"))
    second()
    first()
    return [float(s) for s in (sums[0].min(), sums[0].max(), sums[1].min(), sums[1].max())]


def test_transfers_of_two_meshes_keep_apart(pool: Any) -> None:
    assert pool.run(_crossed, x=4) == [[4.0, 4.0, 40.0, 40.0]] * 4


def _again() -> list[float]:
    """Leave the process group and start another; the same mesh must reach the new one."""
    folder, rank, out = os.environ["SHARDLIB_TEST_STORES"], dist.get_rank(), []
    for turn in range(2):
        mesh = sl.make_mesh(device="cpu", x=2)
        with mesh as view:
            out.append(sl.psum(torch.ones(1), "x").item())
        dist.destroy_process_group()
        store = dist.FileStore(os.path.join(folder, f"store{turn}"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return [*out, float(view is mesh)]


def test_a_mesh_made_after_the_old_groups_are_gone_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None
) -> None:
    monkeypatch.setenv("SHARDLIB_TEST_STORES", str(tmp_path))
    assert sl.launch(_again, x=2) == [[2.0, 2.0, 1.0]] * 2


ALONE = """
import shardlib as sl
from shardlib.mesh import as_mesh
try:
    sl.make_mesh(x=2, y=2)
except sl.ShardError as e:
    assert type(e).__name__ == "MeshError" and "needs 4 ranks, 1 process is running" in str(e), e
    assert "sl.simulate(x=2, y=2)" in e.fix and "--nproc-per-node 4" in e.fix
import torch
with sl.make_mesh(x=1, y=-1) as mesh:
    a = sl.shard(torch.eye(2), "x y")
    assert (mesh.sizes, mesh.kind) == ((1, 1), "dist") and torch.equal(sl.unshard(a @ a), torch.eye(2))
    assert sl.current_mesh() is mesh
print("right")
"""


def test_one_plain_process_is_a_mesh_of_one() -> None:
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    clean["CUDA_VISIBLE_DEVICES"] = ""
    clean["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=clean, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "right", done.stderr


@pytest.mark.parametrize("given", [({"x": 2},), ((2, 2), ("x", "y")), (2, 2)])
@pytest.mark.parametrize("make", [sl.simulate, sl.record, sl.make_mesh])
def test_sizes_without_names_are_refused_with_the_line_that_names_them(
    make: Any, given: Any
) -> None:
    with pytest.raises(sl.ShardError, match="axes are named") as e:
        make(*given)
    with eval(e.value.fix.replace("make_mesh", "simulate"), {"sl": sl}) as mesh:
        assert mesh.names[0] == "x" and set(mesh.sizes) == {2}


@pytest.mark.parametrize("name", ["", "x y", "(", "3", ".", "...", "x+", "x\n", "é"])
def test_an_axis_that_no_layout_could_name_is_refused(name: str) -> None:
    with pytest.raises(sl.ShardError, match="cannot name an axis"):
        sl.simulate(**{name: 2})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_mesh_without_a_gpu_is_refused() -> None:
    with pytest.raises(sl.ShardError, match="none of those that this process has: cpu"):
        sl.make_mesh(device="cuda", x=1)


def test_a_size_is_an_integer_and_no_truth() -> None:
    for make in (sl.simulate, sl.record):
        with pytest.raises(MeshError, match="positive integers"):
            make(x=True)


@pytest.mark.parametrize("axes", [{"pipe": 4}, {"pipe": 2, "x": 2}, {"x": 2, "pipe": 2}])
def test_the_mesh_of_a_stage_has_the_other_axes(axes: dict[str, int], pool: Any) -> None:
    others = {a: n for a, n in axes.items() if a != "pipe"} or {"one": 1}
    inner = sl.simulate(**axes).without("pipe")
    assert dict(inner) == others and inner.outer is not None and inner.outer.axis == "pipe"
    for sizes, same, total, mine in pool.run(_stage_sums, **axes):
        assert sizes == others and same and total == mine


def _stage_sums() -> tuple[dict[str, int], bool, float, float]:
    """Sum the ranks of a stage on its mesh, and by the coordinates of the whole mesh."""
    mesh = sl.current_mesh()
    inner = mesh.without("pipe")
    assert mesh.coord is not None
    ranks = mesh.device_mesh.mesh.select(mesh.names.index("pipe"), mesh.coord["pipe"])
    with inner:
        total = sl.psum(torch.tensor([float(dist.get_rank())]), tuple(inner))
    return dict(inner), mesh.without("pipe") is inner, total.item(), float(ranks.sum())


def _shares() -> tuple[list[str], list[bool]]:
    """The meshes around stages of two meshes of the same ranks, and whether meshes are distinct."""
    mesh = sl.current_mesh()
    stage = mesh.without("pipe")
    other = sl.make_mesh(data=4)
    there = other.without("data")
    whole = sl.make_mesh(pipe=1, data=4).without("pipe")
    around = [str(m.outer.mesh) for m in (stage, there, whole) if m.outer is not None]
    assert stage.device_mesh is not None
    distinct = [stage is not there, whole is not other, other.outer is None]
    return around, [*distinct, sl.make_mesh(data=4) is other, as_mesh(stage.device_mesh) is stage]


def test_meshes_of_the_same_ranks_do_not_share_the_mesh_of_a_stage(pool: Any) -> None:
    for around, said in pool.run(_shares, pipe=4):
        assert around == ["pipe=4", "data=4", "pipe=1 data=4"] and said == [True] * 5
