"""Clusters: a rank's memory and speed and the links between ranks, from data sheets or measured.

A cluster is a TOML file, too: ``Cluster.save`` writes it, and its path is taken for a name.
"""

import json
import math
import os
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from shardlib import toml_text
from shardlib.capacity import bytes_in
from shardlib.collectives import (
    all_gather,
    pbroadcast,
    psum,
    psum_scatter,
    spans_processes,
    trace,
)
from shardlib.errors import BadArgument, similar
from shardlib.mesh import Link, Mesh, MeshLike, accelerator, as_mesh, bind, make_mesh, world_size
from shardlib.planning.device import measure_device
from shardlib.planning.work import KernelRates, Rates

_HEAD = "# a cluster, written by shardlib"


@dataclass(frozen=True)
class Cluster:
    """A kind of machine: memory and speed of a rank, and the links between ranks.

    ``memory``  bytes of one rank.
    ``flops``   operations per second that its products reach.
    ``node``    ranks joined by links ``inside``; all others are joined by links ``between``.
    ``source``  origin of the links' figures.
    ``bandwidth``  bytes per second that a rank reads and writes in its memory, by which operators
                   of the stages of a pipeline are priced; infinite where it is not known.
    ``host``       bytes per second to host memory, and from it, by which memory tiers and remat
                   "host" are priced.
    ``call``       seconds of an operator beside these.
    ``kernels``    operations per second by kind of kernel and size, {"matmul float32": {64: 6e10}};
                   without a kind ``flops`` is its rate.  What ``measured`` finds on this device.

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
    call: float = 0.0
    kernels: KernelRates = field(default_factory=dict, hash=False)

    def rates(self, mesh: Mapping[str, int]) -> Rates:
        """Return what prices the work of a rank of a mesh with these axes."""
        links = self.links(mesh)
        return Rates(links, self.flops, self.bandwidth, self.call, self.kernels, self.host)

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
        lines = [
            f"links: {inside[0]} and {inside[1]} a message within {self.node} ranks, "
            f"{between[0]} and {between[1]} between",
            f"({self.source})",
        ]
        for kind, row in self.kernels.items():
            rates = [f"{1e-9 * r:.3g} at {n}" for n, r in row.items()]
            lines.append(f"{kind}: {', '.join(rates)}, in 1e9 operations a second")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a TOML file, whose path ``sl.plan(cluster=...)`` takes.

        Raises: BadArgument where a file is that no ``save`` wrote.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "lab.toml")
        >>> Cluster(memory=80e9, flops=4e14).save(path)
        >>> Cluster.load(path) == Cluster(memory=80e9, flops=4e14)
        True
        """
        tables = {n: x for n, x in asdict(self).items() if isinstance(x, Mapping)}
        lines = [_line(n, x) for n, x in asdict(self).items() if n not in tables]
        for name, rows in tables.items():
            lines += ["", f"[{name}]", *(_line(n, x) for n, x in rows.items())] if rows else []
        if os.path.exists(path) and not Path(path).read_bytes().startswith(_HEAD.encode()):
            why = f"{os.fspath(path)!r} is a file that shardlib did not write, and is not replaced"
            raise BadArgument(why, op="save", fix="cluster.save('new.toml')")
        Path(path).write_text("\n".join([_HEAD, *lines, ""]), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Cluster":
        """Read a TOML file: the fields are its keys, ``inside``, ``between`` and ``kernels`` tables.

        ``memory`` and ``flops`` must be there; memory may be a text such as "80GB".
        Raises: BadArgument, with the key.
        """
        name, fix = os.fspath(path), f"sl.planning.Cluster(80e9, 4e14).save({os.fspath(path)!r})"
        try:
            with open(path, "rb") as f:
                given = tomllib.load(f)
        except (OSError, ValueError) as e:
            raise BadArgument(f"{name}: {e}", op="Cluster.load", fix=fix) from e
        known, found = [f.name for f in fields(cls)], {}
        for key, value in given.items():
            if key not in known:
                near = similar(key, known) or known
                why = f"{name} has no key {key!r}; the nearest is {near[0]!r} of {', '.join(known)}"
                raise BadArgument(why, op="Cluster.load", fix=fix)
            read, what = _READ.get(key, (_number, "a number above 0"))
            try:
                found[key] = read(value)
            except (TypeError, ValueError, BadArgument) as e:
                why = f"{name}: {key} must be {what}, not {value!r}"
                raise BadArgument(why, op="Cluster.load", fix=fix) from e
        if missing := [n for n in ("memory", "flops") if n not in found]:
            why = f"{name} has no {' and no '.join(missing)}"
            raise BadArgument(why, op="Cluster.load", fix=fix)
        return cls(**found)


def _line(key: str, value: object) -> str:
    if isinstance(value, Mapping):
        value = {str(n): x for n, x in value.items()}
    return f"{toml_text.key(key)} = {toml_text.value(value)}"


def _number(x: Any, least: float = 0.0) -> float:
    if isinstance(x, bool) or not x > least:
        raise ValueError(x)
    return float(x)


def _seconds_per(x: Mapping[str, Any]) -> Link:
    """Read a link; nothing is as fast as no time, but a latency of 0 may be said."""
    link = Link(**{n: float(value) for n, value in dict(x).items()})
    if link.alpha < 0 or link.beta <= 0:
        raise ValueError(x)
    return link


def _node(x: Any) -> int:
    if type(x) is not int or x < 1:
        raise ValueError(x)
    return x


def _table(x: Any) -> KernelRates:
    return {
        kind: {_node(int(n)): _number(r) for n, r in dict(row).items()}
        for kind, row in dict(x).items()
    }


_LINK = _seconds_per, "a table of alpha, seconds per message, and beta, seconds per byte"
# of a key of a file: what reads it, and what it must be
_READ: dict[str, tuple[Callable[[Any], Any], str]] = {
    "memory": (lambda x: bytes_in(x) if isinstance(x, str) else _number(x), "bytes, or '80GB'"),
    "node": (_node, "a whole number, 1 at least"),
    "source": (lambda x: x + "", "a text"),
    "call": (lambda x: _number(x, -1e-300), "seconds, 0 at least"),
    "inside": _LINK,
    "between": _LINK,
    "kernels": (_table, "a table of kinds of kernels: sizes = operations per second"),
}


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
    """Return the cluster of a name or of a TOML file; a ``Cluster`` is returned as it is.

    Raises: BadArgument.
    """
    if isinstance(given, Cluster):
        return given
    if given.endswith(".toml"):
        return Cluster.load(given)
    if given not in CLUSTERS:
        why = f"no cluster {given!r}; there are {', '.join(CLUSTERS)}, and files that end in .toml"
        raise BadArgument(why, op="plan", fix="sl.planning.Cluster(memory=80e9, flops=4e14)")
    return CLUSTERS[given]


def measured(
    cluster: str | Cluster = "h100", ranks: int | None = None, seconds: float = 2.0
) -> Cluster:
    """Measure this device, and the links between the running ranks, in place of a cluster's own.

    All ranks of a job must call it, under torchrun or in ``sl.launch``; ranks of a node must be
    consecutive.  They compute at the same time, as in a step, and rank 0's rates are those of all.
    With one node, the links between nodes keep their figures; with one rank, all links.

    ``cluster``  the source of memory and of what is not measured.
    ``ranks``    ranks per node; by default LOCAL_WORLD_SIZE as torchrun sets it, else all.
    ``seconds``  about how long the kernels of the device are measured.
    Raises: BadArgument if the ranks are not a multiple of ``ranks``; MeshError if only part of a
    launcher's environment is set, in which nothing says whether other ranks run.

    >>> found = measured("h100", seconds=0.05)
    >>> found.memory, found.inside == CLUSTERS["h100"].inside, "matmul float32" in found.kernels
    (80000000000.0, True, True)
    """
    found = cluster_of(cluster)
    world = world_size("measured")
    node = ranks or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % node:
        why = f"{world} ranks are no whole nodes of {node}"
        raise BadArgument(why, op="measured", fix=f"sl.planning.measured(ranks={world})")
    if world == 1:
        device = accelerator() or torch.device("cpu")
        text = f"kernels measured on {device.type}; links {found.source}"
        return replace(found, **measure_device(device, seconds), source=text)
    mesh = as_mesh(make_mesh(node=world // node, rank=node))
    links = probe(mesh)
    found = replace(found, **_of_rank_0(measure_device(mesh.device, seconds), mesh))
    if node == world:
        text = f"measured between {node} ranks of a node; between nodes {found.source}"
        return replace(found, node=max(node, found.node), inside=links["rank"], source=text)
    if node == 1:
        text = f"measured between {world} nodes; within a node {found.source}"
        return replace(found, node=1, between=links["node"], source=text)
    text = f"measured between {node} ranks of a node and {world // node} nodes"
    return replace(found, node=node, inside=links["rank"], between=links["node"], source=text)


def _of_rank_0(rates: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Return the rates of a device that rank 0 found, because all must plan alike."""
    text = torch.zeros(1 << 14, dtype=torch.uint8, device="cpu")
    written = json.dumps(rates).encode()
    text[: len(written)] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    with bind(mesh):
        told = pbroadcast(text.to(mesh.device), mesh.names, 0).cpu()
    found = json.loads(bytes(told.tolist()).rstrip(b"\0"))
    return {**found, "kernels": _table(found["kernels"])}


# ---------------------------------------------------------------- measurement of links


def probe(
    mesh: MeshLike | None = None, *, words: int = 1 << 20, repeats: int = 5
) -> dict[str, Link]:
    """Measure seconds per message and per byte along every axis; later choices use them.

    Per axis it times an all_gather, a psum_scatter and a psum, each alone, from which a rank
    receives about one and about ``words`` fp32 words, and takes the fastest of ``repeats`` of each.
    All ranks use rank 0's figures, because they must choose alike.  Where no ranks run (simulate,
    record) the defaults are returned.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     sl.probe()
    {'x': Link(alpha=2e-05, beta=1e-09)}
    """
    m = as_mesh(mesh)
    if not spans_processes(m):
        return {axis: m.links.get(axis, Link()) for axis in m.names}
    axes = [axis for axis in m.names if m.axes[axis] > 1]
    with bind(m):
        found = [
            [_received(axis, 1, m, repeats), _received(axis, words, m, repeats)] for axis in axes
        ]
        told = torch.tensor(found, dtype=torch.float64, device="cpu")
        told = pbroadcast(told.to(m.device), m.names, 0).cpu() if axes else told
    for axis, (small, large) in zip(axes, told.tolist(), strict=True):
        more, seconds = large[1] - small[1], large[0] - small[0]
        m.links[axis] = Link(small[0] / small[2], max(seconds / max(more, 1.0), 1e-15))
    # choices that depend on the old prices
    m.memo.forget()
    return {axis: m.links.get(axis, Link()) for axis in m.names}


def _received(axis: str, words: int, mesh: Mesh, repeats: int) -> tuple[float, float, int]:
    """Time collectives that each receive about so many words; return seconds, bytes, messages."""
    n, seconds = mesh.axes[axis], 0.0
    part = max(words // (n - 1), 1)
    runs = (all_gather, part), (psum_scatter, n * part), (psum, max(n * part // 2, 1))
    with trace() as moved:
        # the first call connects the ranks
        for run, size in runs:
            run(torch.zeros(size, device=mesh.device), axis)
    for run, size in runs:
        x, best = torch.zeros(size, device=mesh.device), math.inf
        for _ in range(repeats):
            # a barrier, so that all ranks start together
            float(psum(x[:1], mesh.names))
            began = time.perf_counter()
            float(run(x, axis)[-1])
            best = min(best, time.perf_counter() - began)
        seconds += best
    return seconds, float(moved.bytes), moved.messages
