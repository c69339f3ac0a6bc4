"""What of a run goes on from a checkpoint: its place in the data, what islands had under way."""

from __future__ import annotations

import torch.distributed as dist

from partc.data.loader import Loader
from partc.data.sampler import RowSampler
from partc.plan.local_steps import is_outer
from partc.program.checkpoints.saved_checkpoint import Saved, refuse
from partc.program.model.habits import LOG
from partc.program.stage.runtime import Stage


def go_to_position(
    saved: Saved, loader: Loader | RowSampler | None, *, stays: bool = False
) -> None:
    """Let a loader go on where the checkpoint was saved.

    LoadError for a loader where the checkpoint was saved without one. Without a loader, where it
    has a position, a warning on the first rank, unless it ``stays`` where it is.
    """
    if loader is not None:
        if not saved.data:
            refuse(
                saved.path, "it was saved without a loader, so that it has no position in the data",
                "Leave loader= out, or save with it: save_checkpoint(..., loader=loader).",
            )  # fmt: skip
        loader.load_state_dict(saved.data)
    elif saved.data and not stays and dist.get_rank() == 0:
        LOG.warning(
            "partc: %s has a position in the data, and load_checkpoint was given no loader: rows "
            "that were read come again. Pass loader=stage.loader(...), unless the data begin anew "
            "on purpose.", saved.path,
        )  # fmt: skip


def islands_go_on(saved: Saved, stage: Stage) -> bool:
    """Whether what islands kept means the same to a stage; a warning on the first rank where the
    checkpoint has something that is dropped.
    """
    alike = saved.has_same_islands(stage)
    dropped = any(map(is_outer, saved.shards)) and not (alike and saved.mesh == stage.mesh)
    if dropped and dist.get_rank() == 0:
        LOG.warning(
            "partc: %s has what islands kept from one meeting, or step, to the next, and this "
            "program meets otherwise, or is on another mesh: that is dropped, and islands begin "
            "from the mean of their parameters. Nothing to do, if that was meant; else compile "
            "with the tables and the mesh with which it was saved.", saved.path,
        )  # fmt: skip
    return alike
