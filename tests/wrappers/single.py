"""Scripts of accelerate and transformers in ranks that tests have started, one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def as_torchrun() -> Iterator[None]:
    """The variables that torchrun sets, and nothing that accelerate keeps of an earlier script."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    ranks = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank()}
    ranks["WORLD_SIZE"] = dist.get_world_size()
    if dist.get_world_size() > 1:
        os.environ.update({name: str(value) for name, value in ranks.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # is asked for, and the group is there already
    try:
        yield
    finally:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        for name in (*ranks, "MASTER_ADDR"):
            os.environ.pop(name, None)
