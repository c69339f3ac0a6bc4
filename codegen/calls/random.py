"""The random generators of a program, from which dropout masks are drawn.

Ranks that hold different shards of a mask must draw different numbers, ranks that hold copies of it
the same. So there is one generator for each set of mesh axes that shard a mask; its seed follows
from the step's seed and from this rank's coordinates on these axes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from partc.codegen.text import Line
from partc.graph import Graph, ops, value
from partc.plan.mesh import MICROBATCH_AXIS


def generator(graph: Graph, mask: fx.Node) -> str:
    """The attribute of the generator from which a mask is drawn: ``rng_dp`` if dp shards it."""
    return "_".join(["rng", *_axes(graph, mask)])


def seed_lines(graph: Graph, blocks: Sequence[str]) -> list[Line]:
    """The body of a program's method ``seed``.

    ``blocks`` are the attributes of lists of blocks, to which the same generators are given.
    """
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
    """The mesh axes that shard a mask.

    Microbatches are no ranks: they draw one after the other from the same generator.
    """
    cutting = {axis for axis, _ in value(mask).sharding.cuts()}
    return [axis for axis in graph.mesh.names if axis in cutting and axis != MICROBATCH_AXIS]


def _mixed(number: int, num: int, index: str) -> str:
    """The seed of generator ``number`` of ``num``: ``(seed * num + number) * 2**20 + index``.

    ``index`` is the rank's coordinate, below 2**20, so no two generators have the same seed.
    """
    stream = "seed" if num == 1 else f"(seed * {num} + {number})"
    return stream if index == "0" else f"{stream} * 2**20 + {index}"
