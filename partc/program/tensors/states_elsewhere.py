"""States of a module that has some of its tensors on other pipeline ranks: all names are there.

What walks the names of ``part.state_dict()``, as writers of adapters do, finds on every rank those
of the model. Tensors of other ranks are stand-ins, whose values are refused by name.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from partc.program.tensors.stand_in import StandIn

STATES = "state_dict", "load_state_dict"


class _States:
    """One of both methods. ``each``: by the name of every saved tensor of the module, in the
    model's order, its stand-in; None for what this rank has.
    """

    def __init__(self, module: nn.Module, each: Mapping[str, StandIn | None]) -> None:
        self.module, self.each = module, each

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(*copy.deepcopy((self.module, self.each), memo))


class _Given(_States):
    """``state_dict``."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        found = type(self.module).state_dict(self.module, *args, **named)
        if args or named.get("destination") is not None:
            return found  # a part's, which the whole adds to its own
        own, prefix = dict(found), named.get("prefix", "")
        for name, made in self.each.items():
            if made is not None:
                key = f"{prefix}{name}"
                own.setdefault(key, made if named.get("keep_vars") else made.detach())
        order = [key for name in self.each if (key := f"{prefix}{name}") in own]
        found.clear()  # in place: it has torch's metadata
        found.update({key: own[key] for key in dict.fromkeys([*order, *own])})
        return found


class _Taken(_States):
    """``load_state_dict``: other ranks load what is theirs."""

    def __call__(self, state_dict: Any, *args: Any, **named: Any) -> Any:
        if isinstance(state_dict, Mapping):
            mine = {n: x for n, x in state_dict.items() if self.each.get(n) is None}
            given, state_dict = state_dict, OrderedDict(mine)
            if hasattr(given, "_metadata"):
                state_dict._metadata = given._metadata
        return type(self.module).load_state_dict(self.module, state_dict, *args, **named)


def give_states(module: nn.Module, each: Mapping[str, StandIn | None]) -> None:
    """Let the states of a module that has not all of these tensors here name them all."""
    for name in STATES:
        vars(module).pop(name, None)
    if any(made is not None for made in each.values()):
        made = {"state_dict": _Given(module, each), "load_state_dict": _Taken(module, each)}
        vars(module).update(made)
