"""Runs one function on several gloo processes of this machine and hands back what each returned."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import start_processes

Job = Callable[..., Any]  # returns what JSON can hold


def run_ranks(
    job: Job,
    num_ranks: int,
    *,
    timeout_s: float = 600.0,
    environment: Mapping[str, str] | None = None,
    **args: Any,
) -> list[Any]:
    """What ``job(**args)`` returns on each of ``num_ranks`` one-thread processes, in rank order.

    A rank that fails or a run longer than ``timeout_s`` ends all of them and raises here.
    """
    with tempfile.TemporaryDirectory() as folder, _environment(environment or {}):
        rank_args = (job, num_ranks, folder, timeout_s, args)
        ranks = start_processes(_run_rank, rank_args, num_ranks, join=False, start_method="spawn")
        try:
            _join(ranks, timeout_s)
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return [json.loads(_result(folder, rank).read_text()) for rank in range(num_ranks)]


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """Set what spawned processes inherit, and put back what was there."""
    quiet = {"KINETO_LOG_LEVEL": "6"}  # else the profiler talks on stderr
    before = dict(os.environ)
    os.environ.update(quiet | dict(added))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _join(ranks: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not ranks.join(timeout=1.0):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the ranks did not finish within {timeout_s:.0f} s")


def _run_rank(
    rank: int, job: Job, num_ranks: int, folder: str, timeout_s: float, args: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", num_ranks)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    try:
        _result(folder, rank).write_text(json.dumps(job(**args)))
        dist.barrier()  # a rank that leaves early takes its connections with it
    finally:
        dist.destroy_process_group()


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.json"
