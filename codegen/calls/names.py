"""The names of values in a program.

A value of the forward is named after its module (``w1``), else after the user's variable, else
after its op (``gelu``). A gradient is named after its value: ``d_w1``.
"""

from __future__ import annotations

import builtins
import keyword
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from torch import fx, nn

from partc.codegen.calls.op_names import op_name, result_name
from partc.codegen.calls.path_names import inside, is_within, last_words, module_name
from partc.codegen.helpers import needed as helpers
from partc.codegen.safety import FORBIDDEN
from partc.errors import PlanError
from partc.graph import Graph, fake_of, has_value, is_forward, is_tensor, value
from partc.graph.moves import carried
from partc.passes.overlap.write_pieces import taken_from
from partc.plan.mesh import Mesh
from partc.plan.sharding import DTYPE_NAMES
from partc.quoting import identifier

# Names that no value gets: Python's and a program's own, and those of helper functions.
RESERVED = {
    "self",
    "torch",
    "dist",
    "F",
    "nn",
    "Tensor",
    "saved",
    "layer",
    "following",
    "reduced",
    "before",
    "done",
    *dir(builtins),
    *FORBIDDEN,
    *helpers.names(),
}
# Methods and attributes of a program's modules, and of torch's: no parameter or buffer gets these.
OWN = {
    *dir(nn.Module),
    "step", "seed", "rng", "n", "name", "begin", "backward", "weights", "finish", "gather", "whole",
    "regather", "saved", "kept", "left", "losses", "results", "reduce", "reduced", "last", "stages",
    "links", "partials",
}  # fmt: skip
COMMON = {
    "hidden_states",
    "residual",
    "x",
    "out",
    "output",
    "outputs",
    "result",
}  # say nothing about the value
# The targets of an assignment in a source line: ``a, b`` of ``model.py:14: a, b = x.chunk(2)``.
_TARGETS = re.compile(
    r"(?:[\w.\-/]+:\d+: )?\s*([A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)*)\s*(?::[^=]+)?=(?!=)"
)


class Scope:
    """The identifiers that one generated function uses; a name that is taken gets a number."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = {*RESERVED, *taken}

    def fresh(self, wish: str) -> str:
        """A new identifier for a wanted name: ``x``, then ``x_1``, then ``x_2``."""
        name = base = identifier(wish)
        number = 0
        while name in self.taken:
            number += 1
            name = f"{base}_{number}"
        self.taken.add(name)
        return name


def attributes(mesh: Mesh, *others: str) -> Scope:
    """The names of a module's parameters and buffers; a program's own names are taken.

    PlanError for an axis that has such a name, as programs have an attribute for each axis.
    """
    axes: list[str] = []
    for axis in mesh.names:
        if axis in OWN or axis in axes or f"{axis}_rank" in axes or keyword.iskeyword(axis):
            raise _no_axis(axis, mesh)
        axes += axis, f"{axis}_rank"
    return Scope([*OWN, *axes, *others])


def _no_axis(axis: str, mesh: Mesh) -> PlanError:
    return PlanError(
        where=f"mesh {mesh}",
        what=f"an axis is called {axis!r}",
        why="programs keep each axis as an attribute, and use this name for something else",
        do="Rename the axis, for example to dp.",
    )


def wishes(
    graph: Graph, prefix: str = "", given: Mapping[fx.Node, str] = MappingProxyType({})
) -> dict[fx.Node, str]:
    """The wanted name of every value; ``Scope.fresh`` numbers those that several values want.

    Module paths are shortened by ``prefix``, the path of the module whose method is printed. Names
    in ``given`` are used as they are, and for the names of gradients.
    """
    named = dict(_placeholder_names(graph, prefix))
    forward = [n for n in graph.calls() if has_value(n) and is_forward(n)]
    named |= {n: op_name(n) for n in forward}
    named |= dict(_result_names(forward))
    named |= dict(_variable_names(forward))
    named |= dict(_module_names(forward, prefix))
    if graph.loss is not None:
        named |= dict.fromkeys(moved_from(graph.loss), "loss")
    named |= given
    _follow_operands([n for n in forward if n not in given], named)
    compiled = dict(_compiled_names(graph))
    named |= compiled
    named |= dict(_gradient_names(graph, named, given, compiled))
    return {**named, **given}


def of_turn(node: fx.Node, wish: str) -> str:
    """The name of a value in an overlap piece of a block: ``x_0`` for ``x`` in piece 0."""
    turn = value(node).turn
    return wish if turn is None else f"{wish}_{turn}"


def _before(node: fx.Node) -> fx.Node | None:
    """The value that a node holds in another layout, or a piece of; None for other calls."""
    return carried(node) or taken_from(node)


def moved_from(node: fx.Node) -> list[fx.Node]:
    """A value, and the values of calls that it was before collectives moved it, latest first."""
    chain = [node]
    while (before := carried(chain[-1])) is not None:
        chain.append(before)
    return [n for n in chain if n.op == "call_function"]


def _follow_operands(forward: list[fx.Node], named: dict[fx.Node, str]) -> None:
    """Name values after their operands: a moved value keeps the name, a cast adds its dtype.

    ``x -> x_bfloat16`` for a cast of ``x``.
    """
    for node in forward:
        if (before := _before(node)) is not None:
            named[node] = named[before]
        elif named[node] == "cast" and is_tensor(node):
            dtype = DTYPE_NAMES.get(fake_of(node).dtype, "cast")
            named[node] = f"{named[node.all_input_nodes[0]]}_{dtype}"


def known_as(node: fx.Node) -> str:
    """The name by which ``Value.forward`` of a backward call refers to this forward call."""
    return value(node).name or node.name


def is_given(node: fx.Node, wish: str) -> bool:
    """Whether a value's name comes from the user's code, and not from its op or a cast's dtype."""
    word = op_name(node)
    dtype = DTYPE_NAMES.get(fake_of(node).dtype, "") if is_tensor(node) else ""
    return wish != word and not (word == "cast" and wish.endswith(f"_{dtype}"))


def _placeholder_names(graph: Graph, prefix: str) -> Iterator[tuple[fx.Node, str]]:
    """Names of parameters, buffers, inputs, and of what other pipeline stages send."""
    for node in graph.placeholders("received").values():
        yield node, "x" if is_forward(node) else "d_y"
    for kind in ("param", "buffer", "input"):
        placed = graph.placeholders(kind)
        names = [inside(name, prefix) for name in placed if is_within(name, prefix)]
        short = Counter(map(last_words, names))
        for name, node in placed.items():
            own = inside(name, prefix)
            alone = own in names and short[last_words(own)] == 1
            yield node, identifier(last_words(own) if alone else own)


def _result_names(nodes: list[fx.Node]) -> Iterator[tuple[fx.Node, str]]:
    """Names of the results of calls with several: ``mean`` and ``rstd`` of a layer norm."""
    for node in nodes:
        if name := result_name(node):
            yield node, name


def _compiled_names(graph: Graph) -> Iterator[tuple[fx.Node, str]]:
    """The results of functions for torch.compile have the names that they have in the function."""
    for node in graph.calls():
        call = node.all_input_nodes[0] if node.target is operator.getitem else node
        if isinstance(call.target, helpers.Outlined) and call.target.compiled:
            index = node.args[1] if node is not call else 0
            assert isinstance(index, int)
            yield node, call.target.results[index]


def _variable_names(nodes: list[fx.Node]) -> Iterator[tuple[fx.Node, str]]:
    """Names of the user's variables: ``a, b = x.chunk(2)`` names the last values of its line.

    They are used where a line's calls have as many last values as the line has targets.
    """
    lines: dict[tuple[str, str, int | None], list[fx.Node]] = {}
    for node in nodes:
        if _before(node) is None:  # a moved value is called as it was
            at = value(node)
            lines.setdefault((at.module, at.source, at.turn), []).append(node)
    for (_, source, _), members in lines.items():
        match = _TARGETS.match(source)
        targets = [t.strip() for t in match[1].split(",")] if match else []
        within = {_unmoved(operand) for n in members for operand in n.all_input_nodes}
        ends = [n for n in members if is_tensor(n) and n not in within]
        ends = [n for n in ends if not _is_argument(n, source)]
        if targets and len(ends) == len(targets):
            yield from ((n, t) for n, t in zip(ends, targets, strict=True) if t not in COMMON)


def _unmoved(node: fx.Node) -> fx.Node:
    """The value that a node was before collectives moved it; the node itself if none did."""
    while (before := carried(node)) is not None:
        node = before
    return node


def _is_argument(node: fx.Node, source: str) -> bool:
    """Whether a value is an argument of a module that its source line calls, not its result.

    In ``y = self.up(x * 2)`` the product is read by ``self.up``, so ``y`` is not its name.
    """
    path = value(node).module
    readers = [inside(value(u).module, path) for u in node.users if has_value(u)]
    return any(
        r and not r.startswith(path) and f"self.{r.split('.')[0]}(" in source for r in readers
    )


def _module_names(nodes: list[fx.Node], prefix: str) -> Iterator[tuple[fx.Node, str]]:
    """Names of modules' results: the only value that calls outside read in the forward."""
    results: dict[tuple[str, int | None], list[fx.Node]] = {}
    for node in nodes:
        readers = [value(u).module for u in node.users if has_value(u) and is_forward(u)]
        path = value(node).module
        while path and is_tensor(node):
            if any(not is_within(reader, path) for reader in readers):
                results.setdefault((path, value(node).turn), []).append(node)
            path = path.rpartition(".")[0]
    # The innermost module wins: its name comes last and replaces an outer module's.
    for path, turn in sorted(results, key=lambda at: at[0].count(".")):
        if len(results[path, turn]) == 1 and path != prefix:
            yield results[path, turn][0], module_name(inside(path, prefix))


def _gradient_names(
    graph: Graph,
    named: dict[fx.Node, str],
    given: Mapping[fx.Node, str],
    compiled: Mapping[fx.Node, str],
) -> Iterator[tuple[fx.Node, str]]:
    """Names of the backward's values: ``d_<value>`` for the gradient of a value.

    A forward value that the backward computes again has the name it has in the forward.
    """
    # Reversed, so that of several calls with one name the first in the graph stands in the table.
    by_name = {known_as(n): n for n in reversed(list(graph.calls())) if has_value(n)}
    params = graph.params
    final = {n: params[name] for name, node in graph.grads.items() for n in moved_from(node)}
    found: dict[fx.Node, str] = {}
    forward = [n for n in reversed(list(graph.calls())) if has_value(n) and is_forward(n)]
    known: dict[object, fx.Node] = {_origin(n): n for n in forward}
    known |= {value(n).name: n for n in forward if value(n).name}
    for node in graph.calls():
        if is_forward(node):
            continue
        before = _before(node)
        if node in compiled:
            found |= {node: compiled[node]} if compiled[node].startswith("d_") else {}
        elif _is_again(node, found, known) and before not in found:
            again = before or known.get(value(node).name) or known.get(_origin(node))
            unknown = result_name(node) or op_name(node)
            named[node] = unknown if again is None else named.get(again, unknown)
            _follow_operands([node], named)
        elif node in final:
            found[node] = f"d_{named[final[node]]}"
        else:
            whole = taken_from(node)
            own = given.get(whole, "") if whole is not None else ""
            found[node] = own or _gradient_name(node, by_name, named, found)
    yield from found.items()


def _origin(node: fx.Node) -> tuple[object, ...]:
    """A key that is equal for a value and for its recomputation."""
    shape = tuple(fake_of(node).shape) if is_tensor(node) else ()
    result = node.args[1] if node.target is operator.getitem else None
    return (node.target, value(node).module, value(node).source, shape, result)


def _is_again(
    node: fx.Node, gradients: Mapping[fx.Node, str], known: Mapping[object, fx.Node]
) -> bool:
    """Whether a backward node is no gradient but a forward value, recomputed or gathered again."""
    return (
        (bool(node.all_input_nodes) or value(node).name in known)
        and not value(node).forward
        and gradients.keys().isdisjoint(node.all_input_nodes)
    )


def _gradient_name(
    node: fx.Node, by_name: dict[str, fx.Node], named: dict[fx.Node, str], found: dict[fx.Node, str]
) -> str:
    """The name of one gradient.

    It is that of the forward call's operand which has the gradient's shape; the operand in the
    same place as the result is tried first.
    """
    before = _before(node)
    if before in found:
        return found[before]
    forward = by_name.get(value(node).forward)
    if forward is not None and forward.target is operator.getitem:
        forward = forward.all_input_nodes[0]
    if forward is not None and is_tensor(node):
        operands = [n for n in forward.all_input_nodes if is_tensor(n)]
        like = [n for n in operands if fake_of(n).shape == fake_of(node).shape]
        index = node.args[1] if node.target is operator.getitem else 0
        if isinstance(index, int) and index < len(operands) and operands[index] in like:
            return f"d_{named[operands[index]]}"
        if like:
            return f"d_{named[like[0]]}"
    parts = {n: found[n] for n in node.all_input_nodes if n in found and is_tensor(n)}
    if op_name(node) == "add" and parts:  # a sum of contributions
        of_values = [name for n, name in parts.items() if name != f"d_{op_name(n)}"]
        return (of_values or [*parts.values()])[-1]
    return f"d_{op_name(node)}"
