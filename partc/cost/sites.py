"""From which calls of the user's model the events of a step come.

Equal blocks have equal events, which are stored once (``step_events.py``), but other modules. So
the sites of events stand beside the events, one row for each place in the program's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from partc.graph.folds import list_member


class Site(NamedTuple):
    """The module whose forward a call comes from, and the user's line: ``net.py:42: x = up(x)``."""

    module: str = ""
    source: str = ""


NOWHERE = Site()


@dataclass(frozen=True)
class Sites:
    """The sites of all events: each site and each row of sites once, and the row of each place."""

    each: tuple[Site, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    places: tuple[int, ...] = ()

    @classmethod
    def gathered(cls, rows: Iterable[Sequence[Site]]) -> Sites:
        """Sites from the row of each place."""
        each: dict[Site, int] = {}
        known: dict[tuple[int, ...], int] = {}
        numbers = [tuple(each.setdefault(site, len(each)) for site in row) for row in rows]
        places = tuple(known.setdefault(row, len(known)) for row in numbers)
        return cls(tuple(each), tuple(known), places)

    def of(self, place: int) -> tuple[Site, ...]:
        """The row of a place; empty where none was saved."""
        if place >= len(self.places):
            return ()
        return tuple(self.each[number] for number in self.rows[self.places[place]])

    def as_json(self) -> dict[str, Any]:
        return {
            "each": [list(site) for site in self.each],
            "rows": [" ".join(map(str, row)) for row in self.rows],
            "places": list(self.places),
        }

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Sites:
        """Sites from the data of ``as_json``; none from an empty one."""
        if not data:
            return cls()
        each = tuple(Site(str(module), str(source)) for module, source in data["each"])
        rows = tuple(tuple(map(int, row.split())) for row in data["rows"])
        return cls(each, rows, tuple(map(int, data["places"])))


def member(path: str, further: int) -> str:
    """The block that stands ``further`` places behind another one in the same list.

    >>> member("model.layers.1", 3), member("", 3)
    ('model.layers.4', '')
    """
    parts = path.rpartition(".")
    return f"{parts[0]}.{int(parts[2]) + further}" if further and parts[2].isdigit() else path


def block_of(sites: Iterable[Site]) -> str:
    """The block that sites are of: the first that a module's path names; "" if there is none.

    >>> block_of([Site("wte"), Site("model.layers.1.mlp")])
    'model.layers.1'
    """
    members = (list_member(site.module) for site in sites)
    return next((f"{path}.{number}" for path, number in members if path), "")


def moved(sites: tuple[Site, ...], old: str, new: str) -> tuple[Site, ...]:
    """The sites with one block's path in place of another's.

    >>> moved((Site("h.1.mlp", "a.py:3"), Site("wte")), "h.1", "h.4")[0].module
    'h.4.mlp'
    """
    if old == new:
        return sites
    inside = f"{old}."
    return tuple(
        site._replace(module=new + site.module.removeprefix(old))
        if f"{site.module}.".startswith(inside)
        else site
        for site in sites
    )
