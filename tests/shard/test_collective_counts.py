"""What presets move in a step is the known minimum, per layer and around the layers, in bytes that
a rank puts in; formulas are written out here, from the model's sizes alone.

Megatron-LM (Shoeybi et al. 2019): two all_reduces of an activation forward and two backward per
layer; with sequence parallelism (Korthikanti et al. 2022) their halves. ZeRO (Rajbhandari et al.
2020): stage 3 gathers a parameter twice and scatters its gradient once, stages 1 and 2 gather once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import partc
from partc.cost.step_events import LAST, START, StepEvents
from tests.zoo import FAMILIES

LAYERS, BATCH, SEQ, HIDDEN, FFN, VOCAB = 4, 8, 12, 64, 96, 1024
F32 = 4
NORM = HIDDEN * F32
PRODUCTS = (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN) * F32  # of a layer
LAYER = PRODUCTS + 2 * NORM
EMBEDDING = HEAD = VOCAB * HIDDEN * F32
ROWS = BATCH * SEQ * HIDDEN * F32  # of the table, that all tokens look up
SCALAR = ("all_reduce", F32)
LOSS = Counter({SCALAR: 2})  # over dp: the loss, and how many tokens it is the mean of
Counts = Counter[tuple[str, int]]


@cache
def step() -> partc.Traced:
    sizes = {
        "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": FFN,
        "vocab_size": VOCAB, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8,
    }  # fmt: skip
    family = FAMILIES["llama"]
    case = replace(family, config=family.config | sizes, dtype=torch.float32).case("llama")
    ids = torch.ones(BATCH, SEQ, dtype=torch.int64)
    return partc.Traced(case.model, (ids, ids), case.loss)


@cache
def tape_of(mesh: str, plan: str) -> StepEvents:
    program: Any = partc.compile(step(), mesh, plan=plan)
    (tape,) = program.basis.tapes
    return tape  # type: ignore[no-any-return]


def counted(mesh: str, plan: str, axis: str) -> dict[str, Counts]:
    """The transfers over an axis: of one layer by phase, and of what stands between layers."""
    tape = tape_of(mesh, plan)
    found: dict[str, Counts] = {"forward": Counter(), "backward": Counter(), "between": Counter()}
    for label, run, _ in tape.unrolled():
        where = ("backward" if run.is_backward else "forward") if label else "between"
        for event in (*run.gathers, *run.events):
            if event.code in (START, LAST) and (move := tape.moves[event.number]).axis == axis:
                found[where][move.kind, move.put_in_bytes] += 1
    for where in ("forward", "backward"):
        assert not any(times % LAYERS for times in found[where].values())
        found[where] = Counter({move: n // LAYERS for move, n in found[where].items()})
    return found


def moves(*pairs: tuple[str, int]) -> Counts:
    return Counter(pairs)


@pytest.mark.exhaustive
def test_ddp_sums_every_gradient_once() -> None:
    num = 4
    assert counted(f"dp={num}", "ddp", "dp") == {
        "forward": moves(),
        "backward": moves(("all_reduce", LAYER)),
        # the table's less than once: the gradients of the tokens' rows are gathered; that of the
        # last norm goes with the head's
        "between": moves(("all_gather", ROWS // num), ("all_reduce", HEAD + NORM)) + LOSS,
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize(("preset", "num"), [("zero1", 4), ("zero2", 2), ("fsdp", 2), ("fsdp", 4)])
def test_zero_gathers_and_scatters_every_parameter(preset: str, num: int) -> None:
    again = moves(("all_gather", LAYER // num)) if preset == "fsdp" else moves()
    table = moves(("all_gather", EMBEDDING // num), ("reduce_scatter", EMBEDDING))
    if preset == "fsdp":  # less than that: the tokens' rows travel, and their gradients
        rows = ("all_to_all", ROWS // num)
        table = moves(rows, rows)
    assert counted(f"dp={num}", preset, "dp") == {
        "forward": moves(("all_gather", LAYER // num)),
        "backward": moves(("reduce_scatter", LAYER)) + again,
        # between forward and backward the head's weight stays; the embedding's backward needs none
        "between": table + LOSS + moves(
            ("all_gather", (HEAD + NORM) // num), ("reduce_scatter", HEAD + NORM)
        ),
    }  # fmt: skip


def softmax(rows: int) -> Counts:
    """Over tp: the largest logit and the sum of exponentials of every token, and the loss."""
    return Counter({("all_reduce", rows * F32): 2, SCALAR: 1})


@pytest.mark.exhaustive
def test_megatron_sums_two_activations_each_way() -> None:
    activation = ("all_reduce", BATCH * SEQ * HIDDEN * F32)
    assert counted("tp=4", "megatron", "tp") == {
        "forward": moves(activation, activation),
        "backward": moves(activation, activation),
        # behind the embedding, before the head
        "between": moves(activation, activation) + softmax(BATCH * SEQ),
    }


@pytest.mark.exhaustive
def test_sequence_parallelism_halves_them() -> None:
    num = 4
    whole = BATCH * SEQ * HIDDEN * F32
    pair = moves(("all_gather", whole // num), ("reduce_scatter", whole))
    mesh, plan = (f"tp={num}", "megatron-sp")
    assert counted(mesh, plan, "tp") == {
        "forward": pair + pair,
        "backward": pair + pair + moves(("all_reduce", 2 * NORM)),  # gradients of its norms
        "between": pair + pair + softmax(BATCH * SEQ) + moves(("all_reduce", NORM)),
    }


@pytest.mark.exhaustive
def test_both_at_once_move_what_each_moves_of_its_part() -> None:
    half = BATCH * SEQ * HIDDEN * F32 // 2
    pair = moves(("all_gather", half // 2), ("reduce_scatter", half))
    over_tp = counted("dp=2,tp=2", "fsdp+megatron-sp", "tp")
    assert over_tp["forward"] == pair + pair
    assert over_tp["backward"] == pair + pair + moves(("all_reduce", NORM))  # of scattered ones
    over_dp = counted("dp=2,tp=2", "fsdp+megatron-sp", "dp")
    assert over_dp["forward"] == moves(("all_gather", (PRODUCTS // 2 + 2 * NORM) // 2))
    assert over_dp["backward"] == over_dp["forward"] + moves(
        ("reduce_scatter", PRODUCTS // 2), ("reduce_scatter", 2 * NORM)
    )
