"""The laws of a matmul algorithm: the library's keep them, and a broken one is caught."""

from pathlib import Path

import pytest

import shardlib as sl
from tests.test_extend import BLOCK, SMALL, load


@pytest.mark.parametrize(
    ("right", "wrong", "law"),
    [
        ("p * (p > 1)", "p * 2", "messages forward"),
        ("(p - 1) * case.w_bytes, p - 1)", "p * case.w_bytes, p - 1)", "bytes backward"),
        ("y = y + part @ panel", "y = part @ panel", "Y: differs from dense"),
        ("dy @ panel.mT", "dy @ panel.mT * 2", "X's gradient"),
        ("if need[1] and over[1] else dw", "if False else dw", "W's gradient"),
        ("y if bias is None else y + bias", "y", "with a bias"),
        (
            "out, p = case.rows_by(case.w.dims[1])",
            "out, p = case.rows_by(case.w.dims[0])",
            "shard|lie|layout|Y",
        ),
    ],
)
def test_a_broken_algorithm_fails_its_law(
    right: str, wrong: str, law: str, untouched: None, tmp_path: Path
) -> None:
    assert BLOCK.count(right) == 1
    path = tmp_path / "broken.py"
    path.write_text(BLOCK[: BLOCK.index("print(")].replace(right, wrong))
    load(path)
    with pytest.raises((AssertionError, sl.ShardError), match=law):
        sl.testing.check_algorithm("matmul", "panel_by_panel", SMALL)


def test_an_algorithm_that_takes_nothing_is_not_tested(untouched: None) -> None:
    sl.extend.algorithm("matmul", name="never")(lambda case: "it is only an example")
    with pytest.raises(AssertionError, match="nothing was tested"):
        sl.testing.check_algorithm("matmul", "never", SMALL)
    with pytest.raises(sl.ShardError, match="there are laws for matmul"):
        sl.testing.check_algorithm("softmax", "never")


@pytest.mark.parametrize("name", ["oned", "summa_x", "cannon", "mm3", "mm3_xw", "ring"])
def test_the_library_s_algorithms_keep_the_laws(name: str) -> None:
    assert sl.testing.check_algorithm(
        "matmul", name, [{"x": 2, "y": 2} if name in ("summa_x", "cannon") else {"x": 2}]
    )
