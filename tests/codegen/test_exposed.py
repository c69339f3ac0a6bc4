"""A transfer that nothing hides is one line: no start that the next line waits for."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import Literal

import pytest

import partc
from partc.plan import Plan
from partc.program import Program
from partc.verification.verification import verify
from tests.overlap.words import IDS, model, step

STARTED = re.compile(r"(?:\w+, )?(\w+_done) = ")


@cache
def sequence_parallel() -> Program:
    return partc.compile(step(), "tp=2", plan="megatron-sp")


@pytest.mark.exhaustive
def test_no_line_waits_for_what_the_line_before_starts() -> None:
    lines = sequence_parallel().source(0).splitlines()
    for line, following in pairwise(lines):
        started = STARTED.match(line.strip())
        assert started is None or not following.strip().startswith(f"{started[1]}.wait()"), line


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter"])
def test_one_call_starts_and_waits(call: str) -> None:
    """Its comment says that it is exposed, and no handle is kept, so that none is dropped."""
    source = sequence_parallel().source(0)
    found = re.findall(rf"(\w+) = {call}\(\w+, 2, self\.tp, 1\) +# (.*)", source)
    assert found
    assert all(remark.endswith("; exposed") for _, remark in found)
    assert not any(re.search(rf"\b{name}_done\b", source) for name, _ in found)


def test_what_is_hidden_still_has_two_lines() -> None:
    source = sequence_parallel().source(0)
    assert re.search(r"_done\.wait\(\) +# hidden behind", source)


@pytest.mark.rows(1)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_it_computes_what_the_model_computes(backend: Literal["gloo", "nccl"]) -> None:
    program = partc.compile(step(), "tp=2", plan=Plan(preset="megatron-sp", backend=backend))
    verify(program, model(), (IDS,), lambda m, x: m(x)).check()
