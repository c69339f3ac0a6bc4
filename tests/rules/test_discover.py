"""Discovery: cuts of ops without a rule are found by experiment, and nothing false is."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import RuleError, UsageError
from partc.plan.sharding import M, R, U, cut
from partc.rules import Strategy, has_rule, strategies
from partc.rules.discover import discover, strategies_for
from partc.rules.explain_rule import explain_rule
from partc.rules.isolate import answers_of
from partc.rules.signature import Signature, Spec, b, f, i
from partc.rules.table import name_of
from tests.patience import patience

aten = torch.ops.aten
call = Signature.call
Function = Callable[[Tensor], Tensor]
Loss = Callable[[nn.Module, Tensor], Tensor]


@torch.library.custom_op("partc_test::gated_rows", mutates_args=())
def gated_rows(x: Tensor, gate: Tensor, eps: float) -> Tensor:
    """A fused row-wise op, as a user may bring one."""
    return torch.softmax(x * gate + eps, -1)


@torch.library.custom_op("partc_test::touchy_product", mutates_args=())
def touchy_product(x: Tensor, y: Tensor) -> Tensor:
    """A matrix product that takes the process with it where shapes do not fit."""
    if x.shape[1] != y.shape[0]:
        os.abort()
    return x @ y


@torch.library.custom_op("partc_test::deadly", mutates_args=())
def deadly(x: Tensor) -> Tensor:
    """An op that always crashes on the CPU."""
    os.abort()


@torch.library.custom_op("partc_test::whole_only", mutates_args=())
def whole_only(x: Tensor) -> Tensor:
    """An op whose every result entry needs every operand entry."""
    return x * x.square().sum() + x.flip(0, 1)


@gated_rows.register_fake
def _(x: Tensor, gate: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@touchy_product.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], y.shape[1])


@deadly.register_fake
@whole_only.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


ours = torch.ops.partc_test
WHOLE = call(ours.whole_only.default, f(64, 128))


def found(signature: Signature, num: int = 2) -> set[Strategy]:
    return set(discover(signature.node(), num))


def test_zeros_are_no_evidence() -> None:
    """Drawn operands leave this loss without a gradient, so that its mean is nowhere to be seen."""
    scores, targets = f(12, 24), i(12, 24)
    backward = aten.multilabel_margin_loss_backward.default
    assert found(call(backward, f(), scores, targets, 1, scores)) == set()


def test_rows_of_a_fused_op_are_found() -> None:
    rows = call(ours.gated_rows.default, f(4096, 16, 512), f(512), 1e-6)
    assert found(rows) == {
        Strategy((cut(0), R), (cut(0),)),
        Strategy((cut(1), R), (cut(1),)),
    }


def test_sizes_that_do_not_divide_are_left_out() -> None:
    rows = call(ours.gated_rows.default, f(4096, 9, 512), f(512), 1e-6)
    assert found(rows, 4) == {Strategy((cut(0), R), (cut(0),))}


def test_crashing_attempts_are_survived() -> None:
    assert found(call(ours.touchy_product.default, f(64, 128), f(128, 256))) == {
        Strategy((cut(0), R), (cut(0),)),
        Strategy((R, cut(1)), (cut(1),)),
        Strategy((cut(1), cut(0)), (U,)),
        Strategy((U, R), (U,)),
        Strategy((R, U), (U,)),
    }


def test_op_that_only_crashes_is_replicated() -> None:
    assert found(call(ours.deadly.default, f(64, 128))) == set()


def test_hanging_attempt_is_given_up() -> None:
    def attempt(number: int) -> str:
        if number == 1:
            time.sleep(3600)
        return f"done {number}"

    assert answers_of(attempt, 3, seconds=patience(0.5)) == ["done 0", None, "done 2"]


def test_damage_of_an_earlier_attempt_is_not_blamed_on_the_next() -> None:
    damaged: list[int] = []

    def attempt(number: int) -> str:
        if number == 2 and damaged:
            os.abort()
        damaged.append(number)
        return str(number)

    assert answers_of(attempt, 4, seconds=patience()) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    "signature",
    [
        call(aten.eq.Scalar, f(64, 128), 0.0),
        call(aten.le.Scalar, f(64, 128), 1.0),
        call(aten.floor.default, f(64, 128)),
        call(aten.masked_fill.Scalar, f(64, 128), b(64, 128), 1.5),
        call(aten.amax.default, f(64, 128), [1]),
        call(aten.add.Tensor, f(64, 128), 1e-6),
        call(aten.sign.default, f(64, 128)),
        call(aten.relu.default, f(64, 128)),
    ],
    ids=str,
)
def test_nothing_false_is_linear(signature: Signature) -> None:
    assert not [s for s in found(signature) if U in s.ins or U in s.outs]


def test_index_is_no_average() -> None:
    picked = found(call(aten.index.Tensor, f(64, 128), [i(16)]))
    assert Strategy((cut(0), R), (R,)) not in picked
    assert not [s for s in picked if s.ins[0] == cut(0)]


def test_amax_finishes_as_maximum() -> None:
    assert Strategy((cut(1),), (M,)) in found(call(aten.amax.default, f(64, 128), [1]))


def test_random_ops_are_not_guessed() -> None:
    assert found(call(aten.bernoulli.p, f(64, 128), 0.4)) == set()


def test_sums_are_for_floats_only() -> None:
    whole = call(aten.neg.default, Spec((64, 128), torch.int64))
    assert found(whole) == {Strategy((cut(0),), (cut(0),)), Strategy((cut(1),), (cut(1),))}


@pytest.mark.parametrize(
    "signature",
    [
        call(aten.mm.default, f(64, 128), f(128, 256)),
        call(aten.linear.default, f(8, 64, 128), f(256, 128), f(256)),
        call(aten.bmm.default, f(8, 64, 128), f(8, 128, 256)),
        call(aten._softmax.default, f(64, 128), -1, False),
        call(aten.native_layer_norm.default, f(8, 64, 128), [128], f(128), f(128), 1e-5),
        call(aten.gelu_backward.default, f(64, 128), f(64, 128)),
        call(aten.sum.dim_IntList, f(8, 64, 128), [0, 1]),
        call(aten.add.Tensor, f(64, 128), f(128)),
        call(aten.permute.default, f(8, 64, 128), [2, 0, 1]),
    ],
    ids=str,
)
def test_discovery_finds_what_the_table_says(signature: Signature) -> None:
    assert set(strategies(signature.node(), 2)) <= found(signature)


def test_warning_names_op_and_cost_once() -> None:
    warnings: list[str] = []
    for _ in range(2):
        assert strategies_for(WHOLE.node(), 2, warnings=warnings) == []
    assert warnings == [
        "whole_only_default: partc_test.whole_only.default has no sharding rule and runs whole on "
        "every rank (no cut was found by experiment; each rank reads 32768 and writes 32768 "
        'bytes). Add a rule, such as rule("partc_test.whole_only.default", "__->__"), with a '
        "letter in place of `_` for each dim that may be cut."
    ]


def test_strict_refuses_to_replicate() -> None:
    with pytest.raises(RuleError, match=r"partc_test\.whole_only.* has no sharding rule"):
        strategies_for(WHOLE.node(), 2, strict=True)


def test_table_comes_before_discovery() -> None:
    node = call(aten.mm.default, f(12, 24), f(24, 36)).node()
    assert strategies_for(node, 2) == strategies(node, 2)


NO_RULE: tuple[Function, ...] = (  # at least one of these calls an op that has no rule
    lambda x: torch.cdist(x, x.detach()[:3]),
    lambda x: torch.renorm(x, 2, 0, 1.0),
    lambda x: F.channel_shuffle(x.reshape(4, 4, 1, 2), 2),
)


def loss_of(function: Function) -> Loss:
    return lambda model, x: function(model(x)).sum()


def test_a_program_has_what_was_found() -> None:
    """The check of a compiled graph knows such strategies too."""
    model, x = nn.Linear(6, 8).double(), torch.randn(4, 6, dtype=torch.float64)

    def without_rule(loss: Loss) -> list[str]:
        calls = partc.Traced(model, (x,), loss).graph().calls()
        return [name_of(node.target) for node in calls if not has_rule(node.target)]

    loss, ops = next((loss, ops) for loss in map(loss_of, NO_RULE) if (ops := without_rule(loss)))
    program = partc.compile(model, "dp=2", (x,), loss=loss, plan="fsdp", strict=True)
    name = ops[0].split(".")[1].strip("_")
    assert re.search(rf"{name}.*f64\[.*@dp.*\]", program.source())
    partc.verify(program, model, (x,), loss=loss).check()


def test_what_is_known_of_an_op() -> None:
    (known,) = explain_rule("partc_test::gated_rows")
    assert str(known) == (
        "partc_test.gated_rows.default: no rule; an experiment on "
        "partc_test.gated_rows.default(f32[12,24], f32[12,24], 0.4) with 2 ranks found\n"
        "  cut 0, cut 0 -> cut 0"
    )
    assert [each.how for each in explain_rule("partc_test.whole_only")] == ["none"]
    (opened,) = explain_rule("aten.bilinear")
    assert str(opened) == (
        "aten.bilinear.default: no rule, and no graph has it: torch writes it as other ops, such as"
        "\n  aten._trilinear"
    )
    (untried,) = explain_rule("aten._trilinear")
    assert "its signature alone does not say how it is called" in str(untried)
    with pytest.raises(UsageError, match=r"Did you mean aten\._cdist_forward"):
        explain_rule("aten._cdist_forwrd")
    assert [each.how for each in explain_rule("aten.add")] == ["written", "elementwise"]


def test_a_result_that_nobody_reads_is_no_other_call() -> None:
    """The check of a compiled graph sees the call without it."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total: Tensor = model(torch.geqrf(x)[0]).square().sum()
        return total

    model, x = nn.Linear(4, 5), torch.randn(8, 4, 4)
    program = partc.compile(model, "dp=2", (x,), loss=loss, plan="ddp")
    assert "geqrf(x.chunk(2)[self.dp_rank])[0]" in program.source()
