"""What all variants train: a byte-level Llama on Python's own sources.

Model and rows follow from the seed alone, so every variant of one seed begins with the same weights
and sees the same rows in the same order.
"""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import workload
from benchmarks.workload import Size

SIZE = Size("bytes", hidden=160, layers=2, heads=5, ffn=432, vocab=256, seq=32, batch=1)
LEAST_BYTES = 2_000_000  # of text to train on
HELD_OUT_ROWS = 192


def build_model(seed: int, size: Size = SIZE) -> nn.Module:
    """The model with the weights of a seed; its head is its embedding."""
    return workload.build_model(size, seed, tied=True)


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Bytes to train on, and those of other files that are held out: sources of the library that
    comes with Python, in an order drawn once.
    """
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    random.Random(0).shuffle(files)
    held_out, text = bytearray(), bytearray()
    for file in files:
        target = held_out if len(held_out) < LEAST_BYTES // 20 else text
        target += file.read_bytes()
        if len(text) > LEAST_BYTES:
            break
    return torch.tensor(list(text), dtype=torch.uint8), torch.tensor(
        list(held_out), dtype=torch.uint8
    )


def rows(seed: int, step: int, num: int, size: Size = SIZE) -> tuple[Tensor, Tensor]:
    """The rows of all ranks in one step: bytes, and the bytes that follow them."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    text, _ = texts()
    starts = torch.randint(len(text) - size.seq - 1, (num,), generator=generator)
    return _windows(text, starts, size)


def held_out_rows(size: Size = SIZE, num: int = HELD_OUT_ROWS) -> tuple[Tensor, Tensor]:
    """Rows that nobody trains on, equally far apart."""
    _, text = texts()
    return _windows(text, torch.arange(num) * ((len(text) - size.seq - 1) // num), size)


def _windows(text: Tensor, starts: Tensor, size: Size) -> tuple[Tensor, Tensor]:
    found = text[starts[:, None] + torch.arange(size.seq + 1)].long()
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()
