"""Which printed functions a program needs, and their text."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from partc import ops
from partc.codegen import attention, links, printed
from partc.codegen.text import wrap

MODULES = (printed, links, attention, ops)


@dataclass(frozen=True, eq=False)
class Outlined:
    """A function made of calls that several places of a program make alike: the target of a call.

    ``results`` are the names of what it gives, in the program too where it stands for all that is
    ``compiled`` there.
    """

    name: str
    text: str
    results: tuple[str, ...]
    compiled: bool = False

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError("it is printed, not called")


class Helpers:
    """Collects the functions that a program calls; ``text`` prints them and all that they call."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.outlined: list[Outlined] = []

    @property
    def names(self) -> list[str]:
        """The names that no value of this program may have, beside those of ``names()``."""
        return [function.name for function in self.outlined]

    def use(self, name: str) -> str:
        """Note that the program calls a printed function; gives back its name."""
        assert _find(name) is not None, name
        self.used.add(name)
        return name

    def text(self) -> str:
        """The sources, in a fixed order, two lines apart."""
        needed, todo = set[str](), sorted(self.used)
        while todo:
            name = todo.pop()
            if name not in needed:
                needed.add(name)
                todo += [called for called in _called(name) if _find(called) is not None]
        printed = [_source(name) for name in sorted(needed, key=_position)]
        return "\n\n\n".join([*printed, *(function.text for function in self.outlined)])


def names() -> set[str]:
    """Every name that a printed function may have: no value is called so."""
    return {name for module in MODULES for name in vars(module) if _find(name) is not None}


def _find(name: str) -> Callable[..., Any] | None:
    """A function of ``printed``, else a composite op of ``partc.ops``."""
    for module in MODULES:
        found = vars(module).get(name)
        if (
            inspect.isfunction(found) or inspect.isclass(found)
        ) and found.__module__ == module.__name__:
            return found
    return None


@cache
def _source(name: str) -> str:
    function = _find(name)
    assert function is not None
    text = inspect.getsource(function).rstrip().replace("``", "`").replace("  # fmt: skip", "")
    statement = ast.parse(text).body[0]
    if not isinstance(statement, ast.FunctionDef):
        return text
    lines, first = text.splitlines(), statement.body[0].lineno - 1
    head = " ".join(line.strip() for line in lines[:first])
    head = head.replace("( ", "(").replace(", )", ")").replace(" )", ")")  # in one line again
    return "\n".join([*wrap(head, 0), *lines[first:]])


@cache
def _called(name: str) -> list[str]:
    tree = ast.parse(_source(name))
    calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return sorted({f.id for f in calls if isinstance(f, ast.Name)})


@cache
def _position(name: str) -> tuple[int, int]:
    """Printed functions first, each module's in its own order."""
    function = _find(name)
    assert function is not None
    order = [module.__name__ for module in MODULES]
    return order.index(function.__module__), inspect.getsourcelines(function)[1]
