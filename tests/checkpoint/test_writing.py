"""What raised was not written, what returned was; all ranks end alike, and nothing is left over."""

import inspect
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.checkpoint import folder, writing
from shardlib.checkpoint.tree import Content, place_of
from shardlib.errors import BadArgument, CheckpointError
from shardlib.mesh.failures import current_job
from tests.checkpoint.cases import placed
from tests.workers import Pool


def told(f: Any) -> str:
    try:
        f()
    except sl.ShardError as e:
        return e.message
    return "ok"


def everything(place: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    rank = dist.get_rank()
    w, v = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)), torch.arange(300.0)
    t = {"w": sl.shard(w, "x y"), "v": sl.shard(v, "zigzag(x)", pad=True), "p": v.clone(), "n": 1.5}
    big = torch.arange(3 * 40000.0).reshape(3, 40000)
    t["big"] = sl.shard(big, ". x")
    turned = dict(reversed(t.items())) if rank == 2 else t
    sl.save(place + "/c", turned)
    like = {"w": sl.shard(w * 0, "(y x) ."), "v": sl.shard(v * 0, "y"), "p": v * 0, "n": 0.0}
    like["big"] = sl.shard(big * 0, ". (y x)")
    got = sl.load(place + "/c", like)
    out["equal"] = got["n"] == 1.5 and all(
        torch.equal(sl.unshard(got[k]), x) for k, x in (("w", w), ("v", v), ("big", big))
    )
    out["plain"] = torch.equal(got["p"], v)
    out["read once"] = sl.load.bytes_read <= 1.1 * sum(  # type: ignore[attr-defined]
        x.raw.nbytes if isinstance(x, sl.ShardedTensor) else x.nbytes
        for x in (like["w"], like["v"], like["big"], like["p"])
    )
    out["other value"] = told(lambda: sl.save(place + "/c", {**t, "n": 2.5} if rank == 3 else t))
    out["other type"] = told(
        lambda: sl.save(place + "/c", {**t, "n": object()} if rank == 3 else t)
    )
    out["other copy"] = told(lambda: sl.save(place + "/c", {**t, "p": v + (rank == 2)}))
    apart = t["w"].becomes(t["w"].raw.clone())
    lone = sl.shard(torch.arange(300.0), "x")
    lone = lone.becomes(lone.raw + 1e-3) if rank == 3 else lone
    out["other block"] = told(lambda: sl.save(place + "/c", {**t, "w": apart, "q": lone}))
    out["other place"] = told(lambda: sl.save(place + "/" + "cd"[rank == 1], t))
    path = Path(place) / "c" / "rank_00003.safetensors"
    dist.barrier()
    if rank == 0:
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    dist.barrier()
    out["damaged"] = told(lambda: sl.load(place + "/c", like))
    dist.barrier()
    out["elsewhere"] = told(lambda: sl.load(place + ("/c" if rank else "/none"), like))
    dist.barrier()
    path.unlink(missing_ok=True)
    dist.barrier()
    out["absent"] = told(lambda: sl.load(place + "/c", like))
    if rank == 1:
        write, writing.write_file = writing.write_file, _full
    out["disk full"] = told(lambda: sl.save(place + "/new", t))
    if rank == 1:
        writing.write_file = write
    out["alone"] = told(lambda: sl.save(place + "/new", t, timeout=0.7)) if rank == 0 else "ok"
    dist.barrier()
    out["after"] = told(lambda: sl.save(place + "/c", t, timeout=20.0))
    out["whole"] = told(lambda: sl.load(place + "/c", like))
    later = sl.save(place + "/c", {**t, "n": 3.5}, wait=False)
    with torch.no_grad():
        t["w"].raw.zero_()
        t["p"].zero_()
    later.wait()
    got = sl.load(place + "/c", like)
    out["later"] = got["n"] == 3.5 and torch.equal(sl.unshard(got["w"]), w)
    out["later"] = out["later"] and torch.equal(got["p"], v)
    dist.barrier()
    out["left"] = sorted(os.listdir(place))
    return out


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_four_processes_end_alike(pool: Any, tmp_path: Path) -> None:
    said = pool.run(everything, str(tmp_path), x=2, y=2)
    for key in said[0]:
        if key != "alone":
            assert len({str(s[key]) for s in said}) == 1, (key, [s[key] for s in said])
    one = said[0]
    assert one["equal"] and one["plain"] and one["read once"] and one["later"]
    assert one["other value"].startswith("'n' is") or "'n' is" in one["other value"]
    assert "rank 3: 'n' is a object" in one["other type"]
    assert "'p' has other values on rank 2" in one["other copy"]
    assert one["other block"] == "'q' has other values on rank 3 than on rank 2"
    assert "rank 1 saves to" in one["other place"]
    assert "rank_00003.safetensors" in one["damaged"]
    assert one["elsewhere"].startswith("rank 0")
    assert "rank_00003.safetensors" in one["absent"]
    assert one["disk full"] == "rank 1: No space left on device"
    assert one["alone"].startswith("rank 1 said nothing")
    assert one["after"] == one["whole"] == "ok"
    assert one["left"] == ["c"]


def test_the_order_of_names_means_nothing(pool: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "p")
    pool.run(_reversed_on_some, path, x=2, y=2)
    found = sl.load(path)
    assert {n: t.tolist() for n, t in found.items()} == {"a": [1.0] * 4, "b": [7.0] * 4}


def _reversed_on_some(path: str) -> None:
    params = {n: sl.shard(torch.full((4,), float(v)), "x") for n, v in (("a", 1), ("b", 7))}
    if sl.axis_index("x"):
        params = dict(reversed(params.items()))
    sl.save(path, params)


def test_trees_and_their_numbers_come_back(tmp_path: Any) -> None:
    with sl.simulate(data=2, x=2):
        params = {
            "w": sl.shard(torch.arange(8.0).reshape(4, 2), "x ."),
            "b": sl.shard(torch.ones(2), "."),
        }
        tx = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(0.1))
        _, state = tx.update(params, tx.init(params), params)
        held = {"params": params, "state": state, "step": 7, "key": sl.random.get_state()}
        sl.save(tmp_path / "all", held)
        blank = {
            "params": params,
            "state": tx.init(params),
            "step": 0,
            "key": sl.random.get_state(),
        }
        found = sl.load(tmp_path / "all", blank)
        assert found["step"] == 7 and found["key"] == held["key"]
        for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(held), strict=True):
            assert (
                torch.equal(sl.unshard(a), sl.unshard(b)) if isinstance(a, torch.Tensor) else a == b
            )


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    one = torch.ones(1)
    with sl.simulate(x=2):
        pending = sl.shard(torch.ones(4), "... + sum(x)")
        for tree, why in (
            ({1: one, "1": one}, "two leaves are named '1'"),
            ({"f": print}, "'f' is a builtin_function_or_method"),
            ({"w": pending}, "'w' is a sum that is still pending"),
            ({"s": torch.ones(2, device="cpu").to_sparse()}, "'s' is not dense"),
            ({"\ud800": one}, "no text"),
            ({"q": torch.empty(4, dtype=torch.uint4)}, "which no file holds"),
        ):
            with pytest.raises(CheckpointError, match=why):
                sl.save(tmp_path / "p", tree)
    with sl.record(x=2), pytest.raises(CheckpointError, match="no values"):
        sl.save(tmp_path / "p", {"w": sl.shard(torch.ones(4), "x")})
    for arguments in ({"step": -1}, {"keep": 1}, {"step": 1, "keep": 0}):
        with pytest.raises(BadArgument):
            sl.save(tmp_path / "p", {}, **arguments)
    with pytest.raises(BadArgument, match="directory"):
        sl.save(tmp_path / "p.safetensors", {})
    assert not list(tmp_path.iterdir())


def test_a_step_is_kept_unless_it_may_be_replaced(tmp_path: Path) -> None:
    sl.save(tmp_path, {"a": 1}, step=3)
    with pytest.raises(CheckpointError, match="overwrite=False"):
        sl.save(tmp_path, {"a": 2}, step=3, overwrite=False)
    assert sl.load(tmp_path) == {"a": 1}
    sl.save(tmp_path, {"a": 2}, step=3)
    assert sl.load(tmp_path) == {"a": 2}


def test_one_save_is_under_way_and_its_error_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), writing.write_file

    def slow(*args: Any) -> Any:
        go.wait(10)
        return write(*args)

    x = torch.ones(1000)
    monkeypatch.setattr(writing, "write_file", slow)
    first = sl.save(tmp_path / "a", {"x": x}, wait=False)
    x.zero_()
    assert not first.done and not (tmp_path / "a").exists()
    threading.Timer(0.1, go.set).start()
    began = time.monotonic()
    sl.save(tmp_path / "b", {"x": x})
    assert time.monotonic() - began > 0.05 and first.done  # the second waited for the first
    assert sl.load(tmp_path / "a")["x"].sum() == 1000 and sl.load(tmp_path / "b")["x"].sum() == 0
    monkeypatch.setattr(writing, "write_file", _full)
    failing = sl.save(tmp_path / "c", {"x": x}, wait=False)
    with pytest.raises(CheckpointError, match="No space left"):
        failing.wait()
    failing.wait()  # told once
    sl.save(tmp_path / "c", {"x": x}, wait=False)
    with pytest.raises(CheckpointError, match="No space left"):
        sl.save(tmp_path / "d", {"x": x})
    monkeypatch.setattr(writing, "write_file", write)
    sl.save(tmp_path / "d", {"x": x})
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "d"]


def test_no_directory_and_no_permission(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file" / "c", Path("/proc/none/c")):
        with pytest.raises(CheckpointError):
            sl.save(path, {"a": torch.ones(3)})
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("swaps", [True, False], ids=["exchange", "aside"])
def test_savers_at_one_path_leave_one_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    if not swaps:
        monkeypatch.setattr(folder, "exchange", lambda a, b: False)
    wrong: list[str] = []

    def saver(k: int) -> None:
        for i in range(8):
            value = float(100 * k + i)
            group = writing.Group("save", 10.0, True)
            tree = writing.Leaves.of({"x": torch.full((50,), value), "n": value}, "save")
            places = {"x": place_of(tree.tensors["x"], 1)}
            content = Content(places, tree.values, tree.skeleton)
            job = writing.SaveJob(group, str(tmp_path / "c"), None, True)
            try:
                job.begin(content.leaves, tree.skeleton)
                job.write(writing._parts(job, tree, writing.LateValues(tree.tensors)))
                found = sl.load(tmp_path / "c")
            except CheckpointError as e:
                wrong.append(e.message)
                continue
            if not (found["x"] == found["n"]).all():
                wrong.append(f"a mix {found}")

    threads = [threading.Thread(target=saver, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not [w for w in wrong if w.startswith("a mix")]
    assert swaps is False or not wrong
    assert sl.load(tmp_path / "c")["n"] >= 0
    sl.save(tmp_path / "c", {"n": -1.0})
    assert os.listdir(tmp_path) == ["c"]


def test_a_simulated_save_is_a_real_one(pool: Any, tmp_path: Path) -> None:
    """Files, names and bytes are the same but for the checkpoint's id."""
    with sl.simulate(x=2, y=2):
        sl.save(tmp_path / "simulated", placed())
    pool.run(_saved, str(tmp_path / "real"), x=2, y=2)
    a, b = (sorted((tmp_path / n).iterdir()) for n in ("simulated", "real"))
    assert [p.name for p in a] == [p.name for p in b]
    for p, q in zip(a, b, strict=True):
        if p.suffix == ".safetensors":
            assert p.stat().st_size == q.stat().st_size


def _saved(path: str) -> None:
    sl.save(path, placed())


ONE = ["x .", ". x", "zigzag(x) .", "striped(x) .", "(3 x) .", "..."]
TWO = ["x y", "y x", "(x y) .", ". (y x)", "zigzag(x) y", "(3 x) y"]
THREE = ["(x z) y", "z (y x)", "zigzag(z) ."]


def every_pair(path: str, axes: str) -> list[str]:
    """Of forms under which a tensor that does not divide was saved and loaded, the pairs that differ."""
    forms = ONE if axes == "x" else [*ONE, *TWO] + THREE * ("z" in axes)
    w = torch.arange(37 * 29.0).reshape(37, 29)
    placed = {f: sl.shard(w, f, pad=True) for f in forms}
    sl.save(path, placed)
    wrong = []
    for f in placed:
        like = {g: sl.shard(w * 0, f, pad=True) for g in placed}
        got = sl.load(path, like)
        wrong += [f"{g} as {f}" for g, x in got.items() if not torch.equal(x.raw, placed[f].raw)]
    return wrong


@pytest.mark.parametrize("axes", ["x", "x y"])
def test_every_pair_of_layouts_on_four_processes(pool: Any, axes: str, tmp_path: Path) -> None:
    mesh = {"x": 4} if axes == "x" else {"x": 2, "y": 2}
    assert pool.run(every_pair, str(tmp_path / "c"), axes, **mesh) == [[]] * 4


def test_every_pair_of_layouts_on_eight_processes(pool8: Any, tmp_path: Path) -> None:
    found = pool8.run(every_pair, str(tmp_path / "c"), "x y z", x=2, y=2, z=2)
    assert found == [[]] * 8


@pytest.mark.parametrize("mesh", [{"x": 2, "y": 3}, {"x": 2, "y": 2, "z": 2}, {"x": 1}], ids=str)
def test_every_pair_of_layouts_on_simulated_ranks(mesh: dict[str, int], tmp_path: Path) -> None:
    with sl.simulate(**mesh):
        assert every_pair(str(tmp_path / "c"), " ".join(mesh)) == []


def _spread(path: str, apart: bool) -> list[Any]:
    """What four ranks that all hold a tensor read of it, and whether they have it."""
    from shardlib.checkpoint import reading

    w = {n: torch.arange(40_000.0).reshape(200, 200) + i for i, n in enumerate("abcd")}
    tree = {n: sl.shard(x, "...") for n, x in w.items()} | {"split": sl.shard(w["a"], "x .")}
    sl.save(path, {**tree, "plain": w["b"]})
    many, reading._MANY = reading._MANY, 2
    try:
        like = {n: sl.shard(x * 0, "...") for n, x in w.items()}
        like |= {"split": sl.shard(w["a"] * 0, "x ."), "plain": w["b"] * 0}
        if apart:  # ranks that ask for other trees are told, and nobody waits
            if dist.get_rank() == 1:
                del like["plain"]
            return [told(lambda: sl.load(path, like, extra="skip"))]
        found = sl.load(path, like)
        read = sl.load.bytes_read / w["a"].nbytes  # type: ignore[attr-defined]
        alike = all(torch.equal(sl.unshard(found[n]), x) for n, x in w.items())
        same = torch.equal(found["plain"], w["b"]) and torch.equal(
            sl.unshard(found["split"]), w["a"]
        )
        return [read, alike and same]
    finally:
        reading._MANY = many


def test_one_of_many_holders_reads(pool: Any, tmp_path: Path) -> None:
    """Five whole tensors, four blocks of which each is held by one rank, or by two."""
    found = pool.run(_spread, str(tmp_path / "a"), False, x=4)
    assert all(good for _, good in found)
    assert sum(read for read, _ in found) == 5 + 1 and max(read for read, _ in found) <= 2.25
    found = pool.run(_spread, str(tmp_path / "b"), False, x=2, y=2)
    assert all(good for _, good in found) and sum(read for read, _ in found) == 5 + 1
    (one, *others) = pool.run(_spread, str(tmp_path / "c"), True, x=4)
    assert others == [one] * 3 and "rank 1 and rank 0 read other tensors from" in one[0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_program_that_ends_while_it_saves_ends_the_save(tmp_path: Path, fails: bool) -> None:
    """Nobody waited: it is written, or that it was not is said."""
    code = f"""
import time, torch, shardlib as sl
from shardlib.checkpoint import writing
write = writing.write_file
def slow(*a):
    time.sleep(0.5)
    if {fails}: raise OSError(28, "No space left on device")
    return write(*a)
writing.write_file = slow
sl.save({str(tmp_path / "c")!r}, {{"w": torch.ones(1000)}}, wait=False)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    if fails:
        assert "a save failed and nobody asked" in done.stderr and "No space left" in done.stderr
        assert not list(tmp_path.iterdir())
    else:
        assert sl.load(tmp_path / "c")["w"].sum() == 1000


def _ended_while_saving(path: str) -> bool:
    """Ranks go on with loads and saves of their own while the first of them still writes."""
    w, write = sl.shard(torch.arange(4000.0), "x"), writing.write_file
    sl.save(path + "/a", {"w": w})
    if dist.get_rank() == 0:
        writing.write_file = lambda *a: (time.sleep(1.0), write(*a))[1]
    saving = sl.save(path + "/b", {"w": w + 1}, wait=False)
    for _ in range(6):
        assert torch.equal(sl.load(path + "/a", {"w": w})["w"].raw, w.raw)
    writing.write_file = write
    saving.wait()
    return torch.equal(sl.load(path + "/b", {"w": w})["w"].raw, w.raw + 1)


def test_loads_go_on_while_a_save_is_written(pool: Any, tmp_path: Path) -> None:
    assert all(pool.run(_ended_while_saving, str(tmp_path), x=4))


def _failing_later(path: str) -> tuple[list[str], str]:
    """Errors of a save that fails while nobody waits: the lines that they name."""
    write, world = writing.write_file, dist.is_initialized()

    def fails(*args: Any) -> Any:
        if not world or dist.get_rank() == 1:
            raise ValueError("odd")
        return write(*args)

    writing.write_file, out = fails, []
    try:
        saving = sl.save(path, {"a": 1}, wait=False)
        here = f"{Path(__file__).name}:{inspect.currentframe().f_lineno - 1}"  # type: ignore[union-attr]
        with pytest.raises(CheckpointError) as e:
            saving.wait()
        out.append(e.value.line)
        assert f"at  {here}" in str(e.value)
    finally:
        writing.write_file = write
    return out, here


def test_an_error_of_a_save_in_its_thread_names_the_line_of_save(tmp_path: Path) -> None:
    lines, here = _failing_later(str(tmp_path / "c"))
    assert lines == [here]


def test_an_error_of_a_save_in_its_thread_names_the_line_of_save_on_all_ranks(
    pool: Any, tmp_path: Path
) -> None:
    for lines, here in pool.run(_failing_later, str(tmp_path / "c"), x=2, y=2):
        assert lines == [here]


def _raising_meanwhile(path: str) -> float:
    """A rank raises while what it began to save is written, and its process waits for that."""
    write = writing.write_file

    def slow(*args: Any) -> Any:
        time.sleep(1.0)
        return write(*args)

    writing.write_file = slow
    saving = sl.save(path, {"a": sl.shard(torch.ones(3), "x")}, wait=False)
    if dist.get_rank() == 1:
        job = current_job()
        assert job is not None
        job.raised(ValueError("a loss of nan"))
    saving.wait()
    return float(sl.load(path)["a"].raw.sum())


def test_what_a_rank_that_raised_has_begun_to_save_is_saved(tmp_path: Path) -> None:
    workers = Pool(3)
    try:
        assert workers.run(_raising_meanwhile, str(tmp_path / "c"), x=3) == [1.0] * 3
    finally:
        workers.close()


def test_a_wait_for_a_save_ends_where_nothing_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, inner = threading.Event(), os.fsync

    def fsync(fd: int) -> None:
        goes_on.wait(20.0)
        inner(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(writing, "_SLACK", 0.0)
    saving = sl.save(tmp_path / "c", {"a": torch.ones(3)}, wait=False, timeout=0.2)
    with pytest.raises(CheckpointError, match="nothing was written for"):
        saving.wait()
    goes_on.set()
    saving.wait()  # the disk is back
    assert sl.load(tmp_path / "c")["a"].tolist() == [1.0] * 3
