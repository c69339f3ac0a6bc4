"""The models of published measurements: a GPT as Megatron-LM trains it, a Llama as torchtitan does.

Both are plain modules of the size that a row gives, built on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Dims:
    """Sizes of a model and its sequences; without ``ffn`` it is a GPT, with it a Llama."""

    hidden: int
    layers: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int = 0
    ffn: int = 0

    @property
    def model_flops_per_sequence(self) -> float:
        """FLOPs of a GPT's forward and backward over one sequence, nothing computed twice.

        72 s l h^2 (1 + s / 6h + V / 12lh): equation 3 of Narayanan et al. 2021 (arXiv 2104.04473)
        without recomputation, equation 7 of Korthikanti et al. 2022 (arXiv 2205.05198).
        """
        h, s = self.hidden, self.seq
        return (
            72 * s * self.layers * h * h * (1 + s / (6 * h) + self.vocab / (12 * self.layers * h))
        )

    @property
    def block_flops_per_sequence(self) -> float:
        """FLOPs of the forward of all blocks of a GPT, which full recomputation runs again."""
        return 24 * self.seq * self.layers * self.hidden**2 * (1 + self.seq / (6 * self.hidden))


def build(dims: Dims) -> nn.Module:
    """The model on the meta device: a GPT in bf16; a Llama in f32 that computes in bf16."""
    with torch.device("meta"):
        return Llama(dims) if dims.ffn else GPT(dims).to(torch.bfloat16)


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next token, of float logits: ``i64[batch,seq]`` twice."""
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def example(dims: Dims, batch: int) -> tuple[Tensor, Tensor]:
    """A batch without data."""
    ids = torch.zeros(batch, dims.seq, dtype=torch.long, device="meta")
    return ids, ids.clone()


# GPT ----------------------------------------------------------------------------------------------
class GPT(nn.Module):
    """GPT-2's architecture; the head is the embedding, dropout 0.1 as is Megatron-LM's default."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.tokens = nn.Embedding(dims.vocab, dims.hidden)
        self.positions = nn.Parameter(torch.empty(dims.seq, dims.hidden))
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(GPTBlock(dims) for _ in range(dims.layers))
        self.norm = nn.LayerNorm(dims.hidden)
        future = torch.ones(dims.seq, dims.seq, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions)
        for block in self.blocks:
            x = block(x, self.future)
        return F.linear(self.norm(x), self.tokens.weight)


class GPTBlock(nn.Module):
    """Attention with all scores in memory, as before there was FlashAttention, and an MLP."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.heads = dims.heads
        self.attention_norm = nn.LayerNorm(dims.hidden)
        self.qkv = nn.Linear(dims.hidden, 3 * dims.hidden)
        self.proj = nn.Linear(dims.hidden, dims.hidden)
        self.mlp_norm = nn.LayerNorm(dims.hidden)
        self.up = nn.Linear(dims.hidden, 4 * dims.hidden)
        self.down = nn.Linear(4 * dims.hidden, dims.hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), future))
        mlp = self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))
        y: Tensor = x + self.dropout(mlp)
        return y

    def attention(self, x: Tensor, future: Tensor) -> Tensor:
        by_head = self.qkv(x).unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        q, k, v = by_head.unbind(0)  # bf16[batch,heads,seq,head_dim]
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        weights = self.dropout(F.softmax(scores.masked_fill(future, float("-inf")), dim=-1))
        y: Tensor = self.proj((weights @ v).transpose(1, 2).flatten(2))
        return y


# Llama --------------------------------------------------------------------------------------------
class Cast(nn.Module):
    """A linear whose f32 weight is cast to bf16, as FSDP2's mixed precision does."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outside, inside))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(torch.bfloat16))


class RMSNorm(nn.Module):
    """Computed in f32, of bf16 values."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


class Llama(nn.Module):
    """Llama 3: grouped queries, rotary positions in f32, SwiGLU, a head of its own."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.tokens = nn.Embedding(dims.vocab, dims.hidden)
        self.blocks = nn.ModuleList(LlamaBlock(dims) for _ in range(dims.layers))
        self.norm = RMSNorm(dims.hidden)
        self.head = Cast(dims.hidden, dims.vocab)
        angles = torch.empty(dims.seq, dims.hidden // dims.heads // 2)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.tokens.weight.to(torch.bfloat16))
        for block in self.blocks:
            x = block(x, self.angles)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Gated(nn.Module):
    """The MLP behind its gate's product: a module of its own, so that a plan can name it."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.up = Cast(dims.hidden, dims.ffn)
        self.down = Cast(dims.ffn, dims.hidden)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(gate) * self.up(x))
        return y


class LlamaBlock(nn.Module):
    """Attention by FlashAttention and an MLP with a gate."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.head_dim = dims.hidden // dims.heads
        self.attention_norm, self.mlp_norm = RMSNorm(dims.hidden), RMSNorm(dims.hidden)
        self.q = Cast(dims.hidden, dims.heads * self.head_dim)
        self.k = Cast(dims.hidden, dims.kv_heads * self.head_dim)
        self.v = Cast(dims.hidden, dims.kv_heads * self.head_dim)
        self.o = Cast(dims.heads * self.head_dim, dims.hidden)
        self.gate = Cast(dims.hidden, dims.ffn)
        self.gated = Gated(dims)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        y = self.mlp_norm(x)
        z: Tensor = x + self.gated(y, self.gate(y))
        return z

    def attention(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (self.by_head(each(x)) for each in (self.q, self.k, self.v))
        q, k = rotated(q, angles), rotated(k, angles)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        z: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return z

    def by_head(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Each pair of ``bf16[batch,heads,seq,head_dim]`` turned by its ``f32[seq,head_dim/2]``."""
    left, right = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.stack((left * cos - right * sin, left * sin + right * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)
