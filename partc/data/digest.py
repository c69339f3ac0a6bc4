"""A digest of one row of a dataset, to compare what ranks read."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

PLAIN = (bool, int, float, complex, str, bytes, type(None))
SIZE = 8  # bytes


def digest_of(row: Any) -> bytes:
    """8 bytes that follow from a row's tensors, arrays, numbers and texts, and where they stand."""
    leaves, spec = pytree.tree_flatten(row)
    found = hashlib.blake2b(repr(spec).encode(), digest_size=SIZE)
    for leaf in leaves:
        found.update(_content(leaf))
    return found.digest()


def _content(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        return (
            f"{leaf.dtype}{tuple(leaf.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes()
        )
    if isinstance(leaf, np.ndarray | np.generic):
        return f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes()
    if isinstance(leaf, PLAIN):
        return repr(leaf).encode()
    return type(leaf).__name__.encode()  # its text may hold an address
