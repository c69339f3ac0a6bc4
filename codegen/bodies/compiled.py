"""Makes a function for torch.compile of the calls between two transfers.

In: the items of a step (calls, and loops over equal blocks). Out: the items, with one call where
such a stretch of calls stood. One function serves all blocks of a run, so it is compiled once for
all of them. A function takes and returns tensors alone: its caller starts and awaits transfers,
gathers weights and stores gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from partc.codegen.bodies.functions import Written, given_names, snake
from partc.codegen.bodies.replace_calls import rewritten
from partc.codegen.bodies.units import Home, Place, Unit, is_movable, is_stored, moves, places_of
from partc.codegen.calls.names import wishes
from partc.codegen.calls.scope import Scope
from partc.codegen.calls.storage import is_view, owner
from partc.codegen.helpers.needed import Helpers, Outlined
from partc.codegen.repeats.runs import Item
from partc.cost.flops import node_flops
from partc.graph import (
    Graph,
    Phase,
    collectives,
    fake_of,
    is_backward,
    is_forward,
    is_tensor,
    ops,
    update,
    value,
)
from partc.graph.given_back import is_given_back
from partc.program.role import COMPILES
from partc.quoting import docstring

LEAST = 2  # fewer calls than this are not worth a function: one call is one kernel already
PHASES: tuple[Phase, ...] = ("S", "F", "B", "W", "E")


def compiled(
    graph: Graph, items: Sequence[Item], helpers: Helpers, *, by_phase: bool = False
) -> list[Item]:
    """The items with calls of functions for torch.compile, which ``helpers`` then prints.

    ``by_phase`` is for pipeline stages: each phase has a method of its own, so that no function may
    span two phases.
    """
    places = list(places_of(graph, items))
    scope = Scope([function.name for function in helpers.outlined])
    chosen = []
    for place in places:
        for unit in _units(graph, place, by_phase):
            function = _printed(graph, unit, helpers, scope)
            chosen.append((function, [unit]))
    found = rewritten(graph, places, chosen)
    functions = {function: units[0].home.path for function, units in chosen}
    for node in graph.calls():
        if node.target in functions:
            update(node, module=functions[node.target])
    return found


# which calls are compiled together ----------------------------------------------------------------
@dataclass
class _Stretch:
    """Calls that one function makes; ``behind`` has other calls, which read their results.

    Those stand between calls of the function in the graph, and move behind the function's call.
    """

    nodes: dict[fx.Node, None] = field(default_factory=dict)
    behind: dict[fx.Node, None] = field(default_factory=dict)

    def feeds(self, node: fx.Node) -> bool:
        """Whether a call reads a result of this stretch, or of a call that moves behind it."""
        return any(n in self.nodes or n in self.behind for n in node.all_input_nodes)


def _units(graph: Graph, place: Place, by_phase: bool) -> Iterator[Unit]:
    """The stretches of one place that are worth a function, with what each reads and returns."""
    parts = [[n for n in place.nodes if value(n).phase == phase] for phase in PHASES]
    for nodes in parts if by_phase and place.loop is None else place.stretches():
        for stretch in _apart(place, nodes):
            home = _home(graph, place, stretch.nodes, by_phase)
            unit = Unit(home, place, [*stretch.nodes])
            inside = set(unit.nodes)
            reads = dict.fromkeys(n for node in unit.nodes for n in node.all_input_nodes)
            unit.inputs = [n for n in reads if n not in inside]
            unit.outputs = _outputs(place, unit.nodes)
            unit.behind = [*stretch.behind]
            unit.end = next(n for n in reversed(unit.nodes) if _call_of(n) is n)
            if unit.inputs and unit.outputs and sum(map(_weight, unit.nodes)) >= LEAST:
                yield unit


def _weight(node: fx.Node) -> int:
    """How many kernels a call is likely to be: none for a view."""
    if isinstance(node.target, Outlined):
        return LEAST
    return int(not is_view(node))


def _apart(place: Place, nodes: Sequence[fx.Node]) -> list[_Stretch]:
    """The stretches among some calls, so that no function returns a view of other memory.

    Results of a function count as memory of their own (``calls/storage.py``), which the caller may
    overwrite or free; the caller makes such views itself.
    """
    apart: set[fx.Node] = set()
    while True:
        stretches = [each for each in _stretches(nodes, apart) if each.nodes]
        shared = [node for each in stretches for node in _shared(place, each)]
        if not shared:
            return stretches
        apart.update(map(_call_of, shared))


def _shared(place: Place, stretch: _Stretch) -> Iterator[fx.Node]:
    """The results of a stretch that share memory with an operand or with another result."""
    outputs = _outputs(place, [*stretch.nodes])
    homes = [owner(node) for node in outputs]
    for node, home in zip(outputs, homes, strict=True):
        if home is not node and (home not in stretch.nodes or homes.count(home) > 1):
            yield node


def _stretches(nodes: Sequence[fx.Node], apart: Collection[fx.Node]) -> Iterator[_Stretch]:
    """Cut calls into stretches.

    A stretch ends where a transfer starts or is waited for, where the step waits for the script's
    gradients, and where a call of the function would read a call that stays outside and itself
    reads the function's results.
    """
    here, inside = _Stretch(), set()
    results = {node for node in nodes if node.target is operator.getitem}
    for node in nodes:
        if _call_of(node) in inside:
            continue
        if _is_transfer(node) or is_given_back(node):
            yield here
            here = _Stretch()
        elif _is_computed(node, apart):
            if here.behind.keys() & set(node.all_input_nodes):
                yield here
                here = _Stretch()
            here.nodes |= dict.fromkeys([node, *(n for n in node.users if n in results)])
            inside.add(node)
        elif here.feeds(node):
            here.behind[node] = None
    yield here


def _call_of(node: fx.Node) -> fx.Node:
    """The call that a getitem picks a result of; any other node itself."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _is_transfer(node: fx.Node) -> bool:
    """Whether a call starts a transfer or waits for one; ``keep_piece`` moves nothing."""
    return moves(node) and node.target not in (*collectives.LOCAL, collectives.axis_index)


def _is_computed(node: fx.Node, apart: Collection[fx.Node]) -> bool:
    """Whether a function for torch.compile makes a call: it reads tensors and nothing else.

    Two calls stay outside. A gradient of a weight is added to ``.grad`` by the call that computes
    it. Grouped matrix products (``_grouped_mm``, of experts) are supported for fewer dtypes by
    torch.compile than by their eager kernel.
    """
    if node.target is torch.ops.aten._grouped_mm.default:
        return False
    movable = is_movable(node) or _drops_nothing(node)
    movable = movable and node.target is not operator.getitem  # results go with their call
    if node in apart or not movable or not all(map(is_tensor, node.all_input_nodes)):
        return False
    return node.target is not ops.weight_grad or not all(map(is_stored, node.users))


def _drops_nothing(node: fx.Node) -> bool:
    """Whether a call that may draw a dropout mask has probability 0: fused attention."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0


def _outputs(place: Place, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The calls whose results are read outside of the function, in any block of the run.

    The last call is the main result and comes first.
    """
    place = place.outermost
    at = {node: i for i, node in enumerate(place.nodes)}
    groups = [g.nodes for g in place.loop.groups] if place.loop else [place.nodes]
    read: set[fx.Node] = set()
    for group in groups:
        inside = {group[at[node]] for node in nodes}
        read |= {node for node in nodes if group[at[node]].users.keys() - inside}
    found = [node for node in nodes if node in read and is_tensor(node)]
    if found[-1:] == [*nodes[-1:]] and nodes[-1].target is not operator.getitem:
        found.insert(0, found.pop())
    return found


# the functions ------------------------------------------------------------------------------------
def _home(graph: Graph, place: Place, nodes: Collection[fx.Node], by_phase: bool) -> Home:
    """What a function is named after: the block's class in a loop, else the stage or the module.

    The module is that of the call with the most FLOPs.
    """
    if place.loop is not None:
        layer = place.loop.run.layers[0]
        return Home(graph.classes.get(layer, "block"), layer, 0)
    most = max(nodes, key=lambda n: (node_flops(n), bool(value(n).module)))
    return Home("stage" if by_phase else value(most).module.rpartition(".")[2] or "step", "", 0)


def _printed(graph: Graph, unit: Unit, helpers: Helpers, scope: Scope) -> Outlined:
    """The function of a stretch; one of an earlier stage or stretch, where the text is the same."""
    wish = wishes(graph, unit.home.path, {**given_names(graph, unit, {}), **_passing(unit)})
    inline = unit.place.loop is None
    written = Written.of(graph, unit, wish, helpers, fused=True, frees=inline)
    ways = [w for w, found in (("forward", is_forward), ("backward", is_backward))
            if any(map(found, unit.nodes))]  # fmt: skip
    says = f"{' and '.join(ways).capitalize()} of `{docstring(unit.home.name)}`."

    def function(name: str) -> Outlined:
        text = f"{COMPILES}\n{written.text(name, says, written.lines)}"
        return Outlined(name, text, written.results, compiled=True)

    for other in helpers.outlined:
        if function(other.name).text == other.text:
            return other
    made = function(scope.fresh("_".join([snake(unit.home.name), *ways[len(ways) - 1 :]])))
    helpers.outlined.append(made)
    return made


def _passing(unit: Unit) -> dict[fx.Node, str]:
    """Names of the largest value (``x``) and gradient (``d_y``) that come from another block."""
    names: dict[fx.Node, str] = {}
    for name, found in (("x", is_forward), ("d_y", is_backward)):
        passing = [
            n
            for n in unit.inputs
            if unit.place.loop is not None and n.op == "call_function" and found(n)
            if not f"{value(n).module}.".startswith(f"{unit.home.path}.")
        ]
        if passing:
            names[max(passing, key=lambda n: fake_of(n).numel())] = name
    return names
