"""An error that arises in a program's text, as one that names the user's line and what it read.

Torch says ``index out of range in self``. The text says which call of the model that is, and the
frame which tensors the call read, and what numbers stand in them::

    embed (net.py:20: x = self.embed(ids)): torch cannot compute this (IndexError: index out of
    range in self; stage0.py:31, step: embed = F.embedding(ids, self.embed_weight), of the input ids
    int64[8, 6] with numbers from 0 to 99, embed.weight float32[32, 8]). ...
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from partc.errors import PartcError, RunError
from partc.plan.sharding import dtype_name
from partc.program.user_lines import path_in_model
from partc.trace.source_lines import frames_of

if TYPE_CHECKING:
    from partc.program.role import Role

# What scripts and launchers know by its class: memory that is full, ranks that are gone.
THEIRS = (PartcError, torch.OutOfMemoryError, dist.DistError, MemoryError)
_OF_NUMBERS = re.compile(
    r"out of (range|bounds)|out-of-bounds|class values|non-negative|"
    r"between 0 and 1",
    re.I,
)
MOST_LINES = 12  # of one statement
_NAME = re.compile(r"(?:self\.)?[A-Za-z_]\w*")


@contextmanager
def naming_calls(role: Role, step: Any, inputs: Sequence[Tensor] = ()) -> Iterator[None]:
    """Say of an error of a role's text for which call of the model the line stands.

    RunError in place of torch's errors; a note at those that scripts know by their class.
    """
    try:
        yield
    except Exception as error:
        found = _failed_line(error, role)
        if found is None:
            raise
        told = _told(error, *found, role, step, inputs)
        if isinstance(error, THEIRS):
            error.add_note(f"{told.where}\n  {_line(*found, role)}")
            raise
        raise told from error


def _failed_line(error: Exception, role: Role) -> tuple[FrameType, int] | None:
    """The innermost line of the text that stands for a call of the model, and its frame.

    None where a transfer failed: then other ranks are at fault, and no call of the model is.
    """
    shown = role.module.Step.__init__.__code__.co_filename
    frames = [(f, n) for f, n in frames_of(error.__traceback__) if f.f_code.co_filename == shown]
    known = [(frame, number) for frame, number in frames if number in role.lines.of]
    return known[-1] if known else None


def _told(
    error: Exception, frame: FrameType, number: int, role: Role, step: Any, inputs: Sequence[Tensor]
) -> RunError:
    module, source = role.lines.of[number]
    path = path_in_model(module, frame.f_locals.get("self"), role, step) or "loss"
    rank = (
        f"rank {dist.get_rank()}, " if dist.is_initialized() and dist.get_world_size() > 1 else ""
    )
    reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    read, integers = _read(frame, number, role, inputs)
    if _OF_NUMBERS.search(reason) and integers:
        what = "a number of the batch is not one that this line can take"
        do = (
            f"Compare the numbers of {' and '.join(integers)} with what the line takes (rows of a "
            "table, classes), and mend the batch, or make the table larger."
        )
    else:
        what = "torch cannot compute this line"
        do = (
            "Call the model without partc on this batch: if that fails too, mend the batch or this "
            "line; undo what was edited in the text; else report it."
        )
    return RunError(
        where=f"{rank}{path} ({source})" if source else f"{rank}{path}",
        what=what,
        why=f"{type(error).__name__}: {reason}; {_line(frame, number, role)}{read}",
        do=do,
    )


def _line(frame: FrameType, number: int, role: Role) -> str:
    """``stage0.py:31, step: embed = F.embedding(ids, self.embed_weight)``."""
    return f"{role.file}:{number}, {frame.f_code.co_name}: {_statement(frame, number)}"


def _statement(frame: FrameType, number: int) -> str:
    """The statement that begins at a line, without its comments, in one line."""
    text = ""
    for line in range(number, number + MOST_LINES):
        code = linecache.getline(frame.f_code.co_filename, line).partition("  # ")[0]
        text += f"{code.strip()} "
        if text.count("(") <= text.count(")"):
            break
    return text.replace("( ", "(").replace(" )", ")").replace(",)", ")").strip()


def _read(
    frame: FrameType, number: int, role: Role, inputs: Sequence[Tensor]
) -> tuple[str, list[str]]:
    """What tensors a line reads, in words; and those that its numbers may come from: tensors of
    whole numbers, or else inputs.
    """
    named = zip(role.inputs, inputs, strict=False)
    memory = {_memory(x): name for name, x in named if not isinstance(x, FakeTensor)}
    names = {each.key: each.name for each in role.shards}
    held: list[str] = []
    integers: list[str] = []
    others: list[str] = []
    for name in dict.fromkeys(_NAME.findall(_statement(frame, number).partition(" = ")[2])):
        owner, _, attribute = name.rpartition(".")
        holds = vars(frame.f_locals.get("self")).get("_parameters", {}) if owner else frame.f_locals
        x = holds.get(attribute)
        if isinstance(x, Tensor):
            given = memory.get(_memory(x)) if x.numel() else None
            called = f"the input {given}" if given else names.get(attribute, attribute)
            held.append(described(called, x))
            if not x.is_floating_point():
                integers.append(called)
            elif given:
                others.append(called)
    return (f", of {', '.join(held)}" if held else ""), integers or others


def _memory(x: Tensor) -> int:
    """Where a tensor's memory begins; 0 of one without."""
    return 0 if isinstance(x, FakeTensor) else x.untyped_storage().data_ptr()


def described(name: str, x: Tensor) -> str:
    """``ids int64[8, 6] with numbers from 0 to 99``."""
    return f"{name} {dtype_name(x.dtype)}{list(x.shape)}{_range(x)}"


def _range(x: Tensor) -> str:
    """`` with numbers from 0 to 99``, where they can be looked at: not behind a failed kernel."""
    unseen = isinstance(x, FakeTensor) or x.device.type != "cpu" or not x.numel()
    if unseen or x.is_complex() or x.dtype == torch.bool:
        return ""
    return f" with numbers from {x.min().item():.6g} to {x.max().item():.6g}"
