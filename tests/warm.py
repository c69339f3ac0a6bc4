"""What the server that forks ranks does before it forks, so that no rank of a test has to.

It imports this last. A rank then begins with what a first compile imports and makes, frozen for the
collector; and it compiles nothing that another rank has compiled (``tests/compile_once.py``).
"""

from __future__ import annotations

import gc
from typing import Any

import pytest as pytest  # files of tests import it
import torch
import torch.distributed.checkpoint as checkpoint  # noqa: F401  # stages import it at a save
from torch import nn
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    clear_redistribute_planner_cache,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn import functional as F

import partc.program.start  # noqa: F401  # every rank starts a stage
from partc.api import compile
from partc.installed import every, load_installed
from partc.passes import own_passes
from partc.verification import processes
from tests import llamas as llamas  # transformers takes longer to import than torch
from tests.compile_once import share_programs

GARBAGE = 10_000  # new objects between two runs of the garbage collector; graphs are many objects


def compile_some() -> None:
    """A step with gathered weights, and one of two stages."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    batch = torch.zeros(8, 4), torch.zeros(8, 4)
    for mesh, plan in (("dp=2,tp=2", "fsdp"), ("pp=2,dp=2", "ddp")):
        compile(model, mesh, batch, loss=_loss, plan=plan)
    own_passes._load.cache_clear()  # a rank may find packages that this process does not
    load_installed.cache_clear()
    every.cache_clear()


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def spare_collector() -> None:
    """Let the collector pass over what is there now, and run less often.

    It writes into what it looks through, so that ranks could not share that memory.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE)


def end_jobs_clean() -> None:
    """Let go of what a job has left before the next one, as of a stage with a group that has ended.

    What looks at all stages of a process would find it; and each group has a thread, which wakes
    up a hundred times a second as long as DTensor remembers a mesh with the group.
    """
    reply = processes._reply

    def clean(rank: int, store: Any, job: bytes) -> bytes:
        try:
            return reply(rank, store, job)
        finally:
            _clear_sharding_prop_cache()
            clear_redistribute_planner_cache()
            _gen_transform_infos.cache_clear()
            MeshTopoInfo.build_from_mesh.cache_clear()
            gc.collect()

    processes._reply = clean


compile_some()
end_jobs_clean()
share_programs()
spare_collector()
