"""Makes one printed function of calls that a program repeats, such as a norm in every layer.

In: the items of steps (calls, and loops over equal blocks). Out: the items, with one call where the
calls of a function stood. Which calls belong together follows from the user's code: the calls
of one module (``LlamaRMSNorm``), or of one line of a function that a module calls. Two groups of
calls share a function if their printed text is the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from torch import fx

from partc.codegen.bodies.functions import Written, function_name, given_names
from partc.codegen.bodies.replace_calls import rewritten
from partc.codegen.bodies.units import Unit, places_of, signature, units_of
from partc.codegen.calls.names import wishes
from partc.codegen.calls.scope import Scope
from partc.codegen.calls.wishes import Wishes
from partc.codegen.helpers.needed import Helpers, Outlined
from partc.codegen.repeats.runs import Item
from partc.graph import Graph


def outlined(
    steps: Sequence[tuple[Graph, Sequence[Item]]], helpers: Helpers, again: Sequence[bool] = ()
) -> list[list[Item]]:
    """The items with calls of new functions, which ``helpers`` then prints.

    ``steps`` are all that one file prints, the stages of a pipeline rank: what two of them compute
    alike is one function in both, so that their blocks can share a class. ``again`` says which of
    them share the text of one before, so that a function saves no lines there.
    """
    twice = again or [False] * len(steps)
    places = [
        list(places_of(graph, items, each))
        for (graph, items), each in zip(steps, twice, strict=True)
    ]
    alike: dict[object, list[Unit]] = defaultdict(list)
    for unit in (unit for each in places for place in each for unit in units_of(place)):
        alike[signature(unit)].append(unit)
    scope = Scope()
    known: dict[tuple[str, fx.Node], str] = {}  # names in a module's forward
    used: set[fx.Node] = set()
    chosen: list[tuple[Outlined, list[Unit]]] = []
    for group in sorted(alike.values(), key=_gain, reverse=True):
        free = _apart(group, used)
        if not free or not _is_worth_it(_printed_calls(free), len(free[0].nodes)):
            continue  # a call is one line at most: the text has no more lines than this
        function = _printed(free, helpers, scope, known)
        if function is not None:
            helpers.outlined.append(function)
            chosen.append((function, free))
            used.update(n for unit in free for n in unit.nodes)
    return [
        rewritten(graph, each, _of_graph(graph, chosen))
        for (graph, _), each in zip(steps, places, strict=True)
    ]


def _of_graph(
    graph: Graph, chosen: Sequence[tuple[Outlined, list[Unit]]]
) -> list[tuple[Outlined, list[Unit]]]:
    """The functions with those of their units that are in one graph."""
    return [(function, [u for u in units if u.place.graph is graph]) for function, units in chosen]


def _apart(units: Sequence[Unit], used: Collection[fx.Node]) -> list[Unit]:
    """The units whose calls are in no earlier unit and not in ``used``."""
    seen, kept = set(used), []
    for unit in units:
        if seen.isdisjoint(unit.nodes):
            seen.update(unit.nodes)
            kept.append(unit)
    return kept


def _gain(units: Sequence[Unit]) -> tuple[bool, int, int]:
    """Sorts groups of units, the best last: forwards are better, then more calls saved.

    Forwards come first since backwards use the names of their values. Of equal ones the innermost
    module or function is better.
    """
    first = units[0]
    return not first.is_backward, (len(units) - 1) * len(first.nodes), first.home.depth


def _printed(
    units: list[Unit],
    helpers: Helpers,
    scope: Scope,
    known: dict[tuple[str, fx.Node], str],
) -> Outlined | None:
    """The function of all units that have the same text as the first one; None if not worth it.

    Units with another text are dropped from ``units``.
    """
    first, graph = units[0], units[0].place.graph
    # Compared without names first: to find the names of a whole graph's values takes long.
    codes = [Written.of(unit.place.graph, unit, Wishes({}), helpers).code for unit in units]
    same = [unit for unit, code in zip(units, codes, strict=True) if code == codes[0]]
    if not _is_worth_it(_printed_calls(same), len(codes[0]) - len(first.inputs)):
        return None
    wish = wishes(graph, first.home.path, given_names(graph, first, known))
    here = [*first.inputs, *first.nodes]
    at = [wish.at([*unit.inputs, *unit.nodes], here) for unit in units]
    written = [Written.of(u.place.graph, u, w, helpers) for u, w in zip(units, at, strict=True)]
    units[:] = [u for u, w in zip(units, written, strict=True) if w.code == written[0].code]
    written = [w for w in written if w.code == written[0].code]
    if not _is_worth_it(_printed_calls(units), len(written[0].lines)):
        return None
    for unit, text in zip(units, written, strict=True):
        names = {n: str(text.names[n]) for n in [*unit.inputs, *unit.nodes] if n in text.names}
        path = unit.home.path
        known |= {(path, n): name for n, name in names.items() if name.isidentifier()}
    lines = [w.lines for w in written]
    return written[0].function(
        scope.fresh(function_name(first, written[0].results[0])), first, lines
    )


def _printed_calls(units: Sequence[Unit]) -> int:
    """How many calls of a function for these units the file has."""
    return sum(not unit.place.again for unit in units)


def _is_worth_it(num_calls: int, num_lines: int) -> bool:
    """Whether a function saves more lines, where it is called, than its own text adds."""
    return num_calls * (num_lines - 1) > num_lines + 2
