"""Each canonicalising pass from text to text, and that what it makes computes the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partc.graph import Graph, value
from partc.graph.graph_edits import drop_dead
from partc.graph.graph_parse import parse_graph
from partc.lowering import table, trace, traced
from partc.passes.canonical.canonicalize import CANONICAL, canonicalize
from partc.passes.canonical.fold_dropout import fold_dropout
from partc.trace.record import Source
from tests.canonical.pass_cases import CASES
from tests.compare import distance
from tests.interpret import run_graph
from tests.zoo import MODELS


def random_inputs(graph: Graph) -> Iterator[tuple[str, Tensor]]:
    """A tensor for each parameter and input; integers and truths are small."""
    generator = torch.Generator().manual_seed(0)
    for name, node in (graph.params | graph.inputs).items():
        known = value(node)
        if known.dtype.is_floating_point:
            yield name, torch.randn(known.shape, generator=generator).to(known.dtype)
        else:
            yield name, torch.randint(2, known.shape, generator=generator).to(known.dtype)


def results(graph: Graph) -> list[Tensor]:
    given = dict(random_inputs(graph))
    return [t for t in tree_leaves(run_graph(graph, given, {}, given)) if t is not None]


@pytest.mark.parametrize("name", CASES)
def test_pass(name: str, golden: Callable[..., None]) -> None:
    rewrite, text = CASES[name]
    graph = parse_graph(text)
    before = results(graph)
    rewrite(graph)
    graph.fx.lint()
    for old, new in zip(before, results(graph), strict=True):
        assert distance(new, old, 1e-9) < (1e-14 if old.dtype == torch.float64 else 1e-2)
    golden(str(graph))


def test_dropout_mask_is_one_op(golden: Callable[..., None]) -> None:
    graph = parse_graph("""\
graph M
input x : f32[4,6]
forward (loss)
  a = empty_like(x) : f32[4,6]
  b = bernoulli.p(a, 0.75) : f32[4,6]
  c = div.Scalar(b, 0.75) : f32[4,6]
  d = mul.Tensor(x, c) : f32[4,6]
backward (loss)
  e = div.Scalar(b, 0.75) : f32[4,6]
  f = mul.Tensor(d, e) : f32[4,6]
outputs
  result f = f
""")
    fold_dropout(graph)
    golden(str(graph))


@pytest.mark.exhaustive
def test_canonical_graphs_stay_as_they_are() -> None:
    case = MODELS["llama"]()
    graph = trace(case.model, case.inputs, case.loss)
    text = str(graph)
    canonicalize(graph)
    assert str(graph) == text
    assert len({each.name for each in CANONICAL}) >= 12
    drop_dead(graph)
    assert str(graph) == text


class Image(nn.Module):
    """Tokens that become an image and come back."""

    def forward(self, x: Tensor) -> Tensor:
        image = x.transpose(1, 2).unflatten(2, (2, 3))
        return torch.relu(image.flatten(2).transpose(1, 2))


class MeanOfOne(nn.Module):
    """A mean over one entry."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x.unsqueeze(1).mean(1))


@pytest.mark.parametrize(
    ("again", "model"), [("cancel_transposes", Image()), ("drop_noops", MeanOfOne())]
)
def test_a_pass_that_stands_twice_has_work_again(again: str, model: nn.Module) -> None:
    source = Source.of(model, (torch.ones(4, 6, 8),), lambda m, x: m(x).sum())
    ran = sorted(traced(source, table(keep_texts=True), fold=False, kept=None).ran.items())
    texts = {row: each.texts for row, each in ran}
    second = [row for row, each in ran if each.name == again][-1]
    assert texts[second] != texts[second - 1]
