"""Measurement of the links of a mesh, from which the costs of algorithms are computed."""

import math
import time
from typing import Any

import torch

from shardlib.collectives import (
    all_gather,
    pbroadcast,
    psum,
    psum_scatter,
    spans_processes,
)
from shardlib.mesh import Link, MeshLike, as_mesh, bind

__all__ = ["probe"]


def probe(
    mesh: MeshLike | None = None, *, words: int = 1 << 18, repeats: int = 5
) -> dict[str, Link]:
    """Measure seconds per message and per byte along every axis; later choices use them.

    Per axis it times an all_gather and a psum_scatter, of one and of ``words`` fp32 words per rank,
    since products use both, and takes the fastest of ``repeats``.  All ranks use rank 0's figures,
    because they must choose alike.  Where no ranks run (simulate, record) the defaults are
    returned.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     sl.probe()
    {'x': Link(alpha=2e-05, beta=1e-09)}
    """
    m = as_mesh(mesh)
    if not spans_processes(m):
        return {axis: m.links.get(axis, Link()) for axis in m.names}
    axes = [axis for axis in m.names if m.axes[axis] > 1]
    times = []
    with bind(m):
        for axis in axes:
            times += [_seconds(axis, 1, m, repeats), _seconds(axis, words, m, repeats)]
        told = torch.tensor(times, dtype=torch.float64, device="cpu")
        told = pbroadcast(told.to(m.device), m.names, 0).cpu() if axes else told
    for axis, (small, large) in zip(axes, told.reshape(-1, 2).tolist(), strict=True):
        # a ring takes p - 1 hops, each of ``words`` fp32 words
        hops = m.axes[axis] - 1
        m.links[axis] = Link(small / hops, max((large - small) / (hops * 4 * words), 1e-15))
    m.memo.forget()  # choices that depend on the old prices
    return {axis: m.links.get(axis, Link()) for axis in m.names}


def _seconds(axis: str, words: int, mesh: Any, repeats: int) -> float:
    """Time one collective: the mean of a gather and a scatter."""
    x = torch.zeros(words, device=mesh.device)
    best = math.inf
    for _ in range(repeats + 1):
        float(psum(x[:1], mesh.names))  # a barrier, so that all ranks start together
        began = time.perf_counter()
        float(psum_scatter(all_gather(x, axis), axis)[-1])
        best = min(best, time.perf_counter() - began)
    return best / 2
