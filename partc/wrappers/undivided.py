"""A loss whose ``backward`` a script calls past the accelerator, which would have divided it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from weakref import ref

from torch import Tensor

from partc.users_line import warn
from partc.wrappers.how import How
from partc.wrappers.prepared import Prepared


class Divides(Protocol):
    """What divides losses by the steps that it accumulates, while its ``backward`` runs."""

    gradient_accumulation_steps: int
    divides: bool


class Watched(Prepared):
    """A prepared model that warns where ``loss.backward()`` leaves gradients undivided."""

    def __init__(self, model: Any, how: How, device: str, by: Divides) -> None:
        super().__init__(model, how, device)
        self._by = ref(by)  # a copy of the model has none of its own

    def forward(self, *args: Any, **named: Any) -> Any:
        """As of any prepared model."""
        found = super().forward(*args, **named)
        first = found[0] if isinstance(found, tuple) else found
        loss = first.get("loss") if isinstance(first, Mapping) else first
        if self.training and isinstance(loss, Tensor) and loss.requires_grad and not loss.dim():
            loss.register_hook(self._begun_backward)
        return found

    def _begun_backward(self, gradient: Tensor) -> None:
        by = self._by()
        steps = 1 if by is None or by.divides else by.gradient_accumulation_steps
        if steps > 1 and gradient.item() == 1:  # a script may have divided by itself
            warn(
                f"loss.backward(): gradients of gradient_accumulation_steps={steps} steps are "
                "added up and not divided by their number, as accelerator.backward divides. "
                "Call accelerator.backward(loss)"
            )
