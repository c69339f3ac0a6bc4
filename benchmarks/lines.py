"""How long programs are: the lines of every role of some models under some layouts.

Run ``python -m benchmarks.lines``; needs transformers. ``372/418 + 120``: the lines of the files of
a pipeline's ranks, and of the helpers that they share. Of a mixture of experts they are those with
every expert on every rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import partc
from partc.errors import PartcError
from partc.program.helper_file import NAME as HELPERS

LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {  # mesh, plan, what else compile is told
    "dp=1": ("dp=1", "ddp", {}),
    "ddp": ("dp=2", "ddp", {}),
    "fsdp": ("dp=2", "fsdp", {}),
    "tp": ("tp=2", "megatron", {}),
    "sp": ("tp=2", "megatron-sp", {}),
    "fsdp+sp": ("dp=2,tp=2", "fsdp+megatron-sp", {}),
    "1f1b": ("pp=2", "ddp", {"microbatches": 4}),
    "zb-v": ("pp=2,dp=2,tp=2", "fsdp+megatron", {"microbatches": 4, "schedule": "zb-v"}),
}
SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
IDS = {"input_ids": torch.zeros(8, 32, dtype=torch.long)}
IMAGES = {"pixel_values": torch.zeros(8, 3, 32, 32), "labels": torch.zeros(8, dtype=torch.long)}


def llama(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    made = LlamaForCausalLM(
        LlamaConfig(**SMALL, num_hidden_layers=layers, vocab_size=256, use_cache=False)
    )
    return made, {**IDS, "labels": IDS["input_ids"]}


def gpt2(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 256}
    made = GPT2LMHeadModel(GPT2Config(**sizes, n_layer=layers, use_cache=False))
    return made, {**IDS, "labels": IDS["input_ids"]}


def mixtral(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**SMALL, "num_key_value_heads": 4, "num_local_experts": 4, "vocab_size": 256}
    made = MixtralForCausalLM(MixtralConfig(**sizes, num_hidden_layers=layers, use_cache=False))
    return made, {**IDS, "labels": IDS["input_ids"]}


def vit(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"image_size": 32, "patch_size": 8, "num_labels": 8}
    return ViTForImageClassification(ViTConfig(**SMALL, **sizes, num_hidden_layers=layers)), IMAGES


def t5(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_heads": 4,
        "vocab_size": 256,
        "decoder_start_token_id": 0,
    }
    made = T5ForConditionalGeneration(T5Config(**sizes, num_layers=layers, use_cache=False))
    return made, {**IDS, "labels": IDS["input_ids"]}


def resnet(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32], "layer_type": "basic"}
    config = ResNetConfig(**sizes, depths=[layers, layers], num_labels=8)
    return ResNetForImageClassification(config), IMAGES


MODELS: dict[str, Callable[[int], tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "llama": llama, "gpt2": gpt2, "mixtral": mixtral, "vit": vit, "t5": t5, "resnet": resnet,
}  # fmt: skip


def lines(model: str, layout: str, layers: int) -> str:
    """The lines of roles and helpers, ``372/418 + 120``, or the first words of a refusal."""
    mesh, plan, options = LAYOUTS[layout]
    made, batch = MODELS[model](layers)
    try:
        program = partc.compile(
            made, mesh, batch, loss=lambda m, **given: m(**given).loss, plan=plan, **options
        )
    except PartcError as error:
        return f"refused: {str(error)[:40]}"
    lines = {name: len(text.splitlines()) for name, text in program.sources.items()}
    shared = lines.pop(HELPERS, 0)
    return f"{'/'.join(map(str, lines.values()))} + {shared}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--layouts", nargs="*", default=[*LAYOUTS], choices=[*LAYOUTS])
    parser.add_argument("--layers", type=int, default=2)
    chosen = parser.parse_args()
    print("|".join(["| ", *chosen.layouts, ""]))
    print("|".join(["|---", *["---"] * len(chosen.layouts), ""]))
    for model in chosen.models:
        row = [lines(model, layout, chosen.layers) for layout in chosen.layouts]
        print("|".join([f"| {model} ", *row, ""]), flush=True)


if __name__ == "__main__":
    main()
