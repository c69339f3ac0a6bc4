"""Calls of the zoo's training steps: all have rules, and what these say of each holds when run."""

from __future__ import annotations

import pytest

from partc.graph import is_tensor, tensor_args
from partc.lowering import trace
from partc.rules import has_rule, strategies
from partc.rules.prove import prove
from partc.rules.signature import Signature
from partc.rules.table import name_of
from tests.zoo import FAMILIES

PROVED: set[Signature] = set()  # calls of earlier families, which need no second proof


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_a_training_step(name: str) -> None:
    case = FAMILIES[name].case(name)
    graph = trace(case.model, case.inputs, case.loss)
    nodes = list(graph.calls())
    assert sorted({name_of(n.target) for n in nodes if not has_rule(n.target)}) == []
    cuttable = sum(bool(strategies(node, 2)) for node in nodes)
    assert cuttable > 0.9 * len(nodes)  # the rest are counters, orders and constants
    calls = [node for node in nodes if all(map(is_tensor, tensor_args(node)))]
    new = [call for call in dict.fromkeys(map(Signature.of, calls)) if call not in PROVED]
    PROVED.update(new)
    proofs = [
        prove(call, strategy, 2, seeds=(1,))  # the table's own cases have a second draw
        for call in new
        for strategy in strategies(call.node(), 2)
    ]
    assert [str(proof) for proof in proofs if not proof.holds] == []
