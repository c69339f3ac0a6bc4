"""The names of gradients, ``d_up`` for that of ``up``, and of recomputed values."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from partc.codegen.calls.moved_names import before_move, follow_operands, known_as, moved_from
from partc.codegen.calls.op_names import constant_name, op_name, result_name
from partc.codegen.calls.wishes import Wishes
from partc.graph import Graph, fake_of, has_value, is_forward, is_tensor, value
from partc.graph.given_back import result_of
from partc.passes.overlap.write_pieces import taken_from


def name_gradients(graph: Graph, wishes: Wishes, compiled: Mapping[fx.Node, str]) -> None:
    """Add the names of the backward's values to ``wishes``: ``d_<value>`` for a gradient.

    A forward value that the backward computes again has the name it has in the forward.
    ``compiled`` has the names of what functions for torch.compile return.
    """
    # Reversed, so that of several calls with one name the first in the graph stands in the table.
    by_name = {known_as(n): n for n in reversed(list(graph.calls())) if has_value(n)}
    params, named = graph.params, wishes.names
    final = {n: params[name] for name, node in graph.grads.items() for n in moved_from(node)}
    forward = [n for n in reversed(list(graph.calls())) if has_value(n) and is_forward(n)]
    known: dict[object, fx.Node] = {_origin(n): n for n in forward}
    known |= {value(n).name: n for n in forward if value(n).name}
    given = {n: named[n] for n in wishes.given}
    found: dict[fx.Node, str] = {}
    gradients = {n for n in graph.placeholders("received").values() if not is_forward(n)}
    for node in graph.calls():
        if is_forward(node):
            continue
        before = before_move(node)
        if node in compiled:
            found |= {node: compiled[node]} if compiled[node].startswith("d_") else {}
        elif (result := result_of(node)) is not None:
            found[node] = f"d_{named.get(result, 'result')}"
            wishes.of[node] = result
        elif _is_of_loss(node, graph):
            found[node] = "d_loss"
        elif node not in final and before not in found and _is_again(node, gradients, known):
            again = before
            if before is None and not value(node).forward:  # else it is a factor of a gradient
                again = known.get(value(node).name) or known.get(_origin(node))
            unknown = constant_name(node) or result_name(node) or told(node) or op_name(node)
            named[node] = unknown if again is None else named.get(again, unknown)
            follow_operands([node], named)
            if again is not None and before is None:
                wishes.same[node] = wishes.same.get(again, again)
                wishes.said |= {node} if again in wishes.said else set()
        elif node in final:
            found[node] = f"d_{named[final[node]]}"
            wishes.of[node] = final[node]
            wishes.said.add(node)
        else:
            whole = taken_from(node)
            own = given.get(whole, "") if whole is not None else ""
            found[node] = own or _Gradient(graph, by_name, wishes, found, final).name(node)
        gradients |= {node} if node in found else set()
    named |= found
    wishes.gradients |= found.keys()


class _Gradient:
    """Finds the name of a gradient; ``found`` has those of the gradients before it.

    ``by_name`` has the calls to which ``Value.forward`` refers, ``final`` the parameter of each
    parameter's gradient.
    """

    def __init__(
        self, graph: Graph, by_name: dict[str, fx.Node], wishes: Wishes,
        found: dict[fx.Node, str], final: dict[fx.Node, fx.Node],
    ) -> None:  # fmt: skip
        self.by_name, self.wishes, self.found, self.final = by_name, wishes, found, final

    def name(self, node: fx.Node) -> str:
        """The name of the value whose gradient it is, which is noted in ``wishes.of``.

        That is the forward call's operand which has the gradient's shape; the operand in the same
        place as the result is tried first.
        """
        named, of = self.wishes.names, self.wishes.of
        before = before_move(node)
        if before in self.found:
            of |= {node: of[before]} if before in of else {}
            return self.found[before]
        forward = self.by_name.get(value(node).forward)
        if forward is not None and forward.target is operator.getitem:
            forward = forward.all_input_nodes[0]
        if own := self._summed(node) or told(node):
            return own
        if forward is not None and is_tensor(node):
            results = [u for u in forward.users if u.target is operator.getitem and u.args[1] == 0]
            self.wishes.through[node] = named.get(results[0] if results else forward, "")
            operand = _operand(node, forward)
            if operand is not None:
                of[node] = operand
                return f"d_{named[operand]}"
        if (operand := _own_operand(node)) is not None and operand in named:
            of[node] = operand
            return f"d_{named[operand]}"
        parts = {n: self.found[n] for n in node.all_input_nodes if n in self.found and is_tensor(n)}
        if op_name(node) == "add" and parts:  # a sum of contributions
            of_values = [n for n, name in parts.items() if name != f"d_{op_name(n)}"]
            best = (of_values or [*parts])[-1]
            of |= {node: of[best]} if best in of else {}
            self.wishes.said.add(node)
            return parts[best]
        word = op_name(node)  # of a function it is the name that its result has in it
        return word if word.startswith("d_") else f"d_{word}"

    def _summed(self, node: fx.Node) -> str:
        """The name of what is summed over rows to a parameter's gradient: ``d_weight_rows``."""
        readers = list(node.users)
        if len(readers) != 1 or readers[0].target is not torch.ops.aten.sum.dim_IntList:
            return ""
        param = self.final.get(readers[0])
        return "" if param is None else f"d_{self.wishes.names[param]}_rows"


def told(node: fx.Node) -> str:
    """The name that the decomposition of an op has for a call of its own; "" for others."""
    name, equals, rest = value(node).torch_line.partition(" = ")
    return name if equals and not rest and value(node).decomposed_from else ""


def _operand(node: fx.Node, forward: fx.Node) -> fx.Node | None:
    """The operand of a forward call whose gradient a node is, by its shape and place."""
    operands = [n for n in forward.all_input_nodes if is_tensor(n)]
    if (part := _part_of_cat(node, forward)) is not None:
        return part
    like = [n for n in operands if fake_of(n).shape == fake_of(node).shape]
    like = like or [n for n in operands if value(n).shape == value(node).shape]  # cut otherwise
    index = node.args[1] if node.target is operator.getitem else 0
    if isinstance(index, int) and index < len(operands) and operands[index] in like:
        return operands[index]
    return next(iter(like), None)


def _own_operand(node: fx.Node) -> fx.Node | None:
    """What a backward is the gradient of whose forward was rewritten: ``self`` of its kernel."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.name.endswith("_backward"):
        return None
    given = zip((argument.name for argument in schema.arguments), node.args, strict=False)
    operand = dict(given).get("self")
    if not isinstance(operand, fx.Node) or not (is_tensor(operand) and is_tensor(node)):
        return None
    alike = fake_of(operand).shape == fake_of(node).shape
    return operand if alike and is_forward(operand) else None


def _part_of_cat(node: fx.Node, forward: fx.Node) -> fx.Node | None:
    """What a slice of a concatenation's gradient is the gradient of: the part that stands there."""
    aten = torch.ops.aten
    if forward.target is not aten.cat.default or node.target is not aten.slice.Tensor:
        return None
    parts: Any = forward.args[0]
    dim, start, at = int(str(node.args[1])), node.args[2], 0
    if not isinstance(start, int):  # each block has a place of its own
        return _part_in_order(node, parts)
    for part in parts:
        if at == start:
            return cast(fx.Node, part)
        at += fake_of(part).shape[dim]
    return None


def _part_in_order(node: fx.Node, parts: Sequence[fx.Node]) -> fx.Node | None:
    """The part of a concatenation for one of the slices of its gradient, if each part has one."""
    slices = [n for n in node.all_input_nodes[0].users if n.target is node.target]
    return parts[slices.index(node)] if len(slices) == len(parts) else None


def _origin(node: fx.Node) -> tuple[object, ...]:
    """A key that is equal for a value and for its recomputation."""
    shape = tuple(fake_of(node).shape) if is_tensor(node) else ()
    result = node.args[1] if node.target is operator.getitem else None
    return (node.target, value(node).module, value(node).source, shape, result)


def _is_of_loss(node: fx.Node, graph: Graph) -> bool:
    """Whether a node is the gradient of the loss by itself, a one, with which a backward begins."""
    if node.target is not torch.ops.aten.ones_like.default or graph.loss is None:
        return False
    return node.all_input_nodes[0] in moved_from(graph.loss)


def _is_again(
    node: fx.Node, gradients: Collection[fx.Node], known: Mapping[object, fx.Node]
) -> bool:
    """Whether a backward node is no gradient: a forward value, recomputed or gathered again, or
    what a gradient is multiplied by. All that it reads are then forward values.
    """
    made = bool(node.all_input_nodes) or value(node).name in known or constant_name(node)
    return bool(made) and not any(n in gradients for n in node.all_input_nodes)
