"""3D layout: every matrix balanced over a cube of ranks.

Source: Bian et al., arXiv 2105.14450, section 3; Agarwal et al. 1995.
"""

from dataclasses import dataclass

from shardlib.layouts.layout import Layout

__all__ = ["Layout3D"]


@dataclass(frozen=True)
class Layout3D:
    """The layouts of a 3D linear layer; its output is the next layer's input with y, z swapped.

    >>> L = Layout3D("x", "y", "z")
    >>> L.act, L.weight, L.out
    (Layout('(x y) ... z'), Layout('(z x) y'), Layout('(x z) ... y'))
    """

    x: str
    y: str
    z: str

    @property
    def layout(self) -> Layout:
        """The layout used where one is expected: that of activations."""
        return self.act

    @property
    def act(self) -> Layout:
        return Layout.parse(f"({self.x} {self.y}) ... {self.z}")

    @property
    def weight(self) -> Layout:
        return Layout.parse(f"({self.z} {self.x}) {self.y}")

    @property
    def out(self) -> Layout:
        return Layout3D(self.x, self.z, self.y).act
