"""The statements of collectives in one generated function: those that start one, those that wait.

``y_done = dist.all_reduce(y, group=self.tp, async_op=True)`` starts, ``y_done.wait()`` waits; the
comment beside the wait says which calls between the two hide the transfer. Where nothing stands
between the two, one call does both: ``y = all_gather(x, 2, self.tp)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import fx

from partc.codegen.calls.backends import c10d
from partc.codegen.calls.expressions import Expressions
from partc.codegen.calls.hidden import hidden_by
from partc.codegen.calls.random import Drawing
from partc.codegen.calls.ranges import of_transfer
from partc.codegen.calls.statements import Statement
from partc.codegen.calls.storage import overwritable
from partc.codegen.repeats.equal import ends_step
from partc.codegen.text import ATOM, Line, Text
from partc.graph import collectives, is_tensor, tensor_args, typed, value
from partc.graph.dense import surely_dense
from partc.graph.moves import gathers_param, kind_of, moves, results, state_of, wire_of
from partc.plan.wires import OWN, WIRES
from partc.quoting import comment


@dataclass
class Transfers(Expressions):
    """Expressions that also write collectives and their waits as statements."""

    at_once: set[fx.Node] = field(default_factory=set)  # transfers whose call also waits

    def __post_init__(self) -> None:
        super().__post_init__()
        self.in_place = overwritable(self.order)

    def transfer(self, node: fx.Node) -> Statement | None:
        """The statement of a collective or of a wait; None for other calls."""
        statement = self._transfer(node)
        if statement is not None and self.helpers.ranges:
            ranged = of_transfer(node)
            statement.lines = [replace(line, range=ranged) for line in statement.lines]
        return statement

    def _transfer(self, node: fx.Node) -> Statement | None:
        if gathers_param(node):
            return self._gather_weights(node)
        if node in self.joint.params:
            return self._reduce(node)
        if node.target in collectives.COLLECTIVES:
            return self._start(node)
        return self._wait(node) if node.target is collectives.wait else None

    def _start(self, node: fx.Node) -> Statement:
        """The lines that start a collective; an all_reduce overwrites its operand or a copy of it.

        The handle of a last reduction of gradients goes into ``reduced``, for ``finish``.
        """
        operand = node.all_input_nodes[0]
        lines = []
        x = self.text(operand)
        overwrites = node.target is collectives.all_reduce
        if overwrites and (own := self._own_memory(node, operand)):
            lines.append(Line(f"{self.bind(node)} = {x.at(ATOM)}.{own}"))
        elif overwrites or self._gives_up(operand, node):
            self.seen[node] = x
        name = str(self.seen[node]) if node in self.seen else self.bind(node)
        if self._waited(node) is None and self._next_wait(node) is not None:
            self.at_once.add(node)
            call = c10d.at_once(node, x, name, self.helpers)
            remark = comment(f"{typed(node)}; {value(node).remark or 'exposed'}")
            return Statement([*lines, Line(call, remark)], binds=[node])
        waited = self._waited(node)
        grads = "" if waited is None else f"{{{self.stored[waited][0]}: {name}}}"
        if grads and overwrites:
            call = self._summed(node, name, f"[{name}]")
            lines.append(Line(f"reduced.append(({grads}, {call}))", comment(typed(node))))
            return Statement(lines, binds=[node])
        self.scope.taken.add(f"{name}_done")
        joined = c10d.after_wait(node, name, self.helpers)  # has the comment: pieces arrive here
        remark = "" if joined else comment(typed(node))
        lines.append(Line(c10d.start(node, x, name, self.helpers), remark))
        lines += [Line(f"reduced.append(({grads}, {name}_done))")] if grads else []
        return Statement(lines, binds=[node])

    def _own_memory(self, node: fx.Node, operand: fx.Node) -> str:
        """The call that gives an all_reduce memory to work in; empty if the operand's will do.

        c10d wants contiguous memory, and ``clone`` alone keeps the strides of its operand.
        """
        if node in self.in_place:
            return "" if surely_dense(operand) else "contiguous()"
        return f"clone({'' if surely_dense(operand) else 'memory_format=torch.contiguous_format'})"

    def _gives_up(self, operand: fx.Node, node: fx.Node) -> bool:
        """Whether a collective is the only reader of its operand, whose name the result takes."""
        return (
            operand in self.place
            and operand in self.seen
            and set(operand.users) == {node}
            and operand not in self.kept
        )

    def _waited(self, node: fx.Node) -> fx.Node | None:
        """The wait of a collective, if the step's ``finish`` waits for it; else None."""
        waits = list(node.users)
        return waits[0] if len(waits) == 1 and ends_step(self.graph, waits[0]) else None

    def _next_wait(self, start: fx.Node) -> fx.Node | None:
        """The wait of a collective, if it is the next statement; None if ``finish`` waits.

        Start and wait are then one blocking call.
        """
        wait = next(iter(start.users), None)
        if wait is None or wait.target is not collectives.wait or wait not in self.place:
            return None
        if ends_step(self.graph, wait):
            return None
        between = self.order[self.place[start] + 1 : self.place[wait]]
        without = {*self.inlined, *self.seen}  # a value picked from several was seen beside them
        return wait if all(n in without or not self._has_line(n) for n in between) else None

    def _wait(self, node: fx.Node) -> Statement:
        """The lines that wait for a collective, and that make its result of what has arrived."""
        start = node.all_input_nodes[0]
        self.seen[node] = self.seen[start]
        name, hidden = str(self.seen[start]), comment(self._hidden_by(start, node), 1000)
        if gathers_param(start):
            bound = weights_of(start)
            names = ["_" if n is None else self.bind(n) for n in bound]
            listed = f"[{names[0]}]" if len(bound) == 1 else ", ".join(names)
            joined = c10d.put_together(names, moves(start), self.helpers)
            lines = [Line(f"{listed} = {name}.take()", hidden), *joined]
            return Statement(lines, reads=[start], binds=[n for n in bound if n is not None])
        if start in self.at_once:
            return Statement([], reads=[start], binds=[node])
        lines = [Line(f"{name}_done.wait()", hidden)]
        after = c10d.after_wait(start, name, self.helpers) if is_tensor(node) else ""
        lines += [Line(after, comment(typed(node)))] if after else []
        # Over gloo a reduce-scatter of gradients is an all_to_all (it sends half as much as gloo's
        # own): the pieces of all ranks have arrived and are still to be added up.
        scattered = start in self.joint.params and kind_of(start) == "reduce_scatter"
        if scattered and self.helpers.in_pieces:
            lines.append(Line(f"{name} = {self.helpers.use('summed')}({name})"))
        return Statement(lines, reads=[start], binds=[node])

    def _gather_weights(self, node: fx.Node) -> Statement:
        """The start of a gather of weights: ``gathered = gather_weights([...], 2, self.dp)``."""
        shards = c10d.shards([str(self.text(n)) for n in tensor_args(node)], node, self.helpers)
        name = self.scope.passing("gathered")
        self.seen[node] = Text(name)
        call = c10d.transfer(node, shards, self.helpers)
        return Statement([Line(f"{name} = {call}")], binds=[node])

    def _reduce(self, node: fx.Node) -> Statement:
        """The start of a reduction of a dict of gradients: ``grads, grads_done = sum_grads(...)``.

        The handle of a last reduction goes into ``reduced``, for ``finish``.
        """
        grads = self.joint.name(node, self.scope)
        put = "{}.copy_({})" if grads in self.joint.rooms else "{} = {}"
        missing = self.joint.missing(node)
        lines = [Line(put.format(entry, self.text(operand))) for operand, entry in missing]
        if grads in self.joint.rooms:
            done = self._summed(node, self.joint.rooms[grads], f"[*{grads}.values()]")
            return Statement([*lines, Line(f"reduced.append(({grads}, {done}))")])
        if wire_of(node) and kind_of(node) == "all_reduce":
            return self._joined(node, grads, lines)
        lines += self._laid_out(node, grads)
        call = self._moved(node, grads)
        if self._waited(node) is not None:
            remark = comment(typed(node)) if is_tensor(node) else ""
            # What was sent is dropped at once: the step needs the memory.
            return Statement(
                [*lines, Line(f"reduced.append({call})", remark), Line(f"del {grads}")]
            )
        self.seen[node] = Text(grads)
        self.seen |= {n: Text(entry) for n, entry in self.joint.results(node)}
        self.scope.taken.add(f"{grads}_done")
        return Statement([*lines, Line(f"{grads}, {grads}_done = {call}")], binds=[node])

    def _joined(self, node: fx.Node, grads: str, lines: list[Line]) -> Statement:
        """The start of a sum with fewer bytes of gradients that do not lie in one memory yet."""
        flat = self.scope.passing("flat")
        done = self._summed(node, flat, f"[*{grads}.values()]")
        joined = Line(f"{flat}, {grads} = {self.helpers.use('joined')}({grads})")
        return Statement([*lines, joined, Line(f"reduced.append(({grads}, {done}))")])

    def _summed(self, node: fx.Node, flat: str, grads: str) -> str:
        """The call that starts to sum gradients in the memory named ``flat``; ``grads``: a list."""
        if not wire_of(node):
            return c10d.all_reduce(node, flat, at_once=False)
        state = [str(self.text(kept)) for kept in state_of(node)]
        return c10d.narrow_sum(node, [flat, grads, self._key_of(node)], state, self.helpers)

    def _key_of(self, node: fx.Node) -> str:
        """The generator of a sum with fewer bytes; "" for one that draws nothing."""
        drawn, axis = WIRES[wire_of(node)].drawn, node.kwargs["axis"]
        drawing = Drawing(self.graph, self.prefix, self.name_of)
        return drawing.of_sum(node, [f"self.{axis}_rank"] * (drawn == OWN)) if drawn else ""

    def _moved(self, node: fx.Node, grads: str) -> str:
        """The call that starts to reduce the dict of gradients named ``grads``."""
        if wire_of(node):
            return c10d.narrow_scatter(node, grads, self._key_of(node), self.helpers)
        return c10d.transfer(node, grads, self.helpers)

    def _laid_out(self, node: fx.Node, grads: str) -> Iterator[Line]:
        """The lines before a reduce-scatter for gradients that are not sharded on dim 0."""
        scattered = kind_of(node) == "reduce_scatter"
        each = zip(self.joint.params[node], moves(node), strict=True) if scattered else ()
        for param, move in each:
            entry = f"{grads}[{param}]"
            laid_out = c10d.laid_out(entry, move.kwargs, self.helpers)
            if laid_out != entry:
                yield Line(f"{entry} = {laid_out}")

    def _hidden_by(self, start: fx.Node, wait: fx.Node) -> str:
        """The comment beside a wait: which calls between start and wait hide the transfer."""
        if value(start).remark:
            return value(start).remark
        if start not in self.place:
            return "started by the caller"
        span = range(self.place[start] + 1, self.place[wait])
        between = [n for n in (self.order[i] for i in span) if self.place[self._line(n)] in span]
        return hidden_by(start, between, self.spoken)

    def _line(self, node: fx.Node) -> fx.Node:
        """The call in whose line a call stands: its own, or that of the call it is written in."""
        while node in self.inlined:
            node = next(iter(node.users))
        return node

    def spoken(self, node: fx.Node) -> str:
        """The name of a value in the comment of another line."""
        code = self.seen[node].code if node in self.seen else ""
        return code if code.isidentifier() else self.wishes.get(node, code)


def weights_of(gather: fx.Node) -> list[fx.Node | None]:
    """The nodes of the whole weights that a gather gives, in order; None for one that is unread."""
    if gather.target in collectives.JOINED:
        return results(gather, len(tensor_args(gather)))
    return list(gather.users)
