"""What the forward of each module of a model is: its class, its code, and the numbers it reads.

A saved program has what these were when it was compiled; a model that it is loaded with later may
have the same tensors, and compute something else.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from hashlib import sha256
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

from torch import nn

from partc.trace.code_names import names_in
from partc.trace.reachable import is_library

CODE = ", code "  # what follows is the digest of the code, by the version of Python that made it
MOST = 200  # functions of one forward that are looked at
_PLAIN = (bool, int, float, str)
_OF_TORCH = vars(nn.Module)


def forward_code(model: nn.Module) -> dict[str, str]:
    """The forward of each module in words, by path.

    >>> forward_code(nn.Sequential(nn.GELU(approximate="tanh")))
    {'': 'Sequential', '0': "GELU approximate='tanh'"}
    """
    known: dict[type, tuple[str, set[str]]] = {}
    return {path: _told(module, known) for path, module in model.named_modules()}


def changed_code(compiled: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """One line per module whose forward is another: compiled, given.

    Code is compared where the same version of Python has made both.
    """
    lines = []
    for path, before in compiled.items():
        (old, _, old_code), (new, _, new_code) = (
            each.partition(CODE) for each in (before, given.get(path, "none"))
        )
        same_python = old_code.partition(":")[0] == new_code.partition(":")[0]
        if old != new:
            lines.append(f"{path or 'the model itself'}: {old} compiled, {new} given")
        elif same_python and old_code != new_code:
            lines.append(f"{path or 'the model itself'}: the code of {old.split()[0]} has changed")
    return lines


def _told(module: nn.Module, known: dict[type, tuple[str, set[str]]]) -> str:
    kind = type(module)
    if kind not in known:
        known[kind] = _code_of(kind)
    code, names = known[kind]
    read = [(n, vars(module)[n]) for n in sorted(names & vars(module).keys()) if n != "training"]
    words = "".join(f" {name}={_shown(x)}" for name, x in read if _is_told(x))
    return f"{kind.__name__}{words}{code}"


def _is_told(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, FunctionType, BuiltinFunctionType))


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, _PLAIN) else value.__qualname__


def _code_of(kind: type) -> tuple[str, set[str]]:
    """The digest of the user's code that a class's forward calls, "" if there is none; the names
    that it reads.
    """
    left, names, digest = [getattr(kind, "forward", None)], set[str](), sha256()
    met: list[FunctionType] = []
    while left and len(met) < MOST:
        function = left.pop()
        if not isinstance(function, FunctionType) or function in met:
            continue
        met.append(function)
        names |= {*names_in(function.__code__).attributes}
        left += _called(function, kind)
    names -= {each for function in met for each in _set_by(function.__code__)}
    own = [each for each in met if not is_library(each.__module__ or "")]
    for each in sorted(own, key=lambda each: each.__qualname__):
        digest.update(repr(_of_code(each.__code__, each.__doc__)).encode())
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"{CODE}{version}:{digest.hexdigest()[:10]}" if own else "", names


def _called(function: FunctionType, kind: type) -> Iterator[Any]:
    """The methods of a class, and the user's functions, that a function names."""
    read = names_in(function.__code__)
    yield from (getattr(kind, each, None) for each in read.attributes if each not in _OF_TORCH)
    for found in map(function.__globals__.get, read.globals):
        if not is_library(getattr(found, "__module__", None) or "torch"):
            yield found
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def _set_by(code: CodeType) -> Iterator[str]:
    """The attributes that code sets, as a count of its calls: these change while it runs."""
    return (str(x.argval) for x in dis.get_instructions(code) if x.opname == "STORE_ATTR")


def _of_code(code: CodeType, doc: str | None = None) -> tuple[Any, ...]:
    """What a code does, without its lines and its docstring."""
    consts = [
        _of_code(x) if isinstance(x, CodeType) else sorted(map(repr, x))
        if isinstance(x, frozenset) else repr(x)
        for x in code.co_consts if x != doc or doc is None
    ]  # fmt: skip
    return code.co_code.hex(), code.co_names, consts
