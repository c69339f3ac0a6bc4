"""What a method of a block's class leaves: gradients, new values of buffers, and its results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from partc.codegen.bodies.block_arguments import LEFT, TYPES
from partc.codegen.bodies.body import Body
from partc.codegen.bodies.inner_blocks import (
    lists_within,
    read_around,
    sides_within,
    stored_within,
)
from partc.codegen.calls.buffers_in_place import updates
from partc.codegen.repeats.equal import Group, made_in_step
from partc.codegen.repeats.slots import Interface
from partc.codegen.text import Line
from partc.graph import Phase

if TYPE_CHECKING:
    from partc.codegen.bodies.classes import BlockClass


def stored_grads(cls: BlockClass, group: Group) -> dict[fx.Node, list[str]]:
    """For each final gradient made in the block its parameters, as texts: ``self.w_weight``.

    Made in the block is also a gradient whose last reduction the block starts.
    """
    inside = set(group.nodes)
    stored: dict[fx.Node, list[str]] = {}
    for name, node in cls.graph.grads.items():
        made_by = made_in_step(cls.graph, node)
        suffix = cls.own(name, group.layer)
        if stored_within(cls, name, made_by):
            continue
        if made_by in inside and suffix in cls.suffixes and not cls.run.is_called:
            stored.setdefault(node, []).append(f"self.{cls.suffixes[suffix]}")
    return stored


def grad_parts(cls: BlockClass, side: Interface) -> dict[fx.Node, list[str]]:
    """For what the first call of a module adds to gradients their parameters, as texts."""
    parts: dict[fx.Node, list[str]] = {}
    for total in side.totals:
        text = f"self.{cls.suffixes[cls.own(total.param)]}"
        parts.setdefault(total.part_of(side.group.nodes), []).append(text)
    return parts


def written_buffers(cls: BlockClass, group: Group) -> dict[str, fx.Node]:
    """New values of the block's own buffers by the buffer's attribute."""
    inside = set(group.nodes)
    return {
        cls.suffixes[cls.own(name, group.layer)]: node
        for name, node in cls.graph.outputs.buffers.items()
        if node in inside
        and not stored_within(cls, name, node)
        and cls.own(name, group.layer) in cls.suffixes
        and not cls.run.is_called
    }  # fmt: skip


def buffer_updates(cls: BlockClass, side: Interface, body: Body) -> list[Line]:
    """The lines that write new values of buffers; not where the step does it, from a list."""
    news = [
        (f"self.{attribute}", node)
        for attribute, node in written_buffers(cls, side.group).items()
        if side.group.nodes.index(node) not in side.listed
    ]
    return updates(news, body.text)


def returned(cls: BlockClass, side: Interface, body: Body) -> str:
    """What a method returns, as text: results, then lists of values for later phases."""
    nodes = side.group.nodes
    items = [str(body.text(nodes[p])) for p in [*side.carried, *side.listed]]
    for word in cls.left_by(side):
        then = next(p for (b, p), w in LEFT.items() if w == word)
        left = [*lists_within(cls, side.loop.phase, then)]
        left += [str(body.text(n)) for n in saved_for(cls, side, then)]
        items.append(f"[{', '.join(left)}]")
    return ", ".join(items) or "None"


def saved_for(cls: BlockClass, side: Interface, then: Phase) -> list[fx.Node]:
    """The values that a phase saves for a later one, but for those that inner blocks save."""
    later = cls.side(then)
    mine = read_around(later.loop, sides_within(cls)) if later is not None else None
    return [node for node in side.saved.get(then, []) if mine is None or node in mine]


def result_type(cls: BlockClass, side: Interface) -> str:
    """The type that a method's signature says it returns: ``tuple[Tensor, list[Tensor]]``."""
    items = ["Tensor"] * len([*side.carried, *side.listed])
    items += [cls.saved_type] * len(cls.left_by(side))
    if len(items) > TYPES and {*items} == {"Tensor"}:
        return "tuple[Tensor, ...]"
    return items[0] if len(items) == 1 else f"tuple[{', '.join(items)}]" if items else "None"
