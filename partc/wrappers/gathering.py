"""Tensors of all pieces of a batch, each once: ranks that share a piece have the same."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.operations import recursively_apply
from torch import Tensor

from partc.errors import RunError
from partc.program.holders import exchange_texts
from partc.program.uneven_rows import gather_uneven
from partc.wrappers.dealing import DataRanks


def gathered(x: Tensor, ranks: DataRanks) -> Tensor:
    """The rows of all pieces in their order; ranks may have different numbers of rows.

    RunError on every rank if their other sizes differ. All ranks call this together.
    """
    x = x[None] if not x.dim() else x
    if not dist.is_initialized():
        return x
    texts = exchange_texts(json.dumps([*x.shape]), dist.group.WORLD, x.device)
    shapes = [json.loads(text) for text in texts]
    if len({tuple(shape[1:]) for shape in shapes}) > 1:
        raise _other_lengths(shapes)
    found = gather_uneven(x.contiguous(), [shape[0] for shape in shapes])
    return torch.cat([found[rank] for rank in ranks.firsts])


def is_of_tensors(value: Any) -> bool:
    """Whether a nested value has tensors alone."""
    try:
        recursively_apply(lambda x: x, value, error_on_other_type=True)
    except TypeError:
        return False
    return True


def of_first(number: int, device: torch.device) -> int:
    """The first rank's number; all ranks call this together."""
    told = torch.tensor([number % 2**62], device=device)
    if dist.is_initialized():
        dist.broadcast(told, src=0)
    return int(told)


def _other_lengths(shapes: list[list[int]]) -> RunError:
    told = ", ".join(f"rank {rank} {shape}" for rank, shape in enumerate(shapes))
    return RunError(
        where="gather",
        what=f"ranks have tensors of other sizes than their rows: {told}",
        why="rows are put behind each other",
        do="Call accelerator.pad_across_processes(tensor, dim=1) before.",
    )
