"""The position in the data that a checkpoint has, and the loader that goes on from it."""

from __future__ import annotations

import torch.distributed as dist

from partc.data.loader import Loader
from partc.data.sampler import RowSampler
from partc.program.habits import LOG
from partc.program.saved_checkpoint import Saved, refuse


def go_to_position(saved: Saved, loader: Loader | RowSampler | None) -> None:
    """Let a loader go on where the checkpoint was saved.

    LoadError for a loader where the checkpoint was saved without one. Without a loader, where it
    has a position, a warning on the first rank.
    """
    if loader is not None:
        if not saved.data:
            refuse(
                saved.path, "it was saved without a loader, so that it has no position in the data",
                "Leave loader= out, or save with it: save_checkpoint(..., loader=loader).",
            )  # fmt: skip
        loader.load_state_dict(saved.data)
    elif saved.data and dist.get_rank() == 0:
        LOG.warning(
            "partc: %s has a position in the data, and load_checkpoint was given no loader: rows "
            "that were read come again. Pass loader=stage.loader(...), unless the data begin anew "
            "on purpose.", saved.path,
        )  # fmt: skip
