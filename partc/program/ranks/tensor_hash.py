"""A number that stands for a tensor's bytes in their order: copies have equal ones, others do not.

The sign of a zero, the bits of a NaN and two elements that changed places all show. Numbers of a
tensor on the CPU and of its copy on a GPU differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

# Elements that tell models of other seeds apart: so many runs of so many. Of a file, which may be
# larger than memory, a run is one page.
RUNS, IN_A_RUN = 64, 64
WORDS = 1 << 22  # of 4 bytes, which are widened at once on a GPU: 32 MB
ODD, SHIFT = -7046029254386353131, 0x7FEB352D  # 2**64 / golden ratio as int64; any number


@torch.no_grad()
def hashes_of(tensors: Sequence[Tensor]) -> list[int]:
    """The number of each tensor, below 2**63; of tensors on a GPU in one wait for all."""
    found = [_on_cpu(x) if x.device.type == "cpu" else on_device(x) for x in tensors]
    waiting = [x.reshape(()) for x in found if isinstance(x, Tensor)]
    arrived = iter(torch.stack(waiting).tolist() if waiting else [])
    return [(int(next(arrived)) if isinstance(x, Tensor) else x) & (1 << 63) - 1 for x in found]


@torch.no_grad()
def sampled(tensor: Tensor, dtype: torch.dtype) -> int:
    """The number of some elements, in runs that are evenly spaced, in a dtype: the same for copies
    on any device.
    """
    flat = tensor.detach().reshape(-1)
    if (step := flat.numel() // RUNS) > IN_A_RUN:
        flat = flat[: step * RUNS].view(RUNS, step)[:, :IN_A_RUN]
    return hashes_of([flat.cpu().to(dtype)])[0]


def joined(numbers: Sequence[int]) -> int:
    """One number for several, in their order."""
    text = " ".join(map(str, numbers))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _bytes(x: Tensor) -> Tensor:
    """A tensor's bytes as ``u8[n]``, in the order of its elements."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _on_cpu(x: Tensor) -> int:
    return zlib.crc32(_bytes(x).numpy().data)


def on_device(x: Tensor) -> Tensor:
    """The number as ``i64[]`` on the tensor's device: each word times a number of its place, summed
    modulo 2**64.
    """
    flat = _bytes(x)
    rest = -flat.numel() % 4
    if rest:
        flat = torch.cat([flat, flat.new_zeros(rest)])
    words = flat.view(torch.int32)
    total = torch.full((), x.numel(), dtype=torch.int64, device=x.device)
    for first in range(0, words.numel(), WORDS):
        part = words[first : first + WORDS].to(torch.int64)
        total += ((part + SHIFT) * _of_places(first, part)).sum()
    return total


def _of_places(first: int, part: Tensor) -> Tensor:
    """Odd numbers of the places from ``first`` on, one for each element, which look random.

    Numbers that grew with the place would give zeros and ones equal sums in many orders.
    """
    places = torch.arange(first, first + part.numel(), device=part.device)
    for _ in range(2):
        places = (places + SHIFT) * ODD
        places = places ^ (places >> 31)
    return places | 1


@torch.no_grad()
def sketch_of(x: Tensor) -> tuple[float, float]:
    """The product of a tensor with fixed numbers between -1 and 1, and its norm, in float64."""
    flat = x.detach().reshape(-1)
    product = square = 0.0
    for first in range(0, flat.numel(), WORDS):
        part = flat[first : first + WORDS].to(torch.float64)
        product += float(part @ (_of_places(first, part).to(torch.float64) / 2**63))
        square += float(part @ part)
    return product, float(square**0.5)
