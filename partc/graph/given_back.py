"""The op between a model's results and their gradients: ``partc.given_back([logits, hidden])``.

A step whose loss the script computes gives out what the model returns, and goes on once the script
gives back the gradients. A program prints the op as ``[d_logits] = yield {"logits": logits}``. What
the gradients are is the script's: here, as where a program is verified, they are those of the sum
of ``sin(result)``, so that each differs from the others and none is zero.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from partc.graph import Graph

_LIBRARY = torch.library.Library("partc", "FRAGMENT")
_LIBRARY.define("given_back(Tensor[] results) -> Tensor[]")


def gradients(results: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that stand for the script's: ``cos(result)``."""
    return [torch.cos(each) if _is_trained(each) else torch.zeros_like(each) for each in results]


_LIBRARY.impl("given_back", gradients, "CompositeExplicitAutograd")
GIVEN_BACK = torch.ops.partc.given_back.default


def waits_for_script(graph: Graph) -> bool:
    """Whether a step gives out results, and goes on with gradients that the script computes."""
    return any(node.target is GIVEN_BACK for node in graph.calls())


def is_given_back(node: fx.Node) -> bool:
    """Whether a call waits for gradients of results."""
    return node.target is GIVEN_BACK


def result_of(node: fx.Node) -> fx.Node | None:
    """The result whose gradient a value is, which the script gives back; None of any other value.

    The memory of such a gradient is not the program's: it is never written over.
    """
    if node.target is not operator.getitem or not is_given_back(node.all_input_nodes[0]):
        return None
    results: Any = node.all_input_nodes[0].args[0]
    found: fx.Node = results[node.args[1]]
    return found


def _is_trained(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
