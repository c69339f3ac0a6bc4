"""``partc bench``: run a saved program's steps on real ranks, and compare with the prediction."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from partc.errors import UsageError
from partc.measure.bench_rank import measure_rank
from partc.measure.bench_report import Bench
from partc.program import load
from partc.program.ranks.handshake import check_world, world_size
from partc.verification.processes import Processes
from partc.wrong_calls import check_whole_number

TIMEOUT_S = 600.0


def bench(
    folder: str, *, steps: int = 10, warmup: int = 3, device: str = "cpu",
    timeout: float = TIMEOUT_S,
) -> Bench:  # fmt: skip
    """Time steps of a saved program, with random weights and a random batch.

    The ranks are new processes of this machine with one thread each, or those of torchrun; then all
    of them get the result. UsageError for fewer than 2 steps, or for GPUs without torchrun;
    RunError if a rank fails or takes longer than ``timeout`` seconds.
    """
    program = load(folder)
    _check(folder, steps, warmup, device)
    job = (folder, device, steps, warmup)
    if "RANK" not in os.environ:
        with Processes(program.mesh.num_ranks, timeout=timeout, quiet=True) as world:
            return Bench(program, tuple(world.run(measure_rank, *job)))
    check_world(program.mesh, world_size())
    mine = measure_rank(*job)
    every: list[Any] = [None] * world_size()
    dist.all_gather_object(every, mine)
    dist.destroy_process_group()
    return Bench(program, tuple(every))


def _check(folder: str, steps: int, warmup: int, device: str) -> None:
    if steps < 2:
        raise UsageError(
            where=f"--steps {steps}",
            what="so few steps tell nothing of their spread",
            why="medians and quartiles are shown",
            do="Give 2 or more.",
        )
    check_whole_number(warmup, "--warmup")
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(
            where=f"--device {device}", what="there is no such device",
            why="ranks run on CPUs or on GPUs", do="Give cpu or cuda.",
        )  # fmt: skip
    if device != "cpu" and not torch.cuda.is_available():
        raise UsageError(
            where=f"--device {device}", what="torch sees no GPU on this machine",
            why="torch.cuda.is_available() is false",
            do=f"Leave --device out, partc bench {folder}, for ranks on the CPU; or run it on a "
            "machine with GPUs, with a torch for them.",
        )  # fmt: skip
    if device != "cpu" and "RANK" not in os.environ:
        raise UsageError(
            where=f"--device {device}",
            what="GPUs need a launcher",
            why="processes that partc starts itself are gloo's, on the CPU",
            do=f"Run torchrun --nproc-per-node N -m partc bench {folder} --device {device}.",
        )
