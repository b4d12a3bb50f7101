"""Method wrappers on a module that survive copying the module.

A closure over a module would be shared by the module's copies, and compute with the parameters of
the first.  ``Around`` finds the method on its module at each call and holds nothing else of it, so
that ``copy.deepcopy`` and ``pickle`` make copies that run on their own parameters.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

__all__ = ["Around"]


class Around:
    """Wrapper of ``module.name``, set as attribute: calls ``run(module, method, *given, ...)``.

    ``run``    a function that can be imported by its name, so that it can be pickled.
    ``given``  its arguments after the method.

    >>> def doubled(module, forward, factor, x):
    ...     return factor * forward(x)
    >>> import copy, torch
    >>> layer = nn.Linear(2, 2)
    >>> _ = Around(layer, "forward", doubled, 2)
    >>> again = copy.deepcopy(layer)
    >>> _ = again.requires_grad_(False).weight.zero_(), again.bias.fill_(3.0)
    >>> again(torch.ones(1, 2))
    tensor([[6., 6.]])
    """

    def __init__(self, module: nn.Module, name: str, run: Callable[..., Any], *given: Any) -> None:
        self.module, self.__name__, self.run, self.given = module, name, run, given
        self.before = vars(module).get(name)
        vars(module)[name] = self

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The method before wrapping, which also gives the wrapper its signature."""
        if self.before is not None:
            return self.before
        return MethodType(getattr(type(self.module), self.__name__), self.module)

    @property
    def __code__(self) -> Any:
        """Code object of the method, whose file torch.export names."""
        return getattr(self.__wrapped__, "__code__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.module, self.__wrapped__, *self.given, *args, **kwargs)
