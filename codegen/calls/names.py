"""What values are called: after their module, variable or op; gradients ``d_<value>``."""

from __future__ import annotations

import builtins
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from torch import fx

from partc.codegen.helpers import needed as helpers
from partc.codegen.safety import FORBIDDEN
from partc.graph import Graph, fake_of, has_value, is_forward, is_tensor, value
from partc.graph.moves import carried
from partc.passes.overlap.write_pieces import taken_from
from partc.plan.sharding import DTYPE_NAMES
from partc.quoting import identifier

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
COMMON = {
    "hidden_states",
    "residual",
    "x",
    "out",
    "output",
    "outputs",
    "result",
}  # say nothing about the value
PLAIN = {
    "to_copy": "cast", "unsafe_view": "view", "sum": "total", "pow": "power", "slice": "part",
    "cross_entropy_grad": "logits",
}  # fmt: skip
_TARGETS = re.compile(
    r"(?:[\w.\-/]+:\d+: )?\s*([A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)*)\s*(?::[^=]+)?=(?!=)"
)


class Scope:
    """The identifiers of one generated function: each wish is granted once, then numbered."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = {*RESERVED, *taken}

    def fresh(self, wish: str) -> str:
        """``x``, then ``x_1``, ``x_2``."""
        name = base = identifier(wish)
        number = 0
        while name in self.taken:
            number += 1
            name = f"{base}_{number}"
        self.taken.add(name)
        return name


def wishes(
    graph: Graph, prefix: str = "", given: Mapping[fx.Node, str] = MappingProxyType({})
) -> dict[fx.Node, str]:
    """What every value would like to be called, seen from the module at ``prefix``, were it alone.

    ``given`` names stand, and gradients follow them.
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
    """What one of the pieces of a block is called: ``x_0`` of ``x``."""
    turn = value(node).turn
    return wish if turn is None else f"{wish}_{turn}"


def _before(node: fx.Node) -> fx.Node | None:
    """The value that a node is in another layout, or a piece of; None for other calls."""
    return carried(node) or taken_from(node)


def moved_from(node: fx.Node) -> list[fx.Node]:
    """A value and what it was before collectives moved it."""
    chain = [node]
    while (before := carried(chain[-1])) is not None:
        chain.append(before)
    return [n for n in chain if n.op == "call_function"]


def _follow_operands(forward: list[fx.Node], named: dict[fx.Node, str]) -> None:
    """A moved value keeps its name, a cast one adds its dtype."""
    for node in forward:
        if (before := _before(node)) is not None:
            named[node] = named[before]
        elif named[node] == "cast" and is_tensor(node):
            dtype = DTYPE_NAMES.get(fake_of(node).dtype, "cast")
            named[node] = f"{named[node.all_input_nodes[0]]}_{dtype}"


def inside(path: str, prefix: str) -> str:
    """A module path or name as seen from the module at ``prefix``.

    >>> inside("h.0.mlp.fc", "h.0")
    'mlp.fc'
    """
    if path == prefix:
        return ""
    return path.removeprefix(f"{prefix}.") if prefix else path


def known_as(node: fx.Node) -> str:
    """The name that ``forward`` of a backward call has for a forward one."""
    return value(node).name or node.name


def module_name(path: str) -> str:
    """The last name of a module path with the indices around it: ``h.0.mlp`` is ``mlp_0``.

    >>> module_name("encoder.layers.3.fc.1")
    'fc_3_1'
    """
    words: list[str] = []
    numbers: list[str] = []
    for part in path.split("."):
        (numbers if part.isdigit() else words).append(part)
    return "_".join([*(words[-1:] or ["m"]), *numbers])


def op_name(node: fx.Node) -> str:
    """The op's own name: ``silu`` of ``aten.silu.default``; attention is ``attention``."""
    target = node.target
    if isinstance(target, helpers.Outlined):
        return target.results[0]
    if target is operator.getitem and isinstance(node.args[0], fx.Node):
        return op_name(node.args[0])
    name = str(
        getattr(getattr(target, "_schema", None), "name", "")
        or getattr(target, "__name__", "value")
    )
    name = name.split("::")[-1].strip("_")
    if name.startswith("scaled_dot_product"):
        return "attention"
    return PLAIN.get(name, name)


def is_given(node: fx.Node, wish: str) -> bool:
    """Whether a value's name is the user's: it says more than its op, or its operand's cast."""
    word = op_name(node)
    dtype = DTYPE_NAMES.get(fake_of(node).dtype, "") if is_tensor(node) else ""
    return wish != word and not (word == "cast" and wish.endswith(f"_{dtype}"))


def _placeholder_names(graph: Graph, prefix: str) -> Iterator[tuple[fx.Node, str]]:
    for node in graph.placeholders("received").values():
        yield node, "x" if is_forward(node) else "d_y"
    for kind in ("param", "buffer", "input"):
        placed = graph.placeholders(kind)
        names = [inside(name, prefix) for name in placed if _within(name, prefix)]
        short = Counter(map(_last_words, names))
        for name, node in placed.items():
            own = inside(name, prefix)
            alone = own in names and short[_last_words(own)] == 1
            yield node, identifier(_last_words(own) if alone else own)


def _last_words(name: str) -> str:
    """What a parameter is called where no other is called so: the last two words of its name, and
    a list's where they are a member's number and its own.

    >>> _last_words("self_attn.q_proj.weight"), _last_words("model.blocks.5.weight")
    ('q_proj.weight', 'blocks.5.weight')
    """
    parts = name.split(".")
    first = max((i for i, part in enumerate(parts[:-1]) if not part.isdigit()), default=0)
    return ".".join(parts[first:])


RESULTS = {  # of ops whose schema does not name them
    "native_layer_norm": ("", "mean", "rstd"),
    "native_group_norm": ("", "mean", "rstd"),
    "native_batch_norm": ("", "mean", "rstd"),
    "native_batch_norm_legit_functional": ("", "mean", "rstd", "running_mean", "running_var"),
    "nll_loss_forward": ("", "count"),
    "nll_loss2d_forward": ("", "count"),
    "max_pool2d_with_indices": ("", "indices"),
    "var_mean": ("var", "mean"),
}


def _result_names(nodes: list[fx.Node]) -> Iterator[tuple[fx.Node, str]]:
    """The results of a call that has several: ``mean`` and ``rstd`` of a layer norm."""
    for node in nodes:
        if name := _result_name(node):
            yield node, name


def _result_name(node: fx.Node) -> str:
    """What a call that has several results calls this one; "" if nothing."""
    if node.target is not operator.getitem:
        return ""
    index, names = node.args[1], _names_of_results(node.all_input_nodes[0])
    known = isinstance(index, int) and index < len(names) and names[index] != "output"
    return names[index] or "" if known else ""  # type: ignore[index]


def _names_of_results(call: fx.Node) -> Sequence[str | None]:
    if isinstance(call.target, helpers.Outlined):
        return call.target.results
    schema = getattr(call.target, "_schema", None)
    returns = [result.name for result in schema.returns] if schema is not None else []
    return RESULTS.get(op_name(call)) or returns


def _compiled_names(graph: Graph) -> Iterator[tuple[fx.Node, str]]:
    """What compiled functions give is called as it is there."""
    for node in graph.calls():
        call = node.all_input_nodes[0] if node.target is operator.getitem else node
        if isinstance(call.target, helpers.Outlined) and call.target.compiled:
            index = node.args[1] if node is not call else 0
            assert isinstance(index, int)
            yield node, call.target.results[index]


def _variable_names(nodes: list[fx.Node]) -> Iterator[tuple[fx.Node, str]]:
    """The user's variables, read off the source line: its last values are its targets."""
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
    """A value as it was before collectives moved it."""
    while (before := carried(node)) is not None:
        node = before
    return node


def _is_argument(node: fx.Node, source: str) -> bool:
    """Whether a module that the line itself calls reads a value: it is not the line's result."""
    path = value(node).module
    readers = [inside(value(u).module, path) for u in node.users if has_value(u)]
    return any(
        r and not r.startswith(path) and f"self.{r.split('.')[0]}(" in source for r in readers
    )


def _module_names(nodes: list[fx.Node], prefix: str) -> Iterator[tuple[fx.Node, str]]:
    """A module's only value that others read in the forward has the module's name."""
    results: dict[tuple[str, int | None], list[fx.Node]] = {}
    for node in nodes:
        readers = [value(u).module for u in node.users if has_value(u) and is_forward(u)]
        path = value(node).module
        while path and is_tensor(node):
            if any(not _within(reader, path) for reader in readers):
                results.setdefault((path, value(node).turn), []).append(node)
            path = path.rpartition(".")[0]
    for path, turn in sorted(results, key=lambda at: at[0].count(".")):  # the innermost module wins
        if len(results[path, turn]) == 1 and path != prefix:
            yield results[path, turn][0], module_name(inside(path, prefix))


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _gradient_names(
    graph: Graph,
    named: dict[fx.Node, str],
    given: Mapping[fx.Node, str],
    compiled: Mapping[fx.Node, str],
) -> Iterator[tuple[fx.Node, str]]:
    """``d_<value>`` for what a backward node computes the gradient of."""
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
            unknown = _result_name(node) or op_name(node)
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
    """What a value and its recomputation have in common."""
    shape = tuple(fake_of(node).shape) if is_tensor(node) else ()
    result = node.args[1] if node.target is operator.getitem else None
    return (node.target, value(node).module, value(node).source, shape, result)


def _is_again(
    node: fx.Node, gradients: Mapping[fx.Node, str], known: Mapping[object, fx.Node]
) -> bool:
    """Whether a backward node is no gradient but a forward value computed or gathered once more."""
    return (
        (bool(node.all_input_nodes) or value(node).name in known)
        and not value(node).forward
        and gradients.keys().isdisjoint(node.all_input_nodes)
    )


def _gradient_name(
    node: fx.Node, by_name: dict[str, fx.Node], named: dict[fx.Node, str], found: dict[fx.Node, str]
) -> str:
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
