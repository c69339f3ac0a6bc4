"""Drop calls whose result equals their argument: detach, clone, a cast to the same dtype, x * 1.

A concatenation loses the parts that have no entries, and the backward of a batch norm the running
statistics that it does not read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partc.graph import Graph, fake_of, is_call, is_tensor, shape_of, value
from partc.graph.graph_edits import drop_dead, replace_by

aten = torch.ops.aten

COPIES = {
    aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh.default,
    aten.lift_fresh_copy.default, aten.contiguous.default,
}  # fmt: skip
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default}
OLD_NAMES: dict[Any, Any] = {  # of operators on integers
    aten.__lshift__.Scalar: aten.bitwise_left_shift.Tensor_Scalar,
    aten.__lshift__.Tensor: aten.bitwise_left_shift.Tensor,
    aten.__rshift__.Scalar: aten.bitwise_right_shift.Tensor_Scalar,
    aten.__rshift__.Tensor: aten.bitwise_right_shift.Tensor,
}
SAME_IF_SHAPE = {  # these change nothing where they leave the shape as it is
    aten.reshape.default, aten.expand.default, aten.slice.Tensor, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.repeat.default,
}  # fmt: skip
NEUTRAL = {  # the second argument that leaves the first one alone
    aten.mul.Tensor: 1, aten.mul.Scalar: 1, aten.div.Tensor: 1, aten.div.Scalar: 1,
    aten.add.Tensor: 0, aten.add.Scalar: 0, aten.sub.Tensor: 0, aten.sub.Scalar: 0,
    aten.pow.Tensor_Scalar: 1,
}  # fmt: skip
DEFAULTS = {"pin_memory": (None, False), "layout": (None, torch.strided), "non_blocking": (False,)}


def drop_noops(graph: Graph) -> None:
    """Replace a call without effect by its argument, and ``view`` and its like by ``reshape``."""
    for node in list(graph.calls()):
        if node.target in RESHAPES:
            node.target = aten.reshape.default
            node.args = (node.args[0], list(shape_of(node)))
        node.target = OLD_NAMES.get(node.target, node.target)
        _plain_kwargs(node)
        if node.target is aten._conj.default:
            _conjugate(node)
        elif node.target is aten.native_batch_norm_backward.default:
            _read_batch_alone(node)
        elif node.target is aten.cat.default and (parts := _filled(node)):
            _join(node, parts)
        elif is_call(node, aten._to_copy.default) and _counts(node.args[0]):
            node.args = node.args[0].args  # type: ignore[union-attr]
        elif _hands_on(node):
            same: Any = node.args[0]
            replace_by(node, same)
    drop_dead(graph)


def _counts(node: Any) -> bool:
    """Whether a call makes 0 and 1 of truth values: a further cast may read these."""
    if not is_call(node, aten._to_copy.default):
        return False
    return bool(fake_of(node.args[0]).dtype == torch.bool)


def _conjugate(node: fx.Node) -> None:
    """``_conj(x) -> conj_physical(x)``: torch's lazy conjugate is a view that not all ops take.

    The conjugate of a Python number is computed here.
    """
    node.target = aten.conj_physical.default
    of: Any = node.args[0]
    if not isinstance(of, fx.Node):
        for user in list(node.users):
            user.args = fx.node.map_aggregate(
                user.args, lambda a: of.conjugate() if a is node else a
            )


def _read_batch_alone(node: fx.Node) -> None:
    """In training (argument 7) the backward reads the batch's statistics, not the running ones.

    These are as the step leaves them: where a norm runs twice, a later stage may compute them.
    """
    if node.args[7] is True:
        node.args = (*node.args[:3], None, None, *node.args[5:])


def _filled(node: fx.Node) -> list[fx.Node]:
    """The parts of a concatenation that have entries: all that it needs, if they give its dtype."""
    parts: Any = node.args[0]
    filled = [each for each in parts if 0 not in shape_of(each)]
    return filled if {fake_of(each).dtype for each in filled} == {fake_of(node).dtype} else []


def _join(node: fx.Node, parts: list[fx.Node]) -> None:
    if len(parts) == 1:
        replace_by(node, parts[0])
    else:
        node.args = (parts, *node.args[1:])


def _hands_on(node: fx.Node) -> bool:
    """Whether a call's result equals its first argument."""
    if node.target in COPIES:
        return True
    if not node.args or not isinstance(node.args[0], fx.Node) or not is_tensor(node):
        return False
    source = node.args[0]
    if not is_tensor(source) or shape_of(source) != shape_of(node):
        return False
    if fake_of(source).dtype != fake_of(node).dtype:
        return False
    if node.target in SAME_IF_SHAPE or node.target == aten._to_copy.default:
        return True
    if node.target in NEUTRAL:
        other = node.args[1]
        return not isinstance(other, fx.Node) and bool(other == NEUTRAL[node.target])
    if node.target == aten.constant_pad_nd.default:  # [1, -1] keeps the shape and moves the values
        return not any(node.args[1])  # type: ignore[arg-type]
    return _keeps_order(node)


def _keeps_order(node: fx.Node) -> bool:
    """Whether a permutation leaves every dim where it is."""
    if node.target == aten.permute.default:
        dims: Any = node.args[1]
        return [d % len(dims) for d in dims] == list(range(len(dims)))
    if node.target == aten.transpose.int:
        rank = len(value(node).shape)
        first, second = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
        return first == second
    return False


def _plain_kwargs(node: fx.Node) -> None:
    """Drop keyword arguments that are defaults, memory formats, and devices.

    A printed program makes its tensors on the device of its rank.
    """
    node.kwargs = {
        name: given
        for name, given in node.kwargs.items()
        if name not in ("device", "memory_format") and given not in DEFAULTS.get(name, ())
    }
