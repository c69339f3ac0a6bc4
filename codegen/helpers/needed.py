"""Which printed functions a program needs, and their text."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from partc.codegen.helpers import attention, links, messages, printed
from partc.codegen.text import wrap
from partc.graph import ops

ORDER = (printed, messages, links, attention, ops)  # in which functions are printed
MODULES = (messages, printed, links, attention, ops)  # in which they are looked for
Printed = Callable[..., Any]


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
    """Collects the functions that a program calls; ``text`` prints them and all that they call.

    With ``messages`` gathers and scattered sums are those of ``partc/codegen/messages.py``.
    """

    def __init__(self, *, messages: bool = False) -> None:
        self.messages = messages
        self.modules = MODULES if messages else MODULES[1:]
        self.used: set[str] = set()
        self.outlined: list[Outlined] = []

    @property
    def names(self) -> list[str]:
        """The names that no value of this program may have, beside those of ``names()``."""
        return [function.name for function in self.outlined]

    def use(self, name: str) -> str:
        """Note that the program calls a printed function; gives back its name."""
        assert _find(name, self.modules) is not None, name
        self.used.add(name)
        return name

    def text(self) -> str:
        """The sources, in a fixed order, two lines apart."""
        needed, todo = set[Printed](), sorted(self.used)
        while todo:
            function = _find(todo.pop(), self.modules)
            if function is not None and function not in needed:
                needed.add(function)
                todo += _called(function)
        printed = [_source(function) for function in sorted(needed, key=_position)]
        return "\n\n\n".join([*printed, *(function.text for function in self.outlined)])


def names() -> set[str]:
    """Every name that a printed function may have: no value is called so."""
    return {name for module in MODULES for name in vars(module) if _find(name, [module])}


def _find(name: str, modules: Sequence[ModuleType]) -> Printed | None:
    """A function of the first of some modules that has one of this name."""
    for module in modules:
        found = vars(module).get(name)
        if (
            inspect.isfunction(found) or inspect.isclass(found)
        ) and found.__module__ == module.__name__:
            return found
    return None


@cache
def _source(function: Printed) -> str:
    text = inspect.getsource(function).rstrip().replace("``", "`").replace("  # fmt: skip", "")
    statement = ast.parse(text).body[0]
    if not isinstance(statement, ast.FunctionDef):
        return text
    lines, first = text.splitlines(), statement.body[0].lineno - 1
    head = " ".join(line.strip() for line in lines[:first])
    head = head.replace("( ", "(").replace(", )", ")").replace(" )", ")")  # in one line again
    return "\n".join([*wrap(head, 0), *lines[first:]])


@cache
def _called(function: Printed) -> list[str]:
    """What a function calls, and what a class begins with, by name."""
    nodes = [*ast.walk(ast.parse(_source(function)))]
    calls = [n.func for n in nodes if isinstance(n, ast.Call)]
    bases = [base for n in nodes if isinstance(n, ast.ClassDef) for base in n.bases]
    return sorted({f.id for f in (*calls, *bases) if isinstance(f, ast.Name)})


@cache
def _position(function: Printed) -> tuple[int, int]:
    """Printed functions first, each module's in its own order."""
    order = [module.__name__ for module in ORDER]
    return order.index(function.__module__), inspect.getsourcelines(function)[1]
