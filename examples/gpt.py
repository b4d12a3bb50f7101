"""A byte-level GPT that knows nothing of shardlib: an ordinary nn.Module."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "GPTConfig", "generate", "gpt"]


@dataclass(frozen=True)
class GPTConfig:
    """About a million parameters as it stands."""

    vocab: int = 256
    ctx: int = 128
    layers: int = 5
    heads: int = 4
    embed: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        sizes = {n: getattr(self, n) for n in ("vocab", "ctx", "layers", "heads", "embed")}
        least = [f"{n}={size}" for n, size in sizes.items() if size < 1]
        if least or self.embed % self.heads:
            raise ValueError(
                f"{', '.join(least)}: 1 at least"
                if least
                else f"{self.heads} heads do not share {self.embed} channels"
            )


class Attention(nn.Module):
    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.c_attn = nn.Linear(c.embed, 3 * c.embed)
        self.c_proj = nn.Linear(c.embed, c.embed)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (z.view(b, t, self.heads, c // self.heads).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))


class MLP(nn.Module):
    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(c.embed, 4 * c.embed)
        self.c_proj = nn.Linear(4 * c.embed, c.embed)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(c.embed), Attention(c)
        self.ln_2, self.mlp = nn.LayerNorm(c.embed), MLP(c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """forward(idx [B, T]) -> logits [B, T, vocab]; with targets [B, T] -> the mean loss."""

    def __init__(self, c: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = c
        self.wte = nn.Embedding(c.vocab, c.embed)
        self.wpe = nn.Embedding(c.ctx, c.embed)
        self.drop = nn.Dropout(c.dropout)
        self.h = nn.ModuleList([Block(c) for _ in range(c.layers)])
        self.ln_f = nn.LayerNorm(c.embed)
        self.lm_head = nn.Linear(c.embed, c.vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        draw = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim > 1:
                scale = (2 * c.layers) ** -0.5 if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(p, 0.0, 0.02 * scale, generator=draw)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        position = torch.arange(idx.shape[1], device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(position))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits
        wide = torch.promote_types(
            logits.dtype, torch.float32
        )  # bf16 has steps of 1/32 at a loss of 5
        return F.cross_entropy(logits.to(wide).view(-1, logits.size(-1)), targets.view(-1))


def gpt(
    vocab: int = 256,
    ctx: int = 128,
    layers: int = 5,
    heads: int = 4,
    embed: int = 128,
    dropout: float = 0.0,
    seed: int = 0,
) -> GPT:
    """Make one from plain numbers, as a configuration file has them."""
    return GPT(GPTConfig(vocab, ctx, layers, heads, embed, dropout), seed)


@torch.no_grad()
def generate(
    logits: Callable[[Tensor], Tensor],
    prompt: bytes,
    count: int,
    ctx: int,
    seed: int = 0,
    temperature: float = 0.8,
) -> bytes:
    """Continue a prompt byte by byte; ``logits(idx [1, T]) -> [1, T, vocab]``."""
    draw = torch.Generator().manual_seed(seed)
    out = list(prompt)
    for _ in range(count):
        idx = torch.tensor([out[-ctx:]])
        p = torch.softmax(logits(idx)[0, -1].float() / temperature, -1)
        out.append(int(torch.multinomial(p, 1, generator=draw)))
    return bytes(out)
