import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import shardlib as sl
from shardlib.mesh import as_mesh, bind
from tests.ops.test_matmul import relative


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
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    a = sl.shard(torch.eye(4), "x y", mesh=mesh)
    _, params = sl.parallelize(torch.nn.Linear(4, 4), [("*", "...")], mesh=mesh)
    with sl.use_mesh(mesh):
        b = sl.shard(torch.eye(4), "x y")
    inferred = sl.make_mesh(x=2, y=-1)
    nameless = init_device_mesh("cpu", (4,))
    try:
        sl.shard(torch.eye(4), "x .", mesh=nameless)
        refused = False
    except sl.ShardError as e:
        refused = "no axis names" in str(e)
    f = sl.shard_map(lambda v: sl.psum(v, "x"), in_layouts="...", out_layouts="...", mesh=mesh)
    return [
        torch.equal(sl.unshard(a @ b), torch.eye(4)), params["weight"].mesh is a.mesh, a.mesh.device_mesh is mesh,
        tuple(inferred.shape) == (2, 2), refused, float(sl.unshard(f(a.sum()))) == 8.0,
    ]  # fmt: skip


def test_src_takes_the_values_of_rank_zero(pool: Any) -> None:
    assert pool.run(_from_zero, x=2, y=2) == [6.0] * 4


def _from_zero() -> float:
    mine = torch.full((2, 2), float(sl.axis_index(("x", "y")))) + torch.arange(4.0).reshape(2, 2)
    return float(sl.unshard(sl.shard(mine, "x y", src=0)).sum())


def test_launch_returns_by_rank_and_raises_the_first_error() -> None:
    assert sl.launch(_rank_of, 10, x=2) == [10, 11]
    with pytest.raises(sl.ShardError, match=r"rank 1 failed[\s\S]*ZeroDivisionError") as caught:
        sl.launch(_fails_on_one, x=2, timeout=60)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def _rank_of(base: int) -> int:
    return base + sl.axis_index("x")


def _fails_on_one() -> float:
    if sl.axis_index("x") == 1:
        return 1 / 0
    return float(sl.psum(torch.ones(1), "x"))


def test_torchrun_starts_the_same_program(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import torch, shardlib as sl\n"
        "with sl.use_mesh(sl.make_mesh(x=2, device='cpu')):\n"
        "    a = sl.shard(torch.eye(4), 'x .')\n"
        "    total = sl.unshard(a @ sl.shard(torch.ones(4, 4), '. .')).sum().item()\n"
        "import sys; sys.stdout.write(f'sum {total};')\n"
    )
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": root})
    assert done.returncode == 0 and done.stdout.count("sum 16.0;") == 2, done.stdout + done.stderr


def test_sixty_four_simulated_ranks_multiply() -> None:
    x, w = torch.randn(16, 32, dtype=torch.float64), torch.randn(32, 16, dtype=torch.float64)
    x.requires_grad_(), w.requires_grad_()
    (x @ w).square().sum().backward()
    with sl.simulate(x=8, y=8):
        for rule in ("summa", "cannon"):
            with sl.algorithm(matmul=rule):
                a, b = (sl.shard(t.detach(), "x y").requires_grad_() for t in (x, w))
                (a @ b).square().sum().backward()
                assert relative(sl.unshard(a.grad), x.grad) < 1e-12 and relative(sl.unshard(b.grad), w.grad) < 1e-12


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
