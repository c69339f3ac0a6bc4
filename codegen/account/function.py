"""One function of a program before it is printed: its statements, without their text.

A statement says what it reads, binds and calls. Its lines have only what ``frees`` looks for: the
handles of transfers. Variables are numbered (``v12``). So the ``del`` lines are put here where they
will stand in the program.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from partc.codegen.calls.buffers_in_place import SIGNS
from partc.codegen.calls.expressions import Layout, holds_one
from partc.codegen.calls.inline import is_free, is_pointwise
from partc.codegen.calls.path_names import inside
from partc.codegen.calls.spell import spell
from partc.codegen.calls.statements import Statement
from partc.codegen.calls.storage import WRITES, copies, overwritable, shares
from partc.codegen.calls.transfers import weights_of
from partc.codegen.calls.wishes import Wishes
from partc.codegen.repeats.equal import ends_step
from partc.codegen.text import WIDTH, Line, Text
from partc.cost.storage import GRADS_OF_ACTIVATIONS
from partc.graph import Graph, collectives, is_tensor, results_of, value
from partc.graph.given_back import is_given_back
from partc.graph.moves import gathers_param, moves

INDENTED = 8  # columns that a statement of a method is indented by
ENTRY = "grads[self.layer_weight]"  # about as long as where a gradient of a bucket is put


@dataclass
class Function:
    """The statements of one function, and in which memory their values lie.

    ``kept`` and ``stored`` are as for ``Expressions``. ``named`` has the values that the user's
    code names, ``wishes`` about the names that values will have. ``same`` has values that take over
    another value's variable.
    """

    graph: Graph
    order: Sequence[fx.Node]
    kept: set[fx.Node]
    stored: dict[fx.Node, list[str]]
    named: set[fx.Node]
    wishes: Wishes
    prefix: str = ""
    same: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    loops: Collection[int] = ()  # the positions in ``order`` of the calls behind loops

    def __post_init__(self) -> None:
        found = Layout.of(self.graph, self.order, self.kept, self.stored, self.named)
        self.joint, self.stored, self.summed = found.joint, found.stored, found.summed
        self.accumulated, self.inlined = found.accumulated, found.inlined
        self.in_place = overwritable(self.order)
        self.place = {node: i for i, node in enumerate(self.order)}
        self.variables: dict[fx.Node, int] = {}
        paths = {inside(value(n).module, self.prefix) for n in self.order}
        self.leaves = paths - {path.rpartition(".")[0] for path in paths}

    # statements ------------------------------------------------------------------------------
    def statements(self, nodes: Sequence[fx.Node] | None = None) -> list[Statement]:
        """The statements of all nodes that have lines, or of some of them."""
        for node in self.order if nodes is None else nodes:
            self._shorten(node)
        made = map(self._statement, self.order if nodes is None else nodes)
        return [statement for statement in made if statement is not None]

    def _statement(self, node: fx.Node) -> Statement | None:
        if node in self.inlined or not self._has_line(node) or self._is_pick(node):
            return None
        lines = [Line(line) for line in self._handles(node)]
        binds, section = self._binds(node), self._section(node)
        calls = [node, *self.written_in(node)]
        waits = node.target is collectives.wait
        reads = node.all_input_nodes[:1] if waits else self._read_by(node)
        return Statement(lines, reads, binds, calls, section)

    def _has_line(self, node: fx.Node) -> bool:
        if ends_step(self.graph, node) or node in self.summed:
            return False
        return is_tensor(node) or len(results_of(node)) > 1 or is_given_back(node)

    def _is_pick(self, node: fx.Node) -> bool:
        """Whether a value is picked from a call that binds all its results itself."""
        if node.target is not operator.getitem:
            return False
        whole = node.all_input_nodes[0]
        return whole in self.place and len(results_of(whole)) > 1

    def _binds(self, node: fx.Node) -> list[fx.Node]:
        """The values for which a statement has a variable."""
        if node.target is collectives.wait and gathers_param(node.all_input_nodes[0]):
            return [n for n in weights_of(node.all_input_nodes[0]) if n is not None]
        if not is_tensor(node) and node not in self.joint.params and not gathers_param(node):
            return [] if self.is_start(node) else self._picks(node)
        ends = {self.graph.fx.output_node(), *self.summed}
        last = node in self.stored and not node.users.keys() - ends and len(self.stored[node]) == 1
        return [] if last or self.has_room(node) or self.is_last(node) else [node]

    def _picks(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if user.target is operator.getitem]

    def _handles(self, node: fx.Node) -> Iterator[str]:
        """What ``frees`` looks for: ``v3_done = start``, ``v3_done.wait()``, ``reduced.append``."""
        if self.is_start(node) and not gathers_param(node):
            if self.is_last(node):
                yield "reduced.append"
            elif not self.is_at_once(node):
                yield f"{self.handle(node)} = start"
        elif node.target is collectives.wait:
            start = node.all_input_nodes[0]
            if not gathers_param(start) and not self.is_at_once(start):
                yield f"{self.handle(start)}.wait()"

    def is_start(self, node: fx.Node) -> bool:
        return node.target in collectives.COLLECTIVES

    def is_last(self, node: fx.Node) -> bool:
        """Whether the step's ``finish`` waits for a reduction."""
        return self.is_start(node) and any(ends_step(self.graph, user) for user in node.users)

    def reduces(self, start: fx.Node) -> list[str]:
        """The parameters whose gradients a last reduction reduces."""
        results = (move.result for move in moves(start))
        finals = [user for n in results if n is not None for user in (n, *n.users)]
        return [self.stored[n][0] for n in finals if n in self.stored]

    def is_at_once(self, start: fx.Node) -> bool:
        """Whether the call that starts a transfer also waits for it, so that it has no handle."""
        wait = next(iter(start.users), start)
        waits = wait.target is collectives.wait and wait in self.place
        if start in self.joint.params or not waits or self._passes_loop(start, wait):
            return False
        between = self.order[self.place[start] + 1 : self.place[wait]]
        lines = (n for n in between if n not in self.inlined and not self._is_pick(n))
        return not any(map(self._has_line, lines))

    def _passes_loop(self, start: fx.Node, wait: fx.Node) -> bool:
        return any(self.place[start] < i <= self.place[wait] for i in self.loops)

    def has_room(self, node: fx.Node) -> bool:
        """Whether a gradient is written to its part of the memory that is sent."""
        if node not in self.joint.place:
            return False
        start, _ = self.joint.place[node]
        return start.target is collectives.all_reduce_joined and self.is_last(start)

    # expressions -----------------------------------------------------------------------------
    def written_in(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes that are written inside a call's expression, at any depth."""
        for operand in node.all_input_nodes:
            if operand in self.inlined or self._is_one(operand):
                yield from [operand, *self.written_in(operand)]

    def _is_one(self, node: fx.Node) -> bool:
        return node in self.place and holds_one(node)

    def _read_by(self, node: fx.Node) -> list[fx.Node]:
        reads: list[fx.Node] = []
        for operand in node.all_input_nodes:
            within = operand in self.inlined or holds_one(operand)
            reads += self._read_by(operand) if within else [operand]
        return reads

    def _shorten(self, node: fx.Node) -> None:
        """Give operands of a pointwise call a line of their own where its line is too long."""
        while (part := self._part(node)) is not None:
            self.inlined.discard(part)
            self._shorten(part)

    def _part(self, node: fx.Node) -> fx.Node | None:
        """The operand that gets a line of its own next; None where the line is short enough."""
        if node in self.inlined or not self._has_line(node) or not is_pointwise(node):
            return None
        inner = [n for n in self.written_in(node) if n in self.inlined and not is_free(n)]
        texts = {n: len(self._expression(n).code) for n in [node, *inner] if inner}
        length = len(self._target(node)) + texts.get(node, 0)
        if not inner or length <= WIDTH - INDENTED:
            return None
        return min(inner, key=lambda n: max(texts[n], length - texts[n]))

    def _target(self, node: fx.Node) -> str:
        """About the left side of an assignment; a sum over a value repeats that value no more."""
        if node in self.accumulated:
            return ""
        return f"{ENTRY if node in self.joint.place else self.wishes.get(node)} = "

    def _expression(self, node: fx.Node) -> Text:
        if node.target in collectives.LOCAL:
            return Text(f"{self._wish(node.all_input_nodes[0])}.chunk(2)[self.dp_rank]")
        return spell(node, self._wish, "x.device")

    def _wish(self, node: fx.Node) -> Text:
        if node in self.inlined:
            return self._expression(node)
        own = "self." if node.op == "placeholder" else ""
        return Text(f"{own}{self.wishes.get(node, 'value')}")

    def _section(self, node: fx.Node) -> str | None:
        """The module path in the comment above a statement."""
        if value(node).from_forward:
            return None
        path = inside(value(node).module, self.prefix)
        return path.rpartition(".")[0] or path if path in self.leaves else path

    # variables -------------------------------------------------------------------------------
    def text(self, node: fx.Node) -> Text:
        """The variable of a value, or its place in a dict of gradients."""
        if node in self.joint.place and not self.has_room(node):
            return Text(f"grads[{self.joint.place[node][1]}]")
        return Text(self._variable(self._bound_as(node)))

    def handle(self, start: fx.Node) -> str:
        """The variable of a transfer's handle."""
        return f"{self._variable(self._bound_as(start))}_done"

    def _variable(self, node: fx.Node) -> str:
        return f"v{self.variables.setdefault(node, len(self.variables))}"

    def _bound_as(self, node: fx.Node) -> fx.Node:
        """The value whose variable a value takes over: a sum's ``d_x += d_y``, a transfer's."""
        while (before := self._takes_over(node)) is not None:
            node = before
        return node

    def _takes_over(self, node: fx.Node) -> fx.Node | None:
        if node in self.same:
            return self.same[node]
        if node in self.accumulated and node.target in (*SIGNS, *GRADS_OF_ACTIVATIONS, *WRITES):
            return self.accumulated[node]
        if node not in self.place or not is_tensor(node):
            return None
        if node.target is collectives.wait:
            return node.all_input_nodes[0]
        if self.is_start(node) and node not in self.joint.params:
            operand = node.all_input_nodes[0]
            return operand if node in self.in_place or self._gives_up(operand, node) else None
        return None

    def _gives_up(self, operand: fx.Node, node: fx.Node) -> bool:
        """Whether a collective is the only reader of its operand, whose name the result takes."""
        alone = set(operand.users) == {node} and operand not in self.kept
        return alone and operand in self.place and operand not in self.inlined

    def source(self, node: fx.Node) -> fx.Node | None:
        """The value in whose memory a call writes its result, or whose memory it views."""
        if node in self.accumulated:
            return self.accumulated[node]
        views = shares(node) and not copies(node)
        return node.all_input_nodes[0] if node in self.in_place or views else None
