"""A report of the active kernels: a line per device, and one for apex."""

import torch

from shardlib.kernels.apex import probe
from shardlib.kernels.build import sources
from shardlib.kernels.library import why


def info() -> dict[str, str]:
    """Report which kernels serve this machine's devices, and why; nothing is built or loaded.

    >>> import shardlib as sl
    >>> found = sl.kernels.info()
    >>> sorted(found), found["cpu"].startswith("eager")
    (['apex', 'cpu', 'cuda', 'sources'], True)
    """
    out = {}
    path, reason = why(torch.device("cpu"))
    asked = f"{path}, {reason}, inside sl.kernels.use('native')" if path else reason
    out["cpu"] = f"eager; compiled kernels: {asked}"
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    for i in devices:
        path, reason = why(torch.device("cuda", i))
        name = f"cuda:{i}" if len(devices) > 1 else "cuda"
        told = f"compiled kernels: {path}, {reason}" if path else f"eager: {reason}"
        out[name] = f"{torch.cuda.get_device_name(i)}: {told}"
    if not devices:
        out["cuda"] = f"eager: {why(torch.device('cuda'))[1]}"
    out["apex"] = probe().why
    if probe().kind == "nvidia":
        out["apex"] += "; inside sl.kernels.use('apex')"
    out["sources"] = "none: nothing can be built here"
    for file in sources()[:1]:
        out["sources"] = str(file.parent)
    return out
