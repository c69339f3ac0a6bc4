"""What a rank says where a transfer fails that other ranks have to take part in.

Torch names a socket. What has happened is that another rank has ended, has failed, or runs
something else: ``if rank == 0: save_checkpoint(...)`` waits for ranks that never come.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from partc.errors import PartcError, RunError
from partc.program.ranks.meeting import OF_OTHERS

TOGETHER = (
    "module, step, eval_step, clip_grad_norm_, full_state_dict, save_checkpoint and load_checkpoint"
)
GONE = "process group has not been initialized"  # torch's words
WORDS = (*OF_OTHERS, "Timed out", "timed out")


@contextmanager
def of_other_ranks(call: str) -> Iterator[None]:
    """Say of a transfer that fails in a call what it means; the error keeps its class.

    RunError where there is no process group any more. Works as a decorator too.
    """
    try:
        yield
    except PartcError:
        raise
    except (RuntimeError, ValueError) as error:
        if GONE in str(error) and not dist.is_initialized():
            raise RunError(
                where=call, what="the process group of this stage was destroyed",
                why="ranks find each other through it",
                do="Destroy it behind the last call, or make a new stage: program.module().",
            ) from error  # fmt: skip
        if dist.is_initialized() and any(word in str(error) for word in WORDS):
            error.add_note(
                f"partc, {call} on rank {dist.get_rank()}: a transfer failed, as another rank has "
                f"ended, has failed, or runs something else; see what it printed.\n  {TOGETHER} "
                "are calls of all ranks: each makes them in the same order, and as often as the "
                "others (no `if rank == 0`; as many batches on every rank)."
            )
        raise
