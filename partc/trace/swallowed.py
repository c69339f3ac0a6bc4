"""Notice a refusal of the trace that the model's own ``try`` has caught.

``try: m = float(y.max())`` with ``except Exception: m = 1.0`` takes another way on tensors without
values than it takes on real ones, and a program would go that way for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)

from partc.errors import TraceError
from partc.trace.source_lines import source_here

# What asks for values; ``of_floats`` says whether those of floating-point numbers.
OF_VALUES: Any = (DataDependentOutputException, DynamicOutputShapeException)


class Refused:
    """What was refused while the user's code runs, by the refusal of the line that met it."""

    now: ClassVar[dict[int, tuple[Exception, str]] | None] = None
    derived: ClassVar[bool] = False  # whether that code took derivatives

    @classmethod
    def note(cls, error: Exception) -> None:
        """Note that a value was asked for, at the user's line that is running."""
        if cls.now is not None:
            cls.now.setdefault(id(error), (error, source_here()))

    @classmethod
    def forget(cls, error: Exception) -> None:
        """Forget one that partc itself has met with an answer that is right for all values."""
        if cls.now is not None:
            cls.now.pop(id(error), None)


@contextmanager
def none_swallowed() -> Iterator[None]:
    """Run the user's code; TraceError where it returns though something in it was refused."""
    before, Refused.now, Refused.derived = Refused.now, {}, False
    TraceError.made, made = [], TraceError.made
    kept = {name: _of_class(name) for name in _VALUES_OF}
    for name, method in _VALUES_OF.items():
        type.__setattr__(FakeTensor, name, method)
    try:
        yield
        caught, refused = list(Refused.now.values()), TraceError.made
    finally:
        Refused.now, TraceError.made = before, made
        for name, method in kept.items():
            if method is None:
                type.__delattr__(FakeTensor, name)
            else:
                type.__setattr__(FakeTensor, name, method)
    if refused:
        raise refused[0]
    if caught:
        raise _caught(*caught[0])


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an op gives; that it needs values, or is of a backward, is noted."""
    if Refused.now is not None and torch._C._current_autograd_node() is not None:
        Refused.derived = True
    try:
        return func(*args, **kwargs)
    except OF_VALUES as error:
        error.of_floats = bool(args) and getattr(args[0], "is_floating_point", bool)()
        Refused.note(error)
        raise


def _of_class(name: str) -> Any:
    return vars(FakeTensor).get(name)


def _noted(name: str) -> Callable[..., Any]:
    """A method of tensors that gives values to Python, whose failure is noted."""
    plain: Any = getattr(FakeTensor, name)

    def method(self: FakeTensor, *args: Any, **named: Any) -> Any:
        try:
            return plain(self, *args, **named)
        except (RuntimeError, TypeError) as error:
            Refused.note(error)
            raise

    return method


def _formatted(self: FakeTensor, spec: str) -> str:
    """A number as a format asks for it, where it follows from constants alone."""
    if spec and self.dim() == 0:
        return format(self.item(), spec)
    return object.__format__(self, spec)


_VALUES_OF: dict[str, Callable[..., Any]] = {
    "numpy": _noted("numpy"), "tolist": _noted("tolist"), "__array__": _noted("__array__"),
    "__format__": _formatted,
}  # fmt: skip


def _caught(error: Exception, source: str) -> TraceError:
    return TraceError(
        where=source,
        what="Python code asks for the value of a tensor, and catches the refusal",
        why="while tracing, tensors have shapes but no values: a program would do in every step "
        f"what stands behind the except ({type(error).__name__})",
        do="Use torch.where instead of a branch, return the tensor itself beside the loss, or "
        "move this code out of the step.",
    )
