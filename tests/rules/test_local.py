"""How calls are written on pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from partc.graph import Value, fake_of, ops, set_fake, set_value, tensor_args, value
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, R, Sharding, U, cut
from partc.rules import Strategy, strategies, write_local_call
from tests.rules.calls import MODE, Calls, pick

aten = torch.ops.aten
TP2 = Mesh((("tp", 2),))


@pytest.fixture
def calls() -> Calls:
    return Calls()


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
            set_fake(place, torch.empty(shape, dtype=known.dtype))
        operands.append(place)
    with MODE:
        return write_local_call(out, node, operands, chosen, mesh)


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
    whole = Sharding.of({"tp": out}, TP2).local_shape(tuple(fake_of(node).shape), TP2)
    assert tuple(fake_of(local).shape) == whole


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
    set_fake(operands[0], fake_of(d_loss))
    with MODE:
        second = write_local_call(
            first.graph, backward, [*operands, operands[0]], {"tp": by_class[1]}, TP2
        )
    assert second.args[2] is first.args[1]


def test_ignored_targets_are_outside_of_every_window(calls: Calls) -> None:
    scores, target = calls.tensor(4, 12), calls.tensor(4, dtype=torch.int64)
    node = calls.call(aten.nll_loss_forward.default, scores, target, None, 2, 7)
    local = on_pieces(node, next(s for s in strategies(node, 2) if s.variant))
    window = local.args[1]
    assert isinstance(window, fx.Node)
    assert window.kwargs == {"ignore": 7, "outside": -100, "of": 12}
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
        set_fake(place, fake_of(whole)[:, ::2] if fake_of(whole).dim() > 1 else fake_of(whole))
    strategy = Strategy((cut(1),) * 4 + (R, R), (cut(1), U, U))
    with MODE:
        local = write_local_call(out, node, operands, {"tp": strategy}, TP2)
    assert all(isinstance(a, fx.Node) and fake_of(a).is_contiguous() for a in local.args[3:5])
