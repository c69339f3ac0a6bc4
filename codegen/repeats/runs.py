"""What the loops of a program go through: runs of equal blocks, and a run's calls by phase."""

from __future__ import annotations

from collections.abc import Iterable
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
    """

    layers: tuple[str, ...]
    forward: tuple[Group, ...]
    backward: tuple[Group, ...]
    weights: tuple[Group, ...] = ()
    elsewhere: frozenset[str] = frozenset()
    numbers: tuple[Varied, ...] = ()
    kin: str = ""

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
    """One phase of a run, printed as one ``for``: the calls of each block in execution order."""

    run: Run
    phase: Phase
    groups: tuple[Group, ...]


Item = fx.Node | Loop


def sections(items: Iterable[Item]) -> list[tuple[Loop | None, list[fx.Node]]]:
    """Each loop with the calls behind it, up to the next loop; first the calls before any."""
    found: list[tuple[Loop | None, list[fx.Node]]] = [(None, [])]
    for item in items:
        if isinstance(item, Loop):
            found.append((item, []))
        else:
            found[-1][1].append(item)
    return found
