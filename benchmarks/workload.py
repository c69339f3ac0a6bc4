"""The model, batch and loss that every side of a benchmark trains; the one-process reference."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Size:
    """Dimensions of a Llama and of its global batch."""

    name: str
    hidden: int
    layers: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    batch: int


@dataclass(frozen=True)
class Pipeline:
    """A cut into ``stages`` of equally many layers on ``ranks``; the schedule by partc's name."""

    schedule: str
    ranks: int
    stages: int
    microbatches: int


SIZES = {
    size.name: size
    for size in (
        Size("demo", hidden=256, layers=8, heads=8, ffn=688, vocab=4096, seq=128, batch=8),
        Size("x10", hidden=768, layers=10, heads=12, ffn=2048, vocab=8192, seq=128, batch=4),
        Size("300M", hidden=1024, layers=20, heads=16, ffn=2816, vocab=16384, seq=128, batch=2),
    )
}


def build_model(size: Size, seed: int = 0, tied: bool = False) -> nn.Module:
    """A Llama with the same weights in every process; ``tied``: its head is its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig(
        hidden_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.heads, intermediate_size=size.ffn, vocab_size=size.vocab,
        max_position_embeddings=size.seq, use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def stage_starts(size: Size, num: int) -> tuple[int, ...]:
    """The first layer of each of ``num`` stages."""
    return tuple(size.layers * stage // num for stage in range(num))


def build_batch(size: Size) -> tuple[Tensor, Tensor]:
    """The global batch: token ids and the tokens that follow them, ``i64[batch,seq]`` each."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(size.vocab, (size.batch, size.seq + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next token."""
    logits = model(ids).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parameter_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """One group per tensor type: fused AdamW refuses DTensors and plain tensors in one group."""
    groups: dict[type, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(type(parameter.data), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def build_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Fused AdamW over these parameters, the same on every side."""
    return torch.optim.AdamW(parameter_groups(parameters), lr=LEARNING_RATE, fused=True)


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The norm of all elements. In float64: torch's own of a million float32 is 1e-5 off."""
    squares = [t.detach().double().pow(2).sum().item() for t in tensors]
    return math.sqrt(sum(squares))


@dataclass(frozen=True)
class Reference:
    """What one process computes: each step's loss, and the norm of the first gradient."""

    losses: tuple[float, ...]
    grad_norm: float


def reference(size: Size, num_steps: int) -> Reference:
    """Train the undistributed model for ``num_steps`` in this process."""
    model, batch = build_model(size), build_batch(size)
    optimizer = build_optimizer(list(model.parameters()))
    losses, norm = [], 0.0
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        if step == 0:
            norm = norm_of(p.grad for p in model.parameters() if p.grad is not None)
        optimizer.step()
        losses.append(loss.item())
    return Reference(tuple(losses), norm)
