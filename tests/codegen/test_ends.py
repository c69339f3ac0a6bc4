"""Which waits the step does at its end: found for a whole graph as for each of its calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import partc
from partc.codegen.repeats import equal, owners
from partc.graph import Graph


@pytest.mark.rows(1)
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_all_that_end_are_those_of_which_each_is_told(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def looked(graph: Graph) -> set[torch.fx.Node]:
        found = equal.all_that_end(graph)
        seen.append((found, {node for node in graph.calls() if equal.ends_step(graph, node)}))
        return found

    monkeypatch.setattr(owners, "all_that_end", looked)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    partc.compile(
        model, "dp=2", (torch.randn(4, 4),), loss=lambda m, x: m(x).square().mean(), plan=plan
    )
    assert seen
    assert all(found == told for found, told in seen)
    assert any(found for found, _ in seen)
