"""Arguments that stand in each other's place, told by what they are: ``Traced(model, loss, batch)``
where it is ``Traced(model, batch, loss)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from os import PathLike
from typing import TYPE_CHECKING, Any

from partc.errors import UsageError

if TYPE_CHECKING:
    from inspect import Signature

MOST = 5  # arguments that are tried in other orders
_CALLED = {"inputs": "batch"}  # what an argument is, where its name says less


def misplaced(
    call: str, known: Signature, args: Sequence[Any], named: Mapping[str, Any]
) -> UsageError | None:
    """The refusal of a call whose arguments fit in another order, and in one alone; else None.

    It is asked for a call that has failed, so that no call which works is refused.
    """
    try:
        given = known.bind(*args, **named).arguments
    except TypeError:  # what is missing, or too much, is told otherwise
        return None
    wrong = [name for name, x in given.items() if x is not None and not _fits(name, x)]
    if not 1 < len(wrong) <= MOST:
        return None
    orders = [
        order for order in permutations(wrong)
        if all(_fits(name, given[of]) for name, of in zip(wrong, order, strict=True))
    ]  # fmt: skip
    if len(orders) != 1:
        return None
    places = ", ".join(f"{name}={_told(given[name])}" for name in wrong)
    each = (f"the {_CALLED.get(n, n)} as {of}" for n, of in zip(wrong, orders[0], strict=True))
    return UsageError(
        where=f"{call}({places})", what="arguments stand in each other's place",
        why=f"it is given {', '.join(each)}", do=f"Write {call}({_written(known, given)}).",
    )  # fmt: skip


def _written(known: Signature, given: Mapping[str, Any]) -> str:
    """The arguments that are given as they are written, in order: ``model, mesh, loss=loss``."""
    kinds = {name: known.parameters[name].kind for name in given if name in _KINDS}
    return ", ".join(
        f"{name}={name}" if kind is kind.KEYWORD_ONLY else name for name, kind in kinds.items()
    )


def _fits(name: str, given: Any) -> bool:
    """Whether an argument of this name may be this; True where its kind is not known."""
    return name not in _KINDS or _KINDS[name](given)


def _told(given: Any) -> str:
    if isinstance(given, str):
        return repr(given) if len(given) < 40 and "\n" not in given else "'...'"
    if callable(given) and hasattr(given, "__name__"):
        return str(given.__name__)
    kind = type(given).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def _is_ours(given: Any, *names: str) -> bool:
    """Whether a value is of one of partc's classes, which rooms above have."""
    kind = type(given)
    return kind.__name__ in names and kind.__module__.partition(".")[0] == "partc"


def _is_model(given: Any) -> bool:
    from torch import nn

    own = isinstance(given, nn.Module) and type(given).__module__ != "torch.nn.modules.loss"
    return own or _is_ours(given, "Traced")


def _is_batch(given: Any) -> bool:
    """Tensors, alone or in what holds them."""
    from torch import Tensor

    if isinstance(given, Mapping):
        return any(map(_is_batch, given.values()))
    return isinstance(given, Tensor) or (
        isinstance(given, list | tuple) and any(map(_is_batch, given))
    )


def _is_loss(given: Any) -> bool:
    from torch import Tensor, nn

    plain = callable(given) and not isinstance(given, nn.Module | Tensor | type)
    criterion = isinstance(given, nn.Module) and not _is_model(given)
    return (plain or criterion) and not _is_ours(given, "Program", "Graph", "Traced")


def _is_mesh(given: Any) -> bool:
    sizes = isinstance(given, Mapping) and all(isinstance(x, int) for x in given.values())
    text = isinstance(given, str) and ("=" in given or given.endswith(".toml"))
    return (
        (text and "\n" not in given)
        or sizes
        or _is_ours(given, "Mesh")
        or type(given).__name__ == "DeviceMesh"
    )


def _is_plan(given: Any) -> bool:
    text = isinstance(given, str) and ("=" not in given or "\n" in given)
    return text or isinstance(given, PathLike) or _is_ours(given, "Plan")


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "path": lambda given: isinstance(given, str | PathLike),
    "model": _is_model, "inputs": _is_batch, "loss": _is_loss, "mesh": _is_mesh, "plan": _is_plan,
    "program": lambda given: _is_ours(given, "Program"),
    "graph": lambda given: _is_ours(given, "Graph"),
}  # fmt: skip
