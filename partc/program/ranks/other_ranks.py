"""What a rank says where a transfer fails that other ranks have to take part in.

Torch names a socket. What has happened is that another rank has ended, has failed, or runs
something else: ``if rank == 0: save_checkpoint(...)`` waits for ranks that never come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import get_ident

import torch.distributed as dist

from partc.errors import PartcError, RunError, TransferError
from partc.program.ranks.farewell import AT_ITS_END, ends_of_others
from partc.program.ranks.meeting import OF_OTHERS
from partc.program.ranks.places import PROGRAMS
from partc.program.ranks.waiting import known_waiting

TOGETHER = (
    "module, step, eval_step, clip_grad_norm_, full_state_dict, save_checkpoint and load_checkpoint"
)
GONE = "process group has not been initialized"  # torch's words
WORDS = (*OF_OTHERS, "Timed out", "timed out", "Broken pipe")


@contextmanager
def of_other_ranks(call: str) -> Iterator[None]:
    """A call of all ranks: as ``named_failures``, and where it waits in vain it is said where the
    others are. Works as a decorator too.
    """
    known = known_waiting(get_ident())
    says = known is not None and call not in PROGRAMS  # these say so themselves
    with named_failures(call), known.within(call) if known and says else nullcontext():
        yield


@contextmanager
def named_failures(call: str) -> Iterator[None]:
    """Say of a transfer that fails in a call what it means, and which ranks have ended.

    TransferError in the place of torch's; RunError where there is no process group any more.
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
            raise _failed(call, str(error)) from error
        raise


def _failed(call: str, of_torch: str) -> TransferError:
    ends = ends_of_others()
    what = "; ".join(f"rank {rank} {end}" for rank, end in [*ends.items()][:4])
    return TransferError(
        where=f"rank {dist.get_rank()}, {_numbered(call)}",
        what=f"a transfer failed: {what or 'another rank has ended, or runs something else'}",
        why=f"torch says: {(of_torch.strip().splitlines() or [''])[0].split('. ')[0].rstrip('.')}",
        do=_mended([*ends.values()]),
    )


def _numbered(call: str) -> str:
    """``step 7`` for the step that this rank is in; other calls as they are."""
    known = known_waiting(get_ident())
    now = "" if known is None else known.last
    return now if call in PROGRAMS and now.startswith(f"{call} ") else call


def _mended(ends: Sequence[str]) -> str:
    """What to do where other ranks have ended so."""
    if not all(end.startswith(AT_ITS_END) for end in ends):
        return "Mend what failed there; this rank only ends because of it."
    if ends:
        return (
            "Give every rank as many batches, as model.loader(dataset) does, or a "
            "DistributedSampler with DataLoader(drop_last=True); or let all ranks leave the loop "
            "together."
        )
    return (
        f"See what the other ranks printed. {TOGETHER} are calls of all ranks: each makes them in "
        "the same order, and as often as the others, without `if rank == 0`."
    )
