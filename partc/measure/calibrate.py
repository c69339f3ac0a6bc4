"""``partc calibrate``: measure this machine's devices and links, and write a mesh.toml.

The calls that are timed are those of generated programs, on all ranks at once. The result has rates
by size, and for each collective the latency and bandwidth that fit its times best
(``partc/measure/measured.py``). Measurements that are impossible or vary too much are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from partc.errors import UsageError
from partc.machines.topology import LIBRARIES
from partc.measure.calibrate_compute import measure_compute
from partc.measure.calibrate_links import (
    MIB,
    level_groups,
    measure_contention,
    measure_links,
    measure_sharing,
)
from partc.measure.calibrated import Fitted, Found, check_found, fitted_topology, lines_off
from partc.measure.measured import Measured
from partc.measure.stopwatch import Effort, Stopwatch
from partc.verification.processes import Processes

TIMEOUT_S = 300.0
MOST_RANKS = 1024
TIMES = 3  # attempts, where measurements vary too much
LINKS_S = 24.0  # seconds for the collectives of all levels together
Run = Callable[..., Any]


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    ``times``: attempts where measurements vary too much. ``links_s``: seconds for all collectives.
    """

    effort: Effort = field(default_factory=Effort)
    times: int = TIMES
    links_s: float = LINKS_S
    most_bytes: int = 64 * MIB


def calibrate(
    ranks: int | None = None,
    backend: str = "gloo",
    *,
    keep_noisy: bool = False,
    scale: Scale | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Fitted:
    """Measure with ``ranks`` new processes (default 2), or under torchrun with its ranks.

    ``tell`` gets a line of progress for each kind of measurement. RunError if a measurement is
    impossible, or its spread is above a half without ``keep_noisy``; UsageError for an unknown
    backend or an impossible number of ranks.
    """
    scale = scale or Scale()
    if backend not in LIBRARIES:
        raise UsageError(
            where=f"backend {backend!r}",
            what="it cannot be measured",
            why=f"known are {', '.join(LIBRARIES)}",
            do="Take one of these.",
        )
    if ranks is not None and not 1 <= ranks <= MOST_RANKS:
        raise UsageError(
            where=f"--ranks {ranks}",
            what="that many ranks cannot be started",
            why=f"each is a process of this machine, from 1 to {MOST_RANKS:,}",
            do=f"Give a number from 1 to {MOST_RANKS:,}.",
        )
    with _ranks(ranks, backend, scale.effort) as (num, run):
        local = int(os.environ.get("LOCAL_WORLD_SIZE", num))
        groups = level_groups(num, local) if num > 1 else []
        device, memory_bytes = run(_device, local)
        tell("products, attention, sums, optimizer ...")
        compute = _calmest(lambda: run(measure_compute), scale.times)
        links = []
        for number, level in enumerate(groups):
            tell(f"collectives of {len(level[0])} ranks, level {number} ...")
            given = (level, scale.links_s / len(groups), scale.most_bytes)
            links.append(_calmest(partial(run, measure_links, *given), scale.times, lines_off))
        tell("computing beside a transfer ...")
        contention = partial(run, measure_contention, groups[0]) if groups else list
        beside = _calmest(contention, scale.times)
        sharing = _calmest(lambda: run(measure_sharing), scale.times)
    found = Found(
        name=f"{num} ranks over {backend}",
        library=backend,
        device=device,
        memory_bytes=memory_bytes,
        ranks=num,
        sizes=tuple(len(level[0]) for level in groups),
        compute=tuple(compute),
        links=tuple(map(tuple, links)),
        beside=tuple(beside),
        sharing=tuple(sharing),
    )
    check_found(found, keep_noisy)
    return fitted_topology(found)


def _calmest(
    measure: Callable[[], list[Measured]],
    times: int,
    off: Callable[[list[Measured]], list[str]] = lambda _: [],
) -> list[Measured]:
    """The best of several attempts at a measurement: that with the fewest results to be refused.

    Attempts end at the first with none. There are ``times`` attempts where results are noisy, and
    ``TIMES`` where ``off`` finds collectives whose times fit no straight line.
    """
    best: tuple[int, list[Measured]] | None = None
    for turn in range(TIMES):
        found = measure()
        wrong = len(off(found))
        refused = sum(each.is_noisy for each in found) + wrong
        if best is None or refused < best[0]:
            best = refused, found
        if not refused or (not wrong and turn + 1 >= times):
            break
    assert best is not None
    return best[1]


@contextmanager
def _ranks(ranks: int | None, backend: str, effort: Effort) -> Iterator[tuple[int, Run]]:
    """The number of ranks, and a function that runs another on all ranks and returns its result."""
    if "RANK" not in os.environ:
        num = ranks or 2
        _check_devices(num, backend)
        with Processes(num, timeout=TIMEOUT_S, quiet=True) as world:
            yield (
                num,
                lambda function, *given: world.run(_measure, backend, effort, function, *given)[0],
            )
        return
    num = int(os.environ["WORLD_SIZE"])
    if ranks not in (None, num):
        raise UsageError(
            where=f"--ranks {ranks}",
            what="that is not how many there are",
            why=f"torchrun has started {num}",
            do="Leave it out under torchrun.",
        )
    _check_devices(1, backend)
    dist.init_process_group("gloo")
    try:
        yield num, partial(_measure, backend, effort)
    finally:
        dist.destroy_process_group()


def _check_devices(num: int, backend: str) -> None:
    """UsageError if there are fewer GPUs than ranks, as NCCL lets no two ranks share one."""
    if backend == "nccl" and torch.cuda.device_count() < num:
        raise UsageError(
            where=f"--backend {backend}",
            what=f"{num} ranks need as many GPUs",
            why=f"torch sees {torch.cuda.device_count()} here",
            do="Take fewer ranks, or --backend gloo.",
        )


def _measure(backend: str, effort: Effort, function: Run, *given: Any) -> Any:
    """Run a measurement on one rank; the result is the same on all ranks."""
    return function(Stopwatch(backend, effort), *given)


def _device(watch: Stopwatch, num_local: int) -> tuple[str, int]:
    """The name of the ranks' devices, and the bytes of memory of each."""
    if watch.device.type == "cuda":
        known = torch.cuda.get_device_properties(watch.device)
        return known.name, known.total_memory
    threads = torch.get_num_threads()
    name = f"CPU process of {'one thread' if threads == 1 else f'{threads} threads'}"
    return name, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_local
