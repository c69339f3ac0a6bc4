"""Which values share memory, and where a result may therefore be written over an operand."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from partc.cost.storage import GRADS_OF_ACTIVATIONS
from partc.graph import collectives, fake_of, is_backward, is_tensor, ops, value
from partc.graph.given_back import result_of

aten = torch.ops.aten
VIEWS = {
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze",
    "expand", "expand_as", "slice", "select", "unflatten", "flatten", "split",
    "split_with_sizes", "unbind", "chunk", "diagonal", "as_strided", "narrow", "unfold",
    "view_as_complex", "view_as_real", "contiguous", "movedim", "alias", "detach", "mT",
    "swapaxes",
}  # fmt: skip
SUMS = (aten.add.Tensor, aten.sub.Tensor, ops.cross_entropy_grad)
WRITES = (  # write entries into a copy of their first operand; their twin `_` into the operand
    aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.index_add.default,
    aten.index_copy.default, aten.index_put.default, aten._unsafe_index_put.default,
)  # fmt: skip
FILLED = (
    aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default, aten.full.default,
    aten.new_full.default, aten.full_like.default, aten.ones.default, aten.new_ones.default,
)  # fmt: skip
BIG = 2  # log-probabilities are worth it where they take more than 1/2 of the biggest value


def is_view(node: fx.Node) -> bool:
    """Whether a call's result may share memory with its first operand."""
    return _gives_view(node.target)


@cache
def _gives_view(target: Any) -> bool:
    if target in (operator.getitem, collectives.keep_piece, collectives.wait):
        return True
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    return schema.name.split("::")[1] in VIEWS or any(r.alias_info for r in schema.returns)


def shares(node: fx.Node) -> bool:
    """Whether a value may lie in the memory of its first operand.

    The getitem of an op with several results (a layer norm) does not: each result has memory of its
    own. The getitem of a ``split`` does.
    """
    if node.op != "call_function" or not is_view(node):
        return False
    return node.target is not operator.getitem or is_view(node.all_input_nodes[0])


def owner(node: fx.Node) -> fx.Node:
    """The node whose call allocated the memory of a value: ``x`` for ``x.view(...).t()``."""
    while shares(node):
        node = node.all_input_nodes[0]
    return node


def copies(node: fx.Node) -> bool:
    """Whether a ``reshape`` or ``contiguous`` copies, as its operand's strides allow no view."""
    if node.target not in (aten.reshape.default, aten.contiguous.default):
        return False
    operand = fake_of(node.all_input_nodes[0])
    if node.target is aten.contiguous.default:
        return not operand.is_contiguous()
    return _reshape_copies(operand.shape, operand.stride(), fake_of(node).shape)


@lru_cache(maxsize=4096)
def _reshape_copies(shape: torch.Size, stride: tuple[int, ...], wanted: torch.Size) -> bool:
    """Whether elements that lie at these strides have to move for another shape."""
    with _disable_current_modes():
        operand = torch.empty_strided(shape, stride, device="meta")
        result = operand.reshape(wanted)
    return bool(result.untyped_storage()._cdata != operand.untyped_storage()._cdata)


SHAPED_LIKE = {"ones_like", "zeros_like", "empty_like", "full_like", "rand_like", "randn_like"}


def _reads(user: fx.Node) -> bool:
    """Whether a call reads its operand's numbers; ``zeros_like`` reads only the shape."""
    schema = getattr(user.target, "_schema", None)
    return schema is None or schema.name.split("::")[1] not in SHAPED_LIKE


def overwritable(order: Sequence[fx.Node]) -> set[fx.Node]:
    """The all_reduces that may work in place, as no later call reads their operand.

    ``order`` has the calls of one function in execution order. An operand from outside of the
    function is not overwritten, nor one that the step returns.
    """
    at = {node: i for i, node in enumerate(order)}
    sharing: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        sharing.setdefault(owner(node), []).append(node)
    found = set()
    for node in order:
        if node.target is not collectives.all_reduce:
            continue
        operand = node.all_input_nodes[0]
        home = owner(operand)
        users = [u for n in sharing.get(home, []) for u in n.users if u is not node]
        readers = filter(_reads, users)
        early = all(u in at and at[u] < at[node] for u in readers)
        own = home in at and home.op == "call_function" and result_of(home) is None
        if own and early and _is_plain(operand):
            found.add(node)
    return found


def accumulations(
    order: Sequence[fx.Node], kept: set[fx.Node], *, sums_only: bool = False
) -> dict[fx.Node, fx.Node]:
    """The calls whose result may be written over an operand, each with this operand.

    These are sums (``a += b``, ``a -= b``) and the gradient of a cross entropy; without
    ``sums_only`` also products of a gradient, gradients of activations, log-probabilities, and
    entries that are written into new zeros (``zeros.scatter_(1, ids, x)``).
    A result whose strides are not its operand's is not: calls behind it may be right for these
    strides alone. ``order`` has the calls of one function, ``kept`` those that something outside
    reads.
    """
    memory = _Memory(order, kept)
    biggest = max(map(num_bytes, order), default=0)
    found: dict[fx.Node, fx.Node] = {}
    for node in order:
        if sums_only and node.target not in SUMS:
            continue
        if node.target is aten._log_softmax.default and num_bytes(node) <= biggest // BIG:
            continue
        for into in _overwritten_by(node):
            if alike(node, into) and _is_plain(node) and memory.is_free(into, node):
                viewed = node.target is aten._log_softmax.default
                found.setdefault(node, owner(into) if viewed else into)
    return found


def _overwritten_by(node: fx.Node) -> Sequence[fx.Node]:
    """The operands over which a call may write its result, provided that no other call needs them.

    For a sum of the forward: the left operand, as one would write by hand. For a sum of the
    backward: any operand. For a product: an operand that is a gradient.
    """
    operands = [n for n in node.args if isinstance(n, fx.Node) and is_tensor(n)]
    if node.target is ops.cross_entropy_grad:
        return operands[1:2]
    if node.target is aten._log_softmax.default:
        rows = node.args[1] in (-1, fake_of(node).dim() - 1) and fake_of(node).dim() > 1
        return operands if rows else []
    if node.target in GRADS_OF_ACTIVATIONS:
        return operands[:1]
    if node.target in WRITES:
        return operands[:1] if operands[0].target in (*FILLED, *WRITES) else []
    if node.kwargs or len({owner(n) for n in operands}) < 2:
        return []
    if node.target is aten.mul.Tensor:
        return [n for n in operands if is_backward(node) and value(n).forward]
    if node.target is aten.add.Tensor and is_backward(node):
        return operands
    return operands[:1] if node.target in (aten.add.Tensor, aten.sub.Tensor) else []


class _Memory:
    """Which values of one function share memory, and when each is last read."""

    def __init__(self, order: Sequence[fx.Node], kept: set[fx.Node]) -> None:
        self.at = {node: i for i, node in enumerate(order)}
        self.kept = kept
        self.sharing: dict[fx.Node, list[fx.Node]] = {}
        for node in order:
            self.sharing.setdefault(owner(node), []).append(node)

    def is_free(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether ``reader`` may overwrite a value: it is the last call that reads its memory.

        The memory must be allocated in this function, by no collective, and not be sent by one.
        """
        home = owner(node)
        moved = (*collectives.COLLECTIVES, *collectives.LOCAL, collectives.wait)
        if home not in self.at or home.target in moved or not fake_of(node).is_contiguous():
            return False
        if result_of(home) is not None:
            return False
        family = self.sharing[home]
        readers = {u for n in family for u in n.users} - {reader}
        before = all(u in self.at and self.at[u] < self.at[reader] for u in readers)
        sent = any(u.target in collectives.COLLECTIVES for u in readers)
        return before and not sent and self.kept.isdisjoint(family)


def alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether tensors have one shape and one dtype."""
    return bool(fake_of(a).shape == fake_of(b).shape and fake_of(a).dtype == fake_of(b).dtype)


def _is_plain(node: fx.Node) -> bool:
    return is_tensor(node) and bool(fake_of(node).is_contiguous())


def num_bytes(node: fx.Node) -> int:
    """The bytes of a rank's shard of a value; 0 for what is no tensor."""
    fake = fake_of(node)
    return fake.numel() * fake.element_size() if is_tensor(node) else 0
