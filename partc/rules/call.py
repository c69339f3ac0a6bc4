"""The view of a call that rules have: arguments by name, tensors by slot, whole or local shapes."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from partc.graph import fake_of, literals, results_of, tensor_args, value

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call of an op, with its tensors by slot.

    A *slot* is a place for a tensor: one per tensor argument of the op's schema, in the order of
    the schema. A list of tensors has a slot per tensor. A slot without a tensor (an absent bias) is
    None.
    """

    target: Any
    arguments: Mapping[str, Any]  # by the schema's names, defaults filled in
    slots: tuple[fx.Node | None, ...]
    shapes: tuple[Shape | None, ...]  # of the slots' tensors
    dtypes: tuple[torch.dtype | None, ...]
    results: tuple[Shape | None, ...]
    result_dtypes: tuple[torch.dtype | None, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def shape(self, slot: int) -> Shape:
        """The shape of a slot's tensor; the slot must not be empty."""
        shape = self.shapes[slot]
        assert shape is not None
        return shape

    def rank(self, slot: int = 0) -> int:
        return len(self.shape(slot))

    def dim(self, name: str = "dim", slot: int = 0) -> int:
        """A dim argument as a number from 0: ``-1 -> 2`` for a tensor of three dims."""
        rank = max(self.rank(slot), 1)
        return int(self.arguments[name]) % rank

    def dim_list(self, name: str = "dim", slot: int = 0) -> list[int]:
        """An argument with a list of dims, as sorted numbers from 0; None or [] means all dims."""
        given = self.arguments.get(name)
        rank = self.rank(slot)
        given = [given] if isinstance(given, int) else given
        return sorted(d % max(rank, 1) for d in given) if given else list(range(rank))


@cache
def parameters(target: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Per argument of an op or function: its name, its default, whether it takes tensors."""
    if isinstance(target, torch._ops.OpOverload):
        return tuple(
            (a.name, _default(a), "Tensor" in str(a.type)) for a in target._schema.arguments
        )
    if target is operator.getitem:
        return (("input", None, True), ("index", None, False))
    signature = inspect.signature(target).parameters.values()
    return tuple((p.name, p.default, "Tensor" in str(p.annotation)) for p in signature)


def _default(argument: Any) -> Any:
    return argument.default_value if argument.has_default_value() else None


def arguments_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults filled in."""
    names = [name for name, _, _ in parameters(target)]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: given.get(name, default) for name, default, _ in parameters(target)}


def slot_nodes(target: Any, arguments: Mapping[str, Any]) -> tuple[fx.Node | None, ...]:
    """The nodes of a call's tensors by slot; None for an empty slot."""
    slots: list[Any] = []
    for name, _, takes_tensors in parameters(target):
        given = arguments[name]
        if takes_tensors:
            slots += given if isinstance(given, list | tuple) else [given]
    return tuple(s if isinstance(s, fx.Node) else None for s in slots)


def whole_call(node: fx.Node) -> Call:
    """The call with the shapes of whole tensors; ``node`` belongs to a whole graph."""
    return _call(node, lambda n: value(n).shape, [_shape(r) for r in results_of(node)])


def likeness(node: fx.Node) -> Hashable:
    """Equal for two calls of an op between which no rule can tell: other tensors, of one kind."""
    operands = [(value(n).shape, getattr(fake_of(n), "dtype", None)) for n in tensor_args(node)]
    results = [None if r is None else (r.shape, r.dtype) for r in results_of(node)]
    return node.target, literals(node), tuple(operands), tuple(results)


def local_call(node: fx.Node, local: Sequence[Shape | None], args: Any, kwargs: Any) -> Call:
    """The call with one rank's local shapes; ``args`` and ``kwargs`` have a local graph's nodes."""
    arguments = arguments_of(node.target, args, kwargs)
    return _call(node, lambda n: tuple(fake_of(n).shape), list(local), arguments)


def _call(
    node: fx.Node,
    shape_of: Callable[[fx.Node], Shape],
    results: list[Shape | None],
    arguments: Mapping[str, Any] | None = None,
) -> Call:
    if arguments is None:
        arguments = arguments_of(node.target, node.args, node.kwargs)
    slots = slot_nodes(node.target, arguments)
    # A getitem's operand is a tuple; a rule sees the picked tensor as the operand instead.
    picks = node.target is operator.getitem
    fakes = [None if s is None else fake_of(node if picks else s) for s in slots]
    tensors = [f if isinstance(f, Tensor) else None for f in fakes]
    shapes: list[Shape | None] = [
        None if s is None or t is None else results[0] if picks else shape_of(s)
        for s, t in zip(slots, tensors, strict=True)
    ]
    return Call(
        target=node.target,
        arguments=arguments,
        slots=slots,
        shapes=tuple(shapes),
        dtypes=tuple(None if t is None else t.dtype for t in tensors),
        results=tuple(results),
        result_dtypes=tuple(None if r is None else r.dtype for r in results_of(node)),
    )


def _shape(tensor: Tensor | None) -> Shape | None:
    return None if tensor is None else tuple(tensor.shape)
