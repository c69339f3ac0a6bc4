"""Compare what islands make of their parameters with the definitions of local SGD and DiLoCo.

Every rank makes the parameters of all islands by itself, from seeds, takes its own, and lets the
program meet. What comes of it has to be what the definition says of all of them: of every part of
the model in turn, twice; nothing behind other steps, or once more. In the first steps, where the
plan shares gradients, these have to be their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from partc.codegen.helpers.islands import paired_with
from partc.plan import Plan
from partc.plan.compress import Compress
from partc.plan.local_steps import ALL, RING, SUM, LocalSteps
from partc.plan.mesh import ISLAND, PP
from partc.program import Program
from partc.program.expected import seeded_weight
from partc.program.role import Role, Shard
from partc.verification.defined_sums import Site
from partc.verification.differences import difference, largest
from partc.verification.late_gradients import LateGradients, gradients_of
from partc.verification.served_gradients import ServedGradients
from partc.verification.uneven_gradients import UnevenGradients

MET, SHARED = "meeting of islands", "gradient of islands"
SEED = 5  # from which islands draw whom they meet
TURNS = 2  # of all parts of the model
Compared = tuple[str, str, float]  # kind, name, error
Wholes = dict[str, Tensor]
Run = Callable[[], object]
OwnBatches = UnevenGradients | ServedGradients  # which give every island other rows


@dataclass
class Meetings:
    """What one rank compares, and what the definition has made so far.

    ``parts``: by trained parameter which part of the model has it. ``copies``: by island its whole
    parameters, and the buffers that steps change. ``outer``: by parameter what islands keep: where
    they last met, the outer momentum, and the sum that is on its way where they go on meanwhile.
    """

    role: Role
    how: LocalSteps
    rank: int
    parts: Mapping[str, int]
    copies: list[Wholes] = field(default_factory=list)
    outer: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # of parameters, by their keys
    under_way: bool = False  # sums are, so that nobody may touch them
    device: torch.device | str = "cpu"

    @classmethod
    def of(
        cls, program: Program, role: Role, rank: int
    ) -> Meetings | LateGradients | OwnBatches | None:
        """None where the plan has no islands, or the program does not train."""
        plan = Plan.parse(program.plan)
        if role.is_inference:
            return None
        if plan.stale is not None:
            return LateGradients(role, plan.stale, rank)
        if plan.uneven is not None:
            return UnevenGradients(role, plan.uneven, rank)
        if plan.servers is not None and not plan.servers.is_beside:
            return ServedGradients(role, plan.servers, rank)
        how = plan.local_steps
        if how is None:
            return None
        known = program.fingerprint.tensors.items()
        sizes = {name: prod(each.shape) for name, each in known if each.kind == "param"}
        return cls(role, how, rank, _parts(sizes, how.fragments))

    def rows(self, step: Any, run: Run, alone: Run) -> Iterator[Compared]:
        """What was compared, of which tensor, and its relative error.

        ``run`` lets the rank's module take a step, ``alone`` one without other islands.
        """
        held = self.role.tensors(step)
        before = {name: x.clone() for name, x in held.items()}
        self.device = next(step.parameters()).device
        yield from self._shared(step, run, alone)
        running = [s for s in self.role.buffers if not torch.equal(before[s.name], held[s.name])]
        params = [s for s in self.role.params if held[s.name].requires_grad]
        self.order = [key for key, _ in step.named_parameters()]
        floats = [s for s in running if s.dtype.is_floating_point or s.dtype.is_complex]
        with torch.no_grad():
            yield from self._met(step, params, floats)

    # gradients -----------------------------------------------------------------------------------
    def _shared(self, step: Any, run: Run, alone: Run) -> Iterator[Compared]:
        """The gradients of the last step in which islands share them, and of the one behind it."""
        held, start = self.role.tensors(step), self.how.start_step
        with torch.no_grad():
            for shard in self.role.params:
                held[shard.name].mul_(1 + self.role.mesh.coords(self.rank)[ISLAND] / 8)
        for taken in range(max(0, start - 1), start + 1):
            wanted = gradients_of(self.role, step, alone, taken)
            if taken < start:
                for grad in wanted.values():
                    self.role.module.__dict__["dist"].all_reduce(grad, group=step.island)
                    grad /= self.role.mesh.islands
            found = gradients_of(self.role, step, run, taken)
            for name, grad in wanted.items():
                yield SHARED, name, _error(found.get(name), grad)

    # parameters ----------------------------------------------------------------------------------
    def _met(self, step: Any, params: list[Shard], running: list[Shard]) -> Iterator[Compared]:
        apart = self.how.period // self.how.fragments
        shards = [*params, *running]
        self.copies = [
            {s.name: self._drawn(f"{s.name} of {i}", s) for s in shards}
            for i in range(self.role.mesh.islands)
        ]
        self._write(step, shards)
        for s in shards:  # islands begin as one
            self._give(s.name, self._mean(s.name))
        means = {s.name: self._mean(s.name) for s in params}
        nothing = {
            name: [torch.zeros_like(x) for _ in self.how.keeps[1:]] for name, x in means.items()
        }
        self.outer = {name: (x, *nothing[name]) for name, x in means.items()}
        step.seed(SEED)
        step.met = -1
        yield from self._again(step, shards, self.how.start_step)
        for turn in range(1, TURNS * self.how.fragments + 1):
            self._go_on(shards, turn)
            behind = self.how.start_step + turn * apart
            if apart > 1:
                yield from self._compared(step, shards, behind - 1)
            self._write(step, shards)
            part = turn % self.how.fragments
            if self.how.overlap:
                yield from self._met_later(step, params, running, turn, behind)
                continue
            self._define(params, running, part, behind)
            step.met = -1
            yield from self._again(step, shards, behind)
            yield from self._again(step, shards, behind)

    def _met_later(
        self, step: Any, params: list[Shard], running: list[Shard], turn: int, behind: int
    ) -> Iterator[Compared]:
        """What becomes of a part that is summed while islands go on: nothing until that ends."""
        shards, part = [*params, *running], turn % self.how.fragments
        for s in running:
            self._give(s.name, self._mean(s.name))
        for s in self._of_part(params, part):
            last, velocity, _ = self.outer[s.name]
            total = torch.stack([last - copy[s.name] for copy in self.copies]).sum(0)
            self.outer[s.name] = last, velocity, total
        step.met, self.under_way = -1, True
        yield from self._again(step, shards, behind)
        self._go_on(shards, -turn)
        self._write(step, shards)
        for after in range(1, self.how.overlap):
            yield from self._again(step, shards, behind + after)
        self._end(params, part)
        self.under_way = False  # the text has waited for them
        yield from self._again(step, shards, behind + self.how.overlap)
        yield from self._again(step, shards, behind + self.how.overlap)
        self._write(step, shards)
        step.met = -1  # of what did not begin here nothing ends
        yield from self._again(step, shards, behind + self.how.overlap)

    def _go_on(self, shards: list[Shard], turn: int) -> None:
        """Let every island go a way of its own."""
        for island, copy in enumerate(self.copies):
            for s in shards:
                way = self._drawn(f"{s.name} {island} {turn}", s)
                copy[s.name] = copy[s.name] + 0.1 * way

    def _of_part(self, params: list[Shard], part: int) -> list[Shard]:
        return [s for s in params if self.parts[s.name] == part]

    def _end(self, params: list[Shard], part: int) -> None:
        """The definition of what becomes of a part once its sum is there."""
        mix = self.how.mix
        for s in self._of_part(params, part):
            new = self._outer_step(s.name, self.outer[s.name][2] / len(self.copies))
            for copy in self.copies:
                copy[s.name] = (1 - mix) * new + mix * copy[s.name]

    def _outer_step(self, name: str, delta: Tensor) -> Tensor:
        """The definition of the outer optimizer, SGD with Nesterov momentum: where it comes to."""
        last, velocity, *under_way = self.outer[name]
        momentum = self.how.outer_momentum
        velocity = momentum * velocity + delta
        new = last - self.how.outer_lr * (delta + momentum * velocity)
        self.outer[name] = new, velocity, *under_way
        return new

    def _drawn(self, name: str, shard: Shard) -> Tensor:
        """Numbers of a whole tensor, which follow from a name, on the device of the text: a GPU
        divides by a number of Python otherwise than a CPU does, and what is to be rounded may
        be at an edge.
        """
        return seeded_weight(name, shard.shape, shard.dtype).to(self.device)

    def _define(self, params: list[Shard], running: list[Shard], part: int, behind: int) -> None:
        """The definition: a part of the model, and all running statistics, become one; or each
        island's become a mean with those of its partners.
        """
        if self.how.partners != ALL:
            self._mix([s.name for s in (*self._of_part(params, part), *running)], behind)
            return
        for s in running:
            self._give(s.name, self._mean(s.name))
        met = self._of_part(params, part)
        ways = self._rounded_ways(met)
        for s in met:
            new = self._mean(s.name)
            if self.how.keeps:
                way = ways.get(s.name, self.outer[s.name][0] - new)
                new = self._outer_step(s.name, way)
            self._give(s.name, new)

    def _mix(self, names: list[str], behind: int) -> None:
        """The definition of gossip: new copies are W times the old ones, with equal weights for an
        island and its partners.
        """
        num = len(self.copies)
        mixed = torch.eye(num, dtype=torch.float64)
        for i in range(num):
            ring = {(i - 1) % num, (i + 1) % num}
            drawn = paired_with(i, num, SEED, behind)
            mixed[i, [*(ring if self.how.partners == RING else drawn)]] = 1
        mixed /= mixed.sum(1, keepdim=True)
        for name in names:
            old = torch.stack([copy[name] for copy in self.copies])
            weights = mixed.to(old.device, old.dtype)
            for copy, row in zip(self.copies, weights, strict=True):
                copy[name] = torch.tensordot(row, old, 1)

    def _rounded_ways(self, shards: list[Shard]) -> Wholes:
        """The mean ways of parameters from where islands last met, where the plan has them rounded:
        those of one rank leave together, in the order of its parameters.
        """
        if not self.how.wire or not shards:
            return {}
        mesh, own = self.role.mesh, self.role.mesh.coords(self.rank)
        shards = sorted(shards, key=lambda s: self.order.index(s.key))
        places = {s.name: torch.arange(prod(s.shape)).view(s.shape) for s in shards}
        found = {s.name: torch.zeros_like(self._mean(s.name)) for s in shards}
        for coords in mesh.all_coords():
            if coords[ISLAND] or coords.get(PP) != own.get(PP):
                continue
            each = [self._ways(island, shards, coords) for island in self.copies]
            how = Compress(self.how.wire, block=self.how.block, error_feedback=False)
            mean = Site(how, [each[0].shape]).add(torch.stack(each)) / len(each)
            taken = [s.take(places[s.name], mesh, coords).flatten() for s in shards]
            parts = mean.split([len(self._in_blocks(at)) for at in taken])
            for s, at, part in zip(shards, taken, parts, strict=True):
                found[s.name].view(-1)[at] = part[: len(at)]
        return found

    def _ways(self, copy: Wholes, shards: list[Shard], coords: Mapping[str, int]) -> Tensor:
        """How far an island's pieces of some parameters are from where islands last met."""
        mesh = self.role.mesh
        ways = ((s, self.outer[s.name][0] - copy[s.name]) for s in shards)
        pieces = [s.take(way, mesh, coords).flatten() for s, way in ways]
        return torch.cat([*map(self._in_blocks, pieces)])

    def _in_blocks(self, numbers: Tensor) -> Tensor:
        """Numbers, and zeros behind them, as whole blocks: no block has numbers of two tensors."""
        return torch.cat([numbers, numbers.new_zeros(-len(numbers) % self.how.block)])

    def _mean(self, name: str) -> Tensor:
        return torch.stack([copy[name] for copy in self.copies]).mean(0)

    def _give(self, name: str, new: Tensor) -> None:
        for copy in self.copies:
            copy[name] = new

    def _write(self, step: Any, shards: list[Shard]) -> None:
        """Give the rank its pieces of its island's copy, and of what it keeps between meetings.

        What it has kept was compared, and may differ in its last bit: of two ways that differ so,
        one may be rounded up and the other down.
        """
        held = self.role.tensors(step)
        for name, piece in self._pieces(shards).items():
            if name in held:
                held[name].copy_(piece)

    def _pieces(self, shards: list[Shard]) -> Wholes:
        """This rank's pieces, by name, of its island's copy and of what it keeps."""
        mesh = self.role.mesh
        coords = mesh.coords(self.rank)
        copy = self.copies[coords[ISLAND]]
        found = {s.name: s.take(copy[s.name], mesh, coords) for s in shards}
        for s in shards if self.how.keeps else ():
            for word, whole in zip(self.how.keeps, self.outer.get(s.name, ()), strict=False):
                if word == SUM and self.under_way:
                    continue
                found[f"{s.name}_{word}@{ISLAND}"] = s.take(whole, mesh, coords)
        return found

    def _compared(self, step: Any, shards: list[Shard], behind: int) -> Iterator[Compared]:
        """What meeting behind so many steps has made of the rank's pieces of its copy."""
        self._write(step, shards)
        step.met = -1
        yield from self._again(step, shards, behind)

    def _again(self, step: Any, shards: list[Shard], behind: int) -> Iterator[Compared]:
        """The same of the pieces as they are, and of what the rank keeps."""
        held = self.role.tensors(step)
        step.taken = behind
        step.meet()
        for name, tensor in self._pieces(shards).items():
            yield MET, name, _error(held.get(name), tensor)


def _parts(sizes: Mapping[str, int], num: int) -> dict[str, int]:
    """By parameter the part of the model that it belongs to, of as many elements as the others.

    A block of a list belongs to one part: that in which its first parameter begins.
    """
    whole, begins = max(1, sum(sizes.values())), accumulate(sizes.values(), initial=0)
    found: dict[str, int] = {}
    first: dict[tuple[str, ...], int] = {}
    for name, begin in zip(sizes, begins, strict=False):
        path = tuple(name.split("."))
        depth = [i for i, word in enumerate(path[:-1], start=1) if word.isdigit()]
        block = path[: depth[0]] if depth else path
        found[name] = first.setdefault(block, min(num * begin // whole, num - 1))
    return found


def _error(mine: Tensor | None, wanted: Tensor) -> float:
    """The largest difference over the largest value; infinite where nothing is there."""
    return inf if mine is None else difference(mine, wanted) / (largest(wanted) or 1.0)
