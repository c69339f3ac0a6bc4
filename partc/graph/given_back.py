"""The op between a model's results and their gradients: ``partc.given_back([logits, hidden])``.

A step whose loss the script computes gives out what the model returns, and goes on once the script
gives back the gradients. A program prints the op as ``[d_logits] = yield {"logits": logits}``. What
the gradients are is the script's: here, as where a program is verified, they are those of the sum
of ``sin(result)``, so that each differs from the others and none is zero.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def _is_trained(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
