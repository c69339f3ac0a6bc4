"""A rule that does not fit its op is refused by name, before a program is written with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partc
from partc.errors import RuleError, UsageError
from partc.rules import strategies, strategies_for
from partc.rules.signature import Signature, f, i
from partc.rules.table import RULES, Rule, rule
from tests.docs.pages import blocks
from tests.house import HERE

aten = torch.ops.aten
OP = "aten.multi_margin_loss.default"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("...->...", "number of operands is 1 in the rule and 3 in the op"),
        ("ab,a,,a->", "number of operands is 4 in the rule and 3 in the op"),
        ("ab,a->,", "number of results is 2 in the rule and 1 in the op"),
        ("a,a->", "term 'a' has 1 dim and the tensor 2"),
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
    if "hold" not in what:
        assert "this call, at test_wrong_rules.py:" in caught.value.why
        assert "has the shapes [4, 8], [4], none -> []" in caught.value.why


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"linear": "0|1|4"}, "names slot 4.*from 0 to 3"),
        ({"added": 4}, "added=4 names slot 4"),
        ({"unread": 9}, "unread=9 names slot 9"),
        ({"sizes": "pp"}, "sizes names the argument 'pp'.*Did you mean 'p'"),
        ({"contiguous": ("grd",)}, "contiguous names the argument 'grd'.*Did you mean 'grad'"),
        ({"scales": {"p": "z"}}, "p shrinks with 'z'"),
        ({"windowed": 3}, "windowed is 3"),
    ],
)
def test_a_field_that_names_what_is_not_there(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        rule("aten._cdist_backward", "...nm,...nk,...mk,...nm->...nk", **fields)
    assert "aten._cdist_backward" not in RULES


def test_slots_of_a_function_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Signature.call(aten.multi_margin_loss.default, f(4, 6), i(4, high=6), 1, 1.0, None)
    monkeypatch.setitem(RULES._entries, OP, Rule("b_,b,->", linear=lambda call: "0|3"))
    with pytest.raises(RuleError, match=r"linear=.*it gives '0\|3', and the call has 3 slots"):
        strategies(call.node(), 2)


@pytest.mark.parametrize(
    ("op", "told"),
    [
        ("aten.bilinear", r"'aten.bilinear', .*no graph has this op.*such as aten\._trilinear\."),
        ("aten.cdist.default", r"such as aten\._cdist_forward\."),
        ("aten.layer_norm", r"such as aten\.native_layer_norm\."),
        ("aten.einsum", r"as torch writes it as other ops\. Write"),
    ],
)
def test_a_rule_of_an_op_that_torch_opens_is_told(
    op: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    rule(op, lambda call: "")
    del RULES._entries[op]
    assert re.search(told, caplog.text)


@pytest.mark.parametrize("op", ["aten._cdist_forward", "aten.linear.default", "partc_later.gated"])
def test_rules_that_a_graph_may_read_are_not(op: str, caplog: pytest.LogCaptureFixture) -> None:
    rule(op, lambda call: "")
    del RULES._entries[op]
    assert not caplog.records


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


def test_the_proof_of_the_page_fails_without_the_rule() -> None:
    page = [each.text for each in blocks(HERE / "docs" / "how-to" / "add-a-rule.md")]
    (recipe,) = [text for text in page if "found = strategies(call.node(), 2)" in text]
    assert "aten._cdist_forward" not in RULES
    with pytest.raises(AssertionError, match="no rule was read"):
        exec(recipe, {"torch": torch})


def test_two_lines_of_one_script_with_rules_for_one_op_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(RULES, "_entries", dict(RULES._entries))
    script, line = (
        tmp_path / "script.py",
        "rule('aten._cdist_forward.default', '...nk,...mk->...nm')",
    )
    script.write_text(f"{line}\n{line}\n")
    with pytest.raises(UsageError, match="the op has a rule"):
        exec(compile(script.read_text(), script, "exec"), {"__name__": "__main__", "rule": rule})
    names = {"__name__": "__main__", "rule": rule}
    exec(compile(f"\n{line}", script, "exec"), names)  # the script, changed, once more


def test_a_cell_that_runs_again_replaces_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RULES, "_entries", dict(RULES._entries))
    op = "aten._cdist_forward.default"
    cell, module = {"__name__": "__main__", "rule": rule}, {"__name__": "mine", "rule": rule}
    exec(f"rule({op!r}, '...nk,...mk->...nm')", cell)
    exec(f"rule({op!r}, '...n!k,...m!k->...nm')", cell)
    assert RULES[op].notation == "...n!k,...m!k->...nm"
    for other, taken in ((module, op), (cell, "aten.mm")):
        with pytest.raises(UsageError, match="the op has a rule"):
            exec(f"rule({taken!r}, 'mk,kn->mn')", other)
