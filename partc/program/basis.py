"""The data from which a saved program's times are predicted again, also for other machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from partc.collecting import no_collecting
from partc.cost.step_events import StepEvents
from partc.errors import LoadError
from partc.machines.topology import Topology
from partc.machines.topology_text import parse_topology
from partc.passes.search.plans.save_scaling_model import taken_as_json, taken_of_json
from partc.passes.search.plans.search_plans import Taken

Json = Mapping[str, Any]


def _nothing() -> None:
    """Finds no candidate."""


@dataclass(frozen=True)
class Basis:
    """The machines, and the step's calls and transfers, of a program.

    ``machine``: the topology as TOML. ``tapes``: the StepEvents of each stage, in order.
    ``trained_bytes``: bytes of trained parameters per pipeline rank. ``find`` returns the scaling
    model of the step and this program's place among the candidates of the search, or None where
    nothing can be estimated; since it takes as long as a partition, only ``taken`` calls it.
    """

    machine: str = ""
    tapes: tuple[StepEvents, ...] = ()
    trained_bytes: tuple[int, ...] = ()
    find: Callable[[], Taken | None] = field(default=_nothing, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without ``find``, which holds a graph: another process has no scaling model."""
        return Basis, (self.machine, self.tapes, self.trained_bytes)

    @cached_property
    def taken(self) -> Taken | None:
        """The result of ``find``, computed once."""
        with no_collecting():
            return self.find()

    def topology(self) -> Topology:
        """The topology that the program was planned for."""
        return parse_topology(self.machine, "the saved machine")

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "machine": self.machine,
            "tapes": [tape.as_json() for tape in dict.fromkeys(self.tapes)],
            "stages": [list(dict.fromkeys(self.tapes)).index(tape) for tape in self.tapes],
            "trained_bytes": list(self.trained_bytes),
            "laws": taken_as_json(self.taken) if self.taken else None,
        }

    @classmethod
    def of_json(cls, data: Json) -> Basis:
        """A Basis from the data of ``as_json``; KeyError and alike where entries are missing.

        The scaling model (entry ``laws``) is read later, by ``taken``: LoadError if malformed.
        """
        machine, laws = data["machine"], data["laws"]
        if not isinstance(machine, str):
            raise TypeError("the machine is not a text")
        tapes = [StepEvents.of_json(each) for each in data["tapes"]]
        return cls(
            machine, tuple(tapes[number] for number in data["stages"]),
            tuple(map(int, data["trained_bytes"])),
            partial(_read, laws) if laws else _nothing,
        )  # fmt: skip


def _read(laws: Json) -> Taken:
    try:
        return taken_of_json(laws)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise LoadError(
            where="program.json, basis",
            what="the laws of the step cannot be read",
            why=repr(error),
            do="Compile the program again.",
        ) from None
