"""Compute the numbers that a saved program carries: those of the model's graph on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor, fx

from partc.cost.flops import total_flops
from partc.errors import TraceError
from partc.graph import Graph, value
from partc.graph.draws import Draw, site_of
from partc.graph.folds import spread
from partc.plan import Plan
from partc.program.expected import Expectation, Expected, Seeds, Summary, seeded_weight
from partc.verification.run_graph import run_graph
from partc.verification.steady_draws import WholeDraws, as_on_any_device

MOST_FLOPS = 5e9  # seconds of one processor, in float64
MOST_BYTES = 500e6  # of parameters in float64
MOST_TRIES = 8  # bounds that are tried for an input of integers
TOLERANCE = 1e-8  # in float64; the numbers of a program.json have 12 digits
NOISE = 1e-10  # a gradient below this part of the largest is zero but for rounding
TOO_LARGE = "the step was too large to be run on one device when the program was saved"
LOCAL_STATISTICS = (
    'each piece of the batch has its own statistics in a batch norm (batch_norm = "local"), and a '
    "step on one device those of the whole batch"
)
NOT_FINITE = "seeded weights and inputs gave no finite loss when the program was saved"
CHANGED = "the model had been changed since it was compiled when the program was saved"
PLURAL = {"grads": "gradient", "buffers": "buffer", "results": "result"}


def expectation(
    joint: Graph, plan: str, retraced: Callable[[], Graph], draws: Mapping[str, Draw]
) -> Expectation:
    """What a program of the plan is to compute, found when it is asked for.

    ``joint``: the graph from which the program came. ``retraced`` gives it with all equal blocks;
    it holds the model, so it is kept for small models alone. ``draws``: what the program draws.
    """
    if not is_small(joint):
        return Expectation(lambda: TOO_LARGE)
    trains = torch.is_grad_enabled()
    whole = retraced if joint.folds else lambda: joint

    def find() -> Expected | str:
        if Plan.parse(plan).batch_norm == "local":
            return LOCAL_STATISTICS
        try:
            with torch.set_grad_enabled(trains):
                return expected_of(whole(), draws) or NOT_FINITE
        except TraceError:
            return CHANGED

    return Expectation(find)


def is_small(graph: Graph) -> bool:
    """Whether a step may be run when its program is saved."""
    held = sum(prod(value(node).shape) for node in spread(graph.params, graph.folds).values())
    return 8 * held <= MOST_BYTES and total_flops(graph) <= MOST_FLOPS


def expected_of(graph: Graph, draws: Mapping[str, Draw]) -> Expected | None:
    """The numbers of a graph's step in float64; None where no seeded batch gives finite numbers.

    ``graph`` is the joint graph of the model with all its blocks, ``draws`` what its program draws.
    """
    if graph.folds:
        raise AssertionError("a graph without some of its blocks computes another step")
    buffers = {**_seeded(graph.buffers), **graph.constants}
    step = _Step(graph, _seeded(graph.params), buffers, draws)
    for plain in (False, True):
        try:
            seeds = step.seeds(plain)
            summaries = step.summaries(seeds)
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            continue  # a batch that the model does not take
        if all(isfinite(each.norm) for each in summaries.values()):
            return Expected(seeds, summaries)
    return None


def differing(
    graph: Graph, known: Expected, draws: Mapping[str, Draw], constants: Mapping[str, Tensor]
) -> str:
    """What of a graph's step is not as ``known``, for the same batch; empty where all is.

    ``constants``: the values of buffers that are not seeded. A gradient that is rounding noise is
    not compared.
    """
    buffers = {**_seeded(graph.buffers), **graph.constants, **constants}
    step = _Step(graph, _seeded(graph.params), buffers, draws)
    try:
        found = step.summaries(known.seeds)
    except (RuntimeError, IndexError, ValueError, NotImplementedError):
        return "the batch that it takes"
    most = max((known.tensors[label].norm for label in known.grads), default=0.0)
    noise = {label for label in known.grads if known.tensors[label].norm <= NOISE * most}
    for label in dict.fromkeys([*known.tensors, *found]):
        mine, wanted = found.get(label), known.tensors.get(label)
        if label not in noise and (mine is None or wanted is None or not _near(mine, wanted)):
            return label
    return ""


def _near(mine: Summary, wanted: Summary) -> bool:
    off = max(abs(mine.norm - wanted.norm), abs(mine.product - wanted.product))
    return off <= TOLERANCE * wanted.norm


def _seeded(nodes: Mapping[str, fx.Node]) -> dict[str, Tensor]:
    return {
        name: seeded_weight(name, value(node).shape, value(node).dtype)
        for name, node in nodes.items()
    }


@dataclass(frozen=True)
class _Step:
    """A step on seeded weights."""

    graph: Graph
    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    draws: Mapping[str, Draw]

    def seeds(self, plain: bool) -> Seeds:
        """The largest bounds of integers that the forward takes, found by trying."""
        seeds = Seeds(plain=plain)
        self.run(seeds, forward=True)
        for name, node in self.graph.inputs.items():
            if value(node).dtype in (torch.int64, torch.int32):
                seeds = next(self._accepted(seeds, name), seeds)
                ignoring = replace(seeds, ignoring=(*seeds.ignoring, name))
                seeds = ignoring if self.takes(ignoring) else seeds
        return seeds

    def _accepted(self, seeds: Seeds, name: str) -> Iterator[Seeds]:
        """Seeds with a larger bound of one input that the forward takes, the largest first."""
        for high in self._sizes()[:MOST_TRIES]:
            larger = replace(seeds, highs={**seeds.highs, name: high})
            if self.takes(larger):
                yield larger

    def _sizes(self) -> list[int]:
        """The sizes of parameters' dims, largest first: one is the number of a table's rows."""
        shapes = (value(node).shape for node in self.graph.params.values())
        return sorted({size for shape in shapes for size in shape if size > 2}, reverse=True)

    def takes(self, seeds: Seeds) -> bool:
        """Whether the forward runs on this batch and gives a finite loss."""
        try:
            self.run(seeds, forward=True)
        except (RuntimeError, IndexError, ValueError):
            return False
        return True

    def run(self, seeds: Seeds, *, forward: bool = False) -> dict[str, Any]:
        """The step's outputs; with ``forward`` only whether it runs up to the loss."""
        inputs = {n: (value(x).shape, value(x).dtype) for n, x in self.graph.inputs.items()}
        last = self.graph.loss if forward else None
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        batch = seeds.batch(inputs)
        chance = WholeDraws(self.draws)

        def named(node: fx.Node) -> None:
            chance.name = self.graph.sites.get(site_of(node), site_of(node))

        with as_on_any_device(chance):
            return run_graph(self.graph, self.params, buffers, batch, last=last, before=named)

    def summaries(self, seeds: Seeds) -> dict[str, Summary]:
        """The summaries of loss, gradients, changed buffers and results."""
        outputs = self.run(seeds)
        loss = {} if outputs.get("loss") is None else {"loss": outputs["loss"]}
        found = {
            f"{word} {name}": tensor
            for kind, word in PLURAL.items()
            for name, tensor in (outputs.get(kind) or {}).items()
        }
        return {label: Summary.of(label, x) for label, x in {**loss, **found}.items()}
