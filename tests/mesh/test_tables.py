"""A table is uploaded once, and serves training also where inference came first."""

import torch

from shardlib.mesh import uploaded


def test_what_inference_uploads_serves_a_later_backward() -> None:
    device = torch.get_default_device()
    with torch.inference_mode():
        rows = uploaded((3, 1, 2), device)
    assert rows is uploaded((3, 1, 2), device) and not rows.is_inference()
    x = torch.randn(4, requires_grad=True)
    (x.index_select(0, rows) * 2).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 2, 2, 2]
