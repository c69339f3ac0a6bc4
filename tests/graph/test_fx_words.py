"""Names of torch.fx that a graph of partc has not are answered with what it has."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import partc
from partc.errors import UsageError
from partc.graph import Graph


def graph() -> Graph:
    x = torch.ones(4, 8)
    return partc.Traced(nn.Linear(8, 4), (x,), lambda model, x: model(x).square().mean()).graph()


WORDS = {
    "nodes": "graph.calls() are the calls",
    "lint": "Leave it out: partc checks the graph",
    "recompile": "Leave it out",
    "inserting_before": "Call call_before",
    "erase_node": "drop_dead",
    "owning_module": "It has torch's: graph.fx.owning_module",
    "alises": "Did you mean 'aliases'",
    "anything": "See help",
}


@pytest.mark.parametrize("name", WORDS)
def test_a_name_of_torchs_graphs_is_answered(name: str) -> None:
    found = graph()
    with pytest.raises(UsageError, match=rf"^graph.{name}: ") as refused:
        getattr(found, name)
    assert WORDS[name] in str(refused.value)
    assert not hasattr(found, name)


def test_a_graph_is_copied_as_before() -> None:
    assert str(copy.deepcopy(graph())) == str(graph())
