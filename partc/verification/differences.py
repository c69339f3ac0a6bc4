"""How far a tensor is from the one that it should be, and by what that is divided."""

from __future__ import annotations

import torch
from torch import Tensor

from partc.verification.reference import Tensors, is_noise


def scales(expected: Tensors) -> dict[str, tuple[float, bool]]:
    """The divisor of each tensor's error, and whether the tensor is rounding noise."""
    sizes = {name: largest(tensor) for name, tensor in expected.items()}
    most = max(sizes.values(), default=0.0)
    found = {}
    for name, size in sizes.items():
        noise = is_noise(size, most, expected[name].dtype)
        found[name] = ((most if noise else size) or 1.0, noise and size > 0)
    return found


def largest(tensor: Tensor) -> float:
    """The largest absolute value that is finite; 0 where there is none."""
    plain = tensor.detach()
    plain = plain.double() if plain.dtype == torch.bool else plain
    sizes = plain.abs()
    sizes = sizes[sizes.isfinite()]
    return float(sizes.amax()) if sizes.numel() else 0.0


def difference(ours: Tensor, expected: Tensor) -> float:
    """The largest absolute difference; infinite where shapes differ or an entry is NaN."""
    if ours.shape != expected.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    ours = ours.to(expected.device)
    wide = torch.promote_types(ours.dtype, expected.dtype)
    wide = wide if wide.is_floating_point or wide.is_complex else torch.float64
    difference = (ours.detach().to(wide) - expected.detach().to(wide)).abs()
    same = ours.detach() == expected.detach()  # equal infinities have no difference
    worst = float(torch.where(same, torch.zeros_like(difference), difference).amax())
    return worst if worst == worst else float("inf")
