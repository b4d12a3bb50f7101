"""Tables make what the functions they name make."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.command.config import Config, ConfigError
from shardlib.command.from_config import (
    batches,
    built,
    mesh_of,
    module_of,
    optimizer,
    rows_of,
    rules_of,
)
from shardlib.command.train import start
from tests.command.test_train import close, losses


def words(vocab: int = 64, width: int = 8) -> nn.Module:
    """Logits out of ids: no loss of its own."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(vocab, width), nn.Linear(width, vocab))


def rows(count: int = 16) -> Any:
    ids = torch.randint(64, (count, 9), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": r[:-1], "labels": r[1:]} for r in ids]


def mean(apply: Any, params: Any, batch: Any) -> Any:
    return apply(params, batch["input_ids"]).square().mean()


def tables(**more: Any) -> Config:
    made: dict[str, Any] = {
        "steps": 3,
        "mesh": {"x": 2},
        "model": {"make": f"{__name__}:words"},
        "data": {"batch": 4, "dataset": {"make": f"{__name__}:rows"}},
        "layout": {"recipe": "megatron1d"},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "log": {"every": 1},
    }
    return Config(made | more)


def test_logits_are_compared_with_the_labels() -> None:
    """As torch would: the same losses without a mesh, written out."""
    model, found, seen = words(), losses(start(tables(), simulated=True)), []
    with sl.simulate(x=1):
        dealt = [{k: sl.unshard(v) for k, v in b.items()} for b in sl.data(rows(), 4, "...")]
    steps = torch.optim.SGD(model.parameters(), 0.1)
    for batch in dealt[:3]:
        steps.zero_grad()
        out = model(batch["input_ids"]).flatten(0, 1)
        loss = nn.functional.cross_entropy(out, batch["labels"].flatten())
        loss.backward()
        steps.step()
        seen.append(loss.item())
    assert close(found, seen)


def test_a_loss_of_ones_own_counts() -> None:
    own = losses(start(tables(loss=f"{__name__}:mean"), simulated=True))
    assert not close(own, losses(start(tables(), simulated=True)))


def test_init_draws_on_shards_and_the_same_on_every_mesh() -> None:
    one = losses(start(tables(init={"seed": 3}), simulated=True))
    other = tables(init={"seed": 3}, mesh={"data": 2, "x": 1}, layout={"rules": [["*", "..."]]})
    other.tables["mesh"].pop("x")
    assert close(one, losses(start(other, simulated=True)))
    assert not close(one, losses(start(tables(init={"seed": 4}), simulated=True)))


def test_torchs_optimizers_are_taken_by_name() -> None:
    ours = losses(start(tables(optimizer={"name": "adamw", "lr": 0.1}), simulated=True))
    theirs = {"name": "torch.optim.AdamW", "lr": 0.1}
    assert close(ours, losses(start(tables(optimizer=theirs), simulated=True)))


def test_muon_is_told_of_the_models_matrices() -> None:
    made = {"name": "muon", "lr": 0.02, "rest": {"name": "adamw", "lr": 1e-3}}
    config = tables(optimizer=made, model={"make": f"{__name__}:deep"}, loss=f"{__name__}:mean")
    tx = optimizer(config, deep())
    params = dict(deep().named_parameters())
    assert tx.update(params, tx.init(params), params)[0].keys() == params.keys()
    assert len(losses(start(config, simulated=True))) == 3


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return nn.Sequential(nn.Embedding(64, 8), *layers, nn.Linear(8, 64))


def test_a_ring_keeps_the_weights_of_another_recipe() -> None:
    config = Config({
        "mesh": {"x": 2, "s": 2},
        "layout": {"recipe": "ring", "weights": {"recipe": "megatron1d"}},
    })  # fmt: skip
    with mesh_of(config, "simulate") as mesh:
        found = rules_of(config, words(), mesh)
        ours = sl.recipes.ring(words(), weights=sl.recipes.megatron1d(words()))
    assert (list(found.rules), found.tokens) == (list(ours), ours.tokens)
    lacking = Config({"mesh": {"s": 2}, "layout": config.tables["layout"]})
    with mesh_of(lacking, "simulate") as mesh, pytest.raises(ConfigError, match="axis 'x'; this"):
        rules_of(lacking, words(), mesh)


def test_labels_lie_as_the_recipe_says() -> None:
    """Under cube3d ids and labels lie differently, and are of the same rows."""
    axes = {"x": 2, "y": 2, "z": 2}
    config = tables(
        mesh=axes,
        layout={"recipe": "cube3d"},
        data={"batch": 8, "dataset": {"make": f"{__name__}:rows"}},
    )
    with sl.simulate(**axes):
        made = built(config)
        batch = next(iter(batches(made, rows_of(config))))
        ids, labels = (sl.unshard(batch[k]) for k in ("input_ids", "labels"))
        assert str(sl.layout_of(batch["labels"])) != str(sl.layout_of(batch["input_ids"]))
    assert torch.equal(ids[:, 1:], labels[:, :-1])


def test_a_file_is_a_program(tmp_path: Path) -> None:
    """What makes the model may be any function; of a module that is none, no run follows."""
    made = tmp_path / "made"
    with pytest.raises(ConfigError, match="this makes int, not a module"):
        module_of(tables(model={"make": "os:system", "command": f"touch {made}"}))
    assert made.exists()


def test_a_hugging_face_directory_is_read_and_trained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    off = {n: 0.0 for n in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, **off, **ends))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path)
    config = tables(model={"directory": str(tmp_path)}, remat={"transformer.h.*": "full"})
    found = losses(start(config, simulated=True))
    with sl.simulate(x=1):
        first = next(iter(sl.data(rows(), 4, "...")))
        ids, labels = (sl.unshard(first[k]) for k in ("input_ids", "labels"))
    logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    assert abs(nn.functional.cross_entropy(logits, labels.flatten()).item() - found[0]) < 1e-4
    fresh = tables(model={"directory": str(tmp_path), "values": "init"}, init={"seed": 1})
    assert not close(losses(start(fresh, simulated=True)), found)
    with pytest.raises(ConfigError, match=r"\[model\] vlaues: unknown key; did you mean 'values'"):
        module_of(tables(model={"directory": str(tmp_path), "vlaues": "init"}))
