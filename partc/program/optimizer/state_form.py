"""What the state dict of any optimizer has: states by number, and groups of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partc.errors import LoadError
from partc.wrong_calls import quoted


def check_state(given: Any, where: str) -> None:
    """LoadError for what is no state dict of an optimizer."""
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        has = ", ".join(map(str, list(given)[:4])) if isinstance(given, Mapping) else quoted(given)
        raise _no_state(
            where,
            f"it {'has' if isinstance(given, Mapping) else 'is'} "
            f"{has or 'nothing'}, and that of an optimizer has state and param_groups",
        )
    states, groups = given["state"], given["param_groups"]
    if not isinstance(states, Mapping) or not all(isinstance(x, Mapping) for x in states.values()):
        raise _no_state(where, "its state has not the states of each parameter by number")
    if not isinstance(groups, list | tuple) or not all(map(_is_group, groups)):
        raise _no_state(where, "its param_groups are no list of dicts with params")


def _is_group(given: Any) -> bool:
    return isinstance(given, Mapping) and isinstance(given.get("params"), list | tuple)


def _no_state(where: str, why: str) -> LoadError:
    return LoadError(
        where=where, what="the state is none of an optimizer", why=why,
        do="Pass what full_optim_state_dict, or an optimizer's state_dict(), gave.",
    )  # fmt: skip
