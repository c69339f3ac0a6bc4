"""Compare what ranks must hold alike: batch, weights, buffers, and the seed of random numbers.

A program gives plausible losses on ranks that were given different batches, so that nobody would
notice. At the first step of each program, soon behind the first steps of an optimizer, and at every
``every``-th step, each rank makes a number of all that it has (``tensor_hash.py``), and one small
collective over the default group shows every rank the numbers of all. Where they differ a second
one finds the tensors, and all ranks raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod, sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from partc.data.same_rows import noted, watch_samplers
from partc.plan.mesh import ISLAND, PP
from partc.program.optimizer.beside import ALONE, OF_BESIDE, TOGETHER, told
from partc.program.optimizer.same_steps import NAMES, STEPS, Steps, steps_since, watch_steps
from partc.program.ranks.alike import CAUSES, EVERYWHERE, OF_PARAMETERS, Alike
from partc.program.ranks.disagreement import (
    Found,
    disagreement,
    equal_input,
    equal_pieces,
    refused_elsewhere,
)
from partc.program.ranks.tensor_hash import hashes_of, joined, sketch_of
from partc.program.role import Role, Shard
from partc.program.tensors.holders import Holders
from partc.program.tensors.own_writes import NAMES as WRITES
from partc.program.tensors.own_writes import OF_COPIES, OF_FACTORS, OF_PIECES, OWN_WRITES
from partc.users_line import warn
from partc.wrong_calls import check_whole_number

EVERY = 100  # steps from one comparison to the next
COMPARABLE = (TOGETHER, ALONE, "dataset")  # where the first of two numbers is alike, and not 0
EARLY = (1, 10)  # steps that are compared too: optimizers of unlike numbers have then stepped


@dataclass(frozen=True)
class Sources:
    """What a rank was given whole: a number of each tensor by name, and how often it has loaded.

    A tensor that it takes no piece of counts too: other pipeline ranks have to be given the same,
    or each stage would be of another model. It says nothing where these have loaded once more.
    """

    numbers: Mapping[str, int]
    num_loads: int


class Agreement:
    """Compares the ranks of a run now and then.

    Attributes:
        every: how many steps lie between two comparisons; 0 compares at the first step of each
            program alone. It has to be the same on all ranks. A comparison reads all weights once.
        drain: waits for what other islands send, which a comparison must not read half sent.
    """

    def __init__(
        self,
        holders: Holders,
        sources: Callable[[], Sources],
        shown: Callable[[], Mapping[str, Tensor]],
        *,
        draws: bool,
        own_rows: bool = False,
    ) -> None:
        self._every, self.num_steps, self.own_rows = EVERY, 0, own_rows
        self._is_asked = False  # to compare before the next step
        self._holders, self._draws, self.sources = holders, draws, sources
        self.shown = shown  # the parameters that optimizers of the script step on
        self.drain: Callable[[], None] = lambda: None
        watch_steps()
        watch_samplers()
        OWN_WRITES.compared()
        self._seen: dict[int, Role] = {}  # of the programs that have run

    @property
    def every(self) -> int:
        return self._every

    @every.setter
    def every(self, steps: int) -> None:
        self._every = check_whole_number(steps, "stage.agreement.every")

    def compare(
        self, role: Role, inputs: Sequence[Tensor] | None, held: Mapping[str, Tensor],
        drawn: tuple[int, int], device: torch.device,
    ) -> None:  # fmt: skip
        """Compare before a step, if it is time; all ranks call this together.

        Args:
            role: of the program that runs.
            inputs: what this rank was given; None where its checks have refused that.
            held: its pieces of parameters and buffers by the user's names.
            drawn: the seed of random numbers, and the steps taken since it was set.
            device: of the collective.

        Raises:
            RunError: on every rank, if ranks differ in what they must hold alike.
        """
        number, self.num_steps = self.num_steps, self.num_steps + 1
        new = id(role) not in self._seen
        self._seen[id(role)] = role
        regular = self.every > 0 and (number % self.every == 0 or number in EARLY)
        due, self._is_asked = new or regular or self._is_asked, False
        if due and role.mesh.num_ranks > 1:
            comparison = _Comparison(self, role, inputs, held, drawn, device)
            refused = True
            try:
                comparison.run(first=number == 0, new=new)
                refused = inputs is None
            finally:
                if refused:  # on all ranks: the next call compares again
                    self.num_steps = number
                    del self._seen[id(role)]

    def compare_weights(
        self, role: Role, held: Mapping[str, Tensor], drawn: tuple[int, int], device: torch.device
    ) -> None:
        """Compare what ranks hold, of no batch; as ``compare``, whenever all ranks call it."""
        if role.mesh.num_ranks > 1:
            comparison = _Comparison(self, role, (), held, drawn, device)
            comparison.run(first=False, new=False)

    def ask(self) -> None:
        """Compare before the next step; on all ranks."""
        self._is_asked = True

    @property
    def shards(self) -> Mapping[str, Shard]:
        """How each tensor of the model is sharded."""
        return self._holders.shards

    def alike(self, role: Role) -> list[Alike]:
        """All that ranks hold alike, in one order on all ranks."""
        every = tuple(range(role.mesh.pipeline_ranks))
        kinds: dict[tuple[str, frozenset[str], tuple[int, ...]], list[str]] = {}
        for each in role.batch:
            apart = frozenset(axis for axis, *_ in each.cuts)
            kinds.setdefault(("input", apart, every), []).append(each.name)
        for name, places in sorted(self._holders.places.items()):
            apart = frozenset(axis for axis, *_ in self._holders.shards[name].cuts)
            kind = "parameter" if name in self._holders.params else "buffer"
            kinds.setdefault((kind, apart, places), []).append(name)
            if kind == "parameter":
                for of in OF_PARAMETERS:
                    kinds.setdefault((of, frozenset(), places), []).append(name)
            if apart or len(every) > 1:
                kinds.setdefault(("source", frozenset(), every), []).append(name)
        kinds["optimizer", frozenset({PP}), every] = [*NAMES]  # its groups are of a rank's stages
        kinds["write", frozenset({PP}), every] = [*WRITES]
        if self.own_rows:
            alike = frozenset(role.mesh.names) - {axis for x in role.batch for axis, *_ in x.cuts}
            kinds |= {(kind, alike, every): [*OF_BESIDE] for kind in (TOGETHER, ALONE)}
            kinds["dataset", frozenset(), every] = ["number of rows", "rows"]
        if self._draws:
            kinds["random", frozenset(), every] = ["seed", "number of steps"]
        return [
            Alike(key[0], tuple(names), *key[1:], everywhere=key[0] in EVERYWHERE)
            for key, names in kinds.items()
        ]


@dataclass
class _Comparison:
    """One comparison, on one rank."""

    of: Agreement
    role: Role
    inputs: Sequence[Tensor] | None
    held: Mapping[str, Tensor]
    drawn: tuple[int, int]
    device: torch.device

    def run(self, *, first: bool, new: bool) -> None:
        """Compare; at the first step weights have to be equal to the bit."""
        self.of.drain()
        said = [joined(self._numbers(each)) for each in self.alike]
        samples = self._samples()
        rows = self._exchange([int(self.inputs is None), joined(samples), *samples, *said])
        refused = [rank for rank, row in enumerate(rows) if row[0]]
        if refused and self.inputs is None:
            return  # this rank's own error is on its way
        if refused:
            raise refused_elsewhere(refused)
        columns = zip(self.alike, range(2 + len(samples), len(rows[0])), strict=True)
        unlike = [each for each, i in columns if [*self._odd(each, [row[i] for row in rows])]]
        every = [one for each in unlike for one in self._found(each, first)]
        found = {(x.name, x.odd): x for x in reversed(every)}  # a copy's piece, or else its source
        if {name for name, _ in found} == {OF_COPIES}:
            found = {}  # written by other ops, and the same
        if OF_PIECES in {name for name, _ in found}:  # which has factors of its own
            found = {key: x for key, x in found.items() if x.name != OF_FACTORS}
        for each in [x for x in found.values() if x.kind == ALONE]:
            warn(told(str(each)))
            del found[each.name, each.odd]
        for kinds in CAUSES:
            found = {k: x for k, x in found.items() if x.kind in kinds} or found
        OWN_WRITES.compared()
        if found:
            raise disagreement([*reversed(found.values())], self.role, own_rows=self.of.own_rows)
        trains = torch.is_grad_enabled() and not self.role.is_inference
        if new and trains:  # who evaluates may give all ranks the same
            self._look_for_equal_pieces(rows)

    @cached_property
    def alike(self) -> list[Alike]:
        """What ranks hold alike; before the first step of a training islands have equal weights."""
        found = self.of.alike(self.role)
        if self.drawn[1] == 0:
            found = [replace(x, everywhere=True) if x.kind == "parameter" else x for x in found]
        return found

    # numbers -------------------------------------------------------------------------------------
    @cached_property
    def _sources(self) -> Sources:
        return self.of.sources()

    @cached_property
    def _dealt(self) -> list[int]:
        mesh, cut = self.role.mesh, {axis for x in self.role.batch for axis, *_ in x.cuts}
        pieces = prod(mesh.size(axis) for axis in cut if axis in mesh.names)
        return noted({pieces, pieces * mesh.islands})

    @cached_property
    def _steps(self) -> Steps:
        return steps_since(self.of.shown().values())

    @cached_property
    def _hashes(self) -> dict[tuple[str, str], int]:
        """The hash of every tensor that this rank has, by kind and name."""
        batch = zip(self.role.batch, self.inputs or (), strict=False)
        tensors = {("input", each.name): x for each, x in batch}
        for of in self.alike:
            if of.kind in ("parameter", "buffer"):
                tensors |= {(of.kind, n): self.held[n] for n in of.names if n in self.held}
        return dict(zip(tensors, hashes_of([*tensors.values()]), strict=True))

    def _numbers(self, of: Alike) -> list[int]:
        """This rank's number of each of some things; 0 for what it has not."""
        if of.kind == "random":
            return [each & (1 << 63) - 1 for each in self.drawn]
        if of.kind == "optimizer":
            return self._steps.numbers
        if of.kind == "dataset":
            return self._dealt
        if of.kind == "write":
            return OWN_WRITES.since()
        if of.kind in (TOGETHER, ALONE):
            return self._steps.beside[of.kind].numbers()
        shown = self.of.shown()
        if of.kind == "gradient":
            grads = self._steps.grads
            return [grads.get(id(shown[n]), -1) if n in shown else -1 for n in of.names]
        if of.kind == "frozen":
            return [1 + shown[n].requires_grad if n in shown else 0 for n in of.names]
        if of.kind == "source":
            told = self._sources
            return [*(told.numbers.get(name, 0) for name in of.names), told.num_loads]
        return [self._hashes.get((of.kind, name), 0) for name in of.names]

    def _samples(self) -> list[int]:
        """A number of each input."""
        return [self._hashes.get(("input", each.name), 0) for each in self.role.batch]

    def _exchange(self, mine: Sequence[float]) -> list[list[int]]:
        """The numbers of all ranks, by rank."""
        whole = all(isinstance(each, int) for each in mine)
        dtype = torch.int64 if whole else torch.float64
        sent = torch.tensor(mine, dtype=dtype, device=self.device)
        got = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(got, sent)
        rows: list[list[int]] = torch.stack(got).tolist()
        return rows

    # what differs --------------------------------------------------------------------------------
    def _odd(self, of: Alike, values: Sequence[int]) -> Iterator[tuple[list[int], int]]:
        """The ranks whose value is not that of most of their group, and one of those most."""
        for ranks in of.groups(self.role.mesh):
            mine = [values[rank] for rank in ranks]
            usual = max(dict.fromkeys(mine), key=mine.count)  # in a tie that of the first rank
            odd = [rank for rank in ranks if values[rank] != usual]
            if odd:
                yield odd, next(rank for rank in ranks if values[rank] == usual)

    def _found(self, of: Alike, first: bool) -> Iterator[Found]:
        """The things that differ, of things some of which do.

        Copies of a weight that each rank trains by itself, on GPUs whose sums come in no fixed
        order, may drift apart by rounding: at later steps that is no difference.
        """
        rows = self._exchange(self._numbers(of))
        drifts = of.kind in ("parameter", "buffer") and not first
        sketches = self._exchange(self._sketches(of)) if drifts else []
        for i, name in enumerate(of.names):
            numbers = [row[i] for row in rows]
            if of.kind == "source" and not self._is_told(name, numbers, [row[-1] for row in rows]):
                continue
            for odd, usual in self._odd(of, numbers):
                if of.kind in COMPARABLE:
                    same = i > 0 and rows[usual][0] > 0
                    odd = [r for r in odd if same and rows[r][0] == rows[usual][0]]
                if of.kind in (TOGETHER, ALONE):
                    name = str(self._steps.beside[of.kind])
                if sketches:
                    there = sketches[usual][2 * i : 2 * i + 2]
                    odd = [r for r in odd if self._is_far(name, there, sketches[r][2 * i])]
                told = of.kind in ("random", "gradient", "write")
                told = told and name != OF_FACTORS
                values = (rows[usual][i], rows[odd[0]][i]) if odd and told else None
                name = f"gradient of {name}" if of.kind == "gradient" else name
                if of.kind == "frozen":
                    name, odd = f"requires_grad of {name}", [r for r in odd if numbers[r]]
                    values = (numbers[usual] > 1, numbers[usual] < 2)
                if odd:
                    none = of.kind == "optimizer" and 0 in (numbers[usual], numbers[odd[0]])
                    yield Found(of.kind, STEPS if none else name, tuple(odd), usual, values)

    def _is_told(self, name: str, numbers: Sequence[int], loads: Sequence[int]) -> bool:
        """Whether all ranks know from what a tensor was loaded, in the same load if it is whole."""
        return 0 not in numbers and (bool(self.of.shards[name].cuts) or len({*loads}) == 1)

    def _sketches(self, of: Alike) -> list[float]:
        """Two numbers of each tensor: its product with fixed numbers, and its norm."""
        pairs = [sketch_of(self.held[n]) if n in self.held else (0.0, 0.0) for n in of.names]
        return [number for pair in pairs for number in pair]

    def _is_far(self, name: str, there: Sequence[float], here: float) -> bool:
        """Whether two copies differ by more than rounding; also if either is not finite."""
        dtype = self.of.shards[name].dtype
        if not dtype.is_floating_point:
            return True
        return not abs(here - there[0]) <= sqrt(torch.finfo(dtype).eps) * there[1]

    def _look_for_equal_pieces(self, rows: Sequence[Sequence[int]]) -> None:
        """Warn where ranks with samples of their own were given the same ones, or one input of
        several alike.
        """
        role, here = self.role, dist.get_rank()
        dealt = {axis for x in role.batch for axis, *_ in x.cuts} | {ISLAND}
        cut = [axis for axis in role.mesh.names if axis in dealt]
        every = role.mesh.all_coords()
        own = [tuple(coords[axis] for axis in cut) for coords in every]
        computing = [rank for rank, coords in enumerate(every) if role.computes(coords)]
        others = [rank for rank in computing if own[rank] != own[here]]
        if here not in computing or not others:
            return
        if any(rows[rank][1] == rows[here][1] for rank in others):
            same = [rank for rank in computing if rows[rank][1] == rows[here][1]]
            warn(equal_pieces(same, cut))
            return
        for at, (each, x) in enumerate(zip(role.batch, self.inputs or (), strict=False), 2):
            alike = all(rows[rank][at] == rows[here][at] for rank in computing)
            if alike and each.cuts and _has_unlike_rows(x, each.cuts[0][1]):
                warn(equal_input(each.name, computing, cut))


def _has_unlike_rows(x: Tensor, dim: int) -> bool:
    """Whether an input has other numbers in some rows than in the first. A mask of ones, or the
    places of words, are alike in all rows, and may be the same on all ranks.
    """
    return bool((x != x.narrow(dim, 0, 1)).any()) if x.shape[dim] else False
