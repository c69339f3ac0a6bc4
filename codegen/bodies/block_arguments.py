"""What a block's method takes: the class declares these arguments, the step's loop passes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from partc.codegen.calls.names import is_weight
from partc.codegen.calls.wishes import Wishes
from partc.codegen.repeats.slots import Interface, Slot
from partc.codegen.text import Line
from partc.graph import Phase, fake_of, is_call, is_tensor
from partc.plan.mesh import MICROBATCH_AXIS

TYPES = 4  # of more results than that, all tensors, not each is listed
SAVED = "list[Tensor]"
ARGUMENT_TYPES = {"saved": SAVED, "kept": SAVED, "left": SAVED, "i": "int", "reduced": "Reduced",
                  "sums": "Sums"}  # fmt: skip
# The names of the lists of saved values that one phase leaves for a later one.
LEFT: dict[tuple[Phase, Phase], str] = {
    ("F", "B"): "saved",
    ("F", "W"): "kept",
    ("B", "W"): "left",
}


def passed(side: Interface) -> list[Slot]:
    """The slots of values that a method takes as arguments, in the order of the arguments."""
    return [*side.of("carried"), *side.of("shared"), *side.of("listed")]


def reads_microbatch(side: Interface) -> bool:
    """Whether a method asks for the number of the microbatch, ``i``.

    The gradient of what no microbatch changes, such as a penalty on weights, is kept by the first.
    """
    return any(node.kwargs.get("axis") == MICROBATCH_AXIS for node in side.group.nodes)


def main_slot(side: Interface) -> Slot | None:
    """The slot of the biggest value that each block hands to the next: the residual stream.

    A total to which each block only adds, as to the gradient of what all blocks read, is none.
    """
    carried = [slot for slot in side.of("carried") if is_tensor(slot.nodes[0])]
    carried = [slot for slot in carried if not is_weight(slot.nodes[0])]
    carried = [slot for slot in carried if not _is_total(side, slot)] or carried
    return max(carried, key=lambda slot: fake_of(slot.nodes[0]).numel(), default=None)


def _is_total(side: Interface, slot: Slot) -> bool:
    """Whether a block does nothing with a carried value but add to it, and hand on the sum."""
    node, inside = side.own(slot), {*side.group.nodes}
    while node is not side.group.nodes[slot.position]:
        readers = [user for user in node.users if user in inside]
        if len(readers) != 1 or not is_call(readers[0], torch.ops.aten.add.Tensor):
            return False
        (node,) = readers
    return True


def main_names(sides: Sequence[Interface]) -> dict[fx.Node, str]:
    """Names of the main value that runs through the blocks: ``x -> y``, ``d_y -> d_x``."""
    names: dict[fx.Node, str] = {}
    for side, (ahead, behind) in zip(sides, (("x", "y"), ("d_y", "d_x")), strict=False):
        slot = main_slot(side)
        if slot is not None:
            names |= {side.own(slot): ahead, side.group.nodes[slot.position]: behind}
    return names


def own_lines(*, draws: bool, named: bool) -> list[Line]:
    """The statements of ``__init__`` that keep a block's random numbers, and its name."""
    words = [word for word, is_kept in (("rng", draws), ("name", named)) if is_kept]
    return [Line(f"{', '.join(f'self.{w}' for w in words)} = {', '.join(words)}")] * bool(words)


def argument_name(side: Interface, slot: Slot, wish: Wishes) -> str:
    """The wanted name of an argument of a block's method."""
    alone = side.loop.run.is_single or is_weight(slot.nodes[0])  # its result is another value
    if slot.kind != "carried" or alone or slot is main_slot(side):
        return wish.get(side.own(slot), "value")
    return wish.get(side.group.nodes[slot.position], "value")


def signature(name: str, arguments: Sequence[str], result: str) -> Line:
    """The ``def`` line of a block's method."""
    return Line(f"def {name}({', '.join(arguments)}) -> {result}:")
