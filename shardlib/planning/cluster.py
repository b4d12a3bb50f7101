"""Clusters: a rank's memory and speed and the links between ranks, from data sheets or measured."""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from shardlib.collectives import (
    all_gather,
    pbroadcast,
    psum,
    psum_scatter,
    spans_processes,
)
from shardlib.errors import BadArgument
from shardlib.mesh import Link, MeshLike, as_mesh, bind, make_mesh, world_size


@dataclass(frozen=True)
class Cluster:
    """A kind of machine: memory and speed of a rank, and the links between ranks.

    ``memory``  bytes of one rank.
    ``flops``   operations per second that its products reach.
    ``node``    ranks joined by links ``inside``; all others are joined by links ``between``.
    ``source``  origin of the links' figures.
    ``bandwidth``  bytes per second that a rank reads and writes in its memory, by which operators
                   of the stages of a pipeline are priced; infinite where it is not known.
    ``host``       bytes per second to host memory, and from it, by which memory tiers are priced.

    >>> Cluster(memory=80e9, flops=4e14).node
    8
    """

    memory: float
    flops: float
    node: int = 8
    inside: Link = field(default=Link(5e-6, 1 / 200e9))
    between: Link = field(default=Link(1e-5, 1 / 40e9))
    source: str = "as given"
    bandwidth: float = math.inf
    host: float = 16e9

    def links(self, mesh: Mapping[str, int]) -> dict[str, Link]:
        """Return the link of each mesh axis; consecutive ranks of the last axis share a node."""
        out, reach = {}, 1
        for axis, n in reversed(list(mesh.items())):
            reach *= n
            out[axis] = self.inside if reach <= self.node else self.between
        return out

    def told(self) -> str:
        """Describe the assumed links and the source of their figures.

        >>> CLUSTERS["h100"].told().split(" between")[0]
        'links: 225 GB/s and 5 us a message within 8 ranks, 25 GB/s and 10 us'
        """
        inside, between = _told(self.inside), _told(self.between)
        return (
            f"links: {inside[0]} and {inside[1]} a message within {self.node} ranks, "
            f"{between[0]} and {between[1]} between\n({self.source})"
        )


def _told(link: Link) -> tuple[str, str]:
    return f"{1e-9 / link.beta:.3g} GB/s", f"{1e6 * link.alpha:.3g} us"


_SHEETS = "half of data sheets, nothing was measured"

# data sheets' memory; half of the data sheets' operations, links, memory bandwidth, and PCI Express
CLUSTERS = {
    "a100": Cluster(
        80e9, 156e12, 8, Link(5e-6, 1 / 150e9), Link(1e-5, 1 / 12.5e9), _SHEETS, 1e12, 16e9
    ),
    "h100": Cluster(
        80e9, 495e12, 8, Link(5e-6, 1 / 225e9), Link(1e-5, 1 / 25e9), _SHEETS, 1.7e12, 32e9
    ),
    "h200": Cluster(
        141e9, 495e12, 8, Link(5e-6, 1 / 225e9), Link(1e-5, 1 / 25e9), _SHEETS, 2.4e12, 32e9
    ),
    "b200": Cluster(
        180e9, 1125e12, 8, Link(5e-6, 1 / 450e9), Link(1e-5, 1 / 25e9), _SHEETS, 4e12, 32e9
    ),
}


def cluster_of(given: str | Cluster) -> Cluster:
    """Return the cluster of a name; a ``Cluster`` is returned as it is.

    Raises: BadArgument.
    """
    if isinstance(given, Cluster):
        return given
    if given not in CLUSTERS:
        why = f"no cluster {given!r}; there are {', '.join(CLUSTERS)}"
        raise BadArgument(why, op="plan", fix="sl.planning.Cluster(memory=80e9, flops=4e14)")
    return CLUSTERS[given]


def measured(cluster: str | Cluster = "h100", ranks: int | None = None) -> Cluster:
    """Measure the links between the running ranks with ``probe``, in place of a cluster's own.

    All ranks of a job must call it, under torchrun or in ``sl.launch``; ranks of a node must be
    consecutive.  With one node, the links between nodes keep their figures; one rank measures
    nothing.

    ``cluster``  the source of memory and operations.
    ``ranks``    ranks per node; by default LOCAL_WORLD_SIZE as torchrun sets it, else all.
    Raises: BadArgument if the ranks are not a multiple of ``ranks``; MeshError if only part of a
    launcher's environment is set, in which nothing says whether other ranks run.

    >>> measured("h100") == CLUSTERS["h100"]  # one rank has no links: nothing to measure
    True
    """
    found = cluster_of(cluster)
    world = world_size("measured")
    node = ranks or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % node:
        why = f"{world} ranks are no whole nodes of {node}"
        raise BadArgument(why, op="measured", fix=f"sl.planning.measured(ranks={world})")
    if world == 1:
        return found
    links = probe(make_mesh(node=world // node, rank=node))
    if node == world:
        text = f"measured between {node} ranks of a node; between nodes {found.source}"
        return replace(found, node=max(node, found.node), inside=links["rank"], source=text)
    if node == 1:
        text = f"measured between {world} nodes; within a node {found.source}"
        return replace(found, node=1, between=links["node"], source=text)
    text = f"measured between {node} ranks of a node and {world // node} nodes"
    return replace(found, node=node, inside=links["rank"], between=links["node"], source=text)


# ---------------------------------------------------------------- measurement of links


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
    # choices that depend on the old prices
    m.memo.forget()
    return {axis: m.links.get(axis, Link()) for axis in m.names}


def _seconds(axis: str, words: int, mesh: object, repeats: int) -> float:
    """Time one collective: the mean of a gather and a scatter."""
    x = torch.zeros(words, device=mesh.device)
    best = math.inf
    for _ in range(repeats + 1):
        # a barrier, so that all ranks start together
        float(psum(x[:1], mesh.names))
        began = time.perf_counter()
        float(psum_scatter(all_gather(x, axis), axis)[-1])
        best = min(best, time.perf_counter() - began)
    return best / 2
