"""The path of a call is the name that ``named_modules`` gives its submodule."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlib.modules.paths import Paths


class Asking(nn.Module):
    """Notes where it runs."""

    def __init__(self, seen: list[str], open_paths: list[Paths]) -> None:
        super().__init__()
        self.seen, self.open_paths = seen, open_paths

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.open_paths[0].now())
        return x * 2


def net() -> tuple[nn.Sequential, list[str], list[Paths]]:
    seen: list[str] = []
    opened: list[Paths] = []
    inner = nn.Sequential(Asking(seen, opened), nn.Linear(2, 2))
    return nn.Sequential(nn.Linear(2, 2), inner), seen, opened


def test_names_are_those_of_the_outermost_module_that_was_called() -> None:
    model, seen, opened = net()
    with Paths() as paths:
        opened.append(paths)
        model(torch.ones(1, 2))
        model[1](torch.ones(1, 2))  # known already, so it keeps its whole name
        assert paths.now() == ""
    assert seen == ["1.0", "1.0"]


def test_what_is_computed_again_in_backward_keeps_its_name() -> None:
    model, seen, opened = net()
    with Paths() as paths:
        opened.append(paths)
        x = model(torch.ones(1, 2, requires_grad=True))
        checkpoint(model[1], x, use_reentrant=False).sum().backward()
    assert seen == ["1.0"] * 3


def test_a_module_that_no_parent_names_is_called_by_its_class() -> None:
    seen: list[str] = []
    opened: list[Paths] = []

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Asking(seen, opened)(x)

    with Paths() as paths:
        opened.append(paths)
        nn.Sequential(Outer())(torch.ones(1))
    assert seen == ["0.Asking"]


def test_a_module_that_raises_is_left() -> None:
    with Paths() as paths:
        with pytest.raises(RuntimeError):
            nn.Sequential(nn.Linear(2, 2))(torch.ones(1, 3))
        assert paths.now() == ""


def test_no_hook_is_left_behind() -> None:
    from torch.nn.modules import module

    def hooks() -> tuple[int, ...]:
        return tuple(
            len(v)
            for k, v in sorted(vars(module).items())
            if k.startswith("_global_") and isinstance(v, dict)
        )

    before = hooks()
    with Paths():
        assert hooks() != before
    assert hooks() == before
