"""Where the first NaN of a step comes from: the step is run once more, and each op looked at.

What is infinite may be meant, as in a mask. So the first op is looked for that makes a NaN of
numbers without one; and, before it, the first that makes infinity of finite numbers by arithmetic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from partc.plan.sharding import DTYPE_NAMES
from partc.program.role import Role
from partc.program.stage.run_state import Watch
from partc.program.stage.runtime import Stage
from partc.program.user_lines import TEXT, at, file_of, path_in_model
from partc.program.wanted import Wanted

# What these give was said in numbers, or is memory that nobody has written to.
_FILLS = ("empty", "full", "fill", "where", "new_", "scalar_tensor", "resize", "_to_copy", "lift")
_TRANSFERS = ("c10d", "_c10d_functional")  # what arrives was made by other ranks


@dataclass(frozen=True)
class Origin:
    """Where a rank's first bad number was made.

    ``order``: the number of ops before it; of ranks with one program that of the first says most.
    ``text``: what is said of it.
    """

    order: int
    text: str


class FirstBad(TorchDispatchMode):
    """Looks at what each op takes and gives, until one makes a NaN."""

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where, self.count = where, 0
        self.infinite: Origin | None = None
        self.nan: Origin | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        self.count += 1
        if self.nan is not None or func.namespace in _TRANSFERS:
            return func(*args, **kwargs)
        taken = list(numbers((args, kwargs)))
        had_nan, had_infinite = has_nan(taken), has_infinite(taken)
        told = ", ".join(described(x) for x in taken[:3])  # before an op that writes in place
        given = func(*args, **kwargs)
        found = list(numbers(given))
        if not func._opname.startswith(_FILLS):
            self._look(func, told, found, had_nan=had_nan, had_infinite=had_infinite)
        return given

    def _look(
        self, func: Any, told: str, found: list[Tensor], *, had_nan: bool, had_infinite: bool
    ) -> None:
        if not had_nan and has_nan(found):
            text = f"the first NaN is made in {self.where()} by {func._opname} of {told}"
            self.nan = Origin(self.count, text)
        elif self.infinite is None and not (had_nan or had_infinite) and has_infinite(found):
            text = f"the first infinity is made in {self.where()} by {func._opname} of {told}"
            self.infinite = Origin(self.count, text)

    @property
    def origin(self) -> Origin | None:
        """What was found: the first infinity is told with the NaN that followed."""
        if self.nan is None or self.infinite is None:
            return self.nan or self.infinite
        return Origin(self.infinite.order, f"{self.infinite.text}; {self.nan.text}")


def search(stage: Stage, run: Callable[[], object]) -> Origin | None:
    """Where a step of a stage makes its first bad number on this rank.

    ``run`` does the step once more: all ranks call this together.
    """
    running: list[Role] = []
    mode = FirstBad(lambda: _place(running, stage))
    with _noting_roles(stage, running), torch.compiler.set_stance("force_eager"), mode:
        run()
    return mode.origin


# numbers -------------------------------------------------------------------------------------
def is_finite(x: Tensor) -> bool:
    """Whether all elements of a tensor are finite; integers are."""
    return not (has_nan([x]) or has_infinite([x]))


def has_nan(tensors: Iterable[Tensor]) -> bool:
    return any(bool(x.isnan().any()) for x in tensors)


def has_infinite(tensors: Iterable[Tensor]) -> bool:
    return any(bool(x.isinf().any()) for x in tensors)


def described(x: Tensor) -> str:
    """``f32[8,64] from -3.1 to 88.9``: its shape, and between which numbers its elements lie."""
    shape = f"{DTYPE_NAMES.get(x.dtype, x.dtype)}[{','.join(map(str, x.shape))}]"
    if not x.numel() or x.is_complex():
        return shape
    low, high = (each.item() for each in torch.aminmax(x.float()))
    return f"{shape} from {low:.4g} to {high:.4g}"


def numbers(values: Any) -> Iterator[Tensor]:
    """The tensors of numbers that may be NaN."""
    for x in tree_iter(values):
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
            yield x


# places --------------------------------------------------------------------------------------
@contextmanager
def _noting_roles(stage: Stage, running: list[Role]) -> Iterator[None]:
    """Inside, ``running`` ends with the text that runs."""
    state = stage._own.state
    before: Watch = state.watch

    def watch(role: Role, wanted: Wanted) -> AbstractContextManager[None]:
        running.append(role)
        return before(role, wanted)

    state.watch = watch
    try:
        yield
    finally:
        state.watch = before


def _place(running: list[Role], stage: Stage) -> str:
    """The module and line of the user's for the line that runs, and that line of the program."""
    frame, role = sys._getframe(), running[-1] if running else None
    while frame is not None:
        file, number = frame.f_code.co_filename, frame.f_lineno
        if file.startswith(TEXT) and role is not None and number in role.lines.of:
            module, source = role.lines.of[number]
            runs = [each.run for each in stage._own.members.values() if each.role is role]
            block = frame.f_locals.get("self")
            path = path_in_model(module, block, role, runs[0]) if runs else module
            return f"{at(path, source)} ({file_of(file)}:{number}, {frame.f_code.co_name})"
        frame = frame.f_back  # type: ignore[assignment]
    return "the step's own text"
