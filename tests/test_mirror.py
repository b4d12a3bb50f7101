"""Tests mirror modules: shardlib/ops/norm.py is tested by tests/ops/test_norm.py."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ELSEWHERE = {  # tests that hold several modules to one law -> those that have no file of their own
    "layouts/test_layout.py": "layouts/divisibility layouts/placements layouts/text layouts/row layouts/col layouts/block2d layouts/depth25d layouts/cube3d layouts/replicated",
    "layouts/test_spec.py": "layouts/partition",
    "modules/test_parallelize.py": "modules/patterns",  # rules match names
    "modules/test_dim_trace.py": "modules/dim_factors",  # atoms are what the dimensions of a module are made of
    "planning/test_layer_dedup.py": "planning/products",  # which are counted layer by layer
    "ops/attention/test_masks.py": "masks",  # the public names
    "ops/attention/test_engine.py": "attention",  # and these
    "accelerator/test_accelerator.py": "collectives/backends/streams",  # on a device that has some
    "checking/test_proof.py": "checking/first_mismatch testing/plugin",
    "test_desync.py": "command/desync",
    "command/test_main.py": "__main__",
    "planning/test_explain.py": "memory_tracker",  # the peak on paper is the peak of a step
    # torch's database
    "test_operators.py": "ops/declare ops/dims ops/matrix ops/composite ops/contract ops/einsum",
    "kernels/test_info.py": "kernels/__main__",
    "kernels/test_dropout.py": "kernels/bits",
    "optim/test_adaptive.py": "optim/momentum",  # optimizers of one element, by one law
    "optim/test_muon.py": "optim/newton_schulz optim/matrix_owners",  # where matrices are computed
    "optim/test_soap.py": "optim/matrix_owned",
    "optim/test_zero.py": (  # every stage by one law
        "optim/reduction optim/stage0 optim/stage1_2 optim/stage3 optim/zero_stage"
    ),
    "ops/matmul/test_matmul2d.py": "ops/matmul/case ops/matmul/matmul1d",
    "ops/matmul/test_shared_gather.py": "ops/matmul/gathered_summa",
    "ops/attention/test_op.py": (  # every engine on every mask, layout and ring
        "ops/attention/aligned ops/attention/case ops/attention/function ops/attention/transfers "
        "ops/attention/engines/allgather ops/attention/engines/double_ring "
        "ops/attention/engines/pass_q "
        "ops/attention/engines/routes ops/attention/engines/rsa"
    ),
}
MODULES = [
    p.relative_to(ROOT / "shardlib").with_suffix("")
    for p in (ROOT / "shardlib").rglob("*.py")
    if p.stem != "__init__"
]


def own(module: Path) -> Path:
    return ROOT / "tests" / module.with_name(f"test_{module.name.removeprefix('_')}.py")


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_has_a_test_of_its_name_or_is_listed(module: Path) -> None:
    listed = [test for test, modules in ELSEWHERE.items() if module.as_posix() in modules.split()]
    assert own(module).exists() != bool(listed), (
        f"{module}: write {own(module)} or list it (once): {listed}"
    )


def test_what_is_listed_exists() -> None:
    assert all((ROOT / "tests" / test).exists() for test in ELSEWHERE)
    assert {m for modules in ELSEWHERE.values() for m in modules.split()} <= {
        m.as_posix() for m in MODULES
    }
