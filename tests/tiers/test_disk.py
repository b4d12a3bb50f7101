"""Rows on a disk are those of one generation, whatever ends the process or fails beneath it."""

import errno
import multiprocessing as mp
import os
import random
import resource
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib import filesystem
from shardlib.errors import BadArgument, ShardError
from shardlib.tiers import disk
from shardlib.tiers.disk import DiskRows
from tests.tiers import kill
from tests.tiers.disk_cases import (
    PAGE,
    RING,
    SIZES,
    Journal,
    content,
    descriptors,
    failing,
    holds,
    intercepted,
    opened,
    read,
    step,
    threads,
)


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """Give a directory in memory, where there is one: a flush takes no time there."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path)


# ---------------------------------------------------------------- one process


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("direct", [True, False])
def test_rows_are_read_as_they_were_written(
    tmp_path: Path, durable: bool, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.setattr(os, "O_DIRECT", 0)
    with opened(tmp_path, durable=durable, resume=False) as rows:
        for generation in range(4):
            step(rows, generation)
            assert holds(rows, generation)
        rows.write("long", content(0, "long", 9))
        assert torch.equal(read(rows, "long"), content(0, "long", 9))
    assert len(os.listdir(tmp_path)) == durable


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex64])
def test_a_row_of_any_dtype_and_shape_keeps_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5).to(dtype)
    with opened(tmp_path, rows={"x": x.nbytes, "scalar": x.itemsize}) as rows:
        out, one = torch.empty_like(x), torch.empty((), dtype=dtype)
        rows.write("x", x)
        rows.write("scalar", x[1, 1])
        rows.read("x", out).wait()
        rows.read("scalar", one).wait()
    assert torch.equal(out, x) and torch.equal(one, x[1, 1])


def test_tensors_of_inference_mode_are_read_and_written(tmp_path: Path) -> None:
    with opened(tmp_path) as rows, torch.inference_mode():
        step(rows, 1)
        assert holds(rows, 1)


def test_a_run_is_compared_with_all_that_describes_it(tmp_path: Path) -> None:
    with opened(tmp_path / "a", run={"ranks": 7, "mesh": None}) as rows:
        step(rows, 1)
    with pytest.raises(ShardError, match="'ranks' is 1 there, and 2 here"):
        opened(tmp_path / "a", run={"ranks": 1}, ranks=2)
    with pytest.raises(TypeError):
        opened(tmp_path / "b", run={"mesh": object()})
    with pytest.raises(ShardError, match="the run is described by"):
        opened(tmp_path / "b", run={"mesh": "x" * (1 << 16)})
    assert not os.listdir(tmp_path / "b")


def test_buffers_take_no_more_than_the_ring_and_closing_leaves_nothing(tmp_path: Path) -> None:
    held = descriptors()
    for ring in (2 * PAGE, 3 * PAGE + 5, 1 << 20):
        rows = opened(tmp_path, ring=ring)
        buffers = {id(b): len(b) for _, b in rows._mover.values()}
        assert sum(buffers.values()) == rows.ring <= ring and len(threads()) == 2
        step(rows, 1 if rows.generation < 0 else rows.generation + 1)
        rows.close()
        rows.close()
        with pytest.raises(ShardError, match="the rows are closed"):
            rows.read("page", torch.empty(PAGE, dtype=torch.uint8))
    assert not threads() and descriptors() == held


def test_rows_that_are_forgotten_are_closed(tmp_path: Path) -> None:
    held = descriptors()
    rows = opened(tmp_path)
    rows.write("long", content(0, "long", 1))
    del rows
    until = time.monotonic() + 10
    while (threads() or descriptors() > held) and time.monotonic() < until:
        time.sleep(0.01)
    assert not threads() and descriptors() == held


def test_bad_arguments_change_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as rows:
        step(rows, 5)
        page = torch.empty(PAGE, dtype=torch.uint8)
        calls: list[Callable[[], Any]] = [
            lambda: rows.write("other", page),
            lambda: rows.write("above", page),
            lambda: rows.write("page", torch.empty(PAGE, 2, dtype=torch.uint8)[:, 0]),
            lambda: rows.read("page", torch.empty(PAGE, dtype=torch.uint8, device="meta")),
            lambda: rows.commit(5),
            lambda: rows.commit(-1),
            lambda: rows.commit(True),
            lambda: rows.commit(1 << 63),
            lambda: rows.commit(6, "n" * (1 << 16)),
        ]
        for call in calls:
            with pytest.raises(BadArgument):
                call()
        assert rows.generation == 5 and holds(rows, 5)


def test_numbers_of_generations_may_be_as_large_as_63_bits(tmp_path: Path) -> None:
    with opened(tmp_path, rows={f"r{i}": 1 for i in range(300)}) as rows:
        for number in (0, (1 << 63) - 3, (1 << 63) - 2, (1 << 63) - 1):
            rows.commit(number, "n" * ((1 << 16) - 2))
    with opened(tmp_path, rows={f"r{i}": 1 for i in range(300)}) as rows:
        assert rows.generation == (1 << 63) - 1


def test_jobs_of_one_row_run_in_the_order_of_their_calls(tmp_path: Path) -> None:
    with opened(tmp_path) as rows:
        outs = [torch.empty(SIZES["long"], dtype=torch.uint8) for _ in range(20)]
        for i, out in enumerate(outs):
            rows.write("long", content(0, "long", i))
            rows.read("long", out)
            if i % 3 == 2:
                rows.commit(i)
        rows.read("long", outs[0]).wait()
        assert all(torch.equal(out, content(0, "long", i)) for i, out in enumerate(outs) if i)
        assert torch.equal(outs[0], content(0, "long", 19))


def test_a_row_that_was_never_written_is_not_read(tmp_path: Path) -> None:
    with opened(tmp_path) as rows:
        step(rows, 1, ["page"])
    with opened(tmp_path) as rows:
        assert torch.equal(read(rows, "page"), content(0, "page", 1))
        with pytest.raises(ShardError, match="row 'long' is not read: it was never written"):
            read(rows, "long")


# ---------------------------------------------------------------- several ranks


def test_all_ranks_go_back_to_the_newest_generation_that_all_committed(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 2) as a, opened(tmp_path, 1, 2) as b:
        for g in (1, 2):
            step(a, g)
            step(b, g)
        step(a, 3)
    with opened(tmp_path, 1, 2) as b, opened(tmp_path, 0, 2) as a:
        assert (a.generation, b.generation, a.notes) == (2, 2, {"step": 2})
        assert holds(a, 2) and holds(b, 2)


def test_a_generation_of_an_attempt_that_was_given_up_is_not_mixed_with_a_new_one(
    tmp_path: Path,
) -> None:
    """Rank 1 is ahead by generation 2 when the job ends; the next attempt's rank 0 comes first."""
    with opened(tmp_path, 0, 2) as a, opened(tmp_path, 1, 2) as b:
        for rows in (a, b):
            step(rows, 1)
        b.write("page", content(1, "page", 77))
        b.commit(2)
    with opened(tmp_path, 0, 2) as a:
        assert a.generation == 1
        step(a, 2)
        with opened(tmp_path, 1, 2) as b:
            assert b.generation == 1 and holds(b, 1)
            step(b, 2)
            assert holds(b, 2)
    with opened(tmp_path, 1, 2) as b, opened(tmp_path, 0, 2) as a:
        assert a.generation == b.generation == 2 and holds(a, 2) and holds(b, 2)


def test_a_rank_waits_where_it_would_be_two_generations_ahead(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 2, timeout=0.1) as a, opened(tmp_path, 1, 2) as b:
        step(a, 1)
        step(b, 1)
        step(a, 2)
        ticket = a.write("page", content(0, "page", 3))
        with pytest.raises(ShardError, match=r"rank 1 has not committed generation 2 in 0\.1 s"):
            ticket.wait()
        with pytest.raises(ShardError, match="rank 1 has not"):
            a.commit(3)
    with opened(tmp_path, 0, 2) as a, opened(tmp_path, 1, 2) as b:
        assert a.generation == b.generation == 1 and holds(a, 1) and holds(b, 1)
        for rows in (a, b):
            step(rows, 2)
        later = threading.Timer(0.2, step, (b, 3))
        step(a, 3)
        later.start()
        step(a, 4)  # waits for it
        later.join()


def test_closing_does_not_wait_for_other_ranks(tmp_path: Path) -> None:
    began = time.monotonic()
    with opened(tmp_path, 0, 2, timeout=60.0) as a, opened(tmp_path, 1, 2) as b:
        for rows in (a, b):
            step(rows, 1)
        a.commit(2)
        ticket = a.write("page", content(0, "page", 3))
    with pytest.raises(ShardError, match="or the rows are closed"):
        ticket.wait()
    assert time.monotonic() - began < 30 and not threads()


def test_closing_ends_a_commit_that_waits_for_other_ranks(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 2, timeout=60.0) as a, opened(tmp_path, 1, 2) as b:
        for rows in (a, b):
            step(rows, 1)
        a.commit(2)
        said: list[str] = []

        def commit() -> None:
            try:
                a.commit(3)
            except ShardError as e:
                said.append(e.message)

        thread = threading.Thread(target=commit)
        thread.start()
        time.sleep(0.1)
        began = time.monotonic()
        a.close()
        thread.join(60)
    assert "or the rows are closed" in said[0]
    assert time.monotonic() - began < 30, "it ended at its timeout"


def test_a_commit_without_writes_waits_too(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 2, timeout=0.1) as a, opened(tmp_path, 1, 2) as b:
        step(a, 1)
        step(b, 1)
        a.commit(2)
        with pytest.raises(ShardError, match="rank 1 has not committed generation 2"):
            a.commit(3)
    with opened(tmp_path, 0, 2) as a, opened(tmp_path, 1, 2) as b:
        assert a.generation == b.generation == 1


def test_a_rank_without_its_file_is_no_new_run(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 2) as a, opened(tmp_path, 1, 2) as b:
        for g in (1, 2):
            step(a, g)
            step(b, g)
    os.rename(tmp_path / "rank_00001.rows", tmp_path / "aside")
    for rank in (0, 1):
        with pytest.raises(ShardError, match=r"no generation .* rank 0 \[1, 2\], rank 1 none"):
            opened(tmp_path, rank, 2)
    os.rename(tmp_path / "aside", tmp_path / "rank_00001.rows")
    with opened(tmp_path, 0, 2) as a, opened(tmp_path, 1, 2) as b:
        assert holds(a, 2) and holds(b, 2)


def test_a_first_commit_that_other_ranks_never_made_is_no_generation(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 2) as a:
        step(a, 1)
    with opened(tmp_path, 0, 2) as a, opened(tmp_path, 1, 2) as b:
        assert a.generation == b.generation == -1
        step(a, 1)
        step(b, 1)


@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(st.sampled_from("wwwcckr"), st.integers(0, 2), st.sampled_from(list(SIZES))),
        max_size=60,
    ),
)
def test_drawn_writes_commits_and_kills_leave_what_a_dictionary_has(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, acts: list[tuple[str, int, str]]
) -> None:
    path = tmp_path_factory.mktemp("drawn")
    rows = [opened(path, r, ranks) for r in range(ranks)]
    now: list[dict[str, int]] = [{} for _ in rows]
    kept: list[list[dict[str, int]]] = [[{}] for _ in rows]  # by number of commits
    serial = 0
    for act, r, name in acts:
        r, serial = r % ranks, serial + 1
        ahead = len(kept[r]) > min(map(len, kept))
        if act == "w" and not ahead:
            now[r][name] = serial
            rows[r].write(name, content(r, name, serial))
        elif act == "c" and not ahead:
            kept[r].append(dict(now[r]))
            rows[r].commit(len(kept[r]), {"rank": r})
        elif act == "r" and name in now[r]:
            assert torch.equal(read(rows[r], name), content(r, name, now[r][name]))
        elif act == "k":  # every process is gone, what it wrote is not committed
            for one in rows:
                one.close()
            common = min(map(len, kept))
            rows = [opened(path, q, ranks) for q in range(ranks)]
            for q, one in enumerate(rows):
                kept[q] = kept[q][:common]
                now[q] = dict(kept[q][-1])
                assert one.generation == (common if common > 1 else -1)
                for known in SIZES:
                    if known in now[q]:
                        assert torch.equal(read(one, known), content(q, known, now[q][known]))
    for one in rows:
        one.close()


# ---------------------------------------------------------------- the directory


def contents(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(path.iterdir()) if p.is_file()}


@pytest.mark.parametrize(
    ("kw", "said"),
    [
        ({"resume": False}, "a run is there already"),
        ({"run": {"mesh": "x=4"}}, "another run: 'mesh' is 'x=2' there, and 'x=4' here"),
        ({"run": {"mesh": "x=2", "lr": 1}}, "another run: 'lr' is None there, and 1 here"),
        ({"ranks": 2}, "another run: 'ranks' is 1 there, and 2 here"),
        ({"ranks": 2, "rank": 1}, "another run: 'ranks' is 1 there, and 2 here"),
        ({"rows": SIZES | {"page": 5}}, f"another model: 'page' is {PAGE} there, and 5 here"),
        ({"rows": {"page": PAGE}}, "another model: 'above' is"),
        ({"rows": SIZES | {"more": 5}}, "another model: 'more' is None there, and 5 here"),
    ],
)
def test_another_run_is_refused_by_name_and_keeps_its_bytes(
    tmp_path: Path, kw: dict[str, Any], said: str
) -> None:
    with opened(tmp_path) as rows:
        step(rows, 1)
    before, held = contents(tmp_path), descriptors()
    with pytest.raises(ShardError, match=said) as error:
        opened(tmp_path, **kw)
    assert str(tmp_path) in str(error.value) and "fix" in str(error.value)
    assert contents(tmp_path) == before and descriptors() == held and not threads()


def test_a_run_that_committed_nothing_is_begun_again(tmp_path: Path) -> None:
    opened(tmp_path, resume=False).close()
    with opened(tmp_path, resume=False) as rows:
        rows.write("page", content(0, "page", 1))
    with opened(tmp_path, resume=False) as rows:
        assert rows.generation == -1
        step(rows, 1)
    with pytest.raises(ShardError, match="a run is there already"):
        opened(tmp_path, resume=False)


def test_a_write_that_was_interrupted_before_it_was_posted_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with opened(tmp_path) as rows:
        step(rows, 1)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(rows, "_post", interrupted)
            rows.write("page", content(0, "page", 2))
        with pytest.raises(ShardError, match="generation 2 is not committed: row 'page' is not"):
            rows.commit(2)
    with opened(tmp_path) as rows:
        assert holds(rows, 1)


def test_a_directory_in_use_is_refused_and_the_user_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_HELD", 0.05)
    with opened(tmp_path) as rows:
        step(rows, 1)
        with pytest.raises(ShardError, match="another process that is alive uses it"):
            opened(tmp_path)
        step(rows, 2)
        assert holds(rows, 2)
    with opened(tmp_path) as rows:
        assert rows.generation == 2


def test_files_that_no_run_made_are_refused_and_kept(tmp_path: Path) -> None:
    for i, make in enumerate(
        [
            lambda p: p.write_bytes(b"mine"),
            lambda p: p.write_bytes(bytes(1 << 20)),
            lambda p: p.symlink_to(tmp_path / "target"),
            lambda p: os.mkfifo(p),
            lambda p: p.mkdir(),
        ]
    ):
        (tmp_path / "target").write_bytes(b"t" * (1 << 20))
        path = tmp_path / str(i)
        path.mkdir()
        make(path / "rank_00000.rows")
        before, held = contents(path) if i < 3 else None, descriptors()
        with pytest.raises(ShardError, match="no file for the rows"):
            opened(path)
        assert os.listdir(path) == ["rank_00000.rows"] and descriptors() == held
        assert i > 2 or contents(path) == before
        assert (tmp_path / "target").read_bytes() == b"t" * (1 << 20)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ShardError, match="no file for the rows"):
        opened(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with opened(tmp_path / "link") as rows:  # a link of the user's to a directory is followed
        step(rows, 1)
    assert os.listdir(tmp_path / "elsewhere") == ["rank_00000.rows"]


@pytest.mark.parametrize("cut", [True, False])
def test_a_file_that_was_cut_or_removed_is_found_at_the_commit(tmp_path: Path, cut: bool) -> None:
    file = tmp_path / "rank_00000.rows"
    with opened(tmp_path) as rows:
        step(rows, 1)
        os.truncate(file, file.stat().st_size - 1) if cut else file.unlink()
        with pytest.raises(ShardError, match=r"another program removed or cut rank_00000\.rows"):
            step(rows, 2, ["byte"])


def test_a_cut_file_is_refused_at_the_next_opening(tmp_path: Path) -> None:
    file = tmp_path / "rank_00000.rows"
    with opened(tmp_path) as rows:
        step(rows, 1)
        os.truncate(file, file.stat().st_size // 2)
        with pytest.raises(ShardError, match=r"row '\w+' is not read: the file ends before"):
            holds(rows, 1)
    with pytest.raises(ShardError, match="another program removed or cut"):
        opened(tmp_path)


def test_a_directory_removed_beneath_a_run_is_found_at_the_commit(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as rows:
        step(rows, 1)
        os.unlink(tmp_path / "run" / "rank_00000.rows")
        os.rmdir(tmp_path / "run")
        with pytest.raises(ShardError, match="generation 2 is not committed: another program"):
            step(rows, 2)


def test_a_directory_may_be_renamed_beneath_a_run(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as rows:
        step(rows, 1)
        os.rename(tmp_path / "run", tmp_path / "moved")
        step(rows, 2)
        assert holds(rows, 2)
    with opened(tmp_path / "moved") as rows:
        assert rows.generation == 2 and holds(rows, 2)


# ---------------------------------------------------------------- damage


def test_a_flipped_bit_of_a_row_is_refused_by_name(tmp_path: Path) -> None:
    with opened(tmp_path) as rows:
        step(rows, 1)
        begin = {n: rows._begin[n] + rows._kept[n].place * disk._pages(b) for n, b in SIZES.items()}
        file = tmp_path / "rank_00000.rows"
        for k in range(200):
            name = ["byte", "below", "page", "above", "long"][k % 5]
            bit = (k * 7919) % (8 * SIZES[name])
            with open(file, "r+b") as f:
                at = begin[name] + bit // 8
                f.seek(at)
                was = f.read(1)
                f.seek(at)
                f.write(bytes([was[0] ^ 1 << bit % 8]))
            with pytest.raises(ShardError, match=f"row '{name}' is not read: it is damaged"):
                read(rows, name)
            with open(file, "r+b") as f:
                f.seek(at)
                f.write(was)
        assert holds(rows, 1)


def test_a_flipped_bit_of_a_header_leaves_a_whole_generation_or_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as rows:
        for g in (1, 2):
            step(rows, g)
        end = rows._file.begin  # type: ignore[union-attr]
    file, seen = tmp_path / "rank_00000.rows", set()
    before = file.read_bytes()
    for k in range(120):
        bit = (k * 104729 * 8 + k) % (8 * 300) + 8 * (end // 120 * k // 4096 * 4096 if k % 2 else 0)
        touched = bytearray(before)
        touched[bit // 8] ^= 1 << bit % 8
        file.write_bytes(touched)
        try:
            with opened(tmp_path) as rows:
                seen.add(rows.generation)
                assert rows.generation in (1, 2) and holds(rows, rows.generation)
        except ShardError as e:
            seen.add(e.message[:20])
    assert {1, 2} & seen and len(seen) > 1


# ---------------------------------------------------------------- faults


FEW = {n: SIZES[n] for n in ("page", "above", "long")}


def run_with(act: Any, path: Path) -> tuple[int, int, str]:
    """Run two attempts of a commit each: (last commit that returned, last begun, error)."""
    done = begun = 0
    try:
        with intercepted(act):
            for attempt in (1, 2):
                with opened(path, resume=attempt > 1, rows=FEW) as rows:
                    assert rows.generation == (done or -1), "what returned is there"
                    begun = attempt
                    step(rows, attempt, FEW)
                    done = attempt
                    assert holds(rows, done, FEW)
    except ShardError as e:
        return done, begun, e.message
    return done, begun, ""


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_system_call_that_fails_ends_the_run_with_its_cause_and_loses_nothing(
    quick: Path, code: int
) -> None:
    counted = failing(-1, code)
    assert run_with(counted, quick / "whole") == (2, 2, "")
    held = descriptors()
    for nth in range(len(counted.calls)):  # type: ignore[attr-defined]
        path = quick / str(nth)
        act = failing(nth, code)
        done, begun, said = run_with(act, path)
        name = act.calls[nth]  # type: ignore[attr-defined]
        assert not threads() and descriptors() == held, (nth, name)
        assert os.strerror(code) in said or (name == "close" and done == 2), (nth, name, said)
        with opened(path, rows=FEW) as rows:
            found = max(rows.generation, 0)
            assert done <= found <= begun, (nth, name)
            assert not found or holds(rows, found, FEW), (nth, name)
            step(rows, begun + 1, FEW)
            assert holds(rows, begun + 1, FEW)
        assert os.listdir(path) == ["rank_00000.rows"], (nth, name)
        shutil.rmtree(path)


def test_short_transfers_change_nothing(tmp_path: Path) -> None:
    def act(name: str, call: Callable[..., Any], args: Any, kw: Any) -> Any:
        if name == "pwrite" and len(args[1]) > PAGE:
            return call(args[0], args[1][: len(args[1]) // 2 + 1], args[2])
        if name == "preadv" and len(args[1][0]) > PAGE:
            return call(args[0], [args[1][0][: len(args[1][0]) // PAGE // 2 * PAGE]], args[2])
        return call(*args, **kw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "O_DIRECT", 0)  # half pages
        assert run_with(act, tmp_path) == (2, 2, "")


def test_the_error_of_a_write_reaches_the_next_call_with_its_row_and_line(tmp_path: Path) -> None:
    def act(name: str, call: Callable[..., Any], args: Any, kw: Any) -> Any:
        if name == "pwrite" and threading.current_thread().name.startswith("shardlib disk"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*args, **kw)

    rows = opened(tmp_path)
    step(rows, 1)
    with intercepted(act):
        rows.write("long", content(0, "long", 2))
        until = time.monotonic() + 10
        while rows._error is None and time.monotonic() < until:
            time.sleep(0.01)
    for call in (
        lambda: rows.write("page", content(0, "page", 2)),
        lambda: read(rows, "page"),
        lambda: rows.commit(2),
    ):
        with pytest.raises(ShardError, match="row 'long' is not written: Input/output error") as e:
            call()
        assert isinstance(e.value.__cause__, OSError) and "test_disk.py:" in e.value.line
    rows.close()
    with opened(tmp_path) as rows:
        assert rows.generation == 1 and holds(rows, 1)


def test_an_interrupt_within_a_commit_is_final(tmp_path: Path) -> None:
    """Whether the header is on the disk is not known: rows of the next generation would be lost."""
    rows = opened(tmp_path)
    step(rows, 1)

    def act(name: str, call: Callable[..., Any], args: Any, kw: Any) -> Any:
        out = call(*args, **kw)
        if name == "pwrite" and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return out

    with intercepted(act), pytest.raises(KeyboardInterrupt):
        step(rows, 2)
    with pytest.raises(ShardError, match="generation 2 is not committed: KeyboardInterrupt"):
        rows.write("page", content(0, "page", 3))
    rows.close()
    with opened(tmp_path) as rows:
        assert rows.generation == 2 and holds(rows, 2)


def test_ring_is_used_by_long_rows(tmp_path: Path) -> None:
    with opened(tmp_path) as rows:
        assert rows.ring == RING < SIZES["long"]


def test_a_power_cut_at_any_moment_leaves_what_all_ranks_committed(quick: Path) -> None:
    """Also one while rank 0 is ahead of a header that rank 1 has not flushed, one after an attempt
    that was given up, and one after processes were killed between a header and its flush.
    """
    journal, done = Journal(), list[tuple[int, int, int]]()
    held: dict[int, dict[str, int]] = {0: {}}
    path = quick / "run"
    path.mkdir()

    def acted(rows: DiskRows, number: int) -> None:
        names = list(SIZES) if number % 2 else ["below", "long"]
        held[number] = held[number - 1] | dict.fromkeys(names, number)
        step(rows, number, names)
        done.append((len(journal.events), rows.rank, number))

    def flushes_header(name: str) -> bool:
        kind, *_, data = journal.events[-1]
        ours = threading.current_thread() is threading.main_thread()
        return ours and name == "fdatasync" and kind == "write" and len(data) > 1 << 16

    def ahead(name: str) -> None:
        if flushes_header(name):
            journal.before = lambda name: None
            a.write("long", content(0, "long", 77)).wait()

    def killed(name: str) -> None:
        if flushes_header(name):
            raise KeyboardInterrupt

    with intercepted(journal):
        with opened(path, 0, 2) as a, opened(path, 1, 2) as b:
            for number in (1, 2):
                acted(a, number)
                acted(b, number)
            acted(a, 3)
            journal.before = ahead
            acted(b, 3)
            assert journal.before is not ahead, "rank 0 was ahead"
            a.write("page", content(0, "page", 77))
            a.commit(4)
        with opened(path, 1, 2) as b, opened(path, 0, 2) as a:
            assert a.generation == b.generation == 3
            acted(b, 4)
            acted(a, 4)
            journal.before = killed
            for rows in (a, b):
                with pytest.raises(KeyboardInterrupt):
                    acted(rows, 5)
            journal.before = lambda name: None
        with opened(path, 0, 2) as a, opened(path, 1, 2) as b:
            assert a.generation == b.generation == 5
            # rank 0 flushes the header of rank 1 only afterwards
            for rows in (b, a):
                rows.write("long", content(rows.rank, "long", 77)).wait()
                done.append((len(journal.events), 0, 5))
                done.append((len(journal.events), 1, 5))
    folder, seen, draw = path.stat().st_ino, set[int](), random.Random(0)
    for count in range(len(journal.events) + 1):
        reached = [{n for at, rank, n in done if at <= count and rank == r} for r in (0, 1)]
        least = min(max(some, default=0) for some in reached)
        for often in (0.0, 0.6):
            into = quick / f"{count} {often}"
            into.mkdir()
            journal.cut(count, folder, into, often, draw)
            with opened(into, 0, 2) as a, opened(into, 1, 2) as b:
                assert a.generation == b.generation and max(a.generation, 0) >= least, count
                seen.add(a.generation)
                for rows in (a, b):
                    for name, number in held[max(a.generation, 0)].items():
                        assert torch.equal(read(rows, name), content(rows.rank, name, number))
            shutil.rmtree(into)
    assert seen == {-1, 1, 2, 3, 4, 5}


# ---------------------------------------------------------------- full disks, and processes


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 2 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    if done.returncode:
        pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True, timeout=10)


def test_a_full_disk_is_refused_before_the_first_step_and_one_that_fills_later_stops_no_run(
    small: Path,
) -> None:
    with pytest.raises(ShardError, match="no file for the rows: No space left on device") as error:
        opened(small / "run", rows={"large": 1 << 20})  # two places
    assert "bytes" in error.value.operands["free"] and os.listdir(small / "run") == []
    with opened(small / "run") as rows:
        step(rows, 1)
        with (small / "fill").open("wb") as f, pytest.raises(OSError, match="No space left"):
            while f.write(bytes(1 << 16)):
                f.flush()
        for generation in range(2, 6):
            step(rows, generation)
            assert holds(rows, generation)
    with opened(small / "run") as rows:
        assert rows.generation == 5 and holds(rows, 5)


def limited(path: Path, nbytes: int, said: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
    try:
        opened(path)
    except ShardError as e:
        said.send(e.message)


def test_a_file_beyond_a_limit_of_the_process_is_refused(tmp_path: Path) -> None:
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=limited, args=(tmp_path / "run", 1 << 18, theirs))
    process.start()
    process.join(30)
    assert ours.poll(1) and "File too large" in ours.recv()
    assert os.listdir(tmp_path / "run") == []


def test_a_disk_without_fallocate_has_rows_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "_ALLOCATE", None)
    for durable in (True, False):
        with opened(tmp_path / str(durable), durable=durable) as rows:
            step(rows, 1)
            assert holds(rows, 1)


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ShardError, match="it has no locks"):
        opened(tmp_path)


@pytest.mark.parametrize("kills", kill.CASES, ids=str)
def test_a_kill_leaves_one_generation_on_all_ranks_and_the_run_goes_on(kills: Any) -> None:
    wrong, seen = kill.run(kills)
    assert not wrong, seen
