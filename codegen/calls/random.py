"""The text of random draws, each with a generator for its site and this rank's place.

``torch.rand(8, 64, generator=self.rng("noise", self.dp_rank))``: ``self.rng`` is the ``Draws`` of
the program. What a draw reads for its shape alone is not read where the shape can be written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from partc.codegen.calls.arguments import Call
from partc.codegen.helpers.needed import Helpers
from partc.codegen.text import ATOM, Text
from partc.graph import Graph, fake_of, first_operand, ops, value
from partc.graph.draws import reads_shape_alone, site_of, word_of
from partc.plan.mesh import MICROBATCH_AXIS
from partc.quoting import literal

FILL = {"normal_functional": "normal_", "bernoulli": "bernoulli_"}  # in-place ops, by the word
FACTORIES = {"rand_like": "rand", "randn_like": "randn", "randint_like": "randint"}
IN_TORCH = ("bernoulli", "binomial", "multinomial", "normal", "poisson")
FIRST_LAYER = "self.n"  # where a stage's class keeps the number of its first layer


@dataclass(frozen=True)
class Drawing:
    """Where draws are printed: in a method of a block (its path), or of a stage.

    ``name_of`` writes a site that is in no block, where the numbers of layers may be relative.
    """

    graph: Graph
    block: str = ""
    name_of: Callable[[str], str] = literal

    def text(
        self, node: fx.Node, operand: Callable[[fx.Node], Text], device: str, helpers: Helpers
    ) -> Text:
        """The expression of a draw; ``device`` is the text of the device of new tensors."""
        rng = self._generator(node)
        if node.target is ops.dropout_mask:
            x, p = operand(first_operand(node)), literal(node.args[1])
            return Text(f"{helpers.use('dropout_mask')}({x}, {p}, {rng})")
        call, word = Call.of(node, operand, device), word_of(node.target)
        made = [f"dtype={literal(fake_of(node).dtype)}", f"device={device}"]
        sizes = ", ".join(map(str, fake_of(node).shape)) or "()"
        if word in FACTORIES:
            low = [str(call.text(name)) for name in ("low", "high") if name in call.given]
            shape = literal(tuple(fake_of(node).shape))
            given = [*low, shape] if low else [sizes]
            return _called(f"torch.{FACTORIES[word]}", *given, f"generator={rng}", *made)
        if reads_shape_alone(node):
            empty = _called("torch.empty", sizes, *made)
            name = FILL.get(word, f"{word}_")
            return _called(f"{empty}.{name}", call.arguments(skip=1), f"generator={rng}")
        return self._of_values(node, call, rng, device)

    def _of_values(self, node: fx.Node, call: Call, rng: str, device: str) -> Text:
        """A draw that reads values, in one order whatever their strides, or sizes alone."""
        operands = node.all_input_nodes
        whole = {n: Text(f"{call.operand(n).at(ATOM)}.contiguous()") for n in operands}
        plain = Call(node, call.given, lambda n: whole[n], device)
        name = f"torch.{call.name}" if call.name in (*IN_TORCH, *_FROM_SIZES) else ""
        if not name:
            overload = node.target._overloadname  # type: ignore[union-attr]
            name = f"torch.ops.aten.{call.name}" + ("" if overload == "default" else f".{overload}")
        place = [] if operands else [f"device={device}"]
        return _called(name, plain.arguments(), f"generator={rng}", *place)

    def _generator(self, node: fx.Node) -> str:
        """``self.rng("noise", self.dp_rank)``: the site, and this rank's place on what cuts it."""
        cutting = {axis for axis, _ in value(node).sharding.cuts()}
        axes = [axis for axis in self.graph.mesh.names if axis in cutting]
        place = [f"self.{axis}_rank" for axis in axes if axis != MICROBATCH_AXIS]
        whole = MICROBATCH_AXIS in self.graph.mesh.names and MICROBATCH_AXIS not in axes
        return f"self.rng{'.of_step' if whole else ''}({', '.join([self._site(node), *place])})"

    def of_sum(self, node: fx.Node, place: Sequence[str]) -> str:
        """The generator of a sum with fewer bytes, with the ranks' own place or none."""
        return f"self.rng({', '.join([self._named(value(node).site), *place])})"

    def _site(self, node: fx.Node) -> str:
        return self._named(site_of(node))

    def _named(self, site: str) -> str:
        if not self.block or not site.startswith(f"{self.block}."):
            return self.name_of(site)
        rest = site.removeprefix(self.block).replace("{", "{{").replace("}", "}}")
        return "f" + literal(f"{{self.name}}{rest}")


_FROM_SIZES = ("rand", "randn", "randint", "randperm")


def _called(name: str, *arguments: Any) -> Text:
    return Text(f"{name}({', '.join(str(a) for a in arguments if str(a))})")
