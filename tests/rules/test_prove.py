"""The prover: it accepts every rule of the table and none of the deliberately wrong ones."""

from __future__ import annotations

import json

import pytest
import torch

from partc.plan.sharding import Layout, M, R, U, cut, join_pieces, take_piece
from partc.rules import Strategy
from partc.rules.experiment import cut_whole, piece_sizes, take_apart
from partc.rules.prove import Claims, prove
from partc.rules.signature import Operand, Signature, Spec, b, f, i
from tests.rule_cases.cases import cases_by_rule, why_not_run
from tests.rule_cases.report import as_json, proofs_of, prove_rule, rules_table

aten = torch.ops.aten
call = Signature.call
X = f(12, 24)
CASES = cases_by_rule()  # finding the calls that run takes as long as proving some of them

WRONG = [  # call, operand layouts, result layouts
    (call(aten.pow.Tensor_Scalar, X, 2), [U], [U]),
    (call(aten.rsqrt.default, X), [U], [U]),
    (call(aten.silu.default, X), [U], [U]),
    (call(aten.relu.default, X), [U], [U]),
    (call(aten.floor.default, X), [U], [U]),
    (call(aten.gelu.default, X), [M], [M]),
    (call(aten.neg.default, X), [M], [M]),
    (call(aten.add.Tensor, X, 1e-6), [U], [U]),
    (call(aten.add.Tensor, X, X), [U, R], [U]),
    (call(aten.mul.Tensor, X, X), [U, U], [U]),
    (call(aten.div.Tensor, X, X), [R, U], [U]),
    (call(aten.masked_fill.Scalar, X, b(12, 24), 1.5), [U, R], [U]),
    (call(aten.mm.default, X, f(24, 36)), [cut(1), cut(0)], [R]),
    (call(aten.mm.default, X, f(24, 36)), [U, U], [U]),
    (call(aten.mm.default, X, f(24, 36)), [cut(0), R], [cut(1)]),
    (call(aten.linear.default, X, f(36, 24), f(36)), [cut(1), cut(1), R], [U]),
    (call(aten.linear.default, X, f(36, 24), f(36)), [U, R, R], [U]),
    (call(aten._softmax.default, X, -1, False), [cut(1)], [cut(1)]),
    (call(aten.cumsum.default, X, 1), [cut(1)], [cut(1)]),
    (call(aten.sort.default, X, 1), [cut(1)], [cut(1), cut(1)]),
    (call(aten.amax.default, X, [1]), [cut(1)], [U]),
    (call(aten.amax.default, X, [1]), [U], [U]),
    (call(aten.sum.dim_IntList, X, [1]), [cut(1)], [M]),
    (call(aten.mean.dim, X, [1]), [cut(1)], [U]),
    (call(aten.any.dim, b(12, 24), 1), [cut(1)], [R]),
    (call(aten.var_mean.correction, X, [1], correction=0), [cut(1)], [R, R]),
    (call(aten.max.dim, X, 1), [cut(0)], [cut(0), R]),
    (call(aten.topk.default, f(12, 12), 12, 0), [cut(1)], [cut(0), cut(1)]),
    (
        call(aten.native_layer_norm.default, X, [24], f(24), f(24), 1e-5),
        [cut(0), R, R],
        [R, cut(0), cut(0)],
    ),
    (
        call(aten.native_layer_norm.default, X, [24], f(24), f(24), 1e-5),
        [cut(1), cut(0), cut(0)],
        [cut(1), R, R],
    ),
    (call(aten.embedding.default, f(24, 36), i(12)), [cut(0), R], [U]),
    (call(aten.nll_loss_forward.default, X, i(12), None, 1, -100), [cut(0), cut(0)], [U, U]),
    (call(aten.transpose.int, f(12, 12), 0, 1), [cut(0)], [cut(0)]),
    (call(aten.cat.default, [X, f(12, 36)], 1), [cut(1), cut(1)], [cut(1)]),
    (call(aten.bernoulli.p, X, 0.4), [cut(0)], [R]),
    (call(aten.bernoulli.p, X, 0.4), [R], [U]),
]


def always(strategy: Strategy) -> Claims:
    """A table that lists the strategy for every call."""
    return lambda node, num: [strategy]


@pytest.mark.rows(200)
@pytest.mark.parametrize("name", CASES)
def test_rule_holds_on_its_cases(name: str) -> None:
    cases = CASES[name]
    assert cases or why_not_run(name), f"{name} has a rule and no case in tests/rule_cases"
    proofs = proofs_of(cases)
    assert [str(proof) for proof in proofs if not proof.holds] == []


def test_every_wrong_rule_is_caught() -> None:
    survivors = []
    for signature, ins, outs in WRONG:
        wrong = Strategy(tuple(ins), tuple(outs))
        proof = prove(signature, wrong, 2, claims=always(wrong))
        survivors += [str(proof)] if proof.holds or proof else []
    assert survivors == []
    assert len(WRONG) == 36


def test_constant_below_the_tolerance_is_caught_by_redrawing_it() -> None:
    wrong = Strategy((U,), (U,))
    proof = prove(call(aten.add.Tensor, X, 1e-15), wrong, 2, claims=always(wrong))
    assert [(t.literals, t.holds) for t in proof.trials[:2]] == [("given", True), ("random", False)]


def test_rule_that_rests_on_a_literal_is_proved_on_that_literal() -> None:
    proof = prove(call(aten.masked_fill.Scalar, X, b(12, 24), 0.0), Strategy((U, R), (U,)), 2)
    assert proof.holds
    assert {trial.literals for trial in proof.trials} == {"given"}


def test_failed_proof_says_how() -> None:
    proof = prove(call(aten.silu.default, f(12)), Strategy((cut(0),), (R,)), 2)
    assert str(proof) == (
        "aten.silu.default(f32[12]) on 2 ranks: cut 0 -> R FAILS with given literals and even "
        "pieces: the result is f64[12], and R makes f64[6] of the ranks' f64[6]"
    )


def test_failed_proof_names_the_result_of_another_shape() -> None:
    sorts = call(aten.max.dim, X, 1)
    proof = prove(sorts, Strategy((cut(0),), (cut(0), R)), 2)
    assert str(proof).endswith("result 1 is i64[12], and R makes i64[6] of the ranks' i64[6]")
    added = prove(call(aten.mm.default, X, f(24, 36)), Strategy((U, U), (U,)), 2)
    assert "off by" in str(added)


def test_random_draws_are_proved_by_their_moments() -> None:
    case = call(aten.bernoulli.p, X, 0.4)
    proof = prove(case, Strategy((cut(0),), (cut(0),)), 2)
    assert proof.holds
    assert {trial.method for trial in proof.trials} == {"moments"}


def test_uneven_pieces() -> None:
    assert piece_sizes(12, 2, uneven=True) == [7, 5]
    assert piece_sizes(12, 4, uneven=True) == [4, 3, 3, 2]
    assert piece_sizes(11, 3, uneven=True) == [6, 3, 2]


@pytest.mark.parametrize("layout", [R, U, M, cut(1), cut(0, 2), cut(1, 4)])
def test_parts_make_the_whole(layout: Layout) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(12, 24, generator=generator, dtype=torch.float64)
    (parts,) = take_apart([whole], [layout], [2, 1], seed=0)
    torch.testing.assert_close(join_pieces(parts, layout, layout.outer), whole)
    assert all(part.any() for part in parts)


def test_cut_is_the_one_of_shardings() -> None:
    whole = torch.arange(288).view(12, 24)
    pieces = cut_whole(whole, cut(1, 3), [1, 1])
    assert all(torch.equal(p, take_piece(whole, 1, 3, 2, rank)) for rank, p in enumerate(pieces))


def test_signature_of_a_node_is_the_case_it_was_made_from() -> None:
    case = call(aten.index.Tensor, f(12, 24), [None, i(6)])
    assert Signature.of(case.node()) == case
    assert str(case) == "aten.index.Tensor(f32[12,24], [None, i64[6]])"
    assert case.args[1] == (None, Operand(1))


def test_doubling_reaches_dtype_literals() -> None:
    case = call(aten._to_copy.default, Spec((4,), torch.bfloat16), dtype=torch.float16)
    assert str(case.in_float64()) == "aten._to_copy.default(f64[4], dtype=torch.float64)"


def test_table_of_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    some = {"aten.mm": [call(aten.mm.default, X, f(24, 36))], "aten.nonzero": []}
    monkeypatch.setattr("tests.rule_cases.report.cases_by_rule", lambda: some)
    told: list[str] = []
    table = rules_table(lambda name, number, total: told.append(f"{name} {number}/{total}"))
    heads, mm, nonzero = table.splitlines()[1:]
    assert heads.split()[:4] == ["op", "rule", "cuts", "trials"]
    assert mm.split()[:2] == ["aten.mm", "mk,kn->mn"]
    assert mm.split()[4:8] == ["even", "uneven", "f64", "values"]
    assert mm.endswith("proved")
    assert nonzero.endswith("the shapes of its results depend on data")
    assert told == ["aten.mm 1/2", "aten.nonzero 2/2"]
    assert json.loads(as_json())[0]["result"] == "proved"


def test_report_names_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Strategy((U,), (U,))
    monkeypatch.setattr("tests.rule_cases.report.strategies", lambda node, num, seen: [wrong])
    line = prove_rule("aten.hardswish", [call(aten.hardswish.default, X)])
    assert line.result.startswith("FAILS 3 times, first: aten.hardswish.default(f32[12,24]) on 2")
