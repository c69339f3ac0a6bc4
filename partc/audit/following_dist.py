"""Collectives, messages and helper functions of a text, as they change spreads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as c10d
from torch import Tensor

from partc.audit.following import Following, Spreads
from partc.audit.moved import all_reduce, exchange, gather, scatter
from partc.audit.recording import Record, RecordingDist, Started
from partc.audit.spread import Known, R, U, cut
from partc.dryrun.as_c10d_takes import as_c10d_takes
from partc.dryrun.live_memory import LiveMemory
from partc.plan.mesh import Mesh
from partc.program.role import Role

LIBRARY = "nccl"  # programs that send messages over gloo call the collective; numbers tell of them
Message = tuple[Any, ...]  # source, target, tag, and the number of the message


# helper functions -------------------------------------------------------------------------------
def with_known_helpers(role: Role, mode: Following) -> dict[str, Any]:
    """Put layouts behind the functions that reorder pieces; returns what was there before."""
    replaced = {}
    for name, after in HELPERS.items():
        real = role.module.__dict__.get(name)
        if callable(real):
            replaced[name] = real
            role.module.__dict__[name] = _followed(real, after, mode)
    return replaced


def _followed(real: Callable[..., Any], after: Callable[..., None], mode: Following) -> Any:
    def call(x: Tensor, num: int, *args: Any, **named: Any) -> Any:
        before = dict(mode.of(x))
        result = real(x, num, *args, **named)
        after(mode, before, result, num, args, named)
        return result

    return call


def _joined(
    mode: Following, before: Spreads, result: Tensor, num: int, args: Any, named: Any
) -> None:
    """``join(pieces, num, dim, outer)``: whole, or cut elsewhere, if they were cut there."""
    dim, outer = (*args, named.get("outer", 1))[:2]
    found: Spreads = {}
    for axis, each in before.items():
        if each is not None and each.kind in ("rows", "moved"):
            after = R if each.kind == "rows" else cut(*each.to)
            found[axis] = after if (each.dim, each.outer) == (dim, outer) else None
        else:
            found[axis] = each if each is not None and each.kind != "cut" else None
    mode.note(result, found)


def _in_pieces(
    mode: Following, before: Spreads, result: Tensor, num: int, args: Any, named: Any
) -> None:
    """``in_pieces(x, num, dim, outer)``: pieces of a sum, or of a piece, one after the other."""
    dim, outer = (*args, named.get("outer", 1))[:2]
    found: Spreads = {}
    for axis, each in before.items():
        found[axis] = None if each is not None and each.kind == "cut" else each
        if each is not None and mode.axes[axis] == num:
            if each == U:
                found[axis] = cut(dim, outer).as_kind("pieces")
            elif each.kind == "cut":
                found[axis] = replace(each, kind="moved", to=(dim, outer))
    mode.note(result, found)


HELPERS: dict[str, Callable[..., None]] = {"join": _joined, "in_pieces": _in_pieces}


def _is_sum(each: Known) -> bool:
    """Whether ranks send one another pieces of an unfinished sum, or what may be one."""
    return each is None or each.kind in ("U", "pieces")


@as_c10d_takes
class FollowingDist(RecordingDist):
    """Collectives that change layouts."""

    def __init__(
        self, found: Record, mesh: Mesh, live: LiveMemory, mode: Following,
        messages: dict[Message, Spreads],
    ) -> None:  # fmt: skip
        super().__init__(found, mesh, live, LIBRARY)
        self.mode, self.messages = mode, messages
        self.numbers: dict[Any, int] = {}

    def _axis(self, group: Any) -> str | None:
        return group if isinstance(group, str) and group in self.mode.axes else None

    def all_reduce(
        self, tensor: Tensor, op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        axis = self._axis(group)
        if axis is not None:
            all_reduce(self.mode, tensor, op, axis)
        elif len(self._ranks(group)) > 1:
            self.mode.forget(tensor)
        return super().all_reduce(tensor, op, group, async_op)

    def all_gather_single(
        self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        axis = self._axis(group)
        if axis is None:
            self.mode.forget(output)
        else:
            gather(self.mode, output, input, axis)
        return super().all_gather_single(output, input, group, async_op)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, op: Any = c10d.ReduceOp.SUM, group: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        axis = self._axis(group)
        if axis is None:
            self.mode.forget(output)
        else:
            scatter(self.mode, output, input, axis)
        return super().reduce_scatter_single(output, input, op, group, async_op)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        axis, before = self._axis(group), self.mode.of(input)
        self.mode.forget(output)
        if axis is not None and _is_sum(before[axis]):
            exchange(self.mode, output, input, str(axis))
        elif axis is not None:
            others = {
                a: None if each and each.kind == "cut" else each for a, each in before.items()
            }
            mine = before[axis]
            moves = mine is not None and mine.kind == "moved"
            self.mode.note(output, {**others, axis: mine if moves else None})
        return super().all_to_all_single(output, input, group, async_op)

    def broadcast(self, tensor: Tensor, *args: Any, **named: Any) -> Any:
        self.mode.forget(tensor)
        return super().broadcast(tensor, *args, **named)

    def _message(
        self, kind: str, tensor: Tensor, ends: tuple[int, int], group: Any, tag: int
    ) -> Started:
        at = (kind, ends, tag)
        number = self.numbers[at] = self.numbers.get(at, -1) + 1
        message = (*ends, tag, number)
        if kind == "isend":
            self.messages[message] = dict(self.mode.of(tensor))
        else:
            self.mode.forget(tensor)
            self.mode.note(tensor, self.messages.get(message, dict.fromkeys(self.mode.axes)))
        return super()._message(kind, tensor, ends, group, tag)
