"""The law of a program's length: what a reviewer reads of a large model is a few pages."""

from __future__ import annotations

import re

import pytest
import torch

import partc
from benchmarks import compile_time

LLAMA_70B = 80  # layers


def lines(mesh: str, plan: str) -> dict[str, int]:
    """The lines of each file of a Llama of 70 billion parameters."""
    model = compile_time.build_model(LLAMA_70B, seq=4096)
    ids = torch.zeros(64, 4096, dtype=torch.long, device="meta")
    program = partc.compile(model, mesh, (ids,), loss=compile_time.loss_of, plan=plan)
    assert not re.search(r"\w_\d\d_", program.source()), "a layer's number in a name"
    return {name: len(text.splitlines()) for name, text in program.sources.items()}


@pytest.mark.parametrize(
    ("mesh", "plan", "limit"),
    # wished for on two axes: 400; long names of the model's own break lines, and that attention has
    # two kernels on GPUs takes 13
    [("dp=8,tp=8", "fsdp+megatron", 422), ("tp=8", "megatron", 332)],
)
def test_a_role_of_a_70b_model_has_fewer_lines(mesh: str, plan: str, limit: int) -> None:
    assert list(lines(mesh, plan).values()) < [limit]
