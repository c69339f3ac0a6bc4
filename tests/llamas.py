"""Llamas of real widths on the meta device, which take no memory, for tests of the plan search."""

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
    """The loss of predicting each next token."""
    loss: Tensor = model(ids, labels=ids).loss
    return loss


def tokens(batch: int, seq: int = 2048) -> Tensor:
    """A batch of token ids without data."""
    return torch.zeros(batch, seq, dtype=torch.long, device="meta")


def traced(model: nn.Module, batch: int) -> Graph:
    """The joint graph of a training step, in which equal layers are left out (``graph.folds``)."""
    return trace(model, (tokens(batch),), loss_of, fold=True)
