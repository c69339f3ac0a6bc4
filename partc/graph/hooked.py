"""The op that stands for a function of the user's hooks: ``partc.hooked(x, "layers_mlp")``.

A program prints it as ``hooks.layers_mlp(x)``. What the function computes is the user's: here the
op gives its operand back, in the same memory, as a hook may do.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from partc.graph import Graph

_LIBRARY = torch.library.Library("partc", "DEF")
_LIBRARY.define("hooked(Tensor(a) x, str name) -> Tensor(a)")


def _same(x: Tensor, name: str) -> Tensor:
    same: Tensor = torch.ops.aten.alias.default(x)
    return same


_LIBRARY.impl("hooked", _same, "CompositeExplicitAutograd")
HOOKED = torch.ops.partc.hooked.default
GRAD = ".grad"  # of an entry of the plan: the gradient of a module's result


def calls_hooks(graph: Graph) -> bool:
    """Whether values of a graph go through the user's functions."""
    return any(node.target is HOOKED for node in graph.calls())


def function_of(entry: str) -> str:
    """The name of the function for an entry of the plan's ``hooks``.

    >>> function_of("layers.*.mlp"), function_of("layers.*.mlp.grad")
    ('layers_mlp', 'layers_mlp_grad')
    """
    return "_".join(part for part in re.split(r"\W+", entry) if part)
