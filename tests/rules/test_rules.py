"""The rule language, and what the table says of typical calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from partc.errors import RuleError
from partc.graph import Value, fake_of, ops, set_fake, set_value
from partc.graph.graph_edits import run_fake
from partc.plan.sharding import M, R, cut
from partc.rules import Strategy, has_rule, strategies
from partc.rules.notation import parse, resolve
from partc.rules.table import RULES, name_of
from tests.rules.calls import Calls

aten = torch.ops.aten


@pytest.fixture
def calls() -> Calls:
    return Calls()


def texts(node: fx.Node, num: int = 2, seen: Any = ()) -> list[str]:
    return [str(strategy) for strategy in strategies(node, num, seen)]


# the language --------------------------------------------------------------------------------
def test_letters_groups_and_marks() -> None:
    notation = parse("b(g !c)...,(3 n) @v->b_,n =c")
    assert [t.dims for t in notation.operands] == [(("b",), ("g", "c"), ("...",)), (("3", "n"),)]
    assert notation.operands[1].index_of == "v"
    assert notation.results[1].kept == "c"
    assert notation.frozen == {"c", "3"}


def test_sizes_are_solved_through_groups() -> None:
    factors = resolve(parse("(a b) c->a (b c)"), [(4, 6)], [(2, 12)])
    assert factors.sizes == {"a": 2, "c": 6, "b": 2}
    assert factors.before(("a", "b"), "b") == 2


def test_a_dim_of_nothing_is_not_cut() -> None:
    """Registers that a vision model has none of."""
    factors = resolve(parse("a(2 d),b->(2 d)b"), [(0, 0), (1,)], [(0, 0)])
    assert factors.sizes["b"] == 0
    assert {"a", "b", "d"} <= factors.frozen


def test_a_broadcast_dim_has_no_factor() -> None:
    factors = resolve(parse("...,...->..."), [(4, 6), (1,)], [(4, 6)])
    assert factors.operands == (((".1",), (".0",)), ((),))


@pytest.mark.parametrize("text", ["mk,kn", "m(k->m", "m!->m", "m?->m"])
def test_a_malformed_rule_says_so(text: str) -> None:
    with pytest.raises(RuleError, match="not well formed"):
        parse(text)


def test_shapes_that_do_not_fit_say_so() -> None:
    with pytest.raises(RuleError, match="no sizes fit"):
        resolve(parse("k,k->"), [(4,), (6,)], [()])
    with pytest.raises(RuleError, match="2 dims and the tensor 1"):
        resolve(parse("a->ab"), [(4,)], [(4,)])


# what may be cut -----------------------------------------------------------------------------
def test_linear(calls: Calls) -> None:
    x, w, b = calls.tensor(4, 6, 8), calls.tensor(10, 8), calls.tensor(10)
    assert texts(calls.call(aten.linear.default, x, w)) == [
        "cut 0, R -> cut 0",
        "cut 1, R -> cut 1",
        "cut 2, cut 1 -> U",
        "R, cut 0 -> cut 2",
        "U, R -> U",
        "R, U -> U",
    ]
    assert texts(calls.call(aten.linear.default, x, w, b)) == [
        "cut 0, R, R -> cut 0",
        "cut 1, R, R -> cut 1",
        "R, cut 0, cut 0 -> cut 2",
        "U, R, U -> U",
        "R, U, U -> U",
    ]


def test_seen_layouts_bring_outer_factors(calls: Calls) -> None:
    node = calls.call(aten.linear.default, calls.tensor(4, 8), calls.tensor(24, 8))
    assert "R, cut 0 outer 3 -> cut 1 outer 3" in texts(node, 2, [(1, cut(0, 3))])
    assert "R, cut 0 outer 3 -> cut 1 outer 3" in texts(node, 2, [(2, cut(1, 3))])
    assert "R, cut 0 outer 3 -> cut 1 outer 3" not in texts(node, 2)


def test_sizes_that_do_not_divide_are_left_out(calls: Calls) -> None:
    node = calls.call(aten.mm.default, calls.tensor(6, 4), calls.tensor(4, 9))
    assert texts(node, 3)[:2] == ["cut 0, R -> cut 0", "R, cut 1 -> cut 1"]


def test_what_is_added_is_unfinished_with_the_product(calls: Calls) -> None:
    node = calls.call(aten.addmm.default, calls.tensor(6), calls.tensor(4, 8), calls.tensor(8, 6))
    assert "U, cut 1, cut 0 -> U" in texts(node)
    assert "R, cut 1, cut 0 -> U" not in texts(node)


def test_view_follows_blocks(calls: Calls) -> None:
    x = calls.tensor(2, 6, 4)
    merged = calls.call(aten.view.default, x, [12, 4])
    assert texts(merged)[:2] == ["cut 0 -> cut 0", "cut 1 -> cut 0 outer 2"]
    split = calls.call(aten.view.default, calls.tensor(2, 24), [2, 6, 4])
    assert "cut 1 -> cut 1" in texts(split)
    assert "cut 1 outer 6 -> cut 2" in texts(split)
    crossed = calls.call(aten.view.default, calls.tensor(4, 6), [6, 4])
    assert texts(crossed) == ["U -> U", "M -> M"]


def test_parts_of_a_fused_dim(calls: Calls) -> None:
    x = calls.tensor(4, 24)
    assert "cut 1 outer 3 -> cut 1, cut 1, cut 1" in texts(calls.call(aten.split.Tensor, x, 8, 1))
    uneven = calls.call(aten.split_with_sizes.default, x, [16, 8], 1)
    assert "cut 1 outer 3 -> cut 1 outer 2, cut 1" in texts(uneven)
    assert "cut 1 outer 3 -> cut 1" in texts(calls.call(aten.slice.Tensor, x, 1, 8, 16))
    assert "cut 1, cut 1 -> cut 1 outer 2" in texts(calls.call(aten.cat.default, [x, x], 1))
    assert texts(calls.call(aten.slice.Tensor, x, 1, 1, 24))[0] == "cut 0 -> cut 0"


def test_broadcast_operands_are_replicated(calls: Calls) -> None:
    node = calls.call(aten.add.Tensor, calls.tensor(4, 6), calls.tensor(1, 6))
    assert texts(node) == ["cut 0, R -> cut 0", "cut 1, cut 1 -> cut 1", "U, U -> U"]


@pytest.mark.parametrize(
    ("target", "constants", "linear"),
    [
        (aten.add.Tensor, (1e-6,), False),
        (aten.sub.Tensor, (2,), False),
        (aten.mul.Tensor, (2,), True),
        (aten.div.Tensor, (2,), True),
        (aten.pow.Tensor_Scalar, (2,), False),
        (aten.relu.default, (), False),
        (aten.special_i0e.default, (), False),
        (aten.neg.default, (), True),
    ],
)
def test_linear_in_one_operand(
    calls: Calls, target: Any, constants: tuple[Any, ...], linear: bool
) -> None:
    node = calls.call(target, calls.tensor(4, 6), *constants)
    assert ("U -> U" in texts(node)) is linear
    assert "cut 0 -> cut 0" in texts(node)


def test_fills_are_linear_with_zero_only(calls: Calls) -> None:
    x, mask = calls.tensor(4), calls.tensor(4, dtype=torch.bool)
    assert "U, R -> U" in texts(calls.call(aten.masked_fill.Scalar, x, mask, 0))
    assert "U, R -> U" not in texts(calls.call(aten.masked_fill.Scalar, x, mask, -1.0))
    assert "R, U -> U" in texts(calls.call(aten.where.ScalarOther, mask, x, 0.0))
    assert "R, U, U -> U" in texts(calls.call(aten.where.self, mask, x, x))


def test_sums_of_bools_count_but_bools_do_not_add_up(calls: Calls) -> None:
    mask = calls.tensor(4, 6, dtype=torch.bool)
    assert "cut 0 -> U" in texts(calls.call(aten.sum.dim_IntList, mask, [0]))
    assert texts(calls.call(aten.clone.default, mask)) == ["cut 0 -> cut 0", "cut 1 -> cut 1"]
    assert texts(calls.call(aten.any.dim, mask, 0)) == ["cut 1 -> cut 0"]


def test_fractions_are_not_cut_off_piece_by_piece(calls: Calls) -> None:
    x = calls.tensor(4)
    assert "U -> U" in texts(calls.call(aten._to_copy.default, x, dtype=torch.float64))
    assert "U -> U" not in texts(calls.call(aten._to_copy.default, x, dtype=torch.int64))
    assert "U -> U" not in texts(calls.call(aten.cumsum.default, x, 0, dtype=torch.int32))
    assert texts(calls.call(aten.sum.dim_IntList, x, [0], dtype=torch.int64)) == ["cut 0 -> U"]


def test_reductions(calls: Calls) -> None:
    x = calls.tensor(4, 6)
    assert texts(calls.call(aten.amax.default, x, [1], True)) == ["cut 0 -> cut 0", "cut 1 -> M"]
    assert texts(calls.call(aten.mean.dim, x, [1])) == [
        "cut 0 -> cut 0",
        "cut 1 -> U (mean)",
        "U -> U",
    ]
    assert texts(calls.call(aten.max.dim, x, 1)) == ["cut 0 -> cut 0, cut 0"]
    assert texts(calls.call(aten._softmax.default, x, 1, False)) == ["cut 0 -> cut 0"]


def test_embedding_rows_are_windows(calls: Calls) -> None:
    weight, ids = calls.tensor(12, 8), calls.tensor(4, 6, dtype=torch.int64)
    assert texts(calls.call(aten.embedding.default, weight, ids)) == [
        "cut 0, R -> U (window)",
        "cut 1, R -> cut 2",
        "R, cut 0 -> cut 0",
        "R, cut 1 -> cut 1",
        "U, R -> U",
    ]


def test_gradients_of_norm_weights_are_sums(calls: Calls) -> None:
    x, stat, w = calls.tensor(4, 6, 8), calls.tensor(4, 6, 1), calls.tensor(8)
    node = calls.call(
        aten.native_layer_norm_backward.default, x, x, [8], stat, stat, w, w, [True, True, True]
    )
    assert texts(node)[0] == "cut 0, cut 0, cut 0, cut 0, R, R -> cut 0, U, U"


def test_convolution_by_group_and_channel(calls: Calls) -> None:
    x, w = calls.tensor(2, 8, 5, 5), calls.tensor(12, 4, 3, 3)
    node = calls.call(
        aten.convolution.default, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2
    )
    assert texts(node)[:4] == [
        "cut 0, R -> cut 0",
        "cut 1 outer 2, cut 1 -> U",
        "cut 1, cut 0 -> cut 1",
        "R, cut 0 outer 2 -> cut 1 outer 2",
    ]


def test_causal_attention_keeps_its_queries(calls: Calls) -> None:
    q = calls.tensor(2, 4, 6, 8)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert texts(calls.call(op, q, q, q)) == [
        "cut 0, cut 0, cut 0 -> cut 0, cut 0",
        "cut 1, cut 1, cut 1 -> cut 1, cut 1",
        "cut 2, R, R -> cut 2, cut 2",
    ]
    assert len(texts(calls.call(op, q, q, q, 0.0, True))) == 2


@pytest.mark.parametrize(
    ("name", "options", "num_cuts"),
    [
        ("flash", (0.0, False, False), 3),
        ("flash", (0.0, True, False), 2),
        ("efficient", (None, True), 2),
        ("cudnn", (None, True), 3),
    ],
)
def test_attention_of_other_devices(name: str, options: tuple[Any, ...], num_cuts: int) -> None:
    graph = fx.Graph()
    query, key = graph.placeholder("q"), graph.placeholder("k")
    for node, heads in ((query, 4), (key, 2)):
        set_value(node, Value("input", (2, heads, 64, 8), torch.bfloat16))
        set_fake(node, torch.empty(2, heads, 64, 8, dtype=torch.bfloat16, device="meta"))
    target = getattr(aten, f"_scaled_dot_product_{name}_attention").default
    node = graph.call_function(target, (query, key, key, *options))
    set_value(node, Value())
    set_fake(node, run_fake(target, node.args, {}))
    found = strategies(node, 2)
    assert len(found) == num_cuts
    assert Strategy((cut(1),) * 3, (cut(1), cut(1)) + (R,) * (len(fake_of(node)) - 2)) in found


def test_an_unknown_op_has_no_rule(calls: Calls) -> None:
    assert not has_rule(aten.linalg_svd.default)
    assert strategies(calls.call(aten.linalg_svd.default, calls.tensor(4, 4)), 2) == []


def test_every_rule_names_an_op() -> None:
    for name in RULES:
        namespace, packet, *overload = name.split(".")
        if namespace == "aten":
            assert hasattr(aten, packet), name
            assert set(overload) <= set(getattr(aten, packet).overloads()), name


def test_names() -> None:
    assert name_of(aten.add.Tensor) == "aten.add.Tensor"
    assert name_of(ops.weight_grad) == "partc.ops.weight_grad"


def test_maxima_pass_moves_only(calls: Calls) -> None:
    x = calls.tensor(4, 6)
    passes = {
        M for s in strategies(calls.call(aten.permute.default, x, [1, 0]), 2) if s.outs[0] == M
    }
    assert passes == {M}
    assert all(s.outs[0] != M for s in strategies(calls.call(aten.exp.default, x), 2))
