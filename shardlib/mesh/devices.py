"""Devices, as torch reports them: the accelerator, this process's device, a device's backend."""

import torch
import torch.distributed as dist
from torch import Tensor

from shardlib.errors import MeshError


def accelerator() -> torch.device | None:
    """Return the accelerator that torch has here (cuda, xpu, mps, a registered one), if any.

    >>> accelerator() is None or accelerator().type != "cpu"
    True
    """
    return torch.accelerator.current_accelerator(check_available=True)


def placed(device: torch.device | str | int) -> torch.device:
    """Return a device with its index: an accelerator without one is this process's own.

    >>> placed("cpu"), placed("meta")
    (device(type='cpu'), device(type='meta'))
    """
    device = torch.device(device)
    here = accelerator()
    if device.index is None and here is not None and device.type == here.type:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def take_device(kind: str, number: int) -> None:
    """Make an accelerator of this kind this process's own device.

    The number wraps around: a launcher may have made only one device visible to each process.
    """
    here = accelerator()
    if here is not None and here.type == kind:
        torch.accelerator.set_device_index(number % torch.accelerator.device_count())


def backend_of(kind: str, op: str) -> str:
    """Name the backend that torch has for transfers between devices of this kind.

    Raises: MeshError where none was registered.

    >>> backend_of("cpu", "make_mesh")
    'gloo'
    """
    try:
        return dist.get_default_backend_for_device(kind)
    except ValueError as e:
        why = f"torch knows no backend for transfers between devices of the kind {kind!r}"
        fix = f"torch.distributed.Backend.register_backend(name, make, devices=[{kind!r}])"
        raise MeshError(why, op=op, fix=fix) from e


# bytes: pinned memory is kept for the next copy
_PINNED = 1 << 26


def brought(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, such as a batch: by pinned memory, so that the host does not wait.

    >>> brought(torch.ones(2), torch.device("cpu"))
    tensor([1., 1.])
    """
    if x.device.type != "cpu" or device.type in ("cpu", "meta") or x.nbytes > _PINNED:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
