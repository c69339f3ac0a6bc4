"""Variables of the running functions that no later line reads, as that of a loop behind it."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Mapping
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

_READ_ALL = frozenset({"locals", "vars", "dir", "eval", "exec", "breakpoint"})
_OF_AN_ARGUMENT = frozenset({"vars", "dir"})  # where one is given: `vars(options)` reads that
_ENDS = ("RETURN_", "RAISE_", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")


def unread_values(kinds: tuple[type, ...]) -> list[Any]:
    """The values of these kinds in variables of the callers that nothing reads again, one for each
    variable: what is kept by them alone is used by nobody.
    """
    frame, found = sys._getframe(1), list[Any]()
    while frame is not None:
        found += _unread_of(frame, kinds)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def unpacked_by(frame: FrameType) -> bool:
    """Whether what a frame does now is to unpack: ``loss, logits = found``."""
    opcode = frame.f_code.co_code[frame.f_lasti]
    return dis.opname[opcode] in ("UNPACK_SEQUENCE", "UNPACK_EX")


def _unread_of(frame: FrameType, kinds: tuple[type, ...]) -> list[Any]:
    """Variables of a module are none of these: its functions, or a notebook's next cell, may read
    them. A function that asks for ``locals()`` holds the dict that is cleared here.
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED or _reads_all(frame.f_code):
        return []
    variables = frame.f_locals
    names = [name for name, value in variables.items() if isinstance(value, kinds)]
    found = [variables[name] for name in names if _unread(name, frame)]
    if isinstance(variables, dict):
        variables.clear()  # before Python 3.13 a copy that the frame keeps, and all values with it
    return found


def _unread(name: str, frame: FrameType) -> bool:
    code = frame.f_code
    shared = name in code.co_cellvars or name in code.co_freevars
    return not shared and not _read_later(code, frame.f_lasti, name)


def _reads_all(code: CodeType) -> bool:
    """Whether code may read variables by their names, as ``locals()`` does; ``model.eval()`` is
    another eval.
    """
    if _READ_ALL.isdisjoint(code.co_names):
        return False
    calls = [*dis.get_instructions(code)]
    return any(
        x.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        and x.argval in _READ_ALL
        and not (x.argval in _OF_AN_ARGUMENT and behind.opname.startswith("LOAD_"))
        for x, behind in pairwise(calls)
    )


def _read_later(code: CodeType, at: int, name: str) -> bool:
    """Whether some way through the code, from behind the call at ``at``, reads the variable before
    it is set anew. An exception may leave any line.
    """
    calls = {each.offset: each for each in dis.get_instructions(code)}
    behind = dict(zip(calls, [*calls][1:], strict=False))
    handlers = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    first = next((offset for offset in calls if offset > at), None)  # `at` may be in its cache
    todo, seen = [first, *_caught(at, handlers)], set[int]()
    while todo:
        here = todo.pop()
        if here is None or here in seen:
            continue
        seen.add(here)
        todo += _caught(here, handlers)
        effect = _effect(calls[here], name)
        if effect == "reads":
            return True
        if effect != "sets":
            todo += _next(calls[here], behind)
    return False


def _effect(call: dis.Instruction, name: str) -> str | None:
    """What an instruction does first to a variable; 3.13 has some for two variables."""
    of = call.argval if isinstance(call.argval, tuple) else (call.argval,)
    if name not in of or "_ATTR" in call.opname or "_CONST" in call.opname:
        return None
    if call.opname.startswith("STORE_FAST_LOAD_FAST"):
        return "sets" if of[0] == name else "reads"
    return "sets" if call.opname.startswith(("STORE_", "DELETE_")) else "reads"


def _next(call: dis.Instruction, behind: Mapping[int, int]) -> list[int | None]:
    jumps = call.opcode in dis.hasjrel or call.opcode in dis.hasjabs
    target = [call.argval] if jumps else []
    return target if call.opname.startswith(_ENDS) else [*target, behind.get(call.offset)]


def _caught(at: int, handlers: Any) -> list[int]:
    return [each.target for each in handlers if each.start <= at < each.end]
