"""A call without its graph: target, literals, and the shapes and dtypes of its operands.

A signature is made from an fx node or by hand, can be run on tensors, and is a dictionary key.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate

from partc.errors import RuleError, UsageError
from partc.graph import Value, fake_of, is_tensor, set_fake, set_value, value
from partc.graph.fake_calls import quiet_log
from partc.graph.graph_edits import run_fake
from partc.plan.sharding import DTYPE_NAMES
from partc.rules.table import name_of
from partc.wrong_calls import quoted

HUGE = 1e6  # a larger literal is a mask's "minus infinity", which must not be redrawn


@dataclass(frozen=True)
class Operand:
    """The place of operand number ``index`` in a Signature's arguments."""

    index: int


@dataclass(frozen=True)
class Spec:
    """The shape and dtype of an operand; integers are drawn below ``high`` (0: unknown)."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    high: int = 0

    def __str__(self) -> str:
        return f"{DTYPE_NAMES.get(self.dtype, str(self.dtype))}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Signature:
    """One call of an op: target, arguments with `Operand` in tensors' places, operands' specs."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[Spec, ...]

    @classmethod
    def of(cls, node: fx.Node) -> Signature:
        """The signature of a node's call; a tensor that is given twice becomes two operands."""
        specs: list[Spec] = []

        def operand(arg: fx.Node) -> Operand:
            assert is_tensor(arg), f"{arg} is not a tensor"
            specs.append(Spec(tuple(value(arg).shape), fake_of(arg).dtype))
            return Operand(len(specs) - 1)

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operand)  # type: ignore[arg-type]
        assert callable(node.target)
        return cls(node.target, _frozen(args), tuple(kwargs.items()), tuple(specs))

    @classmethod
    def call(cls, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Signature:
        """A signature by hand, Specs for tensors: ``call(aten.mm.default, f(4, 6), f(6, 8))``.

        UsageError for what is no op.
        """
        if not callable(target) or isinstance(target, torch._ops.OpOverloadPacket):
            raise UsageError(
                where="Signature.call", what=f"the op is {quoted(target)}",
                why="a signature is of one overload of an op, itself and not its name",
                do="Write torch.ops.aten.mm.default, with its overload at the end.",
            )  # fmt: skip
        specs: list[Spec] = []

        def operand(arg: Any) -> Any:
            if isinstance(arg, Tensor):
                raise UsageError(
                    where="Signature.call", what="a tensor is among the arguments",
                    why="a signature has shapes and dtypes", do="Write f(4, 6) for f32[4,6].",
                )  # fmt: skip
            if not isinstance(arg, Spec):
                return arg
            specs.append(arg)
            return Operand(len(specs) - 1)

        args, kwargs = map_aggregate((args, kwargs), operand)
        return cls(target, _frozen(args), tuple(kwargs.items()), tuple(specs))

    @property
    def op(self) -> str:
        """The op's name: ``aten.mm.default``, ``partc.ops.weight_grad``."""
        return name_of(self.target)

    @property
    def packet(self) -> str:
        """The op's name without its overload."""
        is_aten = isinstance(self.target, torch._ops.OpOverload)
        return self.op.rpartition(".")[0] if is_aten else self.op

    def __str__(self) -> str:
        texts = [_text(arg, self.operands) for arg in self.args]
        texts += [f"{key}={_text(arg, self.operands)}" for key, arg in self.kwargs]
        return f"{self.op}({', '.join(texts)})"

    def with_arguments(self, leaf: Callable[[Any], Any]) -> Signature:
        """The call with a function applied to every leaf of its arguments."""
        args, kwargs = map_aggregate((self.args, dict(self.kwargs)), leaf)
        return replace(self, args=_frozen(args), kwargs=tuple(kwargs.items()))

    def with_random_literals(self, seed: int) -> Signature:
        """The call with random scalars, so that a rule fails that needs a scalar to be small."""
        draw = random.Random(seed)
        scalars = _scalar_arguments(self.target)

        def redraw(arg: Any, may_be_int: bool) -> Any:
            if isinstance(arg, float) and arg and abs(arg) < HUGE:
                return draw.uniform(0.2, 0.8) * (1 if arg > 0 else -1)
            is_number = isinstance(arg, int) and not isinstance(arg, bool)
            return draw.randint(2, 5) if is_number and may_be_int and arg else arg

        args = tuple(redraw(arg, i in scalars) for i, arg in enumerate(self.args))
        kwargs = tuple((key, redraw(arg, key in scalars)) for key, arg in self.kwargs)
        return replace(self, args=args, kwargs=kwargs)

    def has_text_of(self, other: Signature) -> bool:
        """Whether both calls have the same target and literals; operands' shapes may differ."""
        return (self.target, self.args, self.kwargs) == (other.target, other.args, other.kwargs)

    def in_float64(self) -> Signature:
        """The call with float64 for every floating dtype, of operands and among literals."""
        operands = tuple(replace(spec, dtype=_double(spec.dtype)) for spec in self.operands)
        return replace(self.with_arguments(_double), operands=operands)

    def run(self, operands: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the call on tensors; the results as a list, as ``graph.results_of`` gives them."""
        return results_list(
            self.target(*self.filled(self.args, operands), **self._kwargs(operands))
        )

    @lru_cache(maxsize=256)  # noqa: B019 - a signature is a value, and is kept as its own key only
    def node(self) -> fx.Node:
        """The call as the only op of a small graph, for code that needs a node.

        RuleError if the op does not take such operands.
        """
        graph, mode = fx.Graph(), fake_mode()
        placeholders = []
        for i, spec in enumerate(self.operands):
            place = graph.placeholder(f"x{i}")
            set_value(place, Value(kind="input", shape=spec.shape, dtype=spec.dtype, name=f"x{i}"))
            with mode:
                set_fake(place, torch.empty(spec.shape, dtype=spec.dtype))
            placeholders.append(place)
        kwargs = self.filled(dict(self.kwargs), placeholders)
        call = graph.call_function(self.target, self.filled(self.args, placeholders), kwargs)
        set_value(call, Value())
        try:
            with mode, quiet_log():
                set_fake(call, run_fake(self.target, call.args, call.kwargs))
        except Exception as error:  # whatever torch says of operands that do not fit
            raise RuleError(
                where=str(self), what="torch does not run such a call", why=str(error),
                do="Correct the shapes, dtypes and other arguments of the signature.",
            ) from error  # fmt: skip
        return call

    def _kwargs(self, operands: Sequence[Any]) -> dict[str, Any]:
        kwargs: dict[str, Any] = self.filled(dict(self.kwargs), operands)
        return kwargs

    @staticmethod
    def filled(arguments: Any, operands: Sequence[Any]) -> Any:
        """The arguments with ``operands`` in the places of their `Operand` entries."""

        def fill(arg: Any) -> Any:
            return operands[arg.index] if isinstance(arg, Operand) else arg

        return map_aggregate(arguments, fill)


def f(*shape: int) -> Spec:
    """The spec of a float32 operand."""
    return Spec(shape)


def c(*shape: int) -> Spec:
    """The spec of a complex64 operand."""
    return Spec(shape, torch.complex64)


def i(*shape: int, high: int = 0) -> Spec:
    """The spec of an int64 operand with values below ``high``."""
    return Spec(shape, torch.int64, high)


def b(*shape: int) -> Spec:
    """The spec of a boolean operand."""
    return Spec(shape, torch.bool)


def results_list(results: Any) -> list[Tensor | None]:
    """Results as a list, with None for absent results; a single tensor gives a list of one."""
    if isinstance(results, Tensor):
        return [results]
    if not isinstance(results, list | tuple):
        return [None]
    return [r if isinstance(r, Tensor) else None for r in results]


@cache
def fake_mode() -> FakeTensorMode:
    """The FakeTensorMode of all small graphs of signatures."""
    return FakeTensorMode()


def _scalar_arguments(target: Callable[..., Any]) -> set[int | str]:
    """The positions and names of the scalar arguments, which are no sizes, dims or counts."""
    if not isinstance(target, torch._ops.OpOverload):
        return set()
    arguments = enumerate(target._schema.arguments)
    numbers = [(i, a.name) for i, a in arguments if "number" in str(a.type)]
    return {key for pair in numbers for key in pair}


def _double(leaf: Any) -> Any:
    if isinstance(leaf, torch.dtype):
        if leaf.is_complex:
            return torch.complex128
        return torch.float64 if leaf.is_floating_point else leaf
    return leaf


def _frozen(tree: Any) -> Any:
    """A tree with tuples for lists, so that a signature can be a dictionary key."""
    if isinstance(tree, (list, tuple)):
        return tuple(_frozen(item) for item in tree)
    return tree


def _text(arg: Any, operands: Sequence[Spec]) -> str:
    if isinstance(arg, Operand):
        return str(operands[arg.index])
    if isinstance(arg, tuple):
        return f"[{', '.join(_text(item, operands) for item in arg)}]"
    return str(arg)
