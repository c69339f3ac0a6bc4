"""What ``benchmarks.overlap`` measures: partc's layouts, each with PyTorch's strongest rival."""

from __future__ import annotations

from functools import partial

from benchmarks import peers, torch_sides
from benchmarks.peers import Layout

NUM_CHECKED = 2  # first steps, compared with one process
TIMEOUT_S = 600.0

_FSDP = partial(torch_sides.fsdp, prefetch=True)
_TP = partial(torch_sides.tensor_parallel, prepared=True, cut_loss=True)
_SP = partial(torch_sides.sequence_parallel, cut_loss=True)
LAYOUTS = {
    "ddp=2": Layout("dp=2", 2, "ddp", (torch_sides.ddp,)),
    "fsdp=2": Layout("dp=2", 2, "fsdp", (_FSDP,)),
    "fsdp=4": Layout("dp=4", 4, "fsdp", (_FSDP,)),
    "tp=2": Layout("tp=2", 2, "megatron", (_TP,)),
    "megatron-sp=2": Layout("tp=2", 2, "megatron-sp", (_SP,)),
    "pp=2,dp=2": peers.LAYOUTS["1f1b 4 ddp"],
}
