"""Find the user's source line, ``model.py:14: x = self.norm(x)``, of running or failed code."""

from __future__ import annotations

import ast
import linecache
import os
import sys
from functools import cache
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn

# Frames of torch and of partc are skipped: parents[1] is partc/, whatever room this module is in.
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_TORCH_NN = str(Path(nn.__file__).parent) + os.sep
_MODULE = nn.Module._call_impl.__code__.co_filename
_ENTRY = "step"  # the function in capture.py below which the user's code runs


def source_here() -> str:
    """The innermost running line of the user's code; "" in the backward of torch's own ops."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            return statement_text(code.co_filename, frame.f_lineno, _column(frame))
        if code.co_name == _ENTRY and code.co_filename.startswith(_OURS):
            return ""
        frame = frame.f_back
    return ""


def torch_line_here() -> str:
    """The innermost running line of ``torch.nn``: ``q = q.view(...)`` of an attention.

    "" where the user's own code is running, or a module's ``__call__``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_TORCH_NN):
            called = code.co_filename == _MODULE
            return "" if called else linecache.getline(code.co_filename, frame.f_lineno).strip()
        if is_users(code.co_filename):
            return ""
        frame = frame.f_back
    return ""


def calls_here() -> tuple[tuple[str, int], ...]:
    """The user's functions that are running below the innermost module's ``__call__``.

    Outermost first: each function's name and the line that is running in it.
    """
    found: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_module = code.co_filename == _MODULE and code.co_name == "_call_impl"
        if is_module or (code.co_name == _ENTRY and code.co_filename.startswith(_OURS)):
            break
        if is_users(code.co_filename):
            found.append((code.co_name, frame.f_lineno))
        frame = frame.f_back
    return tuple(reversed(found))


def source_of(error: BaseException) -> str:
    """The innermost line of the user's code in an error's traceback."""
    found = ""
    for frame, line in frames_of(error.__traceback__):
        if is_users(frame.f_code.co_filename):
            found = line_text(frame.f_code.co_filename, line)
    return found


def module_of(error: BaseException, model: nn.Module) -> str:
    """The path of the innermost submodule whose method was running when the error arose."""
    paths = {id(module): path for path, module in model.named_modules()}
    running = [frame.f_locals.get("self") for frame, _ in frames_of(error.__traceback__)]
    found = [paths[id(m)] for m in running if isinstance(m, nn.Module) and id(m) in paths]
    return found[-1] if found else ""


def frames_of(at: TracebackType | None) -> list[tuple[FrameType, int]]:
    """The frames of a traceback, the outermost first, each with its line."""
    frames = []
    while at is not None:
        frames.append((at.tb_frame, at.tb_lineno))
        at = at.tb_next
    return frames


@cache
def is_users(filename: str) -> bool:
    """Whether a file is the user's: not torch's, partc's or Python's own, nor made in memory."""
    if filename.startswith("<"):
        return filename == "<stdin>"
    if filename.startswith(_PYTHON) and not _PACKAGES.intersection(Path(filename).parts):
        return False
    return not filename.startswith((_TORCH, _OURS))


_PYTHON = str(Path(os.__file__).parent) + os.sep
_PACKAGES = {"site-packages", "dist-packages"}  # folders of others inside of Python's own


@cache
def line_text(filename: str, line: int) -> str:
    """``models/llama.py:14: the code``: the path below its import folder, and the line's text."""
    code = linecache.getline(filename, line).strip()
    return f"{_importable(filename)}:{line}" + (f": {code}" if code else "")


def _column(frame: FrameType) -> int:
    """Where on its line the code begins that is running, if several statements stand there."""
    if ";" not in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        return 0
    at = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return at[2] or 0


@cache
def statement_text(filename: str, line: int, column: int) -> str:
    """As ``line_text``, but of several statements on the line the one at a column alone."""
    whole = linecache.getline(filename, line)
    try:
        tree = ast.parse(whole.strip()) if ";" in whole else ast.Module([], [])
    except SyntaxError:  # a part of a longer statement
        return line_text(filename, line)
    column -= len(whole) - len(whole.lstrip())
    found = [
        each for each in ast.walk(tree)
        if isinstance(each, ast.stmt) and each.col_offset <= column < (each.end_col_offset or 0)
    ]  # fmt: skip
    if len(found) == 0:
        return line_text(filename, line)
    code = ast.get_source_segment(whole.strip(), found[-1])  # the innermost one comes last
    return f"{_importable(filename)}:{line}: {code}"


@cache
def _importable(filename: str) -> str:
    """A file's path below the folder it is imported from, as programs name no machine's folders."""
    path = Path(filename).resolve()
    roots = [Path(entry).resolve() for entry in [*sys.path, os.getcwd()]]
    inside = [path.relative_to(root).as_posix() for root in roots if path.is_relative_to(root)]
    return min(inside, key=len) if inside else path.name
