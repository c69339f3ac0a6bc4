"""The training script of `recoveries.py`: one rank of a small GPT with dropout, which goes on.

    torchrun --nproc-per-node 4 --max-restarts 3 tests/damage/recovered.py PROGRAM RUN STEPS

With two numbers more, of ranks and of restarts, the script starts its ranks by torchrun's agent.
``RUN`` gets the checkpoints, a line of each step in ``progress-RANK``, in the end ``final.json``
with a digest of parameters and optimizer. The environment's ``RECOVERY`` can ask for a failure of
one rank, in the first attempt alone: ``{"rank": 1, "step": 7, "deed": 3}`` ends it before the third
thing that its save of step 7 does to the disk, ``{"rank": 1, "step": 7, "bytes": 100}`` gives its
files no more than so many bytes from then on.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from hashlib import sha256
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import partc
from partc.program.stage.runtime import Stage

EVERY = 2  # steps from one checkpoint to the next


def rank_here() -> int:
    return int(os.environ.get("RANK", "0"))


def attempt() -> int:
    """How often the ranks were started before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def failure() -> dict[str, Any]:
    """What is to happen to this rank in this attempt."""
    asked: dict[str, Any] = json.loads(os.environ.get("RECOVERY", "{}"))
    return asked if not attempt() and asked.get("rank") == rank_here() else {}


def fail_at(step: int, run: Path) -> None:
    asked = failure()
    if asked.get("step") == step and "deed" in asked:
        from tests.program.test_killed_saves import watch  # which imports the compiler

        watch(run.resolve(), asked["deed"])
    if asked.get("step") == step and "bytes" in asked:
        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["bytes"],) * 2)


def note(run: Path, step: int) -> None:
    line = f"{step} {attempt()} {time.time():.3f}\n"
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY:
        with (run / f"progress-{rank_here()}").open("a") as file:
            file.write(line)


def final(stage: Stage, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """A digest of all that was trained; all ranks call this together."""
    states = stage.full_optim_state_dict(optimizer)["state"]
    tensors = {
        **stage.full_state_dict(),
        **{f"{n} {key}": x for n, each in states.items() for key, x in each.items()},
    }
    digest = sha256()
    for name in sorted(tensors, key=str):
        raw = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(str(name).encode() + raw.numpy().tobytes())
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, drawn())
    return {
        "digest": digest.hexdigest(), "tensors": len(tensors), "lr": scheduler.get_last_lr(),
        "drawn": numbers,
    }  # fmt: skip


def drawn() -> list[float]:
    """What the script itself draws in a step: other numbers on each rank."""
    return [random.random(), torch.rand(()).item(), float(np.random.standard_normal())]


def main(program: Path, run: Path, last: int) -> None:
    with (run / f"began-{rank_here()}").open("a") as file:
        file.write(f"{attempt()} {os.getpid()}\n")
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank_here())
    stage = partc.load(program / "build").module()
    stage.load_full(str(program / "weights.safetensors"))
    stage.seed(3)
    optimizer = stage.step_on_pieces(torch.optim.AdamW(stage.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=last + 1)
    rows = torch.randint(64, (24, 16), generator=torch.Generator().manual_seed(1))
    loader = stage.loader(torch.utils.data.TensorDataset(rows), seed=5)
    kept: dict[str, Any] = {"loader": loader, "states": {"scheduler": scheduler}}
    with partc.Checkpoints(run, interval=EVERY, keep_latest_k=2) as checkpoints:
        start = checkpoints.load_latest(stage, optimizer, **kept)
        note(run, start)
        batches = chain.from_iterable(repeat(loader))
        for step, (ids,) in zip(range(start + 1, last + 1), batches, strict=False):
            stage.step(ids)
            stage.clip_grad_norm_(1.0)
            drawn()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            fail_at(step, run)
            checkpoints.save(step, stage, optimizer, **kept)
            note(run, step)
    told = final(stage, optimizer, scheduler)
    if rank_here() == 0:
        (run / "final.json").write_text(json.dumps(told))
    dist.barrier()


def launch(program: Path, run: Path, last: int, ranks: int, restarts: int) -> None:
    """What torchrun does, with ranks that are forks of this process, in which all is imported."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, max_restarts=restarts, start_method="fork",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id=f"recovered-{os.getpid()}",
    )  # fmt: skip
    elastic_launch(config, main)(program, run, last)


if __name__ == "__main__":
    places = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    if len(sys.argv) > 4:
        launch(*places, *map(int, sys.argv[4:]))
    else:
        main(*places)
