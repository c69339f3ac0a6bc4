"""The statements of one generated function, in order, from the nodes that the function computes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import fx

from partc.codegen.calls.buffers_in_place import SIGNS
from partc.codegen.calls.inline import is_free, is_pointwise
from partc.codegen.calls.op_names import STATISTICS, result_name
from partc.codegen.calls.path_names import inside
from partc.codegen.calls.settle import unmarked
from partc.codegen.calls.spell import first_result, put_at, written_over
from partc.codegen.calls.statements import Statement
from partc.codegen.calls.storage import WRITES, owner
from partc.codegen.calls.transfers import Transfers
from partc.codegen.helpers.needed import Outlined
from partc.codegen.text import ATOM, NONE, WIDTH, Line, Text
from partc.cost.storage import GRADS_OF_ACTIVATIONS
from partc.graph import collectives, fake_of, is_tensor, ops, results_of, typed, value
from partc.graph.given_back import given_out, is_given_back
from partc.graph.moves import gathers_param
from partc.quoting import comment, literal

INDENT = 2  # levels by which the body of a method is indented


@dataclass
class Body(Transfers):
    """Writes the statements of one function: transfers, calls, and what adds to gradients."""

    def __post_init__(self) -> None:
        super().__post_init__()
        paths = {inside(value(n).module, self.prefix) for n in self.order}
        parents = {path.rpartition(".")[0] for path in paths}
        self.leaves = paths - parents

    def statements(self) -> list[Statement]:
        """The statements of all nodes that have lines, in order."""
        return [statement for node in self.order for statement in self.one(node)]

    def one(self, node: fx.Node) -> list[Statement]:
        """The statements of one node; none if the node is written inside another one's line."""
        if node in self.inlined or node in self.seen or not self._has_line(node):
            return []
        before = self.parts(node)
        statement = self.statement(node)
        for start in self.joint.begun():
            statement.lines = self._collected(start, statement.lines)
        statement.lines += [line for n in statement.binds for line in self._stores(n)]
        statement.section = self.section(node)
        statement.reads = statement.reads or self.read_by(node)
        statement.calls = [node, *self._written_in(node)]
        return [*before, statement]

    def parts(self, node: fx.Node) -> list[Statement]:
        """Statements for operands that would make the line of a pointwise call too long.

        The operand that splits the expression most evenly gets a line of its own, then the rest is
        measured again: ``y = (a + b) * (c + d)`` becomes ``add = a + b; y = add * (c + d)``.
        """
        before: list[Statement] = []
        while (part := self._part(node)) is not None:
            self.inlined.discard(part)
            before += self.one(part)
        return before

    def _part(self, node: fx.Node) -> fx.Node | None:
        """The operand that gets a line of its own next; None where the line is short enough."""
        inner = [n for n in self._written_in(node) if not is_free(n)]
        if not inner or not is_pointwise(node):
            return None
        texts = {n: len(unmarked(str(self.expression(n)))) for n in [node, *inner]}
        target = f"grads[{self.joint.place[node][1]}]" if node in self.joint.place else ""
        length = len(target or self.wishes.get(node, "")) + len(" = ") + texts[node]
        if node in self.accumulated:  # `a += b` for `a = a + b`
            length -= len(unmarked(f"{self.text(self.accumulated[node])} + ")) - 1
        if length <= WIDTH - 4 * INDENT:
            return None
        return min(inner, key=lambda n: max(texts[n], length - texts[n]))

    def _written_in(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes that are written inside a call's expression, at any depth."""
        for operand in node.all_input_nodes:
            if operand in self.inlined:
                yield from [operand, *self._written_in(operand)]

    def section(self, node: fx.Node) -> str | None:
        """The module path in the comment above a statement.

        Lines of a module without submodules stand under its parent's path. None, for a forward
        value that the backward recomputes: its line stands with the next one, which needs it. ""
        for a transfer of weights or of their gradients: it stands where there is time for it.
        """
        if value(node).from_forward:
            return None
        start = node.all_input_nodes[0] if node.target is collectives.wait else node
        if start in self.joint.params or gathers_param(node):
            return ""
        path = inside(value(node).module, self.prefix)
        return path.rpartition(".")[0] or path if path in self.leaves else path

    def statement(self, node: fx.Node) -> Statement:
        """The lines of one node, before its values are added to gradients.

        A sum or a gradient of an activation is written over an operand where ``accumulated`` says
        so: ``d_x += d_y``.
        """
        transfer = self.transfer(node)
        if transfer is not None:
            return transfer
        if not is_tensor(node):
            return self._several(node)
        if part := self.joint.part(node, self.scope):
            self.seen[node] = Text(part)
            return Statement([Line(self._write(part, node), comment(typed(node)))])
        ends = {self.graph.fx.output_node(), *self.summed}
        if node in self.stored and not node.users.keys() - ends:
            return self._last_store(node)
        into = self.accumulated.get(node)
        if into is not None and into in self.seen and node.target in SIGNS:
            rest = next(a for a in node.args if a is not into)
            self.seen[node] = self.seen[into]
            other = self.text(rest) if isinstance(rest, fx.Node) else literal(rest)
            code = f"{self.seen[node]} {SIGNS[node.target]}= {other}"
            return Statement([Line(code, comment(typed(node)))], binds=[node])
        if (
            into is not None
            and into in self.seen
            and node.target in (*GRADS_OF_ACTIVATIONS, *WRITES)
        ):
            code = put_at(node, self.text) or written_over(self.expression(node), self.seen[into])
            self.seen[node] = self.seen[into]
            return Statement([Line(code, comment(typed(node)))], binds=[node])
        code = self.expression(node).at(NONE)
        line = Line(f"{self.bind(node)} = {code}", comment(typed(node)))
        return Statement([line], binds=[node])

    def _several(self, node: fx.Node) -> Statement:
        """``a, b, _ = call`` for a call with several results; ``_`` is one that is unread."""
        by_index: dict[Any, fx.Node] = {
            u.args[1]: u for u in node.users if u.target is operator.getitem
        }
        if is_given_back(node):
            return self._given_back(by_index, node)
        call = self.expression(node)
        names = [
            self.bind(by_index[i]) if i in by_index else "_" for i in range(len(results_of(node)))
        ]
        while len(names) > 1 and names[-1] == "_" and len(by_index) == 1 and 0 in by_index:
            names.pop()
        bound = [by_index[i] for i in sorted(by_index)]
        shown = (
            bound[:1] if isinstance(node.target, Outlined) else bound
        )  # it says the others itself
        remark = comment(types(shown))
        if len(names) == 1:
            lines = [Line(f"{names[0]} = {first_result(call)}", remark)]
        else:
            both = isinstance(node.target, Outlined) and node.target.compiled
            lines = [Line(f"{', '.join(names)} = {call.at(NONE)}", remark, both=both)]
        return Statement(lines, binds=bound)

    def _given_back(self, by_index: Mapping[int, fx.Node], node: fx.Node) -> Statement:
        """``[d_logits] = yield {"logits": logits}``: the script computes its loss meanwhile."""
        num, results = len(results_of(node)), given_out(self.graph)
        names = [self.bind(by_index[i]) if i in by_index else "_" for i in range(num)]
        given = ", ".join(f"{literal(name)}: {self.text(x)}" for name, x in results.items())
        bound = [by_index[i] for i in sorted(by_index)]
        remark = comment(f"{types(bound)}; of the script's loss")
        line = Line(f"[{', '.join(names)}] = yield {{{given}}}", remark)
        return Statement([line], [*results.values()], bound)

    # gradients -------------------------------------------------------------------------------
    def _collected(self, start: fx.Node, lines: list[Line]) -> list[Line]:
        """The lines of the first gradient of a bucket, with the dict of gradients made before.

        ``grads[w] = d_w -> grads = {w: d_w}``; for a dict with room in the memory that is sent
        ``flat, grads = room([w, ...])`` comes first.
        """
        name, params = self.joint.names[start], self.joint.params[start]
        if name not in self.joint.rooms:
            place, _, gradient = lines[0].code.partition("] = ")
            param = place.removeprefix(f"{name}[")
            if param == place or "," in param:  # a call that gives several values
                return [Line(f"{name}: dict[nn.Parameter, Tensor] = {{}}"), *lines]
            return [replace(lines[0], code=f"{name} = {{{param}: {gradient}}}"), *lines[1:]]
        everything = sorted(params) == sorted(self.own)
        room_for = "[*self.parameters()]" if everything else f"[{', '.join(params)}]"
        call = f"{self.helpers.use('room')}({room_for})"
        return [Line(f"{self.joint.rooms[name]}, {name} = {call}"), *lines]

    def _write(self, part: str, node: fx.Node) -> str:
        """The statement that writes a gradient to its part of the memory that is sent."""
        if node.target is ops.weight_grad:
            d_y, x = (self.text(a) for a in node.args)  # type: ignore[arg-type]
            return f"{self.helpers.use('write_weight_grad')}({part}, {d_y}, {x})"
        return f"{part}.copy_({self.expression(node).at(NONE)})"

    def _stores(self, node: fx.Node) -> list[Line]:
        """The lines that add a value to ``.grad`` of the parameters whose final gradient it is."""
        return [
            Line(f"{self.helpers.called(self.adds.grad)}({param}, {self._own(node)})")
            for param in self.stored.get(node, [])
        ]

    def _own(self, node: fx.Node) -> str:
        """A gradient that may become ``.grad``: a clone where anything else uses its memory."""
        name = str(self.seen[node])
        return f"{name}.clone()" if self._is_shared(node) else name

    def _is_shared(self, node: fx.Node) -> bool:
        """Whether a gradient's memory is of another size, given in, stored twice, or read later.

        As ``.grad``, a piece of a larger memory would keep it alive; elements of an expanded one
        cannot be added to.
        """
        home = owner(node)
        if is_tensor(home) and fake_of(home).numel() != fake_of(node).numel():
            return True
        if home not in self.place or len(self.stored[node]) > 1:
            return True
        family = [n for n in self.order if owner(n) is home]
        readers = {u for n in family for u in n.users} - {self.graph.fx.output_node()} - set(family)
        readers -= self.summed
        late = any(self.place.get(u, len(self.order)) > self.place[node] for u in readers)
        return (
            late or any(n in self.kept for n in family) or sum(n in self.stored for n in family) > 1
        )

    def _last_store(self, node: fx.Node) -> Statement:
        """A gradient that nothing else reads needs no name: ``add_weight_grad(self.w, d_y, x)``."""
        params = self.stored[node]
        if node.target is ops.weight_grad and len(params) == 1:
            d_y, x = (self.text(a) for a in node.args)  # type: ignore[arg-type]
            call = f"{self.helpers.called(self.adds.weight_grad)}({params[0]}, {d_y}, {x})"
            return Statement([Line(call, comment(typed(node)))])
        code = self.expression(node).at(NONE)
        self.seen[node] = Text(code, NONE)
        if len(params) == 1:
            code = (
                f"{Text(code, self.expression(node).level).at(ATOM)}.clone()"
                if self._is_shared(node)
                else code
            )
            call = f"{self.helpers.called(self.adds.grad)}({params[0]}, {code})"
            return Statement([Line(call, comment(typed(node)))])
        line = Line(f"{self.bind(node)} = {code}", comment(typed(node)))
        return Statement([line], binds=[node])


def given_out_at(lines: Sequence[Line]) -> int:
    """The index of the line at which a step waits for the script: what it has to do before then, as
    write buffers, stands before that line, since other steps may run meanwhile.
    """
    return next(i for i, line in enumerate(lines) if "] = yield {" in line.code)


def types(results: Sequence[fx.Node]) -> str:
    """The types of a call's results: ``f32[8,64,64], 2x f32[64]``; none for a norm's statistics."""
    named = [n for n in results if result_name(n) not in STATISTICS] or results
    counted = [(text, len([*same])) for text, same in groupby(map(typed, named))]
    return ", ".join(text if num == 1 else f"{num}x {text}" for text, num in counted)
