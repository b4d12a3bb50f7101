import torch

from shardlib.pipeline.flow import Dependences


def test_data_and_autograd_are_both_followed() -> None:
    flow = Dependences()
    mask, w = torch.ones(3, dtype=torch.bool, device="meta"), torch.ones(3, device="meta")
    w.requires_grad_()
    flow.mark(mask, "mask")
    flow.mark(w, "w")
    hidden = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with flow:
        by_data = torch.where(mask, 1.0, 2.0)
    with hidden:
        # made outside the mode: autograd alone knows
        by_autograd = w * 2
    assert flow.of([by_data]) == {"mask"} and flow.of([by_autograd]) == {"w"}
    assert flow.of([torch.ones(3, device="meta")]) == frozenset()


def test_a_fill_takes_sizes_and_no_values() -> None:
    flow, x = Dependences(), torch.ones(3, device="meta")
    flow.mark(x, "x")
    with flow:
        zeros, written = torch.zeros_like(x), torch.zeros(3, device="meta")
        written.copy_(x)
    assert not flow.reaches(zeros) and flow.reaches(written)
