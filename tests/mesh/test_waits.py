"""Every wait in the library names the clock that ends it."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "shardlib"

TRANSFER = "the group's own timeout ends a transfer"
THREAD = "the thread that holds it runs the model, each wait of which has a clock"
JOB = "a copy or an update in this process, which waits for nothing that has no clock"
SHORT = "it is held for some lines that wait for nothing"

GENERATION = "a job waits for other ranks until the timeout of its rows"

OTHER_CLOCKS = [
    ("collectives/posted.py", "self.wait()", TRANSFER),
    ("collectives/point_to_point.py", "work.wait()", TRANSFER),
    ("collectives/ring.py", "c.wait()", TRANSFER),
    ("collectives/backends/dist.py", "*coming*.wait()", TRANSFER),
    ("collectives/backends/dist.py", "sent.popleft().wait()", TRANSFER),
    ("collectives/backends/dist.py", "work.wait()", TRANSFER),
    ("collectives/backends/dist.py", "recv(*).wait()", TRANSFER),
    ("collectives/backends/dist.py", "all_gather_single(*).wait()", TRANSFER),
    ("ops/*.py", "coming*.wait()", TRANSFER),
    ("ops/*.py", "transfer.wait()", TRANSFER),
    ("ops/*.py", "post(*).wait()", TRANSFER),
    ("ops/matmul/matmul3d.py", "_scatter(*).wait()", TRANSFER),
    ("ops/matmul/gathered_summa.py", "panel.wait()", TRANSFER),
    ("ops/matmul/summa.py", "[ab]_k.wait()", TRANSFER),
    ("ops/attention/engines/ring.py", "wait()", TRANSFER),
    ("optim/sink.py", "later.wait()", TRANSFER),
    ("tensor/grad_coalescing.py", "later.wait()", TRANSFER),
    ("tensor/grad_coalescing.py", "wait()", TRANSFER),
    ("placing.py", "transfer.wait()", TRANSFER),
    ("dtensor_convert.py", "local.wait()", TRANSFER),
    ("mesh/launch.py", "dist.barrier()", TRANSFER),
    ("command/train.py", "under_way.wait()", "a save ends by its own timeout"),
    ("checkpoint/writing.py", "_UNDER_WAY.pop().wait()", "a save ends by its own timeout"),
    ("mesh/scope.py", "_NOW.get()", "a context variable"),
    ("_compat.py", "_ENDS.get()", "a context variable"),
    ("checkpoint/*.py", "part.get()", "it reads a tensor of this process"),
    ("checkpoint/huggingface.py", "x.get()", "it reads a tensor of this process"),
    ("checkpoint/folder.py", "self.due.get()", "an idle daemon thread, which ends with its Behind"),
    ("tiers/disk.py", "copy.ticket.wait()", GENERATION),
    ("tiers/rows.py", "self.committed.wait()", GENERATION),
    ("optim/tiered*.py", "*cache.store.wait()", GENERATION),
    ("tiers/rows.py", "self.disk.read(*).wait()", JOB),
    ("tiers/rows.py", "self._read(*).wait()", JOB),
    ("tiers/rows.py", "self._written(*).wait()", JOB),
    ("tiers/rows.py", "ticket.finished.wait()", JOB),
    ("tiers/rows.py", "ticket.wait()", JOB),
    ("tiers/rows.py", "end.wait()", JOB),
    ("optim/chunk_cache.py", "*.ticket.wait()", JOB),
    ("optim/chunk_cache.py", "ticket.wait()", JOB),
    ("optim/tiered_room.py", "ticket.wait()", JOB),
    ("optim/chunk_cache.py", "self.sending.pop(0).wait()", JOB),
    ("optim/chunk_cache.py", "self.updates*.wait()", JOB),
    ("optim/tiered*.py", "*.submit(*).wait()", JOB),
    ("tiers/buffers.py", "ticket.wait()", JOB),
    ("tiers/activations.py", "self.sent.wait()", JOB),
    ("tiers/activations.py", "*.coming.wait()", JOB),
    ("tiers/mover.py", "*.finished.wait()", JOB),
    ("tiers/mover.py", "self.wait()", JOB),
    ("tiers/mover.py", "worker.join()", JOB),
    ("tiers/mover.py", "due.get()", "an idle daemon thread, which ends with its Mover"),
    ("tiers/mover.py", "while (item := due.get()) is not None", "it sleeps as long as a link takes"),
    ("planning/strategies.py", "wait()", "on shapes nothing is sent"),
    ("tiers/ledger.py", "with self._lock", SHORT),
    ("mesh/store.py", "self._asked.get()", "an idle daemon thread, which ends with the process"),
    ("mesh/launch.py", "while folder.exists()", "a daemon thread, which ends with its folder"),
    ("modules/copies.py", "with self.lock", THREAD),
    ("checkpoint/agree.py", "with self.lock", SHORT),
    ("checkpoint/agree.py", "with self.calls.lock", SHORT),
    ("random.py", "with stream.lock", SHORT),
    ("kernels/active.py", "with _LOCK", SHORT),
    ("kernels/library.py", "with _LOCK", SHORT),
]  # fmt: skip
"""(file, wait, why it needs no timeout of its own)"""

LEAST = {"wait": 1, "get": 1, "join": 1, "poll": 1, "acquire": 2, "result": 1, "recv": 2,
         "communicate": 2, "run": 99, "call": 99, "check_call": 99, "check_output": 99,
         "select": 4, "barrier": 99, "flock": 99}  # fmt: skip
"""Name of a call that waits -> how many arguments without names hold a timeout."""

SUBPROCESS = ("run", "call", "check_call", "check_output")


def endless(call: ast.Call) -> bool:
    """Say whether a call waits, and no argument of it ends that."""
    f = call.func
    name = f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "")
    given = {k.arg: ast.unparse(k.value) for k in call.keywords}
    first = ast.unparse(call.args[0]) if call.args else given.get("blocking", given.get("block"))
    if name not in LEAST or given.get("timeout", "None") != "None" or None in given:
        return False
    if name in SUBPROCESS and not ast.unparse(f).startswith("subprocess."):
        return False
    if name == "flock":
        return "LOCK_NB" not in ast.unparse(call)
    if name in ("acquire", "get") and first == "False":
        return False
    if name == "get" and first == "True":
        return len(call.args) < 2
    if name == "wait" and isinstance(f, ast.Name):  # of multiprocessing.connection
        return len(call.args) < 2
    return len(call.args) < LEAST[name] or first == "None"


def waits(tree: ast.AST) -> Iterator[str]:
    """Give what waits without a timeout: calls, locks, and loops that sleep and read no clock."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and endless(node):
            yield ast.unparse(node)
        elif isinstance(node, ast.With):
            held = [ast.unparse(item.context_expr) for item in node.items]
            yield from (f"with {text}" for text in held if text.lower().endswith("lock"))
        elif isinstance(node, ast.While):
            text = ast.unparse(node)
            if "sleep(" in text and "monotonic()" not in text:
                yield f"while {ast.unparse(node.test)}"


def excepted(file: str, wait: str) -> bool:
    return any(fnmatchcase(file, f) and fnmatchcase(wait, w) for f, w, _ in OTHER_CLOCKS)


def found() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for wait in waits(ast.parse(path.read_text())):
            yield path.relative_to(PACKAGE).as_posix(), wait


def test_every_wait_names_the_clock_that_ends_it() -> None:
    all_of_them = list(found())
    assert [w for w in all_of_them if not excepted(*w)] == []
    for file, wait, _ in OTHER_CLOCKS:  # none outlives the wait that it is for
        assert any(fnmatchcase(f, file) and fnmatchcase(w, wait) for f, w in all_of_them), wait


@pytest.mark.parametrize("wait", ["event.wait()", "thread.join()", "queue.get()", "lock.acquire()"])
def test_a_planted_wait_is_found_in_every_file(wait: str) -> None:
    files = [p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py")]
    assert list(waits(ast.parse(wait))) == [wait]
    assert [f for f in files if excepted(f, wait)] == []


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("thread.join()", False), ("thread.join(2.0)", True), ("', '.join(names)", True),
        ("thread.join(timeout=None)", False), ("event.wait()", False), ("event.wait(0.5)", True),
        ("queue.get()", False), ("queue.get(True)", False), ("queue.get(timeout=s)", True),
        ("queue.get(block=False)", True), ("table.get(key)", True), ("lock.acquire()", False),
        ("lock.acquire(True)", False), ("lock.acquire(blocking=False)", True),
        ("fcntl.flock(fd, LOCK_SH)", False), ("fcntl.flock(fd, LOCK_SH | LOCK_NB)", True),
        ("subprocess.run(command)", False), ("subprocess.run(command, timeout=9)", True),
        ("process.communicate()", False), ("connection.recv()", False), ("self.run(x)", True),
        ("select.select(a, b, c)", False), ("select.select(a, b, c, 1.0)", True),
        ("wait(sentinels)", False), ("wait(sentinels, 0.5)", True), ("dist.barrier()", False),
        ("with self.lock:\n    pass", False), ("while here():\n    time.sleep(1)", False),
        ("while time.monotonic() < until:\n    time.sleep(1)", True),
    ],
)  # fmt: skip
def test_a_planted_wait_without_a_timeout_is_found(text: str, ends: bool) -> None:
    assert bool(list(waits(ast.parse(text)))) is not ends
