"""The wanted names of values, and what longer names can be made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from partc.codegen.calls.path_names import inside
from partc.graph import has_value, is_call, value

# Whose name a value has: one that it was given (an argument), the user's (a module's, a
# variable's), the op's. Of several values with one wish the first kind keeps it.
GIVEN, SAID, OP, MOVED = range(4)


@dataclass
class Wishes:
    """The wanted name of every value in the functions of one module, whose path is ``prefix``.

    ``same`` has the value that a recomputation computes again, ``of`` the value whose gradient a
    value is, ``through`` the name of the forward call that it comes through. ``said`` are values
    that the user's code names, ``moved`` those that a collective has moved. ``stands_for`` maps the
    calls of another place, which does the same, to calls here.
    """

    names: dict[fx.Node, str]
    prefix: str = ""
    given: set[fx.Node] = field(default_factory=set)
    said: set[fx.Node] = field(default_factory=set)
    moved: set[fx.Node] = field(default_factory=set)
    gradients: set[fx.Node] = field(default_factory=set)
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)
    of: dict[fx.Node, fx.Node] = field(default_factory=dict)
    through: dict[fx.Node, str] = field(default_factory=dict)
    stands_for: Mapping[fx.Node, fx.Node] = field(default_factory=dict)

    def here(self, node: fx.Node) -> fx.Node:
        """The call of this place that a call of another place stands for."""
        return self.stands_for.get(node, node)

    def get(self, node: fx.Node, default: str = "") -> str:
        return self.names.get(self.here(node), default)

    def give(self, names: Mapping[fx.Node, str]) -> None:
        """Name some values before all others."""
        self.names |= names
        self.given |= names.keys()

    def rank(self, node: fx.Node) -> int:
        node = self.here(node)
        if node in self.given:
            return GIVEN
        return MOVED if node in self.moved else SAID if node in self.said else OP

    def is_part(self, node: fx.Node) -> bool:
        """Whether a gradient is one of several that are added up to the gradient of a value."""
        node = self.here(node)
        of = self.of.get(node)
        return of is not None and all(
            is_call(user, torch.ops.aten.add.Tensor) and self.of.get(user) is of
            for user in node.users
        )

    def is_gradient(self, node: fx.Node) -> bool:
        return self.here(node) in self.gradients

    def module(self, node: fx.Node) -> str:
        """The path of a value's module, from the module on whose functions are printed."""
        node = self.here(node)
        return inside(value(node).module, self.prefix) if has_value(node) else ""

    def at(self, there: Sequence[fx.Node], here: Sequence[fx.Node]) -> Wishes:
        """The wishes of other calls, ``there``, which do the same as the calls ``here``."""
        return replace(self, stands_for=dict(zip(there, here, strict=True)))
