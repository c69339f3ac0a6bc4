"""The names of values in a program.

A value of the forward is named after its module (``w1``), else after the user's variable, else
after its op (``gelu``). A gradient is named after its value: ``d_w1``.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from torch import fx
from torch._ops import OpOverload

from partc.codegen.calls.gradient_names import name_gradients
from partc.codegen.calls.inline import is_free
from partc.codegen.calls.moved_names import before_move, follow_operands, moved_from
from partc.codegen.calls.op_names import constant_name, op_name, result_name
from partc.codegen.calls.path_names import inside, is_within, last_words, module_name
from partc.codegen.calls.wishes import Wishes
from partc.codegen.helpers import needed as helpers
from partc.graph import Graph, fake_of, has_value, is_forward, is_tensor, value
from partc.graph.moves import carried
from partc.plan.sharding import DTYPE_NAMES
from partc.quoting import identifier

COMMON = {
    "hidden_states",
    "residual",
    "x",
    "out",
    "output",
    "outputs",
    "result",
    "_",  # which lines of a program give to what nobody reads
}  # say nothing about the value
COMMON_IN_TORCH = {"input", "ret", "tensor", "target"}
PRODUCTS = {"linear", "addmm", "mm", "matmul", "convolution", "conv2d", "conv1d"}
_WEIGHT = re.compile(r"[._]weight$")  # `in_proj_weight` of torch's own attention, too
# The targets of an assignment in a source line: ``a, b`` of ``model.py:14: a, b = x.chunk(2)``.
_TARGETS = re.compile(
    r"(?:[\w.\-/]+:\d+: )?\s*([A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)*)\s*(?::[^=]+)?=(?!=)"
)


def wishes(
    graph: Graph, prefix: str = "", given: Mapping[fx.Node, str] = MappingProxyType({}), *,
    stored: Mapping[fx.Node, str] = MappingProxyType({}),
) -> Wishes:  # fmt: skip
    """The wanted name of every value; ``settle`` gives longer ones where several values want one.

    Module paths are shortened by ``prefix``, the path of the module whose method is printed. Names
    in ``given`` are used as they are, and for the names of gradients. ``stored``: the attributes of
    parameters and buffers; where that is shorter, a value is called as the attribute is.
    """
    named = dict(_placeholder_names(graph, prefix))
    alone = {n: path for n, path in stored.items() if not re.search(r"\.\d", path)}
    named |= {n: identifier(path) for n, path in alone.items() if len(named[n]) > len(path)}
    forward = [n for n in graph.calls() if has_value(n) and is_forward(n)]
    said = {*named}
    named |= {n: constant_name(n) or op_name(n) for n in forward}
    named |= dict(_names_in_torch(forward))
    named |= dict(_function_names(forward))
    named |= dict(_result_names(forward))
    named |= dict(_variable_names(forward, _apart))
    users = dict(_variable_names(forward))
    users |= dict(_module_names(forward, prefix))
    users |= dict(_weight_names(forward, prefix))
    if graph.loss is not None:
        users |= dict.fromkeys(moved_from(graph.loss), "loss")
    named |= users
    named |= given
    follow_operands([n for n in forward if n not in given], named)
    compiled = dict(_compiled_names(graph))
    named |= compiled
    moved = {n for n in graph.calls() if has_value(n) and before_move(n) is not None}
    wanted = Wishes(named, prefix, {*given}, said | {*users, *compiled}, moved)
    name_gradients(graph, wanted, compiled)
    wanted.same |= dict(_gathered_again([n for n in graph.calls() if has_value(n)]))
    wanted.give(given)
    return wanted


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


def _function_names(nodes: list[fx.Node]) -> Iterator[tuple[fx.Node, str]]:
    """Names of what the user's functions return: ``rotate_half``."""
    for node in nodes:
        calls = value(node).calls
        inner = calls[-1][0] if len(calls) > 1 else "forward"
        readers = [value(u).calls for u in node.users if has_value(u)]
        ends = all(found[: len(calls) - 1] != calls[:-1] or len(found) < len(calls)
                   for found in readers)  # fmt: skip
        if inner.isidentifier() and inner not in ("forward", "wrapper", "inner") and ends:
            yield node, inner.strip("_")


def _weight_names(nodes: list[fx.Node], prefix: str) -> Iterator[tuple[fx.Node, str]]:
    """Names of products with a weight: ``up_proj`` of a product with ``mlp.up_proj.weight``."""
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.name.split("::")[1] not in PRODUCTS:
            continue
        weights = [w for w in map(_weight_of, node.all_input_nodes) if _WEIGHT.search(w)]
        path = _WEIGHT.sub("", weights[0]) if len(weights) == 1 else ""
        if path and is_within(path, prefix) and is_within(path, value(node).module):
            yield node, module_name(inside(path, prefix))


def is_weight(node: fx.Node) -> bool:
    """Whether a value is a parameter or buffer that a collective has moved."""
    while node.op == "call_function" and (before := carried(node)) is not None:
        node = before
    return node.op == "placeholder" and value(node).kind in ("param", "buffer")


def _gathered_again(nodes: list[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each weight that is gathered more than once, with its first gather."""
    first: dict[object, fx.Node] = {}
    for node in nodes:
        if is_tensor(node) and is_weight(node):
            root = moved_from(node)[-1]
            while (before := carried(root)) is not None:
                root = before
            key = (root, tuple(fake_of(node).shape), fake_of(node).dtype)
            if first.setdefault(key, node) is not node:
                yield node, first[key]


def _weight_of(node: fx.Node) -> str:
    """The name of the matrix that a value is, gathered or cast; "" for other values."""
    if not is_tensor(node) or fake_of(node).ndim < 2:
        return ""
    while node.op == "call_function":
        operands = node.all_input_nodes
        if node.target is operator.getitem and carried(node) is not None:
            operands = [carried(node) or node]
        if len(operands) != 1:
            return ""
        node = operands[0]
    return value(node).name if value(node).kind == "param" else ""


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


def _names_in_torch(nodes: list[fx.Node]) -> Iterator[tuple[fx.Node, str]]:
    """Names that torch's own code has: ``q, k, v`` of attention, ``denom`` of ``F.normalize``."""
    for runs_of in (_apart, _at_once):
        found = _variable_names(nodes, runs_of, lambda node: value(node).torch_line)
        yield from ((node, name) for node, name in found if name not in COMMON_IN_TORCH)


def _at_once(members: list[fx.Node]) -> list[list[fx.Node]]:
    return [members]


def _variable_names(
    nodes: list[fx.Node],
    runs_of: Callable[[list[fx.Node]], list[list[fx.Node]]] = _at_once,
    line_of: Callable[[fx.Node], str] = lambda node: value(node).source,
) -> Iterator[tuple[fx.Node, str]]:
    """Names of the user's variables: ``a, b = x.chunk(2)`` names the last values of its line.

    They are used where a line's calls have as many last values as the line has targets.
    ``runs_of``: the runs of a line, given its calls.
    """
    lines: dict[tuple[str, str, int | None], list[fx.Node]] = {}
    for node in nodes:
        if before_move(node) is None:  # a moved value is called as it was
            at = value(node)
            lines.setdefault((at.module, line_of(node), at.turn), []).append(node)
    for (_, source, _), members in lines.items():
        match = _TARGETS.match(source)
        targets = [t.strip() for t in match[1].split(",")] if match else []
        for ran in runs_of(members) if targets else ():
            within = {_unmoved(operand) for n in ran for operand in n.all_input_nodes}
            ends = [n for n in ran if is_tensor(n) and n not in within]
            ends = [n for n in ends if not _is_argument(n, source)]
            if len(ends) == len(targets):
                named = zip(map(_shown, ends), targets, strict=True)
                yield from ((n, t) for n, t in named if t not in COMMON)


def _shown(node: fx.Node) -> fx.Node:
    """The value that has a line: a view that one call reads is written in that call.

    ``q_states = q.unflatten(2, (4, 16))`` for ``q_states = q.view(...).transpose(1, 2)``, of which
    the backward reads other transposes.
    """
    if not is_free(node) or len(node.users) > 1 or len(node.all_input_nodes) != 1:
        return node
    operand = node.all_input_nodes[0]
    same = has_value(operand) and value(operand).source == value(node).source
    views = same and is_free(operand) and len(operand.users) > 1
    return operand if views and all(isinstance(u.target, OpOverload) for u in node.users) else node


def _apart(members: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The calls of a line by the times that it ran: calls that read none of each other's results.

    A line of a function that is called for queries and for keys runs twice.
    """
    groups: list[list[fx.Node]] = []
    for node in members:
        reads = {_unmoved(operand) for operand in node.all_input_nodes}
        joined = [group for group in groups if not reads.isdisjoint(group)]
        groups = [group for group in groups if group not in joined]
        groups.append([n for group in joined for n in group] + [node])
    return groups if len(groups) > 1 else []


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
        while path and is_tensor(node) and not is_weight(node):
            if any(not is_within(reader, path) for reader in readers):
                results.setdefault((path, value(node).turn), []).append(node)
            path = path.rpartition(".")[0]
    # The innermost module wins: its name comes last and replaces an outer module's.
    for path, turn in sorted(results, key=lambda at: at[0].count(".")):
        found = [*dict.fromkeys(map(_unmoved, results[path, turn]))]  # a sum is called as its parts
        if len(found) == 1 and path != prefix and is_within(value(found[0]).module, path):
            yield found[0], module_name(inside(path, prefix))
