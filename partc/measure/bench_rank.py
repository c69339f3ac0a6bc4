"""One rank of ``partc bench``: times a program's steps with random weights and inputs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partc.cost.roofline import Box
from partc.measure.timed_calls import Clock, CudaClock, HostClock
from partc.measure.timed_step import StepTimes, block_paths, time_step
from partc.program import Program, load
from partc.program.role import Role
from partc.program.stage.runtime import Stage
from partc.program.step.microbatches_of_island import MicrobatchesOfIsland

Optimizers = dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-4, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-4),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-4),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-4, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
}


@dataclass(frozen=True)
class RankTimes:
    """The measured times of one rank.

    ``plain_s``: seconds of (step, optimizer) without timers inside. ``timed``: steps with timers.
    ``boxes``: the time line of each timed step.
    """

    plain_s: list[tuple[float, float]] = field(default_factory=list)
    timed: list[StepTimes] = field(default_factory=list)
    boxes: list[list[Box]] = field(default_factory=list)


def measure_rank(folder: str, device: str, steps: int, warmup: int) -> RankTimes:
    """Measure this rank's steps, alternately without and with timers; all ranks call together."""
    program = load(folder)
    runner = Runner(program, program.module(device))
    for _ in range(warmup):
        runner.plain()
    found = RankTimes()
    for _ in range(steps):
        found.plain_s.append(runner.plain())
        times, boxes = runner.timed()
        found.timed.append(times)
        found.boxes.append(boxes)
    return found


class Runner:
    """Runs and times this rank's steps."""

    def __init__(self, program: Program, stage: Stage) -> None:
        role = program.role(dist.get_rank())
        self.stage, self.inference = stage, role.is_inference
        self.clock: Clock = CudaClock() if stage.device.type == "cuda" else HostClock()
        with torch.no_grad():
            for name, (_, piece) in stage.pieces().items():
                _fill(name, piece)
        stage.seed(0)
        made = make_inputs(role, stage.coords, stage.device)
        turns = MicrobatchesOfIsland.of(program, dist.get_rank())
        made = turns.repeated(made) if turns is not None else made
        tensors = dict(zip(role.inputs, made, strict=True))
        self.args, self.kwargs = program.arguments.call(tensors)
        self.optimizer = self._optimizer(program)
        self.paths = block_paths(stage.rank_step, role.shards)
        self.axes = _axes(stage)

    def _optimizer(self, program: Program) -> torch.optim.Optimizer | None:
        make = OPTIMIZERS.get(program.cost.as_json()["optimizer"])
        trained = [p for p in self.stage.rank_step.parameters() if p.requires_grad]
        return make(trained) if make and trained and not self.inference else None

    def plain(self) -> tuple[float, float]:
        """Seconds of a step without timers inside, and of the optimizer step."""
        self.begin()
        first = self.clock.now()
        self.run()
        middle = self.clock.now()
        self.update()
        last = self.clock.now()
        return self.clock.seconds(first, middle), self.clock.seconds(middle, last)

    def timed(self) -> tuple[StepTimes, list[Box]]:
        """The times of a step with timers, and its time line."""
        return time_step(
            self.stage.rank_step, self.paths, self.axes, self.clock,
            self.begin, self.run, self.update,
        )  # fmt: skip

    def begin(self) -> None:
        """Reset gradients, and let all ranks begin the step together."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        dist.barrier()

    def run(self) -> None:
        """Run the forward and backward, or the forward of an inference program."""
        (self.stage if self.inference else self.stage.step)(*self.args, **self.kwargs)

    def update(self) -> None:
        """Take the optimizer's step."""
        if self.optimizer is not None:
            self.optimizer.step()


def make_inputs(role: Role, coords: Mapping[str, int], device: torch.device) -> list[Tensor]:
    """What the rank at ``coords`` is given: the whole batch, or its piece.

    Floats are normal; integers are 0 or 1, which any model takes as token, label and mask.
    """
    made = []
    for each, (shape, dtype) in zip(role.batch, role.inputs.values(), strict=True):
        place = ",".join(str(coords[axis]) for axis, *_ in each.cuts)
        generator = torch.Generator().manual_seed(zlib.crc32(place.encode()) if place else 0)
        if dtype.is_floating_point:
            made.append(torch.randn(shape, generator=generator).to(device, dtype))
        else:
            made.append(torch.randint(2, shape, generator=generator).to(device, dtype))
    return made


def _fill(name: str, piece: Tensor) -> None:
    """Fill a shard: small weights, scales of 1, biases of 0.

    The generator is seeded by name, so that copies of a shard are equal.
    """
    if not piece.is_floating_point():
        return
    if piece.dim() < 2:
        piece.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    generator = torch.Generator(piece.device).manual_seed(zlib.crc32(name.encode()))
    piece.normal_(0, 0.02, generator=generator)


def _axes(stage: Stage) -> dict[str, str]:
    """The name of each process group of this rank -> its mesh axis."""
    return {group.group_name: axis for axis, group in stage.groups.items()}
