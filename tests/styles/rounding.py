"""How far a model's own gradients move when its numbers are rounded in another way.

Deep nets without norms, or with saturated ones, have gradients so small that one rounding of an
input changes them by more than a program may differ. Their differences prove nothing.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from partc.verification.report import TOLERANCE, Report
from tests.styles import Style

ULP = torch.finfo(torch.float64).eps
DRAWS = 40  # five find two thirds of the change that forty find
NOISE = 1e-12  # of the model's largest gradient


def only_rounding(report: Report, one: Style) -> bool:
    """Whether each tensor that differs is a gradient that the model's own rounding moves as far."""
    wrong = [row for row in report.rows if not row.error <= TOLERANCE]
    moved = moved_by_rounding(one) if wrong else {}
    return all(row.error <= moved.get(row.name, 0.0) for row in wrong)


def moved_by_rounding(one: Style) -> dict[str, float]:
    """By parameter: the largest relative change of its gradient, in float64, when each number of
    the inputs and weights changes by at most one unit of the last place. Gradients that are zero
    but for rounding, as of a key's bias, are left out: ``verify`` has a measure of its own there.
    """
    model, inputs = deepcopy(one.model).double(), _double(one.inputs)
    exact, found = _gradients(model, one, inputs), dict[str, float]()
    sizes = {name: float(grad.abs().max()) for name, grad in exact.items()}
    told = [name for name, size in sizes.items() if size > NOISE * max(sizes.values())]
    for _ in range(DRAWS):
        near = deepcopy(model)
        with torch.no_grad():
            for weight in near.parameters():
                weight.copy_(_nudged(weight))
        nudged = _gradients(near, one, [_nudged(each) for each in inputs])
        for name in told:
            change = float((nudged[name] - exact[name]).abs().max()) / sizes[name]
            found[name] = max(found.get(name, 0.0), change)
    return found


def _double(inputs: Any) -> list[Tensor]:
    return [each.double() if each.is_floating_point() else each for each in inputs]


def _nudged(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor * (1 + ULP * (2 * torch.rand_like(tensor) - 1))


def _gradients(model: Any, one: Style, inputs: list[Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss = one.loss(model, *inputs) if one.loss else model(*inputs)
    loss.backward()
    grads = ((name, weight.grad) for name, weight in model.named_parameters())
    return {name: grad.clone() for name, grad in grads if grad is not None}
