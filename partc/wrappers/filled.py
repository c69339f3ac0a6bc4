"""Inputs that ``pad`` names, filled up to the longest of all ranks, by place or by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from partc.errors import UsageError
from partc.wrong_calls import did_you_mean, quoted

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (*_BY_PLACE, inspect.Parameter.KEYWORD_ONLY)


def inputs_of(call: Callable[..., Any], *, of_loss: bool, by_place: bool = False) -> list[str]:
    """The names of a call's arguments; of a loss those behind the model.

    ``by_place``: of those alone that may be given without their names.
    """
    each = [*inspect.signature(call).parameters.values()][int(of_loss) :]
    return [p.name for p in each if p.kind in (_BY_PLACE if by_place else _BY_NAME)]


def check_names_of_pad(pad: Mapping[str, float], known: Collection[str]) -> None:
    """UsageError for a name that no input has."""
    unknown = next((name for name in pad if name not in known), None)
    if unknown is not None:
        listed = ", ".join(sorted(known))
        raise UsageError(
            where=f"pad={{{unknown!r}: ...}}", what="there is no such input",
            why=f"the inputs are {listed}", do=did_you_mean(unknown, known) or "Take one of these.",
        )  # fmt: skip


def named_tensors(
    pad: Mapping[str, float], places: Sequence[str], args: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The arguments that ``pad`` names, by name, in one order on all ranks; UsageError for one
    that is no tensor.
    """
    given = {**dict(zip(places, args, strict=False)), **named}
    found = {name: given[name] for name in sorted(given) if name in pad and given[name] is not None}
    other = next((name for name, x in found.items() if not isinstance(x, Tensor)), None)
    if other is not None:
        raise UsageError(
            where=f"pad={{{other!r}: ...}}", what=f"the input is {quoted(found[other])}",
            why="a number fills up a tensor",
            do="Fill up its tensors in collate_fn, or pass them as inputs of their own.",
        )  # fmt: skip
    return found


def longer(x: Tensor, sizes: Sequence[int], value: float) -> Tensor:
    """A tensor whose dims behind the rows are filled up to ``sizes``."""
    missing = [want - has for want, has in zip(sizes, x.shape[1:], strict=True)]
    sides = [side for more in reversed(missing) for side in (0, more)]
    return F.pad(x, sides, value=value) if any(missing) else x
