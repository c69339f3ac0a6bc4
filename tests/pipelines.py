"""Pipelines of small models, and how far they are from the whole model.

``python -m tests.pipelines [FAMILY ...]`` prints one line per family of the zoo, layout and kind of
backward: what the stage graphs give, against eager autograd.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.checks.local_graph import check
from partc.graph import Graph, value
from partc.lowering import begin, to_local_graph
from partc.passes.stages.schedule_stages import stage_graphs
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.schedules import NAMES
from partc.verification.precision import Raised
from partc.verification.reference import Reference, eager
from tests.simulate import simulate_stages
from tests.zoo import FAMILIES, Case

BATCH = 24  # rows: 3 or 8 microbatches, of which 3 leave an even number to each of two ranks
SEQ, VOCAB, HIDDEN, FFN = 10, 14, 12, 20
TOLERANCE = 1e-9  # of a program against the model, both in float64
NOISE = 1e-6  # of the largest gradient; smaller ones are measured against this

POINTS: dict[str, tuple[str, ...]] = {  # where stages 1, 2, ... begin
    "gpt2": ("transformer.h.1",),  # tied: the first and the last stage hold the embedding
    "llama": ("model.layers.1",),
    "gemma2": ("model.layers.1", "model.norm"),
    "bert": ("bert.encoder.layer.1",),
    "t5": ("encoder.block.1", "decoder.block.0", "decoder.block.1"),
    "swin": ("swin.encoder.layers.1",),
    "convnext": ("convnext.encoder.stages.1", "convnext.encoder.stages.1.layers.1"),
}


# a toy --------------------------------------------------------------------------------------------
class Block(nn.Module):
    """One residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.w1 = nn.Linear(HIDDEN, FFN)
        self.w2 = nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.w2(F.gelu(self.w1(self.norm(x))))
        return out


class Toy(nn.Module):
    """Blocks between an embedding and a head, which may be one parameter."""

    def __init__(self, layers: int, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def toy_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(ids, labels)
    return loss


def new_toy(layers: int = 2, tied: bool = False) -> Case:
    """A toy, and labels of which each row ignores more than the one before; the first three rows,
    a microbatch of eight, count for nothing.
    """
    torch.manual_seed(0)
    model = Toy(layers, tied).double()
    ids, labels = torch.randint(VOCAB, (2, BATCH, SEQ))
    for row in range(BATCH):
        labels[row, row * SEQ // BATCH :] = -100
    return Case(model, (ids, labels), toy_loss)


toy = cache(new_toy)  # the same one for many tests, which leave it as it is


def stages_of_toy(stages: int, layers: int) -> tuple[str, ...]:
    """Where an even number of blocks begins each stage but the first."""
    return tuple(f"blocks.{stage * layers // stages}" for stage in range(1, stages))


# programs -----------------------------------------------------------------------------------------
TRAINING = [name for name in NAMES if name != "forward-only"]


def toy_program(
    schedule: str, microbatches: int, mesh: str = "pp=2", preset: str = "ddp", tied: bool = False
) -> tuple[Case, Program]:
    """A toy of as many blocks as the schedule wants stages, at least two, and its program."""
    ranks = dict(Mesh.of(mesh).axes).get("pp", 1)
    stages = ranks * NAMES[schedule].usual_chunks
    case = toy(max(2, stages), tied)
    plan = Plan(preset=preset, stages=stages_of_toy(stages, max(2, stages)))
    return case, compiled(case, mesh, plan, schedule, microbatches)


def compiled(case: Case, mesh: str, plan: Plan, schedule: str, microbatches: int) -> Program:
    return partc.compile(case.step, mesh, plan=plan, microbatches=microbatches, schedule=schedule)


# stage graphs -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cut:
    """A model's stage graphs, checked, and what eager autograd gives."""

    graphs: list[Graph]
    reference: Reference

    @classmethod
    def of(cls, case: Case, mesh: str, plan: Plan, split_backward: bool = False) -> Cut:
        graph = case.step.graph()
        graph.mesh = Mesh.of(mesh)
        graphs = stage_graphs(to_local_graph(begin(graph, plan)), split_backward).stages
        for stage in graphs:
            check(stage)
        return cls(graphs, eager(case.model, case.inputs, case.loss))

    def error(self) -> float:
        """The largest error of the loss and of any gradient, each relative to its largest value;
        infinite where a gradient is missing.
        """
        reference = self.reference
        first = self.graphs[0]
        whole = {**reference.weights, **dict(zip(first.inputs, reference.inputs, strict=True))}
        for graph in self.graphs:
            whole |= graph.constants
            for name, node in graph.buffers.items():
                whole.setdefault(name, torch.zeros(value(node).shape))
        with Raised():
            found = simulate_stages(self.graphs, whole)
        assert reference.loss is not None
        return max(
            float((found["loss"] - reference.loss).abs() / reference.loss.abs()),
            _worst(found["grads"], dict(reference.grads)),
        )


def _worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    if found.keys() != expected.keys():
        return float("inf")
    largest = max(float(grad.abs().max()) for grad in expected.values())
    return max(
        float((found[name] - grad).abs().max()) / max(float(grad.abs().max()), NOISE * largest)
        for name, grad in expected.items()
    )


def zoo_error(name: str, mesh: str, preset: str, split_backward: bool) -> float:
    """The error of a family's stage graphs with three microbatches."""
    case = FAMILIES[name].case(name, batch=BATCH)
    plan = Plan(preset=preset, stages=POINTS[name], microbatches=3)
    return Cut.of(case, mesh, plan, split_backward).error()


LAYOUTS = [
    ("", "ddp"),
    ("dp=2", "ddp"),
    ("dp=2", "fsdp"),
    ("tp=2", "megatron"),
    ("dp=2,tp=2", "fsdp+megatron-sp"),
]


def main(families: list[str]) -> None:
    """Print the error of every combination."""
    for name in families or POINTS:
        for mesh, preset in LAYOUTS:
            for split in (False, True):
                error = zoo_error(name, mesh, preset, split)
                backward = "split" if split else "whole"
                print(f"{name:<10}{mesh:<11}{preset:<18}{backward} backward  {error:.1e}")


if __name__ == "__main__":
    main(sys.argv[1:])
