"""Random generators of a program: pieces of a value draw different numbers, copies of it the same.

There is one generator per set of axes that cut a dropout mask, seeded from the seed and this rank's
coordinates on these axes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from partc.codegen.text import Line
from partc.graph import Graph, ops, value
from partc.plan.mesh import MICROBATCH_AXIS


def generator(graph: Graph, mask: fx.Node) -> str:
    """The attribute of the generator that a mask is drawn from: ``rng_dp`` where dp cuts it."""
    return "_".join(["rng", *_axes(graph, mask)])


def seed_lines(graph: Graph, blocks: Sequence[str]) -> list[Line]:
    """The body of ``seed``; the modules in the lists ``blocks`` use the same generators."""
    masks = {generator(graph, n): _axes(graph, n) for n in graph.calls() if n.target in ops.DRAWS}
    if not masks:
        return []
    lines = [Line("device = next(self.parameters()).device")]
    for number, (name, axes) in enumerate(sorted(masks.items())):
        index = "0"
        for axis in axes:
            before = (
                ""
                if index == "0"
                else f"{f'({index})' if '+' in index else index} * {graph.mesh.size(axis)} + "
            )
            index = f"{before}self.{axis}_rank"
        lines.append(
            Line(
                f"self.{name} = torch.Generator(device)"
                f".manual_seed({_mixed(number, len(masks), index)})"
            )
        )
    for attribute in blocks:
        lines.append(Line(f"for layer in self.{attribute}:"))
        lines += [Line(f"layer.{name} = self.{name}", indent=1) for name in sorted(masks)]
    return lines


def _axes(graph: Graph, mask: fx.Node) -> list[str]:
    cutting = {axis for axis, _ in value(mask).sharding.cuts()}
    return [axis for axis in graph.mesh.names if axis in cutting and axis != MICROBATCH_AXIS]


def _mixed(number: int, num: int, index: str) -> str:
    """Different for every generator and coordinate: ``2**20`` coordinates lie between two seeds."""
    stream = "seed" if num == 1 else f"(seed * {num} + {number})"
    return stream if index == "0" else f"{stream} * 2**20 + {index}"
