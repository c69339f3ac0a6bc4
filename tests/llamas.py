"""Llamas of real widths, which hold no memory, for searches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from partc.graph import Graph
from partc.lowering import trace
from partc.plan import Plan

AUTO = Plan(preset="auto")


def llama(layers: int = 6, width: int = 4096, vocab: int = 32000, seq: int = 2048) -> nn.Module:
    """A Llama of real widths in bf16 on the meta device."""
    config: Any = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=7 * width // 2,
        num_attention_heads=width // 128, num_key_value_heads=8, vocab_size=vocab,
        max_position_embeddings=seq, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).train()


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids, labels=ids).loss
    return loss


def tokens(batch: int, seq: int = 2048) -> Tensor:
    return torch.zeros(batch, seq, dtype=torch.long, device="meta")


def traced(model: nn.Module, batch: int) -> Graph:
    return trace(model, (tokens(batch),), loss_of, fold=True)
