"""The trees of a pipeline's stages are one checkpoint, whatever mesh and stages read it."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardlib as sl
from shardlib.checkpoint import huggingface, reading
from shardlib.checkpoint.stages import groups_of, joined, union
from tests.checkpoint.cases import same, whole
from tests.checkpoint.test_writing import _full, told

o = sl.optim
BLOCKS = 4
TIED = "wte"

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: o.adamw(0.01, weight_decay=0.1),
    "stage 1": lambda: o.zero(o.adamw(0.01), axis="data", bucket_mb=0.001),
    "stage 2": lambda: o.zero(o.adamw(0.01), axis="data", stage=2),
    "stage 3": lambda: o.zero(o.adamw(0.01), axis="data", stage=3, bucket_mb=0.001),
    "masters": lambda: o.zero(o.adamw(0.01), axis="data", stage=2, master="fp32"),
}


def values(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A small model, whose last stage has the embedding once more."""
    g = torch.Generator().manual_seed(0)
    shapes = {f"h.{i}.{n}": s for i in range(BLOCKS) for n, s in (("w", (8, 12)), ("b", (8,)))}
    shapes |= {TIED: (16, 8), "norm": (12,)}
    return {n: torch.randn(s, generator=g).to(dtype) for n, s in shapes.items()}


def dealt(stage: int, count: int) -> list[str]:
    """The names of a stage."""
    blocks = range(stage * BLOCKS // count, (stage + 1) * BLOCKS // count)
    names = [f"h.{i}.{n}" for i in blocks for n in "wb"]
    return names + [TIED] * (stage in (0, count - 1)) + ["norm"] * (stage == count - 1)


def layout(x: Tensor, mesh: sl.Mesh, turned: bool) -> str:
    axes = [a for a in ("x", "y") if a in mesh][:: -1 if turned else 1]
    return " ".join([*axes, ".", "."][: x.ndim])


def stage_mesh() -> sl.Mesh:
    """The mesh of this rank's stage, or the one in scope without a pipeline."""
    mesh = sl.current_mesh()
    return mesh.without("pipe") if "pipe" in mesh else mesh


def place() -> tuple[int, int]:
    """This rank's stage and their number; of one that holds all names 0 and 1."""
    mesh = sl.current_mesh()
    mesh = mesh.outer.mesh if mesh.outer else mesh
    if "pipe" not in mesh or mesh.coord is None:
        return 0, 1
    return mesh.coord["pipe"], mesh["pipe"]


def parts(turned: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """This rank's parameters, on the mesh of its stage."""
    mesh, names = stage_mesh(), dealt(*place())
    every = {n: x for n, x in values(dtype).items() if n in names}
    return {n: sl.shard(x, layout(x, mesh, turned), mesh) for n, x in every.items()}


def drawn(kept: Any) -> dict[str, Any]:
    """Other values of the same names, drawn by name, as after some steps."""
    out: dict[str, Any] = {}
    for name, x in kept.items():
        g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        tensor = isinstance(x, Tensor)
        out[name] = torch.randn(x.shape, generator=g).to(x.dtype) if tensor else x + 5
    return out


def run(kind: str, read: str, write: str) -> tuple[dict[str, Tensor], list[Any]]:
    """Draw parameters and a state, or read a checkpoint onto others; save and return all here."""
    tx, key = OPTIMIZERS[kind](), sl.random.get_state()
    half = torch.bfloat16 if kind == "masters" else torch.float32
    with stage_mesh():
        params: Any = parts(bool(read), half)
        params = tx.shard(params) if kind == "stage 3" else params
        state = tx.init(params)

        def tree(step: int) -> dict[str, Any]:
            kept = {"params": o.state_dict(params), "state": o.state_dict(state)}
            return {**kept, "step": step, "key": key, "loss": 0.5}

        found: Any = {n: drawn(x) if isinstance(x, dict) else x for n, x in tree(7).items()}
        found = sl.load(read, tree(0)) if read else {**found, "key": key}
        params = o.load_state_dict(params, found["params"])
        state = o.load_state_dict(state, found["state"])
        found = {**tree(found["step"]), "key": found["key"]}
        sl.save(write, found)
        flat = {f"{p}/{n}": x for p in ("params", "state") for n, x in found[p].items()}
        tensors = {n: whole(x).detach().clone() for n, x in flat.items() if isinstance(x, Tensor)}
        counts = {n: x for n, x in found["state"].items() if not isinstance(x, Tensor)}
        return tensors, [found["step"], found["key"], found["loss"], counts]


def agreed(said: list[tuple[dict[str, Tensor], list[Any]]]) -> tuple[dict[str, Tensor], list[Any]]:
    """The union of what ranks hold; ranks that hold one name have one value."""
    out: dict[str, Tensor] = {}
    for tensors, numbers in said:
        assert numbers == said[0][1]
        for n, x in tensors.items():
            assert same(out.setdefault(n, x), x), n
    return out, said[0][1]


def alike(
    one: tuple[dict[str, Tensor], list[Any]], two: tuple[dict[str, Tensor], list[Any]]
) -> bool:
    (a, numbers), (b, others) = one, two
    return numbers == others and a.keys() == b.keys() and all(same(a[n], b[n]) for n in a)


PLAIN = [{"pipe": 4}, {"pipe": 2, "x": 2}, {"x": 2, "y": 2}, {"x": 2, "pipe": 2}, {"pipe": 4}]
SPLIT = [{"pipe": 2, "data": 2}, {"data": 4}, {"data": 2, "pipe": 2}, {"data": 2, "x": 2}]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_goes_on_with_other_stages_or_none_and_back(
    pool: Any, kind: str, tmp_path: Path
) -> None:
    meshes = PLAIN if kind == "adamw" else SPLIT
    first, *others = meshes
    truth = agreed(pool.run(run, kind, "", str(tmp_path / "0"), **first))
    assert len(truth[0]) == 10 * (4 if kind == "masters" else 3)
    for i, mesh in enumerate(others):
        read, write = (str(tmp_path / f"{j}") for j in (i, i + 1))
        assert alike(agreed(pool.run(run, kind, read, write, **mesh)), truth), mesh
    last = tmp_path / str(len(others))
    for i, mesh in enumerate([{"data": 2, "x": 2}, {"pipe": 2, "data": 2}]):
        with sl.simulate(**mesh):
            assert alike(run(kind, str(last), str(tmp_path / f"simulated {i}")), truth), mesh
    back = pool.run(run, kind, str(tmp_path / "simulated 1"), str(tmp_path / "back"), **first)
    assert alike(agreed(back), truth)
    again, before = (sl.load(tmp_path / n) for n in ("back", "0"))
    for part in ("params", "state"):
        for n, x in before[part].items():
            assert x == again[part][n] if not isinstance(x, Tensor) else same(x, again[part][n])


def _kept(path: str) -> None:
    """Save the parameters of a stage, a plain tensor of each and one of all."""
    plain = {"all": torch.arange(3.0), f"of {place()[0]}": torch.ones(2)}
    later = sl.save(path, {"params": parts(), "plain": plain, "step": 3}, step=3, wait=False)
    later.wait()
    sl.checkpoint.verify(path)
    assert sl.latest(path, verify=True) is not None


@pytest.mark.parametrize(
    "axes", [{"pipe": 4}, {"pipe": 2, "x": 2}, {"data": 2, "pipe": 2}], ids=str
)
def test_a_checkpoint_of_stages_is_one_of_whole_names(
    pool: Any, axes: dict[str, int], tmp_path: Path
) -> None:
    """It is described, verified and converted as any other; a name on two stages is in it once."""
    pool.run(_kept, str(tmp_path / "c"), **axes)
    (path,) = (tmp_path / "c").iterdir()
    about = sl.checkpoint.describe(path)
    plain = {"all": torch.arange(3.0)} | {f"of {i}": torch.ones(2) for i in range(axes["pipe"])}
    names = {f"params/{n}" for n in values()} | {f"plain/{n}" for n in plain}
    assert set(about.tensors) == names and about.values == {"step": 3} and about.step == 3
    mesh = {a: n for a, n in axes.items() if a != "pipe"} or {"one": 1}
    assert about.meshes == [mesh] and len(about.files) == 4
    held = [f"{n}" for file in path.glob("*.safetensors") for n in _names(file)]
    assert [n.partition("@")[0] for n in held].count(f"params/{TIED}") == axes.get("x", 1)
    sl.checkpoint.reshard(path, tmp_path / "other", {"z": 3}, layouts="...")
    sl.checkpoint.to_hf(path, tmp_path / "hf", subtree="params")
    for found in (sl.load(path), sl.load(tmp_path / "other")):
        # what is loaded without a target is on the host
        assert all(same(found["params"][n], x.cpu()) for n, x in values().items())
        assert all(same(found["plain"][n], x.cpu()) for n, x in plain.items())


def _names(file: Path) -> list[str]:
    with file.open("rb") as f:
        table = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return [n for n in table if n != "__metadata__"]


def _refused(path: str) -> dict[str, str]:
    """Texts of saves and loads that some rank makes wrong, on pipe=2 and another axis of 2."""
    rank, (stage, _), out = dist.get_rank(), place(), {}
    p = parts()
    first = "h.2.b" if stage else "h.0.b"

    def save(name: str, tree: Any, to: str = "/new", **how: Any) -> None:
        out[name] = told(lambda: sl.save(path + to, tree, **how))

    save("a name less", {n: x for n, x in p.items() if rank != 3 or n != first})
    save("no name", p if rank != 1 else {})
    save("a value", {**p, "step": 3 + (rank == 3)})
    save("a value of a stage", {**p, "step": 3 + stage})
    save("no tree", {**p, "f": print if rank == 2 else 1})
    save("another place", p, "/new" if stage else "/other")
    save("another step", p, step=3 + stage)
    save("another dtype", {**p, TIED: p[TIED].half() if stage else p[TIED]})
    save("another copy", {**p, TIED: p[TIED] + stage})
    save("another plain copy", {**p, "plain": torch.ones(2) * stage})
    save("other containers", {"p": list(p.values()) if stage else p})
    save("a leaf or a tree", {"q": p, "p": {"h": 1} if stage else 1})
    on_all = sl.shard(torch.ones(4), "pipe")
    save("on all ranks", {**p, "w": on_all} if stage else p)
    save("on none", {"w": on_all} if stage else p)
    moved = {**p, first: p[first].becomes(p[first].raw + 1e-3) if rank == 3 else p[first]}
    save("another replica", moved)
    if rank == 2:
        out["silent"] = told(lambda: sl.save(path + "/new", p, timeout=0.7))
    dist.barrier()
    save("right", {**p, "of 1": 1} if stage else p, "/c")
    like = {n: sl.shard(torch.zeros(x.shape), x.sharding, x.mesh) for n, x in p.items()}

    def load(name: str, tree: Any, **how: Any) -> None:
        out[name] = told(lambda: sl.load(path + "/c", tree, **how))

    both = {**like, "of 1": 0} if stage else like
    load("all", both)
    load("asked for by none", like)
    load("skipped", like, extra="skip")
    load("by a rank too few", both if rank != 3 else like)
    load("copy not asked for", {n: x for n, x in both.items() if rank != 3 or n != TIED})
    load("lacking", {**both, "more": 0} if rank == 2 else both)
    load("kept", {**both, "more": 0} if rank == 2 else both, missing="keep")
    renamed = {f"my {n}": x for n, x in both.items()}
    load("renamed", renamed, names={f"my {n}": n for n in [*values(), "of 1"]})
    dist.barrier()
    return out


def test_a_rank_unlike_its_stage_or_a_name_unlike_its_copy_is_refused_on_all_ranks(
    pool: Any, tmp_path: Path
) -> None:
    said = pool.run(_refused, str(tmp_path), pipe=2, data=2)
    silent = said[2].pop("silent")
    for key in said[0]:
        assert len({each[key] for each in said}) == 1, (key, [each[key] for each in said])
    one = said[0]
    assert one.pop("a name less").startswith("'h.2.b' is nothing on rank 3 and {'dtype': 'F32'")
    assert "is nothing on rank 1 and {'dtype': 'F32'" in one.pop("no name")
    assert one.pop("a value") == "'step' is 4 on rank 3 and 3 on rank 2"
    assert one.pop("a value of a stage") == "'step' is 4 on rank 2 and 3 on rank 0"
    assert "rank 2: 'f' is a builtin" in one.pop("no tree")
    assert one.pop("another place") == f"rank 2 saves to {tmp_path}/new, rank 0 to {tmp_path}/other"
    assert one.pop("another step").startswith(f"rank 2 saves to {tmp_path}/new/step_00000004")
    assert one.pop("another dtype").startswith(f"{TIED!r} is {{'dtype': 'F16', 'shape': [16, 8], ")
    assert one.pop("another copy") == f"{TIED!r} has other values on rank 2 than on rank 0"
    assert one.pop("another plain copy") == "'plain' has other values on rank 2 than on rank 0"
    text = one.pop("other containers")
    assert text == 'the tree["p"] is a map on one stage and a list on another'
    assert one.pop("a leaf or a tree").endswith("is a leaf on one stage and a map on another")
    for key in ("on all ranks", "on none"):
        assert one.pop(key) == "'w' is on ranks of several stages of a pipeline"
    assert one.pop("another replica") == "'h.2.b' has other values on rank 3 than on rank 2"
    assert silent == "rank 0 said nothing during 'the tree' for 0.7 s"
    none = "the checkpoint is of another tree: the tree has no place for 'of 1'"
    assert one.pop("asked for by none").startswith(f"rank 0: {none} (extra='skip'")
    for key in ("by a rank too few", "copy not asked for"):
        assert one.pop(key) == f"rank 3 and rank 2 read other tensors from {tmp_path}/c"
    assert one.pop("lacking").startswith(
        "rank 2: the checkpoint is of another tree: it lacks 'more'"
    )
    assert set(one) == {"right", "all", "skipped", "kept", "renamed"} and set(one.values()) == {
        "ok"
    }
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def _without_parameters(path: str) -> bool:
    """A stage that has no tensor at all gives its values, and a plain tensor."""
    p = {} if place()[0] == 1 else parts()
    p |= {f"of {place()[0]}": torch.arange(3.0)}
    sl.save(path, {"params": p, "step": 3})
    found = sl.load(path, {"params": {n: x * 0 for n, x in p.items()}, "step": 0})
    plain = torch.equal(found["params"][f"of {place()[0]}"], torch.arange(3.0))
    return plain and all(torch.equal(found["params"][n], p[n]) for n in p if n[:2] == "of")


@pytest.mark.parametrize("axes", [{"pipe": 4}, {"data": 2, "pipe": 2}], ids=str)
def test_a_stage_without_parameters_is_one(pool: Any, axes: dict[str, int], tmp_path: Path) -> None:
    assert all(pool.run(_without_parameters, str(tmp_path / "c"), **axes))
    assert {n for n in sl.load(tmp_path / "c")["params"] if n[:2] == "of"} == {
        f"of {i}" for i in range(axes["pipe"])
    }


def _one_reads(path: str) -> list[Any]:
    """Read blocks that two ranks of a stage hold: one reads and sends them, but plain tensors."""
    stage, many = place()[0], reading._MANY
    names = [f"{n} of {stage}" for n in "abc"[stage:]]
    p = {n: torch.arange(40_000.0).reshape(200, 200) + len(n) for n in names}
    tree = {n: sl.shard(x, "...", stage_mesh()) for n, x in p.items()}
    tree[f"plain of {stage}"] = p[names[0]]
    sl.save(path, tree)
    reading._MANY = 2
    try:
        found = sl.load(path, {n: x * 0 for n, x in tree.items()})
    finally:
        reading._MANY = many
    same_values = all(torch.equal(sl.unshard(found[n]), x) for n, x in p.items())
    read = sl.load.bytes_read / p[names[0]].nbytes  # type: ignore[attr-defined]
    return [stage, read, same_values and torch.equal(found[f"plain of {stage}"], p[names[0]])]


def test_one_of_the_holders_in_a_stage_reads(pool: Any, tmp_path: Path) -> None:
    found = pool.run(_one_reads, str(tmp_path / "c"), pipe=2, data=2)
    assert all(right for *_, right in found)
    for stage, blocks in enumerate((3, 2)):  # and each rank its plain tensor
        assert sum(read for at, read, _ in found if at == stage) == blocks + 2


def _exported(path: str, most: int) -> list[str]:
    """Write all stages as Hugging Face would; names that another stage has too are refused."""
    names = {n: f"model.{n}" for n in values()}
    sl.save_hf(path, parts(), names=names, max_bytes=most)
    stage = place()[0]
    wrong = [told(lambda: sl.save_hf(path + "x", parts(), names=lambda n: f"{n[-1]} {n[:2]}"))]
    wrong += [
        told(lambda: sl.save_hf(path + "x", {f"a{stage}": parts()[TIED]}, names=lambda n: "a"))
    ]
    less = dict(list(parts().items())[dist.get_rank() == 3 :])
    wrong += [told(lambda: sl.save_hf(path + "x", less))]
    if dist.get_rank() == 3:
        write, huggingface.write_all = huggingface.write_all, _full
    wrong += [told(lambda: sl.save_hf(path + "x", parts(), max_bytes=1))]
    if dist.get_rank() == 3:
        huggingface.write_all = write
    return wrong


@pytest.mark.parametrize("most", [1000, 1 << 30])
@pytest.mark.parametrize("axes", [{"pipe": 2, "x": 2}, {"data": 2, "pipe": 2}], ids=str)
def test_an_export_of_stages_is_that_of_the_whole_model(
    pool: Any, axes: dict[str, int], most: int, tmp_path: Path
) -> None:
    with sl.simulate(x=2):
        sl.save_hf(tmp_path / "one", {f"model.{n}": x for n, x in parts().items()}, max_bytes=most)
    said = pool.run(_exported, str(tmp_path / "many"), most, **axes)
    assert said == [said[0]] * 4
    assert "names= calls two tensors" in said[0][0]
    assert said[0][1].startswith("'a' is ['a1', [16, 8], 'float32'] on rank ")
    lacking = "'h.2.w' is nothing on rank 3 and ['h.2.w', [8, 12], 'float32'] on rank "
    assert said[0][2] == f"{lacking}{2 if 'x' in axes else 1}"
    assert said[0][3] == "rank 3: No space left on device"
    one, many = (
        {p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("one", "many")
    )
    assert one.keys() == many.keys() and len(one) == (2 if most > 1000 else 5)
    assert all(one[n] == many[n] for n in one if n != "shardlib.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["many", "one"]


def test_ranks_of_no_stage_are_one_group() -> None:
    assert groups_of([[]] * 3) == [[0, 1, 2]]
    assert groups_of([[0, 3], [], [2], [0, 3]]) == [[0, 3], [1], [2]]
    assert groups_of([[0, 1], [], [2, 3], []]) == [[0, 1], [2, 3]]


def test_a_union_has_each_name_of_its_first_stage() -> None:
    t = {"dtype": "F32", "shape": [2], "layout": "x", "mesh": [["x", 2]], "ranks": [0, 1]}
    plain = {"dtype": "F32", "shape": [2], "layout": ".", "mesh": [["", 4]]}
    trees = {
        (0, 1): ["p", 1, {"a": 1, "t": t}, {}],
        (2, 3): ["p", 1, {"b": 2, "plain": plain, "t": {**t, "ranks": [2, 3]}}, {}],
    }
    said, _, copies = union(trees)
    assert said.keys() == {"a", "b", "t", "plain"} and copies == {"t": 0}
    assert said["t"].get("ranks", [0, 1]) == [0, 1] and said["plain"]["ranks"] == [2, 3]
    with pytest.raises(ValueError, match="'a' is 2 on rank 1 and 1 on rank 0"):
        union({(0,): ["p", None, {"a": 1}, {}], (1,): ["p", None, {"a": 2}, {}]})


def test_joined_containers_have_the_items_of_both() -> None:
    a = {"kind": "map", "items": {'"w"': {"name": "w"}, '"h"': {"kind": "map", "items": {}}}}
    b = {"kind": "map", "items": {'"h"': {"kind": "map", "items": {'"v"': {"name": "h/v"}}}}}
    assert joined(a, b) == joined(b, a)
    assert joined(a, b)["items"]['"h"']["items"] == {'"v"': {"name": "h/v"}}
    with pytest.raises(ValueError, match="is a leaf on one stage and a map on another"):
        joined({"name": ""}, a)
