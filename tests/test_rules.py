"""The rule language, what the table says of typical calls, and how calls are written on pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from partc import ops
from partc.errors import RuleError
from partc.graph import Value, held, run_fake, set_held, set_value, tensor_args, value
from partc.mesh import Mesh
from partc.rules import Strategy, has_rule, localize, strategies
from partc.rules.notation import parse, resolve
from partc.rules.table import RULES, name_of
from partc.sharding import Layout, M, R, Sharding, U, cut
from partc.trace import trace
from tests.zoo import MODELS

aten = torch.ops.aten
MODE = FakeTensorMode()
TP2 = Mesh((("tp", 2),))


class Calls:
    """A small joint graph to which calls are added."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder("x")
        set_value(node, Value("input", shape, dtype, name=node.name))
        with MODE:
            set_held(node, torch.empty(shape, dtype=dtype))
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        set_value(node, Value())
        with MODE:
            set_held(node, run_fake(target, args, kwargs))
        return node


@pytest.fixture
def calls() -> Calls:
    return Calls()


def texts(node: fx.Node, num: int = 2, seen: Any = ()) -> list[str]:
    return [str(strategy) for strategy in strategies(node, num, seen)]


def on_pieces(node: fx.Node, strategy: Strategy, mesh: Mesh = TP2, axis: str = "tp") -> fx.Node:
    """The call as the localiser writes it for one strategy on one axis."""
    return on_axes(node, {axis: strategy}, mesh)


def on_axes(node: fx.Node, chosen: dict[str, Strategy], mesh: Mesh) -> fx.Node:
    out = fx.Graph()
    operands = []
    for i, whole in enumerate(tensor_args(node)):
        known = value(whole)
        sharding = Sharding.of({axis: s.ins[i] for axis, s in chosen.items()}, mesh)
        shape = sharding.local_shape(known.shape, mesh)
        assert shape is not None
        place = out.placeholder(f"x{i}")
        set_value(place, Value("input", known.shape, known.dtype, sharding))
        with MODE:
            set_held(place, torch.empty(shape, dtype=known.dtype))
        operands.append(place)
    with MODE:
        return localize(out, node, operands, chosen, mesh)


def pick(node: fx.Node, *outs: Layout, num: int = 2) -> Strategy:
    """The first strategy with these results."""
    return next(s for s in strategies(node, num) if s.outs == outs)


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
        set_held(node, torch.empty(2, heads, 64, 8, dtype=torch.bfloat16, device="meta"))
    target = getattr(aten, f"_scaled_dot_product_{name}_attention").default
    node = graph.call_function(target, (query, key, key, *options))
    set_value(node, Value())
    set_held(node, run_fake(target, node.args, {}))
    found = strategies(node, 2)
    assert len(found) == num_cuts
    assert Strategy((cut(1),) * 3, (cut(1), cut(1)) + (R,) * (len(held(node)) - 2)) in found


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


# how it is written on pieces -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "target", "args", "out", "expected"),
    [
        ((2, 6, 4), aten.view.default, ([12, 4],), cut(0, 2), ([6, 4],)),
        ((1, 6), aten.expand.default, ([4, 6],), cut(1), ([4, 3],)),
        ((4, 24), aten.slice.Tensor, (1, 8, 16), cut(1), (1, 4, 8)),
        (
            (4, 8),
            aten.slice_backward.default,
            ([4, 24], 1, 8, 16, 1),
            cut(1, 3),
            ([4, 12], 1, 4, 8, 1),
        ),
        ((4,), aten.select_backward.default, ([4, 6], 1, 3), cut(0), ([2, 6], 1, 3)),
        ((4, 24), aten.new_zeros.default, ([6, 2],), cut(0), ([3, 2],)),
        ((4, 24), aten.sum.dim_IntList, ([1],), cut(0), ([1],)),
    ],
)
def test_size_literals(
    calls: Calls, shape: tuple[int, ...], target: Any, args: Any, out: Layout, expected: Any
) -> None:
    node = calls.call(target, calls.tensor(*shape), *args)
    local = on_pieces(node, pick(node, out))
    assert local.args[1:] == expected
    whole = Sharding.of({"tp": out}, TP2).local_shape(tuple(held(node).shape), TP2)
    assert tuple(held(local).shape) == whole


def test_split_sizes_and_groups(calls: Calls) -> None:
    node = calls.call(aten.split_with_sizes.default, calls.tensor(4, 24), [16, 8], 1)
    assert on_pieces(node, pick(node, cut(1, 2), cut(1))).args[1:] == ([8, 4], 1)
    x, w = calls.tensor(2, 8, 5, 5), calls.tensor(12, 4, 3, 3)
    conv = calls.call(
        aten.convolution.default, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2
    )
    assert on_pieces(conv, pick(conv, cut(1))).args[-1] == 1


def test_group_norm_numbers(calls: Calls) -> None:
    x, w = calls.tensor(2, 8, 5), calls.tensor(8)
    node = calls.call(aten.native_group_norm.default, x, w, w, 2, 8, 5, 4, 1e-5)
    by_group = on_pieces(node, pick(node, cut(1), cut(1), cut(1)))
    assert by_group.args[3:7] == (2, 4, 5, 2)


def test_a_dim_of_one_left_by_a_cut_is_not_squeezed(calls: Calls) -> None:
    node = calls.call(aten.squeeze.default, calls.tensor(2, 1, 4))
    local = on_pieces(node, pick(node, cut(0)))
    assert (local.target, local.args[1]) == (aten.reshape.default, [1, 4])


def test_mean_is_divided_by_the_whole(calls: Calls) -> None:
    node = calls.call(aten.mean.dim, calls.tensor(4, 6), [1], True)
    local = on_pieces(node, pick(node, U))
    assert (local.target, local.args[1]) == (aten.div.Tensor, 6)


def test_window_of_rows(calls: Calls) -> None:
    weight, ids = calls.tensor(12, 8), calls.tensor(4, 6, dtype=torch.int64)
    node = calls.call(aten.embedding.default, weight, ids, 0)
    local = on_pieces(node, pick(node, U))
    assert local.target is ops.masked_embedding
    window = local.args[1]
    assert isinstance(window, fx.Node)
    assert (window.target, window.args[2]) == (ops.window, 6)


def test_window_on_two_axes_counts_the_larger_blocks_first(calls: Calls) -> None:
    mesh = Mesh((("dp", 3), ("tp", 2)))
    weight, ids = calls.tensor(12, 8), calls.tensor(4, 6, dtype=torch.int64)
    node = calls.call(aten.embedding.default, weight, ids)
    rows = pick(node, U)
    local = on_axes(node, {"dp": rows, "tp": rows}, mesh)
    windows = [n for n in local.graph.nodes if n.target is ops.window]
    assert [w.args[2] for w in windows] == [6, 2]
    held_rows: list[int] = []
    for rank in range(6):
        at = mesh.coords(rank)
        table = Sharding.of({"dp": cut(0), "tp": cut(0)}, mesh).local(torch.arange(12), at, mesh)
        every = ops.window(ops.window(torch.arange(12), at["tp"], 6), at["dp"], 2)
        held_rows += table.tolist()
        assert table.tolist() == torch.arange(12)[every >= 0].tolist()
    assert sorted(held_rows) == list(range(12))


def test_forward_and_backward_share_a_window(calls: Calls) -> None:
    d_loss, scores, target = calls.tensor(), calls.tensor(4, 12), calls.tensor(4, dtype=torch.int64)
    forward = calls.call(aten.nll_loss_forward.default, scores, target, None, 2, -100)
    backward = calls.call(
        aten.nll_loss_backward.default, d_loss, scores, target, None, 2, -100, d_loss
    )
    by_class = [next(s for s in strategies(n, 2) if s.variant) for n in (forward, backward)]
    first = on_pieces(forward, by_class[0])
    local_scores, local_target = first.graph.find_nodes(op="placeholder")
    operands = [local_scores.graph.placeholder("d"), local_scores, local_target]
    set_value(operands[0], value(d_loss))
    set_held(operands[0], held(d_loss))
    with MODE:
        second = localize(first.graph, backward, [*operands, operands[0]], {"tp": by_class[1]}, TP2)
    assert second.args[2] is first.args[1]


def test_ignored_targets_are_outside_of_every_window(calls: Calls) -> None:
    scores, target = calls.tensor(4, 12), calls.tensor(4, dtype=torch.int64)
    node = calls.call(aten.nll_loss_forward.default, scores, target, None, 2, 7)
    local = on_pieces(node, next(s for s in strategies(node, 2) if s.variant))
    window = local.args[1]
    assert isinstance(window, fx.Node)
    assert window.kwargs == {"ignore": 7, "outside": -100}
    assert local.args[4] == -100


def test_window_ops() -> None:
    ids = torch.tensor([0, 5, 6, 11, 7])
    mine = ops.window(ids, 1, 6, ignore=7)
    assert mine.tolist() == [-1, -1, 0, 5, -1]
    rows = ops.masked_embedding(torch.arange(6.0).unsqueeze(1) + 1, mine)
    assert rows.flatten().tolist() == [0, 0, 1, 6, 0]
    picked: Tensor = ops.masked_gather(torch.arange(6.0) + 1, 0, mine)
    assert picked.tolist() == [0, 0, 1, 6, 0]


def test_statistics_are_made_contiguous(calls: Calls) -> None:
    x, stat, w = calls.tensor(4, 6, 8), calls.tensor(4, 6, 1), calls.tensor(8)
    node = calls.call(
        aten.native_layer_norm_backward.default, x, x, [8], stat, stat, w, w, [True, True, True]
    )
    out = fx.Graph()
    operands = [out.placeholder(f"x{i}") for i in range(6)]
    for place, whole in zip(operands, tensor_args(node), strict=True):
        set_value(place, value(whole))
        set_held(place, held(whole)[:, ::2] if held(whole).dim() > 1 else held(whole))
    strategy = Strategy((cut(1),) * 4 + (R, R), (cut(1), U, U))
    with MODE:
        local = localize(out, node, operands, {"tp": strategy}, TP2)
    assert all(isinstance(a, fx.Node) and held(a).is_contiguous() for a in local.args[3:5])


def test_maxima_pass_moves_only(calls: Calls) -> None:
    x = calls.tensor(4, 6)
    passes = {
        M for s in strategies(calls.call(aten.permute.default, x, [1, 0]), 2) if s.outs[0] == M
    }
    assert passes == {M}
    assert all(s.outs[0] != M for s in strategies(calls.call(aten.exp.default, x), 2))


# the table against real models ---------------------------------------------------------------
FAMILIES = ("bert", "convnext", "deepseek_v3", "gpt2", "gpt_neox", "resnet", "swin", "t5")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_call_of_a_model_has_a_rule(family: str) -> None:
    case = MODELS[family]()
    nodes = list(trace(case.model, case.inputs, case.loss).calls())
    assert sorted({name_of(n.target) for n in nodes if not has_rule(n.target)}) == []
    cuttable = sum(bool(strategies(node, 2)) for node in nodes)
    assert cuttable > 0.9 * len(nodes)  # the rest are counters, orders and constants
