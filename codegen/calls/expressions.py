"""The values of one generated function: their names, and the text of the calls that make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from partc.codegen.calls.backends import c10d
from partc.codegen.calls.buffers_in_place import counted
from partc.codegen.calls.inline import inlined
from partc.codegen.calls.joint_grads import JointGrads
from partc.codegen.calls.names import Scope, is_given, of_turn
from partc.codegen.calls.random import generator
from partc.codegen.calls.retarget import for_any_device
from partc.codegen.calls.spell import spell
from partc.codegen.calls.storage import accumulations
from partc.codegen.helpers.needed import Helpers, Outlined
from partc.codegen.repeats.equal import ends_step
from partc.codegen.text import ATOM, COMPARE, Text
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
from partc.passes.overlap.write_pieces import joins_pieces
from partc.quoting import literal

ADDS = ("add_grad", "add_weight_grad", "finish")
PARTIALS = ("add_partial", "add_weight_partial", "finish_partials")


def apart(
    stored: Mapping[fx.Node, list[str]], order: Sequence[fx.Node]
) -> tuple[dict[fx.Node, list[str]], set[fx.Node]]:
    """The parameters by the pieces of their final gradients, each of which is added as it comes,
    and the sums of them, which are then not needed; ``order`` has the calls of the function.
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
    """Whether a call adds up gradients."""
    return node.target is torch.ops.aten.add.Tensor and is_backward(node)


@dataclass
class Expressions:
    """What one function knows of its values: names, and texts of the calls that make them.

    ``seen`` has the texts of what comes from outside: parameters, arguments; ``wishes`` what values
    would like to be called; ``kept`` what is read outside; ``stored`` the parameters, as texts,
    whose final gradient a node is; ``own`` all parameters of the module, as texts.
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
    adds: tuple[str, str, str] = ADDS  # the functions that add to a gradient
    own: Sequence[str] = ()
    one_turn: bool = False  # whether it is the same function for all pieces of a block
    fused: bool = False  # whether torch.compile decides what is written where

    def __post_init__(self) -> None:
        wished = {n: self.wishes.get(n, "") for n in self.order}
        self.named = {n for n in self.order if is_forward(n) and is_given(n, wished[n])}
        self.joint = JointGrads(self.graph, self.order, self.stored)
        self.stored, self.summed = apart(self.stored, self.order)
        fixed = self.kept | self.stored.keys() | self.joint.place.keys()
        in_line = inlined(self.order, fixed, self.named)
        sums = accumulations(self.order, self.kept | self.stored.keys(), sums_only=self.fused)
        self.accumulated = {
            node: into
            for node, into in sums.items()
            if node not in in_line | self.summed and (is_sum(node) or into not in in_line)
        }
        self.accumulated |= {} if self.fused else counted(self.graph, {*self.order})
        self.becomes = {into: node for node, into in self.accumulated.items()}
        fixed |= self.becomes.keys()
        self.inlined = inlined(self.order, fixed, self.named, self.accumulated)
        self.place = {node: i for i, node in enumerate(self.order)}

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
        if node.target is torch.ops.aten._log_softmax.default and node in self.accumulated:
            logits = self.text(tensor_args(node)[0])
            return Text(f"{self.helpers.use('log_softmax_over')}({logits})")
        anywhere = for_any_device(node, self.text, self.device, self.helpers)
        return anywhere or spell(node, self.text, self.device)

    def _composite(self, node: fx.Node) -> Text:
        """A call of a printed function."""
        name = self.helpers.use(node.target.__name__)  # type: ignore[union-attr]
        texts = [str(self.text(a)) if isinstance(a, fx.Node) else literal(a) for a in node.args]
        if node.target is ops.cross_entropy_grad:
            exp = "exp_" if node in self.accumulated else "exp"
            log_p = node.args[1]
            assert isinstance(log_p, fx.Node)
            texts[1] = f"{self.text(log_p).at(ATOM)}.{exp}()"
        if node.target in ops.DRAWS:
            texts.append(f"self.{generator(self.graph, node)}")
        if node.target is ops.same_mask:
            texts.append(self.device)
        named = dict(node.kwargs)
        if node.target is ops.window and "ignore" in named:
            ids = self.text(node.all_input_nodes[0]).at(COMPARE + 1)
            texts[0] = f"torch.where({ids} == {literal(named.pop('ignore'))}, -1, {ids})"
        texts += [
            f"{k}={self.text(a) if isinstance(a, fx.Node) else literal(a)}"
            for k, a in named.items()
        ]
        return Text(f"{name}({', '.join(texts)})")

    def bind(self, node: fx.Node) -> str:
        """Give a value its name; a gradient that is reduced with others its place among them."""
        name = self.joint.entry(node, self.scope)
        name = name or self.scope.fresh(self._wish(node))
        self.seen[node] = Text(name)
        return name

    def _wish(self, node: fx.Node) -> str:
        """What a value would like to be called, or the sum that takes over its memory."""
        chain = [node]
        while chain[-1] in self.becomes:
            chain.append(self.becomes[chain[-1]])
        best = chain[-1] if is_backward(node) else next((n for n in chain if n in self.named), node)
        wish = self.wishes.get(best, "value")
        return wish if self.one_turn else of_turn(node, wish)

    def _has_line(self, node: fx.Node) -> bool:
        """Whether a node is a statement; the step's last waits stand in `finish`."""
        if ends_step(self.graph, node) or node in self.summed:
            return False
        return is_tensor(node) or len(results_of(node)) > 1

    def read_by(self, node: fx.Node) -> list[fx.Node]:
        """The named values that a node's statement reads, those of inlined operands among them."""
        reads: list[fx.Node] = []
        for operand in node.all_input_nodes:
            within = operand in self.inlined or _holds_one(operand)
            reads += self.read_by(operand) if within else [operand]
        return reads


def _holds_one(node: fx.Node) -> bool:
    """Whether a call gives a tuple of one, which is written where that one is taken out."""
    return node.op == "call_function" and not is_tensor(node) and len(results_of(node)) == 1
