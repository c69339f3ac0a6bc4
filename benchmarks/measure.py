"""Time, processor time, bytes sent, peak memory and collectives of one rank's training step."""

from __future__ import annotations

import gc
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.workload import build_optimizer, norm_of
from partc.measure.resident import peak_resident_bytes, process_table, resident_bytes


@dataclass
class Side:
    """One way to train the model on this rank.

    ``forward_backward`` fills every ``.grad`` and returns the loss of this rank's rows;
    ``grad_norm`` is the norm of the whole model's gradient.
    """

    name: str
    parameters: list[nn.Parameter]
    forward_backward: Callable[[], Tensor]
    grad_norm: Callable[[], float]

    def __post_init__(self) -> None:
        self.optimizer = build_optimizer(self.parameters)

    def step(self) -> Tensor:
        """One whole training step; returns the loss."""
        self.optimizer.zero_grad()
        loss = self.forward_backward()
        self.optimizer.step()
        return loss


@dataclass(frozen=True)
class Sample:
    """One step on one rank. ``sent_bytes`` is None where the system does not count it."""

    forward_backward_s: float
    step_s: float
    cpu_s: float
    sent_bytes: int | None


@dataclass(frozen=True)
class Trial:
    """A side's first losses and gradient norm, and how often each collective runs in a step."""

    losses: tuple[float, ...]
    grad_norm: float
    collectives: dict[str, int]


def sample(side: Side) -> Sample:
    """Time one step that all ranks begin together."""
    gc.collect()
    dist.barrier()
    sent, cpu, start = written_bytes(), time.process_time(), time.perf_counter()
    side.optimizer.zero_grad()
    side.forward_backward()
    middle = time.perf_counter()
    side.optimizer.step()
    end = time.perf_counter()
    cpu, now_sent = time.process_time() - cpu, written_bytes()
    moved = None if sent is None or now_sent is None else now_sent - sent
    return Sample(middle - start, end - start, cpu, moved)


def trial(side: Side, num_steps: int) -> Trial:
    """Train for some steps; the last one is counted by the profiler."""
    losses, norm = first_steps(side, num_steps - 1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss = side.step()
    return Trial((*losses, _mean_loss(loss)), norm, _collectives(profiler))


def first_steps(side: Side, num_steps: int) -> tuple[tuple[float, ...], float]:
    """Train for some steps: each one's loss, and the norm of the first gradient."""
    losses, norm = [], 0.0
    for step in range(num_steps):
        losses.append(_mean_loss(side.step()))
        norm = side.grad_norm() if step == 0 else norm
    return tuple(losses), norm


def peak_bytes(build: Callable[[], Side], num_steps: int) -> int | None:
    """The most that a side holds during its last step: weights, optimizer state, buckets, all.

    Counted by the system as resident memory over what the process held before building the side,
    in a process that has called ``free_at_once``; None where the system does not count it.
    """
    gc.collect()
    before = resident_bytes()
    side = build()
    peak = None
    for _ in range(num_steps):
        gc.collect()
        peak = peak_resident_bytes(side.step)
    return None if before is None or peak is None else peak - before


def _mean_loss(loss: Tensor) -> float:
    """The loss over the global batch: each rank has the mean over equally many rows."""
    mean = full(loss.detach()).clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def _collectives(profiler: Any) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    names = [str(event.get("name", "")) for event in events]
    return dict(sorted(Counter(n[len("gloo:") :] for n in names if n.startswith("gloo:")).items()))


def written_bytes() -> int | None:
    """Bytes that this process has written so far, sockets included, as Linux counts them.

    Between the barriers around a step a rank writes to nothing but gloo's sockets.
    """
    written = process_table("io").get("wchar")
    return None if written is None else int(written)


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be a DTensor."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_grad_norm(parameters: list[nn.Parameter]) -> float:
    """The norm of all gradients, DTensors gathered."""
    return norm_of(full(p.grad) for p in parameters if p.grad is not None)


def norm_over_ranks(grads: Mapping[str, Tensor]) -> float:
    """The norm of what all ranks have together; a name that several have is counted once."""
    mine = {name: norm_of([grad]) for name, grad in grads.items()}
    ranks: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, mine)
    norms = {name: norm for rank in ranks for name, norm in rank.items()}
    return math.hypot(*norms.values())


def rows_of(tensor: Tensor, index: int, num: int) -> Tensor:
    """This data-parallel rank's rows of a global batch."""
    return tensor.chunk(num)[index].contiguous()
