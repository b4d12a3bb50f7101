"""torch's own operator database on sharded operands: equal to
dense, or refused and listed with a reason.

Here a seeded sample, and every operator of the list; ``make operators`` runs all of it.
"""

import pickle
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.ops.declare import DECLARED
from tests import database as db
from tests.workers import Pool

SEED = 7
PARTS = 3


def sample(most: int, seed: int = SEED) -> list[str]:
    return random.Random(seed).sample(sorted(db.entries()), most)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_call_equals_dense_or_is_listed(part: int) -> None:
    """A sample of the operators with a few calls each; all calls
    where these do not say what the list says.
    """
    found = {}
    for name in sample(36)[part::PARTS]:
        tally = db.tally(name, 3, SEED)
        found[name] = (
            tally if not db.differences({name: tally}) else db.tally(name, db.SAMPLES, SEED)
        )
    assert not db.differences(found)


@pytest.mark.parametrize("name", db.listed()["inside"])
def test_what_is_listed_as_refused_is(name: str) -> None:
    assert not db.differences({name: db.tally(name, db.SAMPLES, SEED)})


def test_every_reason_is_of_an_operator() -> None:
    refused = db.listed()
    assert not [
        n for of in refused.values() for n, why in of.items() if n not in db.entries() or not why
    ]


# ---------------------------------------------------------------- real ranks


def outcomes(calls: list[db.Call]) -> list[tuple[str, str, Any]]:
    """(call, outcome, bytes) on the ambient mesh, outside ``sl.implicit`` and inside."""
    torch.set_num_threads(1)
    out = []
    for call in calls:
        for within in (nullcontext(), sl.implicit()):
            with within:
                found = db.judge(call)
            out.append((str(call)[:200], f"{found.kind} {type(found.error).__name__}", found.bytes))
    return out


def importable(call: db.Call) -> bool:
    """Whether a process that has not loaded the database can be sent
    the call: it holds a function of torch's.
    """
    try:
        sent = pickle.dumps(call)
        pickle.loads(sent)  # some dtypes are written and not read back
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return False
    return b"torch.testing" not in sent


def test_real_ranks_answer_as_simulated_ones(pool: Pool) -> None:
    """Call by call the same outcome and the same counted bytes."""
    host = torch.get_default_device().type == "cpu"  # sparse tensors are nowhere else
    calls = [
        c
        for name in sample(50, SEED + 1)
        if host or "sparse" not in name
        for c in db.calls(name, 1, SEED, [{"x": 2, "y": 2}])
        if importable(c)
    ]
    with sl.simulate(x=2, y=2):
        want = outcomes(calls)
    assert len(calls) > 12
    for got in pool.run(outcomes, calls, seconds=120, x=2, y=2):
        assert got == want


# ---------------------------------------------------------------- declarations

X, Y = torch.rand(6, 6, 6, dtype=torch.float64), torch.rand(6, 6, 6, dtype=torch.float64) + 1
N = torch.randint(1, 5, (6, 6, 6))
IMAGE = torch.rand(6, 6, 4, 4, dtype=torch.float64)
# calls of declared functions that the database's calls do not reach
UNREACHED: dict[str, list[tuple[Any, ...]]] = {
    "_upsample_bicubic2d_aa": [(IMAGE, [8, 8], False)],
    "_upsample_bilinear2d_aa": [(IMAGE, [8, 8], False)],
    "_upsample_nearest_exact2d": [(IMAGE, [8, 8])],
    "im2col": [(IMAGE, [2, 2], [1, 1], [0, 0], [1, 1])],
    "col2im": [(torch.rand(6, 8, 9, dtype=torch.float64), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])],
    "conv3d": [(torch.rand(6, 2, 4, 4, 4).double(), torch.rand(6, 2, 2, 2, 2).double(), torch.rand(6).double())],
    "grid_sampler": [(IMAGE, torch.rand(6, 3, 3, 2).double() * 2 - 1, 0, 0, False)],
    "local_response_norm": [(IMAGE, 2)],
    "pixel_shuffle": [(IMAGE.reshape(6, 6, 4, 2, 2), 2)],
    "pixel_unshuffle": [(IMAGE, 2)],
    "reflection_pad1d": [(X, [1, 1])],
    "reflection_pad2d": [(IMAGE, [1, 1, 1, 1])],
    "replication_pad1d": [(X, [1, 1])],
    "replication_pad2d": [(IMAGE, [1, 1, 1, 1])],
    "linalg.matrix_exp": [(X,)],
    "linalg.eigvalsh": [(X,)],
    "linalg.inv_ex": [(X,)],
    "linalg.vecdot": [(X, Y)],
    "linalg.diagonal": [(X,)],
    "linalg.matrix_rank": [(X,)],
    "det": [(X,)],
    "slogdet": [(X,)],
    "logdet": [(X @ X.mT + torch.eye(6),)],
    "inverse": [(X,)],
    "matrix_power": [(X, 3)],
    "mode": [(N,)],
    "nanquantile": [(X, 0.3, 1)],
    "repeat": [(X, 1, 1, 2)],
    "tile": [(X, (1, 1, 2))],
    "unfold": [(X, 2, 2, 2)],
    "view_as_real": [(torch.complex(X, Y),)],
    "imag": [(torch.complex(X, Y),)],
    "lp_pool1d": [(X, 2.0, 2)],
    "lp_pool2d": [(IMAGE, 2.0, 2)],
    "lp_pool3d": [(torch.rand(6, 6, 4, 4, 4, dtype=torch.float64), 2.0, 2)],
    "trapezoid": [(X,)],
    "gru": [(X, torch.zeros(1, 6, 5).double(), [torch.rand(15, 6).double(), torch.rand(15, 5).double()],
             False, 1, 0.0, False, False, False)],
    "lstm": [(X, [torch.zeros(1, 6, 5).double()] * 2, [torch.rand(20, 6).double(), torch.rand(20, 5).double()],
              False, 1, 0.0, False, False, True)],
}  # fmt: skip


def tried(name: str) -> list[tuple[Any, ...]]:
    """Calls of a declared name: those written here, or else
    of one or two operands of several dtypes.
    """
    if name in UNREACHED:
        return UNREACHED[name]
    return [(X,), (X, Y), (N, N + 1), (N, 2)]


def proved(calls: dict[str, Any]) -> set[str]:
    """The names whose labelled dimensions were split, with results
    and gradients as dense; none may differ.
    """
    out, wrong = set(), []
    for name, several in calls.items():
        for function, args, kwargs in several:
            for found in db.proofs(name, function, args, kwargs):
                wrong += [found.note] if found.kind in ("wrong", "crash") else []
                out |= {name} if found.kind == "equal" else set()
    assert not wrong
    return out


def test_every_labelled_dimension_may_be_split_alone() -> None:
    """Of declared functions that a sample of the database
    reaches; all of them by ``make operators``.
    """
    names = sample(40, SEED + 2)
    assert len(proved(db.declared_calls(2, SEED, names))) > 12


def test_declarations_that_the_database_does_not_reach_hold_too() -> None:
    reached = set(db.entries()) | {"linalg.qr", "linalg.eigh"}
    names = [n for n in DECLARED if n in UNREACHED or n not in reached]
    held = proved({n: [(DECLARED[n].functions[0], args, {}) for args in tried(n)] for n in names})
    # torch asks a device for a fused recurrent cell of its own
    cells = set() if torch.get_default_device().type == "cpu" else {"gru", "lstm"}
    assert not set(UNREACHED) - held - cells
