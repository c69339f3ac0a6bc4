"""Calls of the zoo's training steps: all have rules, and what these say of each holds when run."""

from __future__ import annotations

import re

import pytest

from partc.graph import is_tensor, tensor_args
from partc.lowering import trace
from partc.rules import has_rule, strategies
from partc.rules.prove import prove
from partc.rules.signature import Signature
from partc.rules.table import name_of
from tests.zoo import FAMILIES

PROVED: set[str] = set()  # forms of earlier calls, which need no second proof
SIZE = re.compile(r"(?<![\w.])\d+(?![\w.])")


def form(call: Signature) -> str:
    """A call up to its sizes: which are equal, which even, and those up to four."""
    sizes: dict[str, str] = {}

    def word(found: re.Match[str]) -> str:
        size = found[0]
        if int(size) <= 4:
            return size
        return sizes.setdefault(size, f"{'odd' if int(size) % 2 else 'even'} {len(sizes)}")

    return SIZE.sub(word, str(call))


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_a_training_step(name: str) -> None:
    case = FAMILIES[name].case(name)
    graph = trace(case.model, case.inputs, case.loss)
    nodes = list(graph.calls())
    assert sorted({name_of(n.target) for n in nodes if not has_rule(n.target)}) == []
    cuttable = sum(bool(strategies(node, 2)) for node in nodes)
    assert cuttable > 0.9 * len(nodes)  # the rest are counters, orders and constants
    calls = [node for node in nodes if all(map(is_tensor, tensor_args(node)))]
    forms = {form(call): call for call in map(Signature.of, calls)}
    new = [call for name, call in forms.items() if name not in PROVED]
    PROVED.update(forms)
    proofs = [
        prove(call, strategy, 2, seeds=(1,))  # the table's own cases have a second draw
        for call in new
        for strategy in strategies(call.node(), 2)
    ]
    assert [str(proof) for proof in proofs if not proof.holds] == []
