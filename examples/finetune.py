"""Fine-tune a Hugging Face decoder on packed texts in 2D; examples/finetune.toml is the same job.

python -m examples.finetune MODEL TEXTS.txt OUT starts 4 processes.  Under torchrun, or in one
process that plays all ranks, call it on a mesh: with sl.make_mesh(x=2, y=2), or sl.simulate(...).
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shardlib as sl


def finetune(model, file, out, steps=8, accumulate=2, length=32, batch=4):
    words, texts = AutoTokenizer.from_pretrained(model), Path(file).read_text().splitlines()
    rows = sl.pack(([*words(t).input_ids, words.eos_token_id] for t in texts), length)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    rules = sl.recipes.optimus2d(module)
    apply, params = sl.load_hf(model, module, rules, cast=True)
    tx = sl.optim.multi_steps(sl.optim.mixed(sl.optim.adamw(1e-2)), accumulate)  # bf16, masters
    state = tx.init(params := sl.optim.Precision().to_param(params))

    def loss(params, batch):  # positions that begin anew part the documents of a row
        ids, positions, labels = (batch[k] for k in ("input_ids", "position_ids", "labels"))
        logits = apply(params, ids, position_ids=positions, use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    layouts = {"input_ids": rules.tokens, "position_ids": rules.tokens, "labels": rules.labels}
    train, held = (sl.data(part, batch, layouts) for part in (rows[batch:], rows[:batch]))
    for _ in range(steps * accumulate):
        grads = sl.grad(loss)(params, next(iter(train)))
        params, state, _ = sl.optim.step(tx, params, grads, state)
    judged = [torch.no_grad()(loss)(params, one).item() for one in held]
    sl.save_hf(out, params, module, tokenizer=words, overwrite=True)
    asked = words(texts[0][:12], return_tensors="pt")
    said = sl.as_module(apply, params).generate(**asked, max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    return sum(judged) / len(judged), words.decode(said[0])


if __name__ == "__main__":
    print(sl.launch(finetune, *sys.argv[1:], x=2, y=2)[0])
