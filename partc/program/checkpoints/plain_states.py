"""States of schedulers and alike as plain JSON, and back.

JSON says lists, numbers and texts. What else a state has is an object with one word: a tuple
``{"tuple": [1, 2]}``, a dict ``{"dict": [["last_epoch", 3]]}``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor

from partc.errors import RunError
from partc.plan.sharding import dtype_name
from partc.program.role import dtype_of

MOST_DEEP = 40  # lists in lists
_MAPPINGS: dict[str, Callable[[dict[Any, Any]], Any]] = {"dict": dict, "Counter": Counter}


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A value as JSON has it; ``where`` names it in errors."""
    if depth > MOST_DEEP:
        _no_value(where, value, f"it lies more than {MOST_DEEP} lists deep")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if type(value) in (list, tuple):
        parts = [plain(x, f"{where}[{i}]", depth + 1) for i, x in enumerate(value)]
        return parts if isinstance(value, list) else {"tuple": parts}
    if type(value) in _MAPPINGS.values():
        pairs = [
            [plain(k, f"a key of {where}", depth + 1), plain(x, f"{where}[{k!r}]", depth + 1)]
            for k, x in value.items()
        ]
        return {type(value).__name__: pairs}
    if isinstance(value, Tensor) and not value.shape and not value.is_complex():
        return {"tensor": [dtype_name(value.dtype), value.item()]}
    return _no_value(where, value, "a checkpoint holds no pickled objects")


def value_of(entry: Any) -> Any:
    """The value that an entry says; ValueError for one that says none."""
    if isinstance(entry, list):
        return [value_of(each) for each in entry]
    if not isinstance(entry, dict):
        return entry
    [(word, parts)] = entry.items()
    if word == "tensor":
        return torch.tensor(parts[1], dtype=dtype_of(parts[0]))
    if word == "tuple":
        return tuple(map(value_of, parts))
    if word not in _MAPPINGS:
        raise ValueError(f"{word!r} is no kind of value")
    return _MAPPINGS[word]({value_of(key): value_of(each) for key, each in parts})


def check_entry(entry: Any) -> dict[str, Any]:
    """The states in a list that is read; ValueError for one that says no value."""
    value_of(["states", *entry.values()])
    return dict(entry)


def _no_value(where: str, value: Any, why: str) -> NoReturn:
    raise RunError(
        where=where, what=f"is a {type(value).__name__}, not a plain value",
        why=f"{why}: a state is of numbers, texts, lists, tuples and dicts",
        do=f"{_instead(value)} Else leave it out of state_dict().",
    )  # fmt: skip


def _instead(value: Any) -> str:
    """What of an object a state can have, so that ``load_state_dict`` makes it again."""
    if isinstance(value, Tensor):
        return (
            "Give its numbers, x.tolist(), of which load_state_dict makes it again; or make it a "
            "buffer of the model, which is saved with it."
        )
    texts = {"tolist": "x.tolist()", "__fspath__": "str(x)", "isoformat": "x.isoformat()"}
    found = next((text for name, text in texts.items() if hasattr(value, name)), "")
    if isinstance(value, set | frozenset):
        found = "sorted(x)"
    if isinstance(value, Enum):
        found = "x.value"
    return f"Give {found or 'numbers and texts'}, of which load_state_dict makes it again."
