"""What the device decides and the host reads a step later, on the host; tests/accelerator has the rest."""

import copy
import pickle

import pytest
import torch

import shardlib as sl
from shardlib.optim.norms import ClipState, ScaleState
from shardlib.optim.transform import Later, Posted, at_rest, begun, chosen

YES, NO = (Posted(torch.tensor(x)) for x in (True, False))


def test_a_number_that_is_decided_later_is_that_number_to_all_who_read_it() -> None:
    for sound, n in ((YES, 4), (NO, 3)):
        count = Later(sound, 4, 3)
        assert (int(count), float(count), repr(count), f"{count:d}") == (
            n,
            float(n),
            f"{n}",
            f"{n}",
        )
        assert count == n and n == count and hash(count) == hash(n) and bool(count)
        assert (count + 1, 1 + count, 2 - count, count / 2, 0.5**count, -count) == (
            n + 1, 1 + n, 2 - n, n / 2, 0.5**n, -n,
        )  # fmt: skip
        assert [count < 4, count >= 4] == [n < 4, n >= 4] and list(range(9))[count] == n
        for again in (copy.deepcopy(count), pickle.loads(pickle.dumps(count))):
            assert type(again) is int and again == n
    assert Later(NO, 5, Later(YES, 4, 3)) == 4


def test_a_step_that_was_passed_over_is_not_counted() -> None:
    w = {"w": torch.ones(2)}
    before, after = (3, w, 0.5, (0,)), (4, w, 0.25, (1,))
    for sound, want in ((True, after), (False, before)):
        found = chosen(torch.tensor(sound), after, before)
        assert found == want and found[1] is w and isinstance(found[0], Later)
        read = begun(found)
        assert read == want and type(read[0]) is int and read[1] is w and begun(read) is read
    assert chosen(None, after, before) is after  # the host decided


def test_tensors_are_those_of_before_where_a_step_is_not_sound() -> None:
    with sl.simulate(x=2):
        old = {"w": sl.shard(torch.zeros(4), "x"), "n": torch.zeros(())}
        new = {"w": sl.shard(torch.full((4,), float("nan")), "x"), "n": torch.ones(())}
        kept = chosen(torch.tensor(False), new, old)
        assert sl.unshard(kept["w"]).tolist() == [0] * 4 and kept["n"] == 0
        assert chosen(torch.tensor(True), new, old)["n"] == 1
        assert chosen(None, new, old) is new


def test_a_checkpoint_holds_numbers_and_nothing_that_is_still_to_be_read() -> None:
    clip = ClipState((Posted(torch.tensor(float("nan"))),))
    state = ScaleState(torch.tensor(8.0), Later(NO, 3, 0), 0, (clip, 7), (YES,))
    assert at_rest({"state": state, "n": None}) == {
        "state": ScaleState(8.0, 0, 0, (ClipState(), 7)), "n": None,
    }  # fmt: skip
    assert sl.optim.state_dict(state) == {"scale": 8.0, "good": 0, "skipped": 0, "inner.1": 7}


def test_an_error_of_the_last_step_is_raised_once() -> None:
    bad, fine = (Posted(torch.tensor(x), lambda x: ValueError(x) if x else None) for x in (2, 0))
    for _ in range(2):
        assert begun((fine, Later(NO, 4, 3)))[1] == 3
    with pytest.raises(ValueError, match="2"):
        begun((fine, (bad,), bad))
    assert begun((bad, Later(YES, 4, 3))) == (bad, 4)
