"""The law of a program's length: what a reviewer reads of a large model is a few pages."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

import partc
from benchmarks import compile_time
from partc.program.helper_file import NAME as HELPERS

LLAMA_70B = 80  # layers


@cache
def step() -> partc.Traced:
    model = compile_time.build_model(LLAMA_70B, seq=4096)
    ids = torch.zeros(64, 4096, dtype=torch.long, device="meta")
    return partc.Traced(model, (ids,), compile_time.loss_of)


def lines(mesh: str, plan: str) -> dict[str, int]:
    """The lines of the roles, and of helpers, of a Llama of 70 billion parameters."""
    program = partc.compile(step(), mesh, plan=plan)
    assert not re.search(r"\w_\d\d_", program.source()), "a layer's number in a name"
    return {name: len(text.splitlines()) for name, text in program.sources.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "plan", "limit"),
    [("tp=8", "megatron", 280), ("dp=8,tp=8", "fsdp+megatron", 340)],
)
def test_a_role_of_a_70b_model_has_fewer_lines(mesh: str, plan: str, limit: int) -> None:
    found = lines(mesh, plan)
    assert found.pop(HELPERS) < 120
    assert all(each < limit for each in found.values()), found
