"""``nn.SyncBatchNorm``: batch norm over the samples of all ranks, as programs have it anyway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn

from partc.errors import PlanError


@contextmanager
def synced_norm_of_one_device() -> Iterator[None]:
    """Run ``nn.SyncBatchNorm`` as the batch norm of one device that has all samples.

    torch's own asks the process group, adds up over its ranks, and refuses tensors of a CPU.
    """
    plain: Any = nn.BatchNorm1d.forward  # of all batch norms; they differ in what they check
    with patch.object(nn.SyncBatchNorm, "forward", plain):
        yield


def check_synced(model: Any, batch_norm: str) -> None:
    """PlanError where the model says that ranks normalise together, and the plan that each does so
    alone.
    """
    if batch_norm != "local" or not isinstance(model, nn.Module):
        return
    for name, part in model.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise PlanError(
                where=f'{name}, batch_norm = "local"',
                what="the model has nn.SyncBatchNorm, over the samples of all ranks, and the plan "
                "asks for statistics of each rank's own",
                why="one of them would not be computed as it says",
                do='Leave batch_norm="local" out, or convert_sync_batchnorm.',
            )
