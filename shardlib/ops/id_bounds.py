"""Range checks of ids, targets and indices; out of range ones are refused, as in torch.

On a CPU the ids are checked before they are used, and the error is raised at once.  On CUDA that
would make the host wait for the device at every lookup, so the device asserts, as in torch's own
embedding and gather: the kernel fails, and the next call that waits for the device raises
RuntimeError.
"""

import torch
from torch import Tensor

from shardlib._compat import assert_async
from shardlib.errors import OutOfRange


def in_range(
    ids: Tensor, count: int, op: str, what: str, ignore: int | None = None, lowest: int = 0
) -> None:
    """Refuse ids outside ``lowest`` .. count - 1 that are not ``ignore``.

    ``ids`` is a raw block of whole numbers.
    """
    if ids.is_meta or not ids.numel():
        return
    if ids.device.type == "cpu":
        low, high = map(int, torch.aminmax(ids))
        if low >= lowest and high < count:
            return
    outside = (ids < lowest) | (ids >= count)
    if ignore is not None:
        outside &= ids != ignore
    if ids.device.type != "cpu":
        assert_async(~outside.any())
    elif outside.any():
        raise OutOfRange(f"{what} {int(ids[outside][0])} is out of range: there are {count}", op=op)
