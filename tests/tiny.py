"""A tiny language model of transformers with a tokenizer of its own, made without a network."""

import json
import warnings
from pathlib import Path

import torch

TEXTS = [f"ring {i} sends a block to rank {i + 1} and waits for the next" for i in range(40)]


def language_model(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a Llama and a tokenizer as ``save_pretrained`` does, into ``folder / "model"``.

    Beside it texts: one a line in ``texts.txt``, split into ``train.jsonl`` and ``held.jsonl``.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<end>"
    )
    words.save_pretrained(folder / "model")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder / "model")
    (folder / "texts.txt").write_text("\n".join(TEXTS))
    for name, texts in (("train", TEXTS[8:]), ("held", TEXTS[:8])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder / "model"
