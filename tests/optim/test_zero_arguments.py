"""Arguments of zero that do not fit together are refused by name, and each fix fits."""

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.optim.index import ZeroSettings

FITTING: dict[str, Any] = {
    "tx": sl.optim.sgd(0.1),
    "axes": ("data",),
    "stage": 1,
    "bucket_mb": None,
    "master": None,
    "reduce_dtype": None,
    "gather_dtype": None,
    "inner": None,
    "keep": False,
}
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"axes": ()}, "no axis to split over"),
        ({"stage": 4}, "no stage 4"),
        ({"stage": True}, "no stage True"),
        ({"stage": 0, "master": "fp32"}, "stage 0 splits nothing"),
        ({"tx": sl.optim.sgd(0.1)._replace(trait=None)}, "nobody said"),
        ({"tx": sl.optim.sgd(0.1)._replace(trait="tree")}, "looks at the tree"),
        ({"inner": "data"}, "in axis= already"),
        ({"bucket_mb": 0}, "more than 0 MiB"),
        ({"master": "fp16"}, "master='fp16' is none of"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype=torch.int8 is no floating"),
        ({"gather_dtype": BF16}, "what no master keeps"),
        ({"gather_dtype": BF16, "master": "fp32", "stage": 3}, "gathered in their own dtype"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_fix(given: dict[str, Any], says: str) -> None:
    asked = {"axis" if k == "axes" else k: v for k, v in (FITTING | given).items()}
    with pytest.raises(sl.ShardError, match=says) as found:
        sl.optim.zero(**asked)
    line = found.value.fix.removeprefix("tx = ")
    eval(line, {"sl": sl, "torch": torch, "tx": sl.optim.sgd(0.1)})


def test_a_faster_axis_is_reduced_first() -> None:
    one, two = (ZeroSettings(**(FITTING | {"inner": i})) for i in (None, "node"))
    assert one.cut == ("data",) and one.hops == (("data",),)
    assert two.cut == ("node", "data") and two.hops == (("node",), ("data",))
