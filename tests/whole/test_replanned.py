"""A program for other ranks: equal to the model, with the old one's batch and own decisions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import PlanError, RunError, UsageError
from partc.program import Program

WIDTH, ROWS, VOCAB = 24, 12, 60


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 36), nn.GELU(), nn.Linear(36, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        found: Tensor = self.head(x)
        return found


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def model_of() -> Model:
    torch.manual_seed(0)
    return Model()


BATCH = torch.randint(VOCAB, (ROWS, 6)), torch.randint(VOCAB, (ROWS, 6))
PIPELINE = 'preset = "ddp"\nmicrobatches = 2\nschedule = "1f1b"'
OWN = """preset = "fsdp"
recompute = "block"
[params]
"head.weight" = {}
"layers.*.0.weight" = { dp = 1 }"""
BY_HAND = '[inputs]\nids = { dp = 0 }\nlabels = { dp = 0 }\n[params]\n"head.weight" = { dp = 0 }'


def compiled(mesh: str, plan: str, model: nn.Module) -> Program:
    return partc.compile(model, mesh, BATCH, loss=loss_of, plan=plan)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "plan", "to", "axes"),
    [
        ("dp=4", "fsdp", 3, "dp=3"),
        ("dp=2,tp=2", "fsdp+megatron", 3, "dp=3 tp=1"),
        ("pp=2,dp=2", PIPELINE, 3, "pp=1 dp=3"),
        ("pp=2,dp=2", PIPELINE, 6, "pp=2 dp=3"),
        ("dp=2,tp=2", "fsdp+megatron", "tp=4", "dp=1 tp=4"),
        ("dp_replicate=2,dp_shard=2", "hsdp", 3, "dp_replicate=1 dp_shard=3"),
        ("dp=4", "auto", 2, "dp=2"),
        ("dp=4", BY_HAND, 3, "dp=3"),
    ],
)
def test_a_replanned_program_computes_the_models_step(
    mesh: str, plan: str, to: int | str, axes: str
) -> None:
    model = model_of()
    first = compiled(mesh, plan, model)
    made = partc.replan(first, to)
    assert str(made.mesh) == axes
    before, now = partc.Plan.parse(first.plan), partc.Plan.parse(made.plan)
    assert (now.preset, now.microbatches) == (before.preset, before.microbatches)
    assert made.inputs == first.inputs
    assert now.notes[0].startswith(f"replanned from {first.mesh} for {made.mesh}: ")
    partc.verify(made, model, BATCH, loss=loss_of).check()


@pytest.mark.exhaustive
def test_there_and_back_is_the_same_program(tmp_path: Path) -> None:
    model = model_of()
    first = compiled("dp=4", "fsdp", model)
    first.save(tmp_path / "4")
    for old, num in (("4", 3), ("3", 4)):
        loaded = partc.with_model(partc.load(tmp_path / old), model, loss_of)
        made = partc.replan(loaded, num)
        made.save(tmp_path / f"{num}")
    assert without_notes(partc.load(tmp_path / "4")) == without_notes(first)


def without_notes(program: Program) -> dict[str, object]:
    """A program's texts without the heads, which have the plan's notes, and its plan without."""
    texts = {name: text.split('"""', 2)[2] for name, text in program.sources.items()}
    return {**texts, "plan": partc.Plan.parse(program.plan).changed(notes=())}


@pytest.mark.exhaustive
def test_what_somebody_wrote_into_the_plan_stays_where_it_divides() -> None:
    made = partc.replan(compiled("dp=4", OWN, model_of()), 3)
    plan = partc.Plan.parse(made.plan)
    assert plan.recompute == "block"
    assert dict(plan.stored("head.weight")) == {}  # the preset would shard it
    assert plan.stored("layers.1.0.weight")["dp"].dim == 1  # the preset would take dim 0


@pytest.mark.exhaustive
def test_what_does_not_divide_is_left_to_the_preset_and_told() -> None:
    model = model_of()
    batch = tuple(x.repeat(5, 1) for x in BATCH)
    first = partc.compile(model, "dp=4", batch, loss=loss_of, plan=OWN)
    plan = partc.Plan.parse(partc.replan(first, 5).plan)  # which does not divide 24 or 36
    assert dict(plan.stored("layers.1.0.weight")) == {}
    assert plan.notes[0].endswith(
        "left to the preset: layers.0.0.weight, layers.1.0.weight, layers.2.0.weight"
    )


def test_an_entry_that_nothing_replaces_is_refused() -> None:
    model = nn.Linear(8, 8)
    x = torch.randn(12, 8)
    plan = '[inputs]\nx = { dp = 0 }\n[params]\n"weight" = { dp = 0 }'
    first = partc.compile(model, "dp=4", x, loss=lambda m, x: m(x).square().mean(), plan=plan)
    with pytest.raises(PlanError, match=r"its dim 0, of 8, is not divided by dp=3"):
        partc.replan(first, 3)


@pytest.mark.exhaustive
def test_other_shapes_and_modes_come_with_it() -> None:
    first = compiled("dp=4", "fsdp", model_of())
    longer = tuple(torch.zeros(ROWS, 8, dtype=torch.long) for _ in BATCH)
    made = partc.replan(first.for_shapes(longer, modes=("train", "eval")), 3)
    assert [each.wanted.mode for each in made.others] == ["train", "eval"]
    assert {each.mesh for each in made.others} == {made.mesh}


def test_what_cannot_be_replanned_is_refused(tmp_path: Path) -> None:
    first = compiled("dp=4", "fsdp", model_of())
    first.save(tmp_path / "build")
    with pytest.raises(UsageError, match=r"numbers of ranks: 1, 2, 3, 4, 6\."):
        partc.replan(first, 5)
    with pytest.raises(RunError, match="the model is not at hand"):
        partc.replan(partc.load(tmp_path / "build"), 3)
    for wrong in (0, True):
        with pytest.raises(UsageError, match=r"replan\(mesh\)"):
            partc.replan(first, wrong)
    with pytest.raises(UsageError, match="the program is"):
        partc.replan("build", 3)  # type: ignore[arg-type]
    edited = dict(first.sources) | {
        "stage0.py": first.source().replace("return loss", "return loss * 2")
    }
    with pytest.raises(UsageError, match=r"stage0\.py was edited"):
        partc.replan(replace(first, sources=edited), 3)
