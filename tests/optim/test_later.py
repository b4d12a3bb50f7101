"""What the device decides and the host reads a step later, on the host; tests/accelerator has the rest."""

import torch

import shardlib as sl
from shardlib.optim.later import begun, chosen, counted, rolled_back, told

State = tuple[int, dict[str, torch.Tensor]]


def test_a_step_that_was_passed_over_is_not_counted() -> None:
    w = torch.ones(2)
    before, after = (3, {"w": w}, 0.5), (4, {"w": w}, 0.25)
    for sound, want in ((True, after), (False, before)):
        found = rolled_back(after, (torch.tensor(sound), *counted(before)))
        assert (found[0], found[2]) == (want[0], want[2]) and found[1]["w"] is w
    assert rolled_back(after, ()) is after  # the host decided
    assert begun({"w": w}, before) == ()


def test_tensors_are_those_of_before_where_a_step_is_not_sound() -> None:
    with sl.simulate(x=2):
        old = {"w": sl.shard(torch.zeros(4), "x"), "n": torch.zeros(())}
        new = {"w": sl.shard(torch.full((4,), float("nan")), "x"), "n": torch.ones(())}
        kept = chosen(torch.tensor(False), new, old)
        assert sl.unshard(kept["w"]).tolist() == [0] * 4 and told(kept["n"]) == 0
        assert chosen(torch.tensor(True), new, old)["n"].item() == 1
        assert chosen(None, new, old) is new
