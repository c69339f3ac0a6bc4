"""What the loops of a program go through: runs of equal blocks, and a run's calls by phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from partc.codegen.repeats.equal import Group
from partc.codegen.repeats.numbers import Varied
from partc.graph import Phase
from partc.graph.places import is_one_call, module_of

PHASES: tuple[Phase, ...] = ("F", "B", "W")
LATER: tuple[Phase, ...] = ("B", "W")


@dataclass(frozen=True, eq=False)
class Run:
    """Neighbouring blocks of one list that compute the same: ``model.layers.0 .. 7``.

    ``forward`` and ``backward`` have the calls of each block, in the order of the list. ``weights``
    has the weight gradients where a split backward computes them apart. ``layers`` has the paths of
    all blocks, those too that the graph leaves out (``graph.folds``), for which there are no calls.
    ``elsewhere`` has the parameters and buffers of other lists that blocks of this one alone read,
    each block those with its own number: ``norms.3.weight`` for ``blocks.3``. ``numbers`` has the
    numbers in which the blocks differ.

    Runs of one ``kin`` share a class though their blocks differ in sizes: ``kin`` is the first
    block of the one from which the class is printed, "" for a run without kin. A run with kin may
    be a single block, of any module: ``encoder.down1``.

    Blocks may also be the calls of one module that is called several times. ``layers`` has their
    places then, ``cell.@0`` (``partc/graph/places.py``).

    ``inner`` has single blocks inside of the first block, which its methods call as methods of
    classes of their own: ``blocks.0.mlp``. Of such a run ``alike`` has the same block inside of the
    other blocks, ``blocks.1.mlp``, and ``given`` what the block around it gives for each of
    ``numbers``: the name of its own number, or a number.
    """

    layers: tuple[str, ...]
    forward: tuple[Group, ...]
    backward: tuple[Group, ...]
    weights: tuple[Group, ...] = ()
    elsewhere: frozenset[str] = frozenset()
    numbers: tuple[Varied, ...] = ()
    kin: str = ""
    inner: tuple[Run, ...] = ()
    alike: tuple[Mapping[Phase, Group | None], ...] = ()
    given: tuple[str | int | float, ...] = ()

    @property
    def is_called(self) -> bool:
        """Whether its blocks are calls of one module: ``cell.@0 .. @11``."""
        return is_one_call(self.layers[0])

    @property
    def is_one_module(self) -> bool:
        """Whether one instance of its class serves all of its blocks."""
        return self.is_called or self.is_single

    @property
    def module(self) -> str:
        """The path of the module that is, or has, the first block."""
        return module_of(self.layers[0])

    @property
    def is_single(self) -> bool:
        """Whether it is a single block, which no loop goes through."""
        return len(self.layers) == 1

    @property
    def follows(self) -> bool:
        """Whether its class is printed from another run of its kin."""
        return self.kin not in ("", self.layers[0])

    def of(self, phase: Phase) -> tuple[Group, ...]:
        return {"F": self.forward, "B": self.backward, "W": self.weights}[phase]


@dataclass(frozen=True, eq=False)
class Loop:
    """One phase of a run, printed as one ``for``: the calls of each block in execution order.

    ``inner`` has this phase of the runs inside of the first block, whose calls are among those of
    the block, one behind the other.
    """

    run: Run
    phase: Phase
    groups: tuple[Group, ...]
    inner: tuple[Loop, ...] = ()

    @property
    def group(self) -> Group:
        """The first block's calls, from which the method of all blocks is printed."""
        return self.run.of(self.phase)[0]

    def items(self) -> list[Item]:
        """The calls of the first block's method in order, with one Loop for each inner block."""
        inner_of = {node: loop for loop in self.inner for node in loop.group.nodes}
        return [*dict.fromkeys(inner_of.get(node, node) for node in self.group.nodes)]


Item = fx.Node | Loop


def loop_of(run: Run, phase: Phase, groups: tuple[Group, ...]) -> Loop:
    """One phase of a run, with the same phase of the runs inside of its first block."""
    inner = tuple(loop_of(each, phase, each.of(phase)) for each in run.inner if each.of(phase))
    return Loop(run, phase, groups, inner)


def with_inner(loops: Iterable[Loop]) -> Iterator[Loop]:
    """The loops, each behind those inside of it."""
    for loop in loops:
        yield from with_inner(loop.inner)
        yield loop


def runs_within(runs: Iterable[Run]) -> Iterator[Run]:
    """The runs, each behind those inside of it."""
    for run in runs:
        yield from runs_within(run.inner)
        yield run


def sections(items: Iterable[Item]) -> list[tuple[Loop | None, list[fx.Node]]]:
    """Each loop with the calls behind it, up to the next loop; first the calls before any."""
    found: list[tuple[Loop | None, list[fx.Node]]] = [(None, [])]
    for item in items:
        if isinstance(item, Loop):
            found.append((item, []))
        else:
            found[-1][1].append(item)
    return found
