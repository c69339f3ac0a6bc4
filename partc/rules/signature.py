"""A call without its graph: an fx node or a hand-written case in, something that can be run out."""

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

from partc.graph import Value, fake_of, is_tensor, set_fake, set_value, value
from partc.graph.graph_edits import run_fake
from partc.plan.sharding import DTYPE_NAMES
from partc.rules.table import name_of

HUGE = 1e6  # beyond it a literal is a mask's "minus infinity" and means no number


@dataclass(frozen=True)
class Operand:
    """Stands in a Signature's arguments for its operand number ``index``."""

    index: int


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of an operand; ``high`` bounds the values of an integer one (0: unknown)."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    high: int = 0

    def __str__(self) -> str:
        return f"{DTYPE_NAMES.get(self.dtype, str(self.dtype))}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Signature:
    """One call of an op: its target, its arguments with Operands for tensors, and the operands."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[Spec, ...]

    @classmethod
    def of(cls, node: fx.Node) -> Signature:
        """The call at a node of a joint graph; a repeated argument becomes operands of its own."""
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
        """A case by hand, Specs in tensors' places: ``call(aten.mm.default, f(4, 6), f(6, 8))``."""
        specs: list[Spec] = []

        def operand(arg: Any) -> Any:
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
        """The same call with every leaf of its arguments mapped."""
        args, kwargs = map_aggregate((self.args, dict(self.kwargs)), leaf)
        return replace(self, args=_frozen(args), kwargs=tuple(kwargs.items()))

    def with_random_literals(self, seed: int) -> Signature:
        """The same call with other scalars: a rule that needs ``1e-6`` to be small must fail."""
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
        """Whether both calls read the same, operands of whatever shape."""
        return (self.target, self.args, self.kwargs) == (other.target, other.args, other.kwargs)

    def in_float64(self) -> Signature:
        """The same call with every floating dtype, operands and literals alike, made double."""
        operands = tuple(replace(spec, dtype=_double(spec.dtype)) for spec in self.operands)
        return replace(self.with_arguments(_double), operands=operands)

    def run(self, operands: Sequence[Tensor]) -> list[Tensor | None]:
        """The results on these operands, as a list like ``graph.results_of``."""
        return results_list(
            self.target(*self.filled(self.args, operands), **self._kwargs(operands))
        )

    @lru_cache(maxsize=256)  # noqa: B019 - a signature is a value, and is kept as its own key only
    def node(self) -> fx.Node:
        """The call as the one op of a small joint graph, for code that works on nodes."""
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
        with mode:
            set_fake(call, run_fake(self.target, call.args, call.kwargs))
        return call

    def _kwargs(self, operands: Sequence[Any]) -> dict[str, Any]:
        kwargs: dict[str, Any] = self.filled(dict(self.kwargs), operands)
        return kwargs

    @staticmethod
    def filled(arguments: Any, operands: Sequence[Any]) -> Any:
        """Arguments with the operands in their places."""

        def fill(arg: Any) -> Any:
            return operands[arg.index] if isinstance(arg, Operand) else arg

        return map_aggregate(arguments, fill)


def f(*shape: int) -> Spec:
    """A float operand of a case."""
    return Spec(shape)


def c(*shape: int) -> Spec:
    """A complex operand of a case."""
    return Spec(shape, torch.complex64)


def i(*shape: int, high: int = 0) -> Spec:
    """An integer operand of a case, with values below ``high``."""
    return Spec(shape, torch.int64, high)


def b(*shape: int) -> Spec:
    """A boolean operand of a case."""
    return Spec(shape, torch.bool)


def results_list(results: Any) -> list[Tensor | None]:
    """One entry for a tensor, one each for a tuple, None where a result is absent."""
    if isinstance(results, Tensor):
        return [results]
    if not isinstance(results, list | tuple):
        return [None]
    return [r if isinstance(r, Tensor) else None for r in results]


@cache
def fake_mode() -> FakeTensorMode:
    """The one mode whose fake tensors these small graphs hold."""
    return FakeTensorMode()


def _scalar_arguments(target: Callable[..., Any]) -> set[int | str]:
    """Positions and names of the arguments that are numbers, not sizes, dims or counts."""
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
    """Lists as tuples, so that a signature can be a dictionary key."""
    if isinstance(tree, (list, tuple)):
        return tuple(_frozen(item) for item in tree)
    return tree


def _text(arg: Any, operands: Sequence[Spec]) -> str:
    if isinstance(arg, Operand):
        return str(operands[arg.index])
    if isinstance(arg, tuple):
        return f"[{', '.join(_text(item, operands) for item in arg)}]"
    return str(arg)
