"""``hooks.py`` beside a saved program's roles: functions of the user's that its text calls.

A program whose plan lists ``hooks`` calls ``hooks.layers_mlp(x)``. The file is the user's: ``save``
writes one that changes nothing where there is none, and never touches it again.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from pathlib import Path
from traceback import extract_tb
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from partc.errors import LoadError, RunError
from partc.file_text import Unreadable, file_text
from partc.program.manifest import OTHERS, refuse
from partc.users_line import failed_at, unparsed

NAME = "hooks.py"
SET = "\nhooks: object = None"  # the line of a role that its loader fills in
_CALLED = re.compile(r"\bhooks\.(\w+)\(")
_HEAD = '''"""Functions of yours that programs of this folder call; partc never overwrites them.

Each is given a rank's piece of a value, and returns one of the same shape and dtype, in new
memory or in that of its argument. It may not write to its argument.
"""

from torch import Tensor
'''
_FUNCTION = """

def {name}(x: Tensor) -> Tensor:
    return x
"""


def called(sources: Iterable[str]) -> list[str]:
    """The names of the functions that texts call, in order."""
    found = (name for text in sources if SET in text for name in _CALLED.findall(text))
    return sorted({*found})


def write_hooks(folder: Path, old: Path, sources: Iterable[str]) -> None:
    """Put the file of an earlier program into a folder, or a new one where functions are called."""
    names, kept = called(sources), old / NAME
    if old.parent.name == OTHERS:
        return
    if kept.is_file():
        (folder / NAME).write_bytes(kept.read_bytes())
    elif names:
        text = _HEAD + "".join(_FUNCTION.format(name=name) for name in names)
        (folder / NAME).write_text(text, encoding="utf-8", newline="\n")


def read_hooks(folder: Path, sources: Iterable[str]) -> str | None:
    """The text of the file, None if no function is called; nothing of it is run.

    LoadError if the file, or a function in it, is missing.
    """
    names = called(sources)
    if not names:
        return None
    place = folder.parent.parent if folder.parent.name == OTHERS else folder
    try:
        text = file_text(place / NAME)
        body = ast.parse(text, NAME).body
    except SyntaxError as error:
        refuse(place / NAME, "cannot be read", unparsed(error), "Mend that line.")
    except (Unreadable, ValueError) as error:
        why = f"{error}; the program calls {', '.join(names)} of it"
        refuse(place / NAME, "cannot be read", why, f"Write {NAME} with these functions.")
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    lacking = [name for name in names if name not in defined]
    if lacking:
        refuse(
            place / NAME, f"has no function {lacking[0]}",
            f"the program calls hooks.{lacking[0]}, as the plan says; the file has "
            f"{', '.join(sorted(defined)) or 'none'}",
            f"Write def {lacking[0]}(x): return x, or take it out of the plan's hooks.",
        )  # fmt: skip
    return text


def set_hooks(module: ModuleType, source: str, text: str | None) -> None:
    """Let a role's module call the user's functions; without a text they change nothing."""
    if SET not in source:
        return
    names = called([source])
    functions: Mapping[str, Callable[[Tensor], Tensor]] = dict.fromkeys(names, _same)
    if text is not None:
        own = _run(text)
        functions = {name: _checked(name, own[name]) for name in names}
    module.__dict__["hooks"] = SimpleNamespace(**functions)


def check_hooks(sources: Iterable[str], text: str | None) -> None:
    """RunError for a program that calls functions, and is not one of a folder that has them."""
    names = called(sources)
    if names and text is None:
        raise RunError(
            where="plan, hooks", what=f"there is no function {names[0]}",
            why=f"functions stand in {NAME} beside a saved program, and this one was not loaded",
            do=f"program.save(folder), write folder/{NAME}, then partc.load(folder).module().",
        )  # fmt: skip


def _same(x: Tensor) -> Tensor:
    return x


def _run(text: str) -> dict[str, Any]:
    """The names that the text sets; LoadError if running it fails."""
    shown, names = f"<partc {NAME}>", {"__name__": "hooks"}
    linecache.cache[shown] = (len(text), None, text.splitlines(keepends=True), shown)
    try:
        exec(compile(text, shown, "exec"), names)
    except Exception as error:
        raise LoadError(
            where=NAME, what="running it fails", why=_raised(error, shown),
            do="Mend that line: the file is run when the program is loaded.",
        ) from error  # fmt: skip
    return names


def _raised(error: Exception, shown: str) -> str:
    """What a line of the file raised when it was run, and which line that was."""
    at = [each for each in extract_tb(error.__traceback__) if each.filename == shown][-1:]
    said = f"{type(error).__name__}: {error}"
    return said + "".join(f", at {NAME}:{each.lineno}: {each.line}" for each in at)


def _check_takes_one(name: str, function: Callable[..., Any]) -> None:
    """RunError for a function that cannot be called with one tensor."""
    try:
        signature(function).bind(None)
    except TypeError as error:
        raise RunError(
            where=f"{NAME}, {name}", what=f"it is not called with one tensor: {error}",
            why="the program gives it this rank's piece, and nothing else",
            do=f"Write def {name}(x): return x.",
        ) from None  # fmt: skip
    except ValueError:  # a builtin that does not tell its parameters
        return


def _checked(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of the user's; RunError where it gives no such value, or writes to its own."""

    _check_takes_one(name, function)

    def hook(x: Tensor) -> Tensor:
        version = x._version
        try:
            y = function(x)
        except Exception as error:
            raise RunError(
                where=f"{NAME}, {name}", what="it fails", why=failed_at(error, function),
                do=f"Mend it: it is given {tuple(x.shape)} {x.dtype}, this rank's piece.",
            ) from error  # fmt: skip
        flaw = _flaw(x, y, version)
        if flaw:
            raise RunError(
                where=f"{NAME}, {name}", what=flaw,
                why="the program goes on with a value like the one that it gave",
                do=f"Return a tensor like {tuple(x.shape)} {x.dtype}, without x.mul_() and alike.",
            )  # fmt: skip
        return y

    return hook


def _flaw(x: Tensor, y: Any, version: int) -> str:
    if not isinstance(y, Tensor):
        return f"it returns {type(y).__name__}, no tensor"
    if (y.shape, y.dtype, y.device) != (x.shape, x.dtype, x.device):
        return f"it returns {tuple(y.shape)} {y.dtype} on {y.device}"
    return "it writes to its argument" if x._version != version else ""
