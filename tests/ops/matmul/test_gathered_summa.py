"""X is paid for once: a product that finds it gathered moves W's panels alone."""

from dataclasses import replace

import pytest

import shardlib as sl
from shardlib.ops.matmul.gathered_summa import streamed
from shardlib.ops.registry import Match

parse = sl.Layout.parse
CASE = sl.extend.MatmulCase(
    parse("x y"), parse("x y"), (16, 8), (8, 4), (("x", 2), ("y", 2)), 4, out=None, more=True
)


def priced(case: sl.extend.MatmulCase) -> Match:
    found = streamed(case)
    assert isinstance(found, Match), found
    return found


def test_the_first_product_gathers_and_the_next_sends_panels_alone() -> None:
    first = priced(CASE)
    again = priced(replace(CASE, held=frozenset({("gather", *_gather(CASE))})))
    gathered = CASE.x_bytes  # the other rank's block of X
    panels = CASE.w_bytes
    assert first.forward.bytes == gathered + panels and again.forward.bytes == panels
    assert again.backward.bytes < first.backward.bytes and again.out == first.out


def _gather(case: sl.extend.MatmulCase) -> tuple[object, object]:
    from shardlib.ops.matmul.gathered_summa import movements

    found = movements(case)
    assert not isinstance(found, str)
    cube, out, _, _ = found
    return cube.x, case.over(out)[0]


@pytest.mark.parametrize("more", [False, None])
def test_one_product_alone_is_no_reason_to_gather(more: bool | None) -> None:
    assert streamed(replace(CASE, more=more)) == "no other product is known to read this X"
