"""Trees come back equal under any layout, mesh and padding; damage is found; other trees refused."""

import json
import os
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import shardlib as sl
from examples.gpt import GPT
from shardlib.checkpoint.folder import MANIFEST
from shardlib.errors import BadArgument, CheckpointError
from tests.checkpoint.cases import DTYPES, MESHES, layouts, placed, put, same, tree, value, whole
from tests.checkpoint.test_files import JUNK, places, replaced
from tests.modules.test_parallelize import CONFIG


@settings(max_examples=30, phases=[Phase.generate])
@given(data=st.data())
def test_drawn_trees_come_back_under_other_layouts(data: Any, tmp_path_factory: Any) -> None:
    draw = data.draw
    path = tmp_path_factory.mktemp("c") / "ckpt"
    one, two = draw(st.sampled_from(MESHES)), draw(st.sampled_from(MESHES))
    leaves = {}
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
        name = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=6))
        leaves[f"{name} {i}"] = value(shape, draw(st.sampled_from(DTYPES)), i)
    values = [1, 2.5, None, "t", True, float("inf"), 2 + 1j]
    with sl.simulate(**one):
        held = {n: put(x, draw(layouts(x.ndim, one))) for n, x in leaves.items()}
        sl.save(path, {"p": held, "n": values})
        again = sl.load(path)
        assert again["n"] == values
        for n, x in held.items():
            assert again["p"][n].sharding == x.sharding and same(whole(again["p"][n]), leaves[n])
    with sl.simulate(**two):
        like = {n: put(torch.zeros_like(x), draw(layouts(x.ndim, two))) for n, x in leaves.items()}
        got = sl.load(path, {"p": like, "n": [0, 0, 0, "", 0, 0, None]})
        assert got["n"] == values
        for n, x in leaves.items():
            assert got["p"][n].place == like[n].place
            assert same(whole(got["p"][n]), x)
            assert (
                not got["p"][n].raw.view(torch.uint8).count_nonzero() or x.numel()
            )  # padding is 0
    plain = sl.load(path)
    assert all(same(plain["p"][n], x.cpu()) for n, x in leaves.items())
    assert os.listdir(path.parent) == ["ckpt"]


@pytest.mark.parametrize("layout", [". x", "x .", ""])
@pytest.mark.parametrize("shape", [(50_257, 192), (40_000, 48), (33_333, 7)], ids=str)
def test_tensors_of_many_rows_come_back_under_other_layouts(
    shape: tuple[int, ...], layout: str, tmp_path: Path
) -> None:
    """As vocabularies are: sums are made piece by piece, and who reads begins pieces elsewhere."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with sl.simulate(x=4):
        sl.save(tmp_path / "c", {"w": sl.shard(x, layout, pad=True) if layout else x})
    with sl.simulate(x=2, y=3):
        found = sl.load(tmp_path / "c", like={"w": sl.shard(torch.zeros_like(x), "y x", pad=True)})
        assert torch.equal(sl.unshard(found["w"]), x)
    assert torch.equal(sl.load(tmp_path / "c", like={"w": torch.zeros_like(x)})["w"], x)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_large_tensors_are_read_tile_by_tile_once(axes: dict[str, int], tmp_path: Path) -> None:
    """No rank reads more than a tenth beside what it holds."""
    w = torch.arange(1536 * 1536, dtype=torch.float32).reshape(1536, 1536)
    names = " ".join(axes)
    rest = names.partition(" ")[2]
    saved = ["...", f"({names}) .", ". x", f"x ({rest})" if rest else "x .", "striped(x) ."]
    for layout in saved:
        with sl.simulate(**axes):
            sl.save(tmp_path / "c", {"w": sl.shard(w, layout, pad=True)})
        for other in ({"a": 4, "b": 2}, {"a": 8}, {"a": 3, "b": 2}):
            with sl.simulate(**other):
                for wanted in ("a ...", "... a", "a b" if "b" in other else ". a"):
                    like = sl.shard(w, wanted, pad=True)
                    got = sl.load(tmp_path / "c", {"w": like})["w"]
                    assert torch.equal(got.raw, like.raw)
                    held = like.raw.numel() * 4
                    assert sl.load.bytes_read <= 1.1 * held, (layout, wanted, other)  # type: ignore[attr-defined]


def test_every_flip_truncation_and_swap_is_found(tmp_path: Path) -> None:
    rng = random.Random(0)
    with sl.simulate(x=2, y=2):
        like = placed()
        sl.save(tmp_path / "c", like)
        sl.save(tmp_path / "d", {**like, "w": like["w"] + 1})
        files = sorted(p for p in (tmp_path / "c").iterdir() if p.name != "lock")
        held = {p: p.read_bytes() for p in files}
        for i in range(100):
            p = files[i % len(files)]
            data = bytearray(held[p])
            if i % 4 == 3:
                del data[rng.randrange(len(data)) :]
            elif i % 4 == 2:
                data += bytes(rng.randrange(1, 9))
            else:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            p.write_bytes(data)
            with pytest.raises(CheckpointError, match=p.name):
                sl.load(tmp_path / "c", like)
            p.write_bytes(held[p])
        for p in files:
            other = tmp_path / "d" / p.name
            p.write_bytes(other.read_bytes())
            with pytest.raises(CheckpointError):
                sl.load(tmp_path / "c", like)
            p.unlink()
            with pytest.raises(CheckpointError, match=p.name):
                sl.load(tmp_path / "c", like)
            p.symlink_to(other)
            with pytest.raises(CheckpointError, match=p.name):
                sl.load(tmp_path / "c", like)
            p.unlink()
            p.write_bytes(held[p])
        a, b = files[0], files[1]
        a.write_bytes(held[b]), b.write_bytes(held[a])
        with pytest.raises(CheckpointError):
            sl.load(tmp_path / "c", like)
        a.write_bytes(held[a]), b.write_bytes(held[b])
        assert torch.equal(sl.unshard(sl.load(tmp_path / "c", like)["w"]), tree()["w"])


def test_damage_names_the_tensor(tmp_path: Path) -> None:
    with sl.simulate(x=2, y=2):
        like = {"first": sl.shard(torch.ones(64, 64), "x y"), "other": sl.shard(torch.ones(4), ".")}
        sl.save(tmp_path / "c", like)
        path = tmp_path / "c" / "rank_00003.safetensors"
        data = bytearray(path.read_bytes())
        data[len(data) - 600] ^= 4
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"rank_00003.*damaged.*'first'"):
            sl.load(tmp_path / "c", like)


def test_another_tree_is_refused_and_partial_loads_are_explicit(tmp_path: Path) -> None:
    with sl.simulate(x=2, y=2):
        t = placed()
        sl.save(tmp_path / "c", t)
        more = {**t, "more": 1}
        with pytest.raises(CheckpointError, match=r"lacks 'more'"):
            sl.load(tmp_path / "c", more)
        assert sl.load(tmp_path / "c", more, missing="keep")["more"] == 1
        with pytest.raises(CheckpointError, match=r"no place for 'step', 'v'"):
            sl.load(tmp_path / "c", {"w": t["w"]})
        assert list(sl.load(tmp_path / "c", {"w": t["w"]}, extra="skip")) == ["w"]
        with pytest.raises(BadArgument, match="extra= is"):
            sl.load(tmp_path / "c", t, extra="drop")
        with pytest.raises(CheckpointError, match="'v' has shape"):
            sl.load(tmp_path / "c", {**t, "v": torch.zeros(3)})
        with pytest.raises(CheckpointError, match="'v' is a tensor in the checkpoint"):
            sl.load(tmp_path / "c", {**t, "v": 1})
        with pytest.raises(CheckpointError, match="'step' is a value in the checkpoint"):
            sl.load(tmp_path / "c", {**t, "step": t["v"]})


def test_names_are_mapped(tmp_path: Path) -> None:
    with sl.simulate(x=2, y=2):
        t = placed()
        sl.save(tmp_path / "c", {"old": t})
        got = sl.load(tmp_path / "c", t, names=lambda n: f"old/{n}")
        assert torch.equal(got["w"].raw, t["w"].raw) and got["step"] == 3
        ours = {"weight": t["w"]}
        got = sl.load(tmp_path / "c", ours, names={"weight": "old/w"}, extra="skip")
        assert torch.equal(got["weight"].raw, t["w"].raw)
        with pytest.raises(CheckpointError, match="'wieght'"):
            sl.load(tmp_path / "c", ours, names={"wieght": "old/w"}, extra="skip")


def test_a_cast_is_asked_for(tmp_path: Path) -> None:
    with sl.simulate(x=2, y=2):
        t = placed()
        sl.save(tmp_path / "c", t)
        like = {**t, "v": sl.shard(torch.zeros(300, dtype=torch.float64), "x")}
        with pytest.raises(CheckpointError, match="'v' is F32 in the checkpoint, F64 in the tree"):
            sl.load(tmp_path / "c", like)
        got = sl.load(tmp_path / "c", like, cast=True)["v"]
        assert got.dtype == torch.float64
        assert torch.equal(sl.unshard(got).float(), tree()["v"])


def test_layouts_are_rules_when_nothing_is_there_to_be_like(tmp_path: Path) -> None:
    with sl.simulate(x=2, y=2):
        sl.save(tmp_path / "c", {"p": placed(), "t": (1, [2, {"k": None}])})
    with sl.simulate(a=3):
        rules = [("*/v", "a"), ("*/w", ". a")]
        got = sl.load(tmp_path / "c", layouts=rules)
        assert got["t"] == (1, [2, {"k": None}])
        assert sl.typeof(got["p"]["w"]) == "f32[64, 48@a]"
        assert torch.equal(sl.unshard(got["p"]["w"]), tree()["w"])
        with pytest.raises(CheckpointError, match="does not divide"):
            sl.load(tmp_path / "c", layouts="a ...")
        got = sl.load(tmp_path / "c", layouts="a ...", pad=True)["p"]["w"]
        assert got.is_padded and torch.equal(sl.unshard(got), tree()["w"])
    with pytest.raises(BadArgument, match="like="):
        sl.load(tmp_path / "c", {}, layouts="...")


def test_blocks_own_their_memory(tmp_path: Path) -> None:
    with sl.simulate(x=2, y=2):
        like = {"w": sl.shard(torch.zeros(64, 48), "y x")}
        sl.save(tmp_path / "c", {"w": placed()["w"]})
        got = sl.load(tmp_path / "c", like)["w"]
        assert got.raw.untyped_storage().nbytes() == got.raw.numel() * 4
        for p in (tmp_path / "c").iterdir():
            p.write_bytes(b"")
        assert torch.equal(sl.unshard(got), tree()["w"])


def test_gradients_are_wanted_where_they_were(tmp_path: Path) -> None:
    with sl.simulate(x=2):
        t = {
            "a": sl.shard(torch.ones(4), "x").requires_grad_(),
            "b": torch.nn.Parameter(torch.ones(2)),
        }
        sl.save(tmp_path / "c", t)
        got = sl.load(tmp_path / "c", t)
        assert got["a"].requires_grad and got["b"].requires_grad
        (got["a"].sum() + got["b"].sum()).backward()


def test_a_model_loads_under_another_recipe_and_in_one_process(tmp_path: Path) -> None:
    m = GPT(CONFIG)
    with sl.simulate(x=2, y=2):
        _, params = sl.parallelize(m, sl.recipes.optimus2d(m))
        sl.save(tmp_path / "a", params)
    with sl.simulate(x=4):
        _, other = sl.parallelize(m, sl.recipes.megatron1d(m))
        blank = {n: p.detach() * 0 for n, p in other.items()}
        got = sl.load(tmp_path / "a", like=blank)
        assert all(torch.equal(got[n].raw, other[n].raw) for n in other)
    plain = sl.load(tmp_path / "a", like=dict(m.named_parameters()))
    assert all(torch.equal(plain[n], p) for n, p in m.named_parameters())


def test_absent_and_foreign_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        sl.load(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"holds no shardlib\.json"):
        sl.load(tmp_path)
    (tmp_path / "f").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="no directory"):
        sl.load(tmp_path / "f")


HOSTILE = [
    "/etc/passwd",
    "../x",
    "x " * 200,
    "(" * 5000,
    "(9 " * 2000 + ")" * 2000,
    10**30,
    [10**15] * 2,
]


@settings(max_examples=150, phases=[Phase.generate])
@given(data=st.data())
def test_a_manifest_of_junk_under_a_right_checksum_is_refused(
    data: Any, tmp_path_factory: Any
) -> None:
    """Whatever stands in it: one error, or the right values; nothing beside the folder is opened."""
    path = tmp_path_factory.getbasetemp() / "manifest"
    if not path.exists():
        with sl.simulate(x=2, y=2):
            sl.save(path, placed())
        path.joinpath("kept").write_bytes((path / MANIFEST).read_bytes())
    said = json.loads((path / "kept").read_bytes().partition(b"\n")[0])
    at = data.draw(st.sampled_from([p for p in places(said) if p]))
    body = json.dumps(replaced(said, at, data.draw(JUNK | st.sampled_from(HOSTILE)))).encode()
    (path / MANIFEST).write_bytes(body + f"\n{zlib.crc32(body):08x}\n".encode())
    for like in (None, {n: x for n, x in tree().items()}):
        try:
            found = sl.load(path, like)
        except CheckpointError:
            continue
        for n, x in tree().items():
            if like is not None and at[0] != "values":
                assert torch.equal(found[n], x) if isinstance(x, torch.Tensor) else found[n] == x


def test_a_value_of_another_kind_is_refused(tmp_path: Path) -> None:
    sl.save(tmp_path / "c", {"lr": 0.5, "name": "adam", "best": None})
    assert sl.load(tmp_path / "c", {"lr": 1, "name": "", "best": 2.0})["best"] is None
    for like in ({"lr": "0.5", "name": "", "best": 0}, {"lr": 0.5, "name": 3, "best": 0}):
        with pytest.raises(CheckpointError, match="in the checkpoint, and"):
            sl.load(tmp_path / "c", like)


def _misread(path: str) -> list[str]:
    """Messages of reading calls in which the code of one rank's user fails."""

    def fails_on_one(name: str, *_: object) -> Any:
        if dist.get_rank() == 2:
            raise KeyError(name)

    rules: Any = [(fails_on_one, "..."), ("*", ".")]
    calls = [
        lambda: sl.load(f"{path}/c", layouts=rules, timeout=2.0),
        lambda: sl.load_hf(
            f"{path}/m", nn.Linear(2, 2), [("*", "...")], names=fails_on_one, timeout=2.0
        ),
    ]
    out = []
    for call in calls:
        with pytest.raises(CheckpointError) as e:
            call()
        out.append(e.value.message)
    return out


def test_an_error_of_any_kind_on_one_rank_is_raised_by_all(pool: Any, tmp_path: Path) -> None:
    sl.save(tmp_path / "c", {"w": torch.ones(4)})
    sl.save_hf(tmp_path / "m", dict(nn.Linear(2, 2).named_parameters()))
    said = pool.run(_misread, str(tmp_path), x=4)
    assert said == [["rank 2: KeyError: 'w'", "rank 2: KeyError: 'weight'"]] * 4
