"""Makes the scaling models of a graph once for many searches: they take most of a search's time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from partc.graph import Graph
from partc.passes.runner import Table
from partc.passes.search.plans.candidate import Recompute
from partc.passes.search.plans.read_scaling_model import READING, Reading
from partc.passes.search.plans.search_plans import ScalingModels, scaling_models_of
from partc.plan import Cuts


@contextmanager
def read_once() -> Iterator[None]:
    """Within this block a second search for the same graph takes the first one's scaling models."""
    known: dict[
        object, tuple[Graph, ScalingModels]
    ] = {}  # with the graph, that its id stays its own

    def once(
        graph: Graph, words: Sequence[str], ways: Sequence[Recompute], table: Table,
        inputs: Mapping[str, Cuts], reading: Reading = READING,
    ) -> ScalingModels:  # fmt: skip
        key = id(graph.fx), *words, *ways, str(inputs), reading
        if key not in known:
            known[key] = graph, scaling_models_of(graph, words, ways, table, inputs, reading)
        return dict(known[key][1])

    with patch("partc.passes.search.plans.choose_plan.scaling_models_of", once):
        yield
