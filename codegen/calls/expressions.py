"""The values of one generated function: their names, and the text of the calls that make them.

Here is decided which values get a line with a name of their own, which are written inside the
expression that reads them, and which are written over another value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from partc.codegen.calls.backends import c10d
from partc.codegen.calls.buffers_in_place import counted
from partc.codegen.calls.inline import inlined
from partc.codegen.calls.joint_grads import JointGrads
from partc.codegen.calls.kernels import as_helper
from partc.codegen.calls.moved_names import of_turn
from partc.codegen.calls.names import is_given
from partc.codegen.calls.random import Drawing
from partc.codegen.calls.retarget import for_any_device
from partc.codegen.calls.scope import Scope
from partc.codegen.calls.spell import share_of, spell
from partc.codegen.calls.storage import accumulations
from partc.codegen.calls.wishes import Wishes
from partc.codegen.helpers.needed import Helpers, Outlined
from partc.codegen.repeats.equal import ends_step
from partc.codegen.text import ATOM, Text
from partc.graph import (
    Graph,
    collectives,
    is_backward,
    is_forward,
    is_tensor,
    ops,
    results_of,
    tensor_args,
)
from partc.graph.draws import draws_numbers
from partc.graph.given_back import is_given_back
from partc.passes.overlap.write_pieces import joins_pieces
from partc.quoting import literal


@dataclass(frozen=True)
class Adds:
    """What adds to a gradient: the text of two calls, one of them for a weight's product, and of an
    empty list of reductions, which adds what they bring; ``helpers`` are what that needs.
    """

    grad: str
    weight_grad: str
    reduced: str
    helpers: tuple[str, ...]


# To ``.grad``, or to a rank's part of a gradient that a pipeline stage sums over microbatches first
# and over ranks once, when the step ends.
ADDS = Adds("add_grad", "add_weight_grad", "Reduced()", ("Reduced",))
SUMS = Adds("sums.add", "sums.add_product", "Reduced()", ("Sums",))
PARTIALS = Adds(
    "self.partials.add", "self.partials.add_product", "ReducedParts(self.partials)",
    ("ReducedParts",),
)  # fmt: skip


def apart(
    stored: Mapping[fx.Node, list[str]], order: Sequence[fx.Node]
) -> tuple[dict[fx.Node, list[str]], set[fx.Node]]:
    """Adds each piece of a gradient to ``.grad`` by itself: ``g = g0 + g1 -> += g0, += g1``.

    A block that is computed in overlap pieces has a gradient of each weight for each piece.
    ``stored`` has the parameters of each final gradient, ``order`` the calls of the function. The
    results are the parameters of each piece, and the sums of pieces that need no line any more.
    """
    found, todo = dict[fx.Node, list[str]](), dict(stored)
    summed, here = set[fx.Node](), set(order)
    while todo:
        node, params = todo.popitem()
        parts = node.all_input_nodes
        ends = all(user.op == "output" or user in summed for user in node.users)
        alone = all(set(part.users) == {node} and part in here for part in parts)
        if joins_pieces(node) and node.target is torch.ops.aten.add.Tensor and ends and alone:
            summed.add(node)
            todo |= dict.fromkeys(parts, params)
        else:
            found[node] = params
    return found, summed


def is_sum(node: fx.Node) -> bool:
    """Whether a call is an addition in the backward, so that it adds up gradients."""
    return node.target is torch.ops.aten.add.Tensor and is_backward(node)


@dataclass(frozen=True)
class Layout:
    """Where the values of one function stand, as follows from its calls alone.

    ``stored`` has the parameters of each final gradient, ``summed`` the sums of pieces that need no
    line, ``accumulated`` each call whose result is written over a value, with that value;
    ``inlined`` has the calls that stand inside of the expression that reads them.
    """

    joint: JointGrads
    stored: dict[fx.Node, list[str]]
    summed: set[fx.Node]
    accumulated: dict[fx.Node, fx.Node]
    inlined: set[fx.Node]

    @classmethod
    def of(
        cls, graph: Graph, order: Sequence[fx.Node], kept: set[fx.Node],
        stored: Mapping[fx.Node, list[str]], named: set[fx.Node], *, fused: bool = False,
        late: Collection[str] = (), added: Collection[fx.Node] = (),
    ) -> Layout:  # fmt: skip
        """``named`` has the values that the user's code names; others are as for Expressions."""
        joint = JointGrads(graph, order, stored)
        final, summed = apart(stored, order)
        summed |= {*added}
        fixed = kept | final.keys() | joint.place.keys()
        # Twice: what is written over another value needs a line; then more or less fits inline.
        in_line = inlined(order, fixed, named)
        sums = accumulations(order, kept | final.keys(), sums_only=fused)
        accumulated = {
            node: into
            for node, into in sums.items()
            if node not in in_line | summed and (is_sum(node) or into not in in_line)
        }
        accumulated |= {} if fused else counted(graph, {*order}, late)
        fixed |= {*accumulated.values()}
        return cls(joint, final, summed, accumulated, inlined(order, fixed, named, accumulated))


@dataclass
class Expressions:
    """What one function knows of its values: names, and texts of the calls that make them.

    ``order`` has the function's calls. ``seen`` has the text by which a node is read, at first for
    parameters and arguments, later for every value that has a name. ``wishes`` has the name that a
    value gets if it is free. ``kept`` has the nodes that something outside of the function reads.
    ``stored`` has the parameters (``self.w1_weight``) whose final gradient a node is, ``own`` all
    parameters of the module. ``prefix`` is the path of the module that the function is a method of.
    """

    graph: Graph
    order: Sequence[fx.Node]
    wishes: Wishes
    scope: Scope
    helpers: Helpers
    seen: dict[fx.Node, Text]
    kept: set[fx.Node] = field(default_factory=set)
    stored: dict[fx.Node, list[str]] = field(default_factory=dict)
    device: str = "self.device"
    prefix: str = ""
    adds: Adds = ADDS  # what adds to a gradient
    own: Sequence[str] = ()
    one_turn: bool = False  # whether all overlap pieces of a block call this function
    name_of: Callable[[str], str] = literal  # writes the site of a draw that is in no block
    late: Collection[str] = ()  # buffers that are written when the step ends, not where they change
    added: Collection[fx.Node] = ()  # additions to totals, which `stored` has the parts of
    fused: bool = False  # whether torch.compile compiles it, and so decides what is written where

    def __post_init__(self) -> None:
        wished = {n: self.wishes.get(n, "") for n in self.order}
        self.named = {n for n in self.order if is_forward(n) and is_given(n, wished[n])}
        found = Layout.of(
            self.graph, self.order, self.kept, self.stored, self.named, fused=self.fused,
            late=self.late, added=self.added,
        )  # fmt: skip
        self.joint, self.stored, self.summed = found.joint, found.stored, found.summed
        self.accumulated, self.inlined = found.accumulated, found.inlined
        self.becomes = {into: node for node, into in self.accumulated.items()}
        self.place = {node: i for i, node in enumerate(self.order)}

    def text(self, node: fx.Node) -> Text:
        """The text that reads a value: its name, or its expression if it has no line of its own."""
        if node not in self.seen:
            assert node in self.inlined or not is_tensor(node), (
                f"{node} is read before it is written"
            )
            return self.expression(node)
        return self.seen[node]

    def expression(self, node: fx.Node) -> Text:
        """The right side of a call's assignment: ``F.linear(x, self.w1_weight)``."""
        if node.target in (*collectives.LOCAL, collectives.axis_index):
            return c10d.local(node, self.text(node.all_input_nodes[0]), self.helpers)
        if isinstance(node.target, Outlined):
            texts = [str(self.text(a)) for a in node.all_input_nodes]
            return Text(f"{node.target.name}({', '.join(texts)})")
        if draws_numbers(node):
            drawing = Drawing(self.graph, self.prefix, self.name_of)
            return drawing.text(node, self.text, self.device, self.helpers)
        if getattr(node.target, "__module__", "") == ops.__name__:
            return self._composite(node)
        if node.target is torch.ops.aten._log_softmax.default and node in self.accumulated:
            logits = self.text(tensor_args(node)[0])
            return Text(f"{self.helpers.use('log_softmax_over')}({logits})")
        if (share := share_of(node, self.text)) and self._is_here(node):
            return share
        given = node, self.text, self.device
        helped = for_any_device(*given, self.helpers) or as_helper(*given, self.helpers)
        return helped or spell(*given)

    def _is_here(self, share: fx.Node) -> bool:
        """Whether the loss whose share this is is computed here; what is saved of it is read."""
        return share.all_input_nodes[0].all_input_nodes[0] in self.place

    def _composite(self, node: fx.Node) -> Text:
        """A call of an op of ``partc.graph.ops``, whose helper function is printed."""
        name = self.helpers.use(node.target.__name__)  # type: ignore[union-attr]
        texts = [str(self.text(a)) if isinstance(a, fx.Node) else literal(a) for a in node.args]
        if node.target is ops.cross_entropy_grad:
            exp = "exp_" if node in self.accumulated else "exp"
            log_p = node.args[1]
            assert isinstance(log_p, fx.Node)
            texts[1] = f"{self.text(log_p).at(ATOM)}.{exp}()"
        texts += [
            f"{k}={self.text(a) if isinstance(a, fx.Node) else literal(a)}"
            for k, a in node.kwargs.items()
        ]
        return Text(f"{name}({', '.join(texts)})")

    def bind(self, node: fx.Node) -> str:
        """Name a value, or give a gradient its place in a dict: ``grads[self.w1_weight]``."""
        name = self.joint.entry(node, self.scope)
        name = name or self._mark(node)
        self.seen[node] = Text(name)
        return name

    def _mark(self, node: fx.Node) -> str:
        """The mark under which a value stands until the function is complete and names are given.

        A value that a sum is written over has the sum's name: ``d_x = ...``, then ``d_x += d_y``.
        """
        chain = [node]
        while chain[-1] in self.becomes:
            chain.append(self.becomes[chain[-1]])
        best = chain[-1] if is_backward(node) else next((n for n in chain if n in self.named), node)
        wish = self.wishes.get(best, "value")
        wish = wish if self.one_turn else of_turn(node, wish)
        return self.scope.value(best, self.wishes, wish)

    def _has_line(self, node: fx.Node) -> bool:
        """Whether a node is a statement here; the last waits of a step are those of ``finish``."""
        if ends_step(self.graph, node) or node in self.summed:
            return False
        return is_tensor(node) or len(results_of(node)) > 1 or is_given_back(node)

    def read_by(self, node: fx.Node) -> list[fx.Node]:
        """The named values that a node's statement reads, directly or in an inlined operand."""
        reads: list[fx.Node] = []
        for operand in node.all_input_nodes:
            within = operand in self.inlined or holds_one(operand)
            reads += self.read_by(operand) if within else [operand]
        return reads


def holds_one(node: fx.Node) -> bool:
    """Whether a call returns a tuple of one tensor: its text stands where that tensor is read."""
    if node.op != "call_function" or is_tensor(node) or is_given_back(node):
        return False
    return len(results_of(node)) == 1
