"""A rule that does not fit its op is refused by name, before a program is written with it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partc
from partc.errors import RuleError
from partc.rules import strategies, strategies_for
from partc.rules.signature import Signature, f, i
from partc.rules.table import RULES, Rule

aten = torch.ops.aten
OP = "aten.multi_margin_loss.default"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("...->...", "number of operands is 1 in the rule and 3 in the op"),
        ("ab,a,,a->", "number of operands is 4 in the rule and 3 in the op"),
        ("ab,a->,", "number of results is 2 in the rule and 1 in the op"),
        ("a,a->", "term 'a' has 1 dims and the tensor 2"),
        ("...,...->...", "no sizes fit"),
        ("ab,c->", r"does not hold.*inconsistent target size"),  # each rank would have all targets
    ],
)
def test_a_rule_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, text: str, what: str) -> None:
    monkeypatch.setitem(RULES._entries, OP, Rule(text))
    batch = torch.randn(4, 6), torch.randint(8, (4,))
    with pytest.raises(RuleError, match=what) as caught:
        partc.compile(
            nn.Linear(6, 8), "dp=2", batch, plan="ddp",
            loss=lambda model, x, classes: F.multi_margin_loss(model(x), classes),
        )  # fmt: skip
    assert f'rule("{OP}", "{text}")' in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        Signature.call(aten.multi_margin_loss.default, f(5, 7), i(5, high=7), 1, 1.0, None),
        Signature.call(aten.bernoulli.p, f(5, 7), 0.4),
        Signature.call(aten.multilabel_margin_loss_forward.default, f(5, 7), i(5, 7, high=7), 1),
    ],
    ids=str,
)
def test_the_advice_is_a_rule_that_fits(monkeypatch: pytest.MonkeyPatch, call: Signature) -> None:
    for name in (call.op, call.packet):
        monkeypatch.delitem(RULES._entries, name, raising=False)
    with pytest.raises(RuleError, match="has no sharding rule") as caught:
        strategies_for(call.node(), 2, strict=True)
    advised = re.search(r'rule\("(.*)", "(.*)"\)', caught.value.do)
    assert advised
    monkeypatch.setitem(RULES._entries, advised[1], Rule(advised[2]))
    assert strategies(call.node(), 2) == []
