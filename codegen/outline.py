"""Calls that several places of a program make alike become one printed function.

In: the items of a step. Out: the items, with one call where the calls of a function stood. What
belongs together is read off the user's code: the calls of one module, or of one line of a function
that a module calls. Functions are told apart by their text alone.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import fx

from partc.codegen.blocks import Item
from partc.codegen.body import Body
from partc.codegen.helpers import Helpers, Outlined
from partc.codegen.names import Scope, wishes
from partc.codegen.replace_calls import rewritten
from partc.codegen.text import NONE, Line, Text, block, wrap
from partc.codegen.units import Unit, moves, places_of, signature, units_of
from partc.graph import (
    Graph,
    is_backward,
    picked,
    typed,
    value,
)
from partc.quoting import comment, docstring, identifier


def outlined(graph: Graph, items: Sequence[Item], helpers: Helpers) -> list[Item]:
    """The items with calls of new functions, which ``helpers`` then prints."""
    places = list(places_of(items))
    units = [unit for place in places for unit in units_of(graph, place)]
    alike: dict[object, list[Unit]] = defaultdict(list)
    for unit in units:
        alike[signature(unit)].append(unit)
    others = list(helpers.outlined)  # other stages' functions
    scope = Scope([function.name for function in others])
    known: dict[tuple[str, fx.Node], str] = {}  # names in a module's forward
    used: set[fx.Node] = set()
    chosen: list[tuple[Outlined, list[Unit]]] = []
    for group in sorted(alike.values(), key=_gain, reverse=True):
        free = _apart(group, used)
        function = _printed(graph, free, helpers, scope, known, others) if len(free) > 1 else None
        if function is not None:
            helpers.outlined += [function] if function not in others else []
            chosen.append((function, free))
            used.update(n for unit in free for n in unit.nodes)
    return rewritten(graph, places, chosen)


def _apart(units: Sequence[Unit], used: Collection[fx.Node]) -> list[Unit]:
    """The units that share no call with an earlier one or with ``used``."""
    seen, kept = set(used), []
    for unit in units:
        if seen.isdisjoint(unit.nodes):
            seen.update(unit.nodes)
            kept.append(unit)
    return kept


def _gain(units: Sequence[Unit]) -> tuple[bool, int, int]:
    """Forwards first; then by how many calls fewer are printed, the innermost name first."""
    first = units[0]
    return not first.is_backward, (len(units) - 1) * len(first.nodes), first.home.depth


def _printed(
    graph: Graph,
    units: list[Unit],
    helpers: Helpers,
    scope: Scope,
    known: dict[tuple[str, fx.Node], str],
    others: Sequence[Outlined],
) -> Outlined | None:
    """The function of all units whose text is that of the first; the others are dropped.

    One of ``others`` serves where it says the same.
    """
    first = units[0]
    wish = wishes(graph, first.home.path, _given(first, known))
    wished = [wish.get(n, "value") for n in [*first.inputs, *first.nodes]]
    written = [_Written.of(graph, unit, wished, helpers) for unit in units]
    units[:] = [u for u, w in zip(units, written, strict=True) if w.code == written[0].code]
    written = [w for w in written if w.code == written[0].code]
    if not _is_worth_it(len(units), len(written[0].lines)):
        return None
    for unit, text in zip(units, written, strict=True):
        names = {n: str(text.names[n]) for n in [*unit.inputs, *unit.nodes] if n in text.names}
        path = unit.home.path
        known |= {(path, n): name for n, name in names.items() if name.isidentifier()}
    lines = [w.lines for w in written]
    for other in others:
        if written[0].function(other.name, first, lines).text == other.text:
            return other
    name = scope.fresh(_snake(first.home.name) + ("_backward" if first.is_backward else ""))
    return written[0].function(name, first, lines)


def _is_worth_it(num_calls: int, num_lines: int) -> bool:
    """Whether a function takes away more lines than its signature and body add."""
    return num_calls * (num_lines - 1) > num_lines + 2


def _given(unit: Unit, known: dict[tuple[str, fx.Node], str]) -> dict[fx.Node, str]:
    """What runs through a function is ``x`` or ``d_y``; a parameter has its own name."""
    names: dict[fx.Node, str] = {}
    main = "d_y" if unit.is_backward else "x"
    for node in unit.inputs:
        stored = _stored(node)
        if stored is not None:
            own = value(stored).name.removeprefix(f"{unit.home.path}.")
            names[node] = identifier(".".join(own.split(".")[-2:]))
        elif unit.is_backward and (unit.home.path, node) in known:
            names[node] = known[unit.home.path, node]
        elif main not in names.values() and (is_backward(node)) == unit.is_backward:
            names[node] = main
    return names


def _stored(node: fx.Node) -> fx.Node | None:
    """The parameter or buffer that a value is, perhaps gathered."""
    index = 0
    while node.op == "call_function" and (moves(node) or node.target is operator.getitem):
        index = picked(node)[1] if node.target is operator.getitem else index
        operands = node.all_input_nodes
        node = operands[index] if len(operands) > 1 else operands[0]
    return node if node.op == "placeholder" and value(node).kind in ("param", "buffer") else None


@dataclass
class _Written:
    """The body of a function as one of its units reads."""

    arguments: list[str]
    lines: list[Line]
    names: dict[fx.Node, Text]
    results: tuple[str, ...]

    @classmethod
    def of(cls, graph: Graph, unit: Unit, wished: Sequence[str], helpers: Helpers) -> _Written:
        wish = dict(zip([*unit.inputs, *unit.nodes], wished, strict=True))
        scope = Scope()
        seen = {node: Text(scope.fresh(wish[node])) for node in unit.inputs}
        arguments = [str(text) for text in seen.values()]
        body = Body(
            graph, unit.nodes, wish, scope, helpers, seen, set(unit.outputs),
            device=f"{arguments[0]}.device", one_turn=True,
        )  # fmt: skip
        last = unit.nodes[-1]
        bound = last in body.accumulated or last.target is operator.getitem
        ends = last in unit.outputs and not bound  # it needs no name
        order = unit.nodes[:-1] if ends else unit.nodes
        statements = [s for node in order for s in body.one(node)]
        if ends:
            statements += body.parts(last)
            body.seen[last] = body.expression(last)
        level = NONE if len(unit.outputs) == 1 else NONE + 1
        lines = [line for s in statements for line in s.lines]
        result = ", ".join(body.text(n).at(level) for n in unit.outputs)
        lines.append(Line(f"return {result}", comment(typed(last)) if ends else ""))
        results = tuple(wish[n] if n is last else str(body.text(n)) for n in unit.outputs)
        return cls(arguments, lines, body.seen, results)

    @property
    def code(self) -> list[str]:
        return [*self.arguments, *(line.code for line in self.lines)]

    def function(self, name: str, unit: Unit, alike: Sequence[Sequence[Line]]) -> Outlined:
        """The text; a line's remark is left out where units differ in it."""
        lines = [
            same[0] if len(set(same)) == 1 else replace(same[0], remark="")
            for same in zip(*alike, strict=True)
        ]
        num = len(unit.outputs)
        result = "Tensor" if num == 1 else f"tuple[{', '.join(['Tensor'] * num)}]"
        typed = ", ".join(f"{argument}: Tensor" for argument in self.arguments)
        way = "Backward" if unit.is_backward else "Forward"
        head = wrap(f"def {name}({typed}) -> {result}:", 0)
        text = [*head, f'    """{way} of `{docstring(unit.home.name)}`."""', block(lines, 1)]
        return Outlined(name, "\n".join(text), self.results)


def _snake(name: str) -> str:
    """
    >>> _snake("LlamaRMSNorm")
    'llama_rms_norm'
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return identifier(words.lower())
