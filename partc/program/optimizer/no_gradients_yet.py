"""A GradScaler in steps without gradients: islands that apply them late give none at first.

Then there is nothing that might be infinite, and the optimizer's step does nothing. torch takes
such a step for a mistake of the script.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

_LATE = "_gradient_is_late"  # an attribute of parameters
_DONE: list[str] = []


def expect_none_at_first(params: Iterable[Tensor]) -> None:
    """Let a GradScaler take optimizers of these parameters while none of them has a gradient."""
    for param in params:
        setattr(param, _LATE, True)
    if _DONE:
        return
    _DONE.append("GradScaler")
    unscale = GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def unscaled(
        self: GradScaler, optimizer: Optimizer, inverse: Tensor, found: Tensor, *args: Any
    ) -> Any:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        if every and all(p.grad is None and hasattr(p, _LATE) for p in every):
            return {found.device: found}
        return unscale(self, optimizer, inverse, found, *args)

    GradScaler._unscale_grads_ = unscaled  # type: ignore[method-assign, assignment]
