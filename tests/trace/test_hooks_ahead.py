"""Models of transformers that put hooks on their modules in their first call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import SegformerConfig, SegformerForSemanticSegmentation

import partc

SIZES = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [4, 2], "hidden_sizes": [8, 16],
    "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 2],
    "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
}  # fmt: skip


def fresh() -> nn.Module:
    model: nn.Module = SegformerForSemanticSegmentation(SegformerConfig(num_labels=6, **SIZES))
    return model.eval()


@pytest.mark.exhaustive
def test_hooks_of_a_first_call_are_no_change_of_the_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(6, (4, 32, 32))}
    model = fresh()
    program = partc.compile(model, "dp=2", batch, plan="ddp")
    partc.verify(program, model, batch).check()
    program.save(tmp_path / "build")
    partc.load(tmp_path / "build", fresh())
