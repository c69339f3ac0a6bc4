"""Compare the classes of a text that send sums with fewer bytes with the schemes' definitions.

In: a loaded role whose text has such classes. Out: the same role with stand-ins for them: exact
sums, with which the rest of the text is compared with the model, and those of the definition
(``defined_sums.py``), with which the classes themselves are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from typing import Any

import torch
from torch import Tensor, nn

from partc.graph.draws import seed_of
from partc.plan import Plan
from partc.plan.compress import Compress
from partc.plan.mesh import ISLAND, PP, TP
from partc.plan.wires import HELPERS, OWN, SCATTERS, WIRES, is_residual
from partc.program.role import Role
from partc.verification.defined_sums import Key, Site
from partc.verification.exact_gathers import gather_exactly
from partc.verification.same_draws import SEED

GRADIENT = "rounded gradient"
STEPS = 3  # in which what is left over is sent twice


Compared = tuple[str, str, float]  # of which kind, of which tensor, and its error


class Arrived:
    """The handle of a sum that is complete already; ``total`` is this rank's piece of it, where
    ranks keep pieces.
    """

    def __init__(self, total: Tensor | None = None) -> None:
        self.total = total

    def wait(self) -> bool:
        return True


@dataclass
class Definition:
    """Stands for the classes of one rank's text: every sum is that of the definition.

    Sums are known by their order in a step, so that a text which takes the buffers of another sum,
    or none, differs. ``rank``: this rank's place among those that sum.
    """

    dist: Any
    how: Compress
    num: int
    rank: int
    names: Sequence[str]  # of parameters, of which one is the name of a sum
    step: int = 0
    sites: list[Site] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)  # of the text, by the order of sums
    drawn: set[str] = field(default_factory=set)  # sums that have drawn in this step

    def __call__(
        self, flat: Tensor, among: Any, size: int, state: list[Tensor], group: Any, *rng: Any
    ) -> Arrived:
        """The sum, written to ``flat``; what it has not sent stays here until the step ends."""
        every, site = self._begun(flat, among, state, group, rng)
        drawn = _generators(rng) and not site.key
        total = every.new_full(every[0].shape, nan) if drawn else site.add(every)
        flat.copy_(total.view(flat.shape))
        return Arrived()

    def scatter(
        self, rows: Tensor, num: int, size: int, state: list[Tensor], group: Any, *rng: Any
    ) -> Arrived:
        """The piece of a sum that this rank keeps, as ``total``; ``rows``: those of all ranks."""
        every, site = self._begun(rows, num, state, group, rng)
        if rng and not site.key:
            return Arrived(rows.new_full(rows[0].shape, nan))
        return Arrived(site.add_piece(every, self.rank).to(rows.dtype))

    def _begun(
        self, flat: Tensor, among: Any, state: list[Tensor], group: Any, rng: Sequence[Any]
    ) -> tuple[Tensor, Site]:
        """The numbers of all ranks for the next sum of the step, and what is known of that sum."""
        mine = flat.flatten().to(torch.float32)  # which raises to float64 where verify does
        every = of_all_ranks(self.dist, mine, self.num, group)
        if len(self.states) == len(self.sites):
            self.sites.append(Site(self.how, shapes_of(flat, among)))
        site = self.sites[len(self.states)]
        self.states.append(state)
        made = _generators(rng)
        site.key = self._key(made[0]) if made else None
        return every, site

    def _key(self, mine: torch.Generator) -> Key:
        """The generators of all ranks, on the same device, for the sum whose generator has this
        seed here; None if no sum has it, or another one had it in this step.
        """
        own = WIRES[self.how.wire].drawn == OWN

        def seed_at(name: str, rank: int) -> int:
            return seed_of(SEED, self.step, None, name, (rank,) if own else ())

        known = {seed_at(name, self.rank): name for name in self.names if name not in self.drawn}
        name = known.get(mine.initial_seed())
        if name is None:
            return None
        self.drawn.add(name)
        return lambda rank: torch.Generator(mine.device).manual_seed(seed_at(name, rank))

    def end(self, finite: bool) -> None:
        """End a step; without a finite sum all that is left over stays as it was. The text's
        buffers get it, to be compared.
        """
        for site, state in zip(self.sites, self.states, strict=False):
            if finite:
                site.keep()
            for buffer, kept in zip(state, site.kept, strict=False):
                buffer.copy_(kept[self.rank].reshape(buffer.shape))
        self.states.clear()
        self.drawn.clear()


@dataclass
class Spoiled:
    """A class of sums, of which one, by its number in a step, gets such an element."""

    made: Callable[..., Any]
    number: int = -1
    count: int = 0
    element: float = inf

    def __call__(self, flat: Tensor, *given: Any) -> Any:
        self.count += 1
        if self.count == self.number:
            flat.view(-1)[0] = self.element
        return self.made(flat, *given)


# the text of one rank ----------------------------------------------------------------------------
def classes_of(role: Role) -> dict[str, Any]:
    """The classes of a text that send sums with fewer bytes, by name."""
    module = role.module.__dict__
    return {name: module[name] for name in sorted(HELPERS) if name in module}


def sum_exactly(role: Role) -> None:
    """Let a role's text sum gradients in the numbers that it is given, in place of fewer bytes, and
    gather weights so.
    """
    module = role.module.__dict__
    gather_exactly(role)

    def exact(
        flat: Tensor, among: Any, size: int, state: list[Tensor], group: Any, *rng: Any
    ) -> Any:
        return module["dist"].all_reduce(flat, group=group, async_op=True)

    def piece(
        rows: Tensor, num: int, size: int, state: list[Tensor], group: Any, *rng: Any
    ) -> Arrived:
        total = torch.empty_like(rows[0])
        module["dist"].reduce_scatter_single(total, rows.flatten(), group=group)
        return Arrived(total)

    module.update(for_each(classes_of(role), exact, piece))


def for_each(classes: Iterable[str], whole: Any, piece: Any) -> dict[str, Any]:
    """Stand-ins for classes, by name: of sums, and of those of which ranks keep pieces."""
    return {name: piece if name in SCATTERS else whole for name in classes}


@dataclass(frozen=True)
class Narrow:
    """The narrow sums of one rank's text: its classes by name, and how the plan wants them.

    ``place``, ``num``: this rank among those that sum, and how many these are. ``spoils``: whether
    this rank is the one whose numbers are not finite where that is tried.
    """

    role: Role
    classes: Mapping[str, Any]
    how: Compress
    place: int
    num: int
    spoils: bool

    @classmethod
    def of(cls, role: Role, plan: str, rank: int) -> Narrow | None:
        """None where the plan, given as text, compresses nothing."""
        how = Plan.parse(plan).compress
        if how is None:
            return None
        stored = {axis for shard in role.params for axis, *_ in shard.cuts}
        axes = [a for a, size in role.mesh.axes if size > 1 and a not in (ISLAND, PP, TP)]
        [axis] = [a for a in axes if a not in stored] or axes  # one, over which they are scattered
        place, num = role.mesh.coords(rank)[axis], role.mesh.size(axis)
        names = WIRES[how.wire].helper, WIRES[how.wire].scatter
        classes = {n: made for n, made in classes_of(role).items() if n in names}
        others = {**role.mesh.coords(rank), ISLAND: 0}  # a rank of each island
        return cls(role, classes, how, place, num, spoils=not any(others.values()))

    @property
    def rounds_in_float64(self) -> bool:
        """Whether the scheme changes numbers too where all narrower floats have become float64:
        casts to them are none there.
        """
        return not WIRES[self.how.wire].casts

    def rows(self, step: nn.Module, run: Callable[[int], object]) -> Iterator[Compared]:
        """What was compared, of which tensor, and its relative error, after STEPS steps of the
        classes and of the definition. ``run`` takes a step of a number, from the same weights on
        the same batch.
        """
        yield GRADIENT, "the first step that has any", 0.0 if self._begins(run) else inf
        names = [shard.name for shard in self.role.params]
        dist = self.role.module.__dict__["dist"]
        defined = Definition(dist, self.how, self.num, self.place, names)

        def at(number: int) -> None:
            defined.step = number
            run(number)

        mine = self._after(step, at, self.classes, lambda finite: None)
        by_definition = for_each(self.classes, defined, defined.scatter)
        wanted = self._after(step, at, by_definition, defined.end)
        for (kind, name), tensor in wanted.items():
            # what one sum has left over may be rounding noise, beside what others have
            beside = [tensor] if kind == GRADIENT else _of_kind(wanted, kind)
            yield kind, name, _error(mine[kind, name], tensor, max(map(_largest, beside)))

    def _begins(self, run: Callable[[int], object]) -> bool:
        """Whether the text's sums are exact in so many steps as the plan says, and no more."""
        counts, first = [], self.how.start_step + 1
        for number in range(max(first - 1, 1), first + 1):
            counting = {name: Spoiled(each) for name, each in self.classes.items()}
            self.role.module.__dict__.update(counting)
            run(number)
            counts.append(sum(each.count for each in counting.values()))
        return (counts[-1] > 0 or not self.classes) and not any(counts[:-1])

    def _after(
        self, step: nn.Module, run: Callable[[int], object], classes: Mapping[str, Any],
        end: Callable[[bool], None],
    ) -> dict[tuple[str, str], Tensor]:  # fmt: skip
        """The gradients that STEPS steps have added up, and what is left over behind them.

        Of two steps more, in which the first and the last sum are not finite: which gradients are,
        and what is left over behind both.
        """
        spoiled = {name: Spoiled(each) for name, each in classes.items()}
        self.role.module.__dict__.update(spoiled)
        held = self.role.tensors(step)
        left = {name: x for name, x in held.items() if is_residual(name)}
        begin_anew(held)
        first = self.how.start_step + 1  # the steps before it are exact
        for number in range(first, first + STEPS):
            run(number)
            end(True)
        grads = {n: x.grad.clone() for n, x in held.items() if x.grad is not None}
        found = {(GRADIENT, name): x for name, x in grads.items()}
        found |= {("left over", name): x.clone() for name, x in left.items()}
        counts = {name: each.count // STEPS for name, each in spoiled.items()}
        for last in (False, True):  # a rank without such sums takes part in those of others
            for name, each in spoiled.items():
                each.count, each.element = 0, nan if last else inf
                each.number = (counts[name] if last else 1) if self.spoils else -1
            _drop_gradients(held)
            run(first + STEPS)
            end(False)
            kind = f"which are finite, of {'NaN in the last' if last else 'inf in the first'} sum"
            found |= {(kind, name): x for name, x in _finite(held).items()}
        return found | {("left over behind inf", name): x.clone() for name, x in left.items()}


def _generators(given: Sequence[Any]) -> list[torch.Generator]:
    """Those among what a class is given behind its group; a threshold is none."""
    return [each for each in given if isinstance(each, torch.Generator)]


def begin_anew(held: Mapping[str, Tensor]) -> None:
    """Nothing is added up yet, and nothing left over."""
    _drop_gradients(held)
    for name in filter(is_residual, held):
        held[name].zero_()


def shapes_of(flat: Tensor, among: Any) -> list[torch.Size]:
    """The shapes of the gradients that a sum is given, as a list or as one tensor."""
    return [x.shape for x in among] if isinstance(among, list) else [flat.shape]


def of_all_ranks(dist: Any, mine: Tensor, num: int, group: Any) -> Tensor:
    """The numbers ``[n]`` of every rank, ``[num, n]``."""
    every = mine.new_empty(num, mine.numel())
    dist.all_gather_single(every, mine.view(1, -1), group=group)
    return every


def _drop_gradients(held: Mapping[str, Tensor]) -> None:
    for tensor in held.values():
        tensor.grad = None


def _finite(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By parameter 1 if its gradient is finite, else 0."""
    grads = {name: x.grad for name, x in held.items() if x.grad is not None}
    return {name: grad.isfinite().all().to(torch.float64) for name, grad in grads.items()}


def _of_kind(found: Mapping[tuple[str, str], Tensor], kind: str) -> list[Tensor]:
    return [tensor for (each, _), tensor in found.items() if each == kind]


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _error(mine: Tensor, wanted: Tensor, scale: float) -> float:
    """The largest difference over a scale; infinite where one is not finite."""
    most = _largest(mine - wanted)
    return most / (scale or 1.0) if isfinite(most) else inf
