"""Say what an op of torch writes to, as its schema tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any


@cache
def write_places(func: Any) -> tuple[tuple[int, str], ...]:
    """Number and name of each argument that an op writes to; none for a function of Python."""
    schema = getattr(func, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return tuple((i, each.name) for i, each in enumerate(arguments) if each.is_write)


def written_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What a call gives for the arguments that its op writes to: a tensor, a list, or None."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in write_places(func)]
