"""Tiny models of twenty families of Hugging Face transformers: two layers, no dropout.

``MODELS["llama"]()`` is a model with inputs and a loss. Dims have different sizes where a family
allows that, so that a swapped dim is noticed; 2 divides batch, heads and widths, for two ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers import AutoModelForImageClassification as AutoImageModel
from transformers import AutoModelForSeq2SeqLM as AutoSeq2Seq

import partc

BATCH, SEQ, TARGET_SEQ = 4, 10, 14
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 48, 6, 2, 8, 40, 112
IMAGE, CHANNELS, CLASSES = 32, 3, 10

Loss = Callable[..., Tensor]
AUTO: dict[str, Any] = {
    "base": AutoModel,
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "seq2seq": AutoSeq2Seq,
    "image": AutoImageModel,
}


@dataclass(frozen=True)
class Case:
    """A model in train mode, its global batch, and the loss ``loss(model, *inputs)``."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Loss

    @cached_property
    def step(self) -> partc.Traced:
        """The traced step, from which a test compiles several plans."""
        return partc.Traced(self.model, self.inputs, self.loss)


@dataclass(frozen=True)
class Family:
    """How a family's model is built: its task, configuration and dtype."""

    task: str
    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def case(self, name: str, batch: int = BATCH, **changed: Any) -> Case:
        """The model and its inputs, from fixed seeds; ``changed`` overrides the configuration."""
        config = AutoConfig.for_model(name, **(self.config | changed))
        if self.task in ("causal", "masked", "seq2seq"):
            config.use_cache = False
        torch.manual_seed(0)
        model = AUTO[self.task].from_config(config).to(self.dtype).train()
        torch.manual_seed(1)
        return Case(model, _inputs(self.task, self.dtype, batch), LOSSES[self.task])


def _inputs(task: str, dtype: torch.dtype, batch: int) -> tuple[Tensor, ...]:
    if task == "image":
        pixels = torch.randn(batch, CHANNELS, IMAGE, IMAGE, dtype=dtype)
        return pixels, torch.randint(CLASSES, (batch,))
    ids = torch.randint(3, VOCAB, (batch, SEQ))
    if task == "seq2seq":
        return ids, torch.randint(3, VOCAB, (batch, TARGET_SEQ))
    labels = ids.clone()
    labels[:, ::4] = -100  # targets that the loss ignores
    return ids, labels


def label_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The loss that a language model computes itself."""
    loss: Tensor = model(input_ids=ids, labels=labels).loss
    return loss


def image_loss(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    """The loss that an image classifier computes itself."""
    loss: Tensor = model(pixel_values=pixels, labels=labels).loss
    return loss


LOSSES: dict[str, Loss] = {
    "causal": label_loss,
    "masked": label_loss,
    "seq2seq": label_loss,
    "image": image_loss,
}

_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_IMAGE: dict[str, Any] = {"num_labels": CLASSES, "num_channels": CHANNELS}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "causal",
        {
            "vocab_size": VOCAB,
            "n_embd": HIDDEN,
            "n_head": HEADS,
            "n_inner": FFN,
            "n_layer": 2,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "llama": Family("causal", _DECODER),
    "qwen2": Family("causal", _DECODER),
    "qwen3": Family("causal", _DECODER),
    "mistral": Family("causal", {**_DECODER, "sliding_window": 6}),
    "gemma2": Family("causal", {**_DECODER, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gpt_neox": Family("causal", {**_DECODER, "rotary_pct": 0.5, "head_dim": None}),
    "opt": Family(
        "causal",
        {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "word_embed_proj_dim": HIDDEN,
            "ffn_dim": FFN,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "max_position_embeddings": 64,
            "dropout": 0.0,
        },
    ),
    "bert": Family("masked", _ENCODER),
    "roberta": Family("masked", {**_ENCODER, "pad_token_id": 1}),
    "distilbert": Family(
        "masked",
        {
            "vocab_size": VOCAB,
            "dim": HIDDEN,
            "hidden_dim": FFN,
            "n_layers": 2,
            "n_heads": HEADS,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "electra": Family("masked", {**_ENCODER, "embedding_size": 32}),
    "t5": Family(
        "seq2seq",
        {
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "d_kv": HEAD_DIM,
            "d_ff": FFN,
            "num_layers": 2,
            "num_heads": HEADS,
            "relative_attention_num_buckets": 16,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": Family(
        "seq2seq",
        {
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "encoder_ffn_dim": FFN,
            "decoder_ffn_dim": 56,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": HEADS,
            "decoder_attention_heads": HEADS,
            "max_position_embeddings": 64,
            "dropout": 0.0,
        },
    ),
    "vit": Family("image", {**_ENCODER, **_IMAGE, "image_size": IMAGE, "patch_size": 8}),
    "swin": Family(
        "image",
        {
            **_IMAGE,
            "image_size": IMAGE,
            "patch_size": 2,
            "embed_dim": 24,
            "depths": [2, 2],
            "num_heads": [2, 6],
            "window_size": 4,
            "mlp_ratio": 2.0,
            "drop_path_rate": 0.0,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    "convnext": Family(
        "image",
        {
            **_IMAGE,
            "image_size": IMAGE,
            "hidden_sizes": [16, 24],
            "depths": [2, 2],
            "num_stages": 2,
        },
    ),
    "resnet": Family(
        "image",
        {**_IMAGE, "embedding_size": 12, "hidden_sizes": [24, 40], "depths": [2, 2]},
    ),
    "mixtral": Family(
        "causal", {**_DECODER, "num_local_experts": 8, "num_experts_per_tok": 2}, torch.float32
    ),
    "deepseek_v3": Family(
        "causal",
        {
            **_DECODER,
            "num_key_value_heads": HEADS,
            "moe_intermediate_size": 20,
            "q_lora_rank": 28,
            "kv_lora_rank": 36,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
        torch.float32,
    ),
}

MODELS: dict[str, Callable[[], Case]] = {
    name: partial(family.case, name) for name, family in FAMILIES.items()
}
