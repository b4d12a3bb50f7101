import math
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from examples.corpus import batches, load, split
from examples.gpt import GPT, GPTConfig, generate
from shardlib.command.config import read
from shardlib.command.main import _parser
from shardlib.command.train import start
from tests.tiny import language_model

ROOT = Path(__file__).parent.parent


def test_the_corpus_is_real_text_and_batches_are_the_same_everywhere() -> None:
    text = load()
    assert len(text) > 400_000 and b"statement" in bytes(text.tolist())
    a, b = (next(batches(text, 4, 16, seed=3)) for _ in range(2))
    assert torch.equal(a[0], b[0]) and torch.equal(a[0][:, 1:], a[1][:, :-1])


def test_the_corpus_splits_without_overlap_and_a_short_one_says_so() -> None:
    text = load("stdlib", most=100_000)
    train, valid = split(text, 0.25)
    assert (len(train), len(valid)) == (75_000, 25_000) and torch.equal(
        torch.cat([train, valid]), text
    )
    with pytest.raises(ValueError, match="10 bytes has no window of 16"):
        next(batches(text[:10], 1, 16))


def test_the_loss_falls_in_one_process() -> None:
    """From guessing any byte to knowing which bytes English has, and the same on every run."""

    def losses() -> list[float]:
        m = GPT(GPTConfig(ctx=32, layers=1, embed=32))
        opt = torch.optim.AdamW(m.parameters(), lr=3e-3)
        out = []
        for _, (ids, targets) in zip(range(20), batches(load(), 8, 32), strict=False):
            loss = m(ids, targets)
            opt.zero_grad()
            loss.backward()
            opt.step()
            out.append(loss.item())
        return out

    curve = losses()
    assert abs(curve[0] - math.log(256)) < 0.1 and curve[-1] < 4.0 and curve == losses()


def test_the_model_has_about_a_million_parameters_and_a_tied_head() -> None:
    m = GPT(GPTConfig())
    assert 0.8e6 < sum(p.numel() for p in m.parameters()) < 1.3e6
    assert m.lm_head.weight is m.wte.weight
    assert len(generate(lambda i: m(i), b"ab", 3, 8)) == 5


def test_the_demo_trains_to_the_single_process_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], forked: None
) -> None:
    """The whole demo, small, on 4 launched processes: sharded, alone, compared, saved, drawn."""
    train_gpt: Any = pytest.importorskip(
        "examples.train_gpt", reason="the demo draws with matplotlib"
    )
    pytest.importorskip(
        "matplotlib", reason="the demo draws with matplotlib, which the test extra leaves out"
    )
    small = [
        "--mesh",
        "data=1,x=2,y=2",
        "--steps",
        "6",
        "--batch",
        "4",
        "--ctx",
        "16",
        "--layers",
        "1",
        "--embed",
        "16",
    ]
    assert train_gpt.main([*small, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert (
        "largest difference over 6 steps" in said
        and "memory per rank" in said
        and "pbroadcast" in said
    )
    assert (
        said.index("one weight under optimus2d") < said.index("training on")
        and "\nloss of the sharded run, steps 1 to 6" in said
    )
    assert said.index("rank 1 was ended by SIGKILL") < said.index("so they start again")
    assert "resumed at step 3 on data=1 x=2: largest difference" in said
    commands = [line.split("#")[0] for line in said.partition("\nnext\n")[2].splitlines()]
    assert len(commands) == 3
    for command in commands:  # each is one that the parser takes, of a file that is there
        python, flag, name, *given = command.split()
        assert Path(python).exists() and (flag, name) == ("-m", "shardlib")
        asked = _parser(given[0]).parse_args(given)
        assert (ROOT / (asked.model if given[0] == "plan" else asked.file)).exists()
    assert {p.name for p in tmp_path.iterdir()} == {"loss.png", "layouts.png", "checkpoint"}


def test_the_demo_with_dropout_is_one_curve_for_every_mesh() -> None:
    import examples.train_gpt as demo

    args = demo.parse(
        [
            "--steps",
            "4",
            "--batch",
            "4",
            "--ctx",
            "16",
            "--layers",
            "1",
            "--embed",
            "16",
            "--dropout",
            "0.2",
        ]
    )
    curves = []
    for axes in ({"data": 1, "x": 1, "y": 1}, {"data": 2, "x": 2, "y": 2}):
        with sl.simulate(**axes):
            curves.append(_losses(demo, args))
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < 1e-4


def _losses(demo: Any, args: Any) -> list[float]:
    m = demo.model(args)
    rules = sl.recipes.optimus2d(m)
    apply, params = sl.parallelize(m, rules, inputs={"idx": rules.tokens, "targets": rules.labels})
    tx = sl.optim.zero(demo.optimizer(args), axis="data")
    state, out = tx.init(params), []
    torch.manual_seed(0)
    for _, (ids, targets) in zip(
        range(args.steps), batches(load(), args.batch, args.ctx), strict=False
    ):
        loss, grads = sl.value_and_grad(lambda p, i=ids, t=targets: apply(p, i, t), pending="data")(
            params
        )
        updates, state = tx.update(grads, state, params)
        params = sl.optim.apply_updates(params, updates)
        out.append(loss.item())
    return out


def test_four_processes_hold_what_one_cannot(forked: None) -> None:
    """Under one cap: the allocator stops a single process, and the ring
    of four trains as the dense module does.
    """
    from examples.long_sequence import train

    length, shape = 8192, (1, 32)
    (alone,) = sl.launch(train, length, length, 1, 24.0, *shape, s=1)
    assert alone == "out of memory"
    ring = sl.launch(train, length, length, 1, 24.0, *shape, s=4)[0]
    with sl.simulate(s=1):
        dense = train(length, length, 1, None, *shape)
    assert isinstance(ring, list) and isinstance(dense, list)
    assert abs(ring[0] - dense[0]) < 1e-5


CODE = (ROOT / "examples" / "finetune.py").read_text().split('"""')[2]


def test_a_fine_tune_takes_thirty_lines() -> None:
    assert sum(bool(line.strip()) for line in CODE.splitlines()) <= 30


def finetuned(folder: str) -> tuple[float, str]:
    from examples.finetune import finetune

    return finetune(f"{folder}/model", f"{folder}/texts.txt", f"{folder}/out")


@pytest.mark.parametrize("real", [False, True])
def test_a_model_is_fine_tuned_saved_with_its_tokenizer_and_generates(
    real: bool, tmp_path: Path, pool: Any
) -> None:
    """In a script, simulated and on 4 processes, and by the command: the same losses."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    language_model(tmp_path)
    if real:
        judged, said = pool.run(finetuned, str(tmp_path), x=2, y=2)[0]
    else:
        with sl.simulate(x=2, y=2):
            judged, said = finetuned(str(tmp_path))
    assert judged < 5 and "ring" in said
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert words("ring 3").input_ids == words(words.decode(words("ring 3").input_ids)).input_ids
    assert model(**words("ring 3", return_tensors="pt")).logits.isfinite().all()


@pytest.mark.parametrize("simulated", [False, True])
def test_a_model_is_fine_tuned_by_one_file(
    simulated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    language_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    # two processes are as real as four
    sets = [] if simulated else ["mesh.y=1"]
    report = start(read(ROOT / "examples" / "finetune.toml", sets), simulated=simulated)
    assert list(report.evaluations) == [4, 8] and report.export == "out/model"
    assert report.evaluations[8] < report.evaluations[4] < 5.7
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "model").eos_token == "<end>"
    )
    if simulated:
        again = start(read(ROOT / "examples" / "finetune.toml"), simulated=True)
        # written once more, nothing lost
        assert again.losses == {} and again.export == report.export
