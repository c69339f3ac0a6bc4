"""The statements of one generated function, from the nodes that stand in it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from partc import collectives, ops
from partc.codegen.backends import c10d
from partc.codegen.equal import ends_step
from partc.codegen.helpers import Helpers, Outlined
from partc.codegen.inline import inlined
from partc.codegen.joint_grads import JointGrads
from partc.codegen.names import Scope, inside, op_name
from partc.codegen.random import generator
from partc.codegen.spell import spell
from partc.codegen.storage import accumulations, overwritable, owner
from partc.codegen.text import ATOM, NONE, Line, Text
from partc.graph import (
    Graph,
    held,
    is_forward,
    is_tensor,
    results_of,
    tensor_args,
    typed,
    value,
)
from partc.moves import gathers_param, moves, results
from partc.quoting import comment, literal

ADDS, PARTIALS = ("add_grad", "add_weight_grad"), ("add_partial", "add_weight_partial")
SMALL, BIG = 64, 2  # fractions of the biggest value: not worth a `del`, worth one at once


@dataclass
class Statement:
    """One or a few lines, the values they read and bind, and the module they stand for."""

    lines: list[Line]
    reads: list[fx.Node] = field(default_factory=list)
    binds: list[fx.Node] = field(default_factory=list)
    section: str = ""


@dataclass
class Body:
    """Writes the statements of one function.

    ``seen`` has the texts of what comes from outside: parameters, arguments; ``wishes`` what values
    would like to be called; ``kept`` what is read outside; ``stored`` the parameters, as texts,
    whose final gradient a node is.
    """

    graph: Graph
    order: Sequence[fx.Node]
    wishes: dict[fx.Node, str]
    scope: Scope
    helpers: Helpers
    seen: dict[fx.Node, Text]
    kept: set[fx.Node] = field(default_factory=set)
    stored: dict[fx.Node, list[str]] = field(default_factory=dict)
    device: str = "self.device"
    prefix: str = ""
    adds: tuple[str, str] = ADDS  # the functions that add to a gradient
    at_once: set[fx.Node] = field(default_factory=set)  # all_reduces that one statement does

    def __post_init__(self) -> None:
        named = {n for n in self.order if is_forward(n) and self.wishes.get(n) != op_name(n)}
        self.accumulated = accumulations(self.order, self.kept | set(self.stored))
        self.joint = JointGrads(self.graph, self.order, self.stored)
        fixed = self.kept | set(self.stored) | set(self.accumulated.values())
        fixed |= self.joint.place.keys()
        self.inlined = inlined(self.order, fixed, named, self.accumulated)
        self.in_place = overwritable(self.graph, self.order)
        self.place = {node: i for i, node in enumerate(self.order)}
        paths = {inside(value(n).module, self.prefix) for n in self.order}
        parents = {path.rpartition(".")[0] for path in paths}
        self.leaves = paths - parents

    # texts -----------------------------------------------------------------------------------
    def text(self, node: fx.Node) -> Text:
        """How a value is read here: its name, or its expression where it has no line of its own."""
        if node not in self.seen:
            assert node in self.inlined or not is_tensor(node), (
                f"{node} is read before it is written"
            )
            return self.expression(node)
        return self.seen[node]

    def expression(self, node: fx.Node) -> Text:
        """The right side of a call."""
        if node.target in (*collectives.LOCAL, collectives.axis_index):
            return c10d.local(node, self.text(node.all_input_nodes[0]), self.helpers)
        if isinstance(node.target, Outlined):
            texts = [str(self.text(a)) for a in node.all_input_nodes]
            return Text(f"{node.target.name}({', '.join(texts)})")
        if getattr(node.target, "__module__", "") == ops.__name__:
            return self._composite(node)
        return spell(node, self.text, self.device)

    def _composite(self, node: fx.Node) -> Text:
        """A call of a printed function."""
        name = self.helpers.use(node.target.__name__)  # type: ignore[union-attr]
        texts = [str(self.text(a)) if isinstance(a, fx.Node) else literal(a) for a in node.args]
        if node.target is ops.dropout_mask:
            texts.append(f"self.{generator(self.graph, node)}")
        texts += [
            f"{k}={self.text(a) if isinstance(a, fx.Node) else literal(a)}"
            for k, a in node.kwargs.items()
        ]
        return Text(f"{name}({', '.join(texts)})")

    def bind(self, node: fx.Node) -> str:
        """Give a value its name; a gradient that is reduced with others its place among them."""
        name = self.joint.entry(node, self.scope)
        name = name or self.scope.fresh(self.wishes.get(node, "value"))
        self.seen[node] = Text(name)
        return name

    # statements ------------------------------------------------------------------------------
    def statements(self) -> list[Statement]:
        """One Statement per node that has lines, in order."""
        return [statement for node in self.order for statement in self.one(node)]

    def one(self, node: fx.Node) -> list[Statement]:
        """The statement of one node, if it has a line."""
        if node in self.inlined or node in self.seen or not self._has_line(node):
            return []
        statement = self.statement(node)
        statement.lines[:0] = [Line(f"{name} = {{}}") for name in self.joint.begun()]
        statement.section = self.section(node)
        statement.reads = statement.reads or self.read_by(node)
        return [statement]

    def section(self, node: fx.Node) -> str:
        """The module that a statement is shown under: a leaf's lines stand with its parent's."""
        path = inside(value(node).module, self.prefix)
        return path.rpartition(".")[0] or path if path in self.leaves else path

    def _has_line(self, node: fx.Node) -> bool:
        """Whether a node is a statement; the step's last waits stand in `finish`."""
        return not ends_step(self.graph, node) and (is_tensor(node) or len(results_of(node)) > 1)

    def read_by(self, node: fx.Node) -> list[fx.Node]:
        """The named values that a node's statement reads, those of inlined operands among them."""
        reads: list[fx.Node] = []
        for operand in node.all_input_nodes:
            reads += self.read_by(operand) if operand in self.inlined else [operand]
        return reads

    def statement(self, node: fx.Node) -> Statement:
        if gathers_param(node):
            return self._gather_weights(node)
        if node in self.joint.params:
            return self._reduce(node)
        if node.target in collectives.COLLECTIVES:
            return self._start(node)
        if node.target is collectives.wait:
            return self._wait(node)
        if not is_tensor(node):
            return self._several(node)
        if node in self.stored and not node.users.keys() - {self.graph.fx.output_node()}:
            return self._last_store(node)
        into = self.accumulated.get(node)
        if into is not None and into in self.seen:
            rest = next(n for n in node.all_input_nodes if n is not into)
            self.seen[node] = self.seen[into]
            line = Line(f"{self.seen[node]} += {self.text(rest)}", comment(typed(node)))
            return Statement([line, *self._stores(node)], binds=[node])
        code = self.expression(node).at(NONE)
        line = Line(f"{self.bind(node)} = {code}", comment(typed(node)))
        return Statement([line, *self._stores(node)], binds=[node])

    def _several(self, node: fx.Node) -> Statement:
        """``a, b, _ = call`` for a call with several results."""
        by_index: dict[Any, fx.Node] = {
            u.args[1]: u for u in node.users if u.target is operator.getitem
        }
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
        remark = comment(", ".join(typed(n) for n in shown))
        if len(names) == 1:
            lines = [Line(f"{names[0]} = {call.at(ATOM)}[0]", remark)]
        else:
            lines = [Line(f"{', '.join(names)} = {call.at(NONE)}", remark)]
        stores = [line for n in bound for line in self._stores(n)]
        return Statement(lines + stores, binds=bound)

    # collectives -----------------------------------------------------------------------------
    def _start(self, node: fx.Node) -> Statement:
        """The start of a collective; an all_reduce overwrites its operand or a copy of it."""
        operand = node.all_input_nodes[0]
        lines = []
        x = self.text(operand)
        overwrites = node.target is collectives.all_reduce
        if node in self.in_place if overwrites else self._gives_up(operand, node):
            self.seen[node] = x
        elif overwrites:
            dense = "" if held(operand).is_contiguous() else "memory_format=torch.contiguous_format"
            lines.append(Line(f"{self.bind(node)} = {x.at(ATOM)}.clone({dense})"))
        name = str(self.seen[node]) if node in self.seen else self.bind(node)
        if overwrites and self._waited(node) is None and self._next_wait(node) is not None:
            remark = f"{typed(node)}; {value(node).note or 'exposed'}"
            lines.append(Line(c10d.all_reduce(node, name), comment(remark)))
            self.at_once.add(node)
            return Statement(lines, binds=[node])
        self.scope.taken.add(f"{name}_done")
        lines.append(Line(c10d.start(node, x, name, self.helpers), comment(typed(node))))
        if (waited := self._waited(node)) is not None:
            lines.append(
                Line(f"reduced.append(({{{self.stored[waited][0]}: {name}}}, {name}_done))")
            )
        return Statement(lines, binds=[node])

    def _gives_up(self, operand: fx.Node, node: fx.Node) -> bool:
        """Whether only the collective that moves a value reads it: the result takes its name."""
        return (
            operand in self.place
            and operand in self.seen
            and set(operand.users) == {node}
            and operand not in self.kept
        )

    def _waited(self, node: fx.Node) -> fx.Node | None:
        """The wait of a collective that the step does at its end."""
        waits = list(node.users)
        return waits[0] if len(waits) == 1 and ends_step(self.graph, waits[0]) else None

    def _next_wait(self, start: fx.Node) -> fx.Node | None:
        """The wait for a collective, if it is the very next statement (and not in `finish`)."""
        wait = next(iter(start.users), None)
        if wait is None or wait.target is not collectives.wait or wait not in self.place:
            return None
        if ends_step(self.graph, wait):
            return None
        between = self.order[self.place[start] + 1 : self.place[wait]]
        return wait if all(n in self.inlined or not self._has_line(n) for n in between) else None

    def _wait(self, node: fx.Node) -> Statement:
        start = node.all_input_nodes[0]
        self.seen[node] = self.seen[start]
        name, hidden = str(self.seen[start]), comment(self._hidden_by(start, node))
        if gathers_param(start):
            bound = weights_of(start)
            names = ", ".join("_" if n is None else self.bind(n) for n in bound)
            names = f"[{names}]" if len(bound) == 1 else names
            lines = [Line(f"{names} = {self.helpers.use('take')}({name})", hidden)]
            return Statement(lines, reads=[start], binds=[n for n in bound if n is not None])
        lines = [] if start in self.at_once else [Line(f"{name}_done.wait()", hidden)]
        after = c10d.after_wait(start, name, self.helpers) if is_tensor(node) else ""
        lines += [Line(after, comment(typed(node)))] if after else []
        return Statement([*lines, *self._stores(node)], reads=[start], binds=[node])

    def _gather_weights(self, node: fx.Node) -> Statement:
        """The start of a transfer of weights, which ``take`` waits for."""
        shards = ", ".join(str(self.text(n)) for n in tensor_args(node))
        name = self.scope.fresh("gathered")
        self.seen[node] = Text(name)
        call = c10d.transfer(node, f"[{shards}]", moves(node), self.helpers)
        return Statement([Line(f"{name} = {call}")], binds=[node])

    def _reduce(self, node: fx.Node) -> Statement:
        """The start of a reduction of gradients, which stand in a dict by their parameters."""
        ends, lines = self._waited(node) is not None, []
        if node.target in collectives.JOINED:
            grads = self.joint.name(node, self.scope)
            for operand, entry in self.joint.missing(node):
                lines.append(Line(f"{entry} = {self.text(operand)}"))
        else:
            x = self.text(tensor_args(node)[0])
            copied = node.target is collectives.all_reduce and node not in self.in_place
            x = Text(f"{x.at(ATOM)}.clone()") if copied else x
            grads = f"{{{self.joint.params[node][0]}: {x}}}"
        call = c10d.transfer(node, grads, self.joint.in_order(node), self.helpers)
        if ends:
            remark = comment(typed(node)) if is_tensor(node) else ""
            return Statement([*lines, Line(f"reduced.append({call})", remark)])
        self.seen[node] = Text(grads)
        self.seen |= {n: Text(entry) for n, entry in self.joint.results(node)}
        self.scope.taken.add(f"{grads}_done")
        return Statement([*lines, Line(f"{grads}, {grads}_done = {call}")], binds=[node])

    def _hidden_by(self, start: fx.Node, wait: fx.Node) -> str:
        """What is computed between start and wait."""
        if value(start).note:
            return value(start).note
        if start not in self.place:
            return "started by the caller"
        between = self.order[self.place[start] + 1 : self.place[wait]]
        work = [self.seen[n].code for n in between if n in self.seen and _is_heavy(n)]
        if not work:
            return "exposed: its result is needed next"
        return f"hidden behind {', '.join(work[:3])}{' ...' if len(work) > 3 else ''}"

    # gradients -------------------------------------------------------------------------------
    def _stores(self, node: fx.Node) -> list[Line]:
        """Adds a value that is a final gradient to its parameters."""
        return [
            Line(f"{self.helpers.use(self.adds[0])}({param}, {self._own(node)})")
            for param in self.stored.get(node, [])
        ]

    def _own(self, node: fx.Node) -> str:
        """The gradient as a tensor that nobody else holds."""
        name = str(self.seen[node])
        return f"{name}.clone()" if self._is_shared(node) else name

    def _is_shared(self, node: fx.Node) -> bool:
        home = owner(node)
        if is_tensor(home) and held(home).numel() > held(node).numel():
            return True  # a view would keep all of it
        if home not in self.place or len(self.stored[node]) > 1:
            return True
        family = [n for n in self.order if owner(n) is home]
        readers = {u for n in family for u in n.users} - {self.graph.fx.output_node()} - set(family)
        late = any(self.place.get(u, len(self.order)) > self.place[node] for u in readers)
        return (
            late or any(n in self.kept for n in family) or sum(n in self.stored for n in family) > 1
        )

    def _last_store(self, node: fx.Node) -> Statement:
        """A gradient that needs no name: ``add_weight_grad(self.w, d_y, x)``."""
        params = self.stored[node]
        if node.target is ops.weight_grad and len(params) == 1:
            d_y, x = (self.text(a) for a in node.args)  # type: ignore[arg-type]
            call = f"{self.helpers.use(self.adds[1])}({params[0]}, {d_y}, {x})"
            return Statement([Line(call, comment(typed(node)))])
        code = self.expression(node).at(NONE)
        self.seen[node] = Text(code, NONE)
        if len(params) == 1:
            code = (
                f"{Text(code, self.expression(node).level).at(ATOM)}.clone()"
                if self._is_shared(node)
                else code
            )
            call = f"{self.helpers.use(self.adds[0])}({params[0]}, {code})"
            return Statement([Line(call, comment(typed(node)))])
        line = Line(f"{self.bind(node)} = {code}", comment(typed(node)))
        return Statement([line, *self._stores(node)], binds=[node])


def weights_of(gather: fx.Node) -> list[fx.Node | None]:
    """The weights that a gather gives, ready to read, None where one is unread."""
    if gather.target in collectives.JOINED:
        return results(gather, len(tensor_args(gather)))
    return list(gather.users)


def _is_heavy(node: fx.Node) -> bool:
    """Whether a call is worth naming as what hides a collective."""
    tags = getattr(node.target, "tags", ())
    light = torch.Tag.pointwise in tags or node.target in (collectives.wait, operator.getitem)
    return is_tensor(node) and not light and node.target not in collectives.COLLECTIVES


# whole functions ----------------------------------------------------------------------------------
def with_sections(statements: Iterable[Statement]) -> list[Line]:
    """The lines of all statements, a comment with the module's path wherever it changes."""
    lines: list[Line] = []
    section = None
    for statement in statements:
        if statement.lines and statement.section != section and statement.section:
            lines.append(Line(f"# {comment(statement.section)}"))
        section = statement.section or section
        lines += statement.lines
    return lines


def free_early(
    statements: list[Statement], seen: Callable[[fx.Node], Text], kept: set[fx.Node]
) -> list[Statement]:
    """The statements, with a ``del`` for the values that nobody reads later.

    It stands at the end of a section, for the biggest values at once; what is small is left.
    """
    last = _last_uses(statements, seen)
    for node in kept:
        last.pop(str(seen(node)), None)
    sizes: dict[str, int] = {}
    for node in (n for s in statements for n in s.binds):
        sizes[str(seen(node))] = max(sizes.get(str(seen(node)), 0), num_bytes(node))
    biggest = max(sizes.values(), default=0)
    dying: dict[int, list[str]] = {}
    for name, i in sorted(last.items()):
        if sizes.get(name, 0) > biggest // SMALL and name.isidentifier():
            dying.setdefault(i, []).append(name)
    codes = (line.code for statement in statements for line in statement.lines)
    waited = {code.removesuffix(".wait()") for code in codes if code.endswith("_done.wait()")}
    dead: list[str] = []
    for i, (statement, following) in enumerate(pairwise(statements)):
        dead += dying.get(i, [])
        now = any(sizes[name] > biggest // BIG for name in dead)
        if dead and (now or following.section != statement.section):
            handles = [f"{name}_done" for name in dead if f"{name}_done" in waited]
            names = ", ".join([*dead, *handles])  # a handle keeps what it moved
            statement.lines.append(Line(f"del {names}" if len(names) < 80 else f"del ({names})"))
            dead = []
    return statements


def _last_uses(statements: list[Statement], seen: Callable[[fx.Node], Text]) -> dict[str, int]:
    """The last statement that reads or binds each name."""
    return {
        str(seen(node)): i
        for i, statement in enumerate(statements)
        for node in [*statement.reads, *statement.binds]
    }


def num_bytes(node: fx.Node) -> int:
    """The size of what a rank holds of a value."""
    fake = held(node)
    return fake.numel() * fake.element_size() if is_tensor(node) else 0
