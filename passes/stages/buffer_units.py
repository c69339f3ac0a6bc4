"""Units that one stage must have together: those that read a buffer, and the one that computes its
new value from activations.

Any other stage would read the old value in the next step (``buffer_stages`` refuses such stages).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from partc.graph import Graph, is_weight, value
from partc.graph.ancestors import ancestors
from partc.graph.input_only import input_only
from partc.passes.stages.cut_stages import Unit


def inseparable(graph: Graph, unit_of: Mapping[fx.Node, int]) -> list[tuple[int, int]]:
    """For each buffer that several units share the first and the last of these units.

    ``unit_of`` has the unit of each forward and backward call of a joint graph.
    """
    readers = _readers(graph, unit_of)
    found = []
    for name, new in graph.outputs.buffers.items():
        if new in unit_of and {"input", "param"} <= {value(node).kind for node in ancestors(new)}:
            units = readers[graph.buffers[name]] | {unit_of[new]}
            found.append((min(units), max(units)))
    return [(first, last) for first, last in found if first < last]


def _readers(graph: Graph, unit_of: Mapping[fx.Node, int]) -> dict[fx.Node, set[int]]:
    """The units that read each value, themselves or by what every stage computes for itself."""
    everywhere = input_only(graph, draws=True) | {n for n in graph.calls() if is_weight(n)}
    found: dict[fx.Node, set[int]] = {}
    for node in reversed(list(graph.fx.nodes)):
        found[node] = set()
        for user in node.users:
            if user in everywhere:
                found[node] |= found[user]
            elif user in unit_of:
                found[node].add(unit_of[user])
    return found


def joined(units: Sequence[Unit], spans: Sequence[tuple[int, int]]) -> list[Unit]:
    """The units with one in place of each span (first, last); it has the name of its first.

    >>> a, b, c = (Unit(name, 1, 2, 3, 4, num) for name, num in [("a", 5), ("b", 6), ("c", 7)])
    >>> [(unit.name, unit.forward_us, unit.boundary_bytes) for unit in joined([a, b, c], [(1, 2)])]
    [('a', 1, 5), ('b', 2, 7)]
    """
    inside = {place for first, last in spans for place in range(first + 1, last + 1)}
    found: list[Unit] = []
    for place, unit in enumerate(units):
        found.append(_one(found.pop(), unit) if place in inside else unit)
    return found


def _one(first: Unit, then: Unit) -> Unit:
    """Two units as one, at whose end the second ends."""
    return Unit(
        name=first.name,
        forward_us=first.forward_us + then.forward_us,
        backward_us=first.backward_us + then.backward_us,
        parameter_bytes=first.parameter_bytes + then.parameter_bytes,
        activation_bytes=first.activation_bytes + then.activation_bytes,
        boundary_bytes=then.boundary_bytes,
    )
