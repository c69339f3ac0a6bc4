"""Tell of a preset that every entry of a plan's ``[params]`` contradicts, as of a finished plan in
which somebody wrote another preset."""

from __future__ import annotations

from collections.abc import Iterator

from partc.graph import Graph, value
from partc.passes.shard.preset_words import (
    axes_of,
    preset_words,
    sharded_axes,
    words_of_auto,
)  # fmt: skip
from partc.plan import Plan, fits
from partc.plan.mesh import MICROBATCH_AXIS, Mesh


def overruled_preset(asked: Plan, made: Plan, graph: Graph, mesh: Mesh) -> Iterator[str]:
    """A sentence for each axis over which ``[params]``, that has an entry for every parameter,
    stores none of what the preset asked for would, or most of what it would leave whole.
    """
    if not asked.preset or not all(any(fits(p, n) for p in asked.params) for n in graph.params):
        return
    words = preset_words(words_of_auto(mesh) if asked.preset == "auto" else asked.preset)
    data, _ = axes_of(mesh, words, asked)
    stored = sharded_axes(words, data, mesh)
    for axis in (a for a in data if a != MICROBATCH_AXIS and mesh.size(a) > 1):
        cut = [name for name in graph.params if axis in made.params.get(name, {})]
        num = mesh.size(axis)
        could = any(dim % num == 0 for n in graph.params.values() for dim in value(n).shape)
        if axis in stored and not cut and could:
            yield _told(asked.preset, f"keep every weight whole over {axis}")
        elif axis not in stored and 2 * len(cut) > len(graph.params):
            yield _told(asked.preset, f"store weights in shards over {axis}")


def _told(preset: str, what: str) -> str:
    return (
        f'preset = "{preset}" says nothing here: the entries of [params] for all parameters, which '
        f"go before it, {what}. Delete [params] and [gather] for what the preset says, or write "
        "the preset that the entries follow."
    )
