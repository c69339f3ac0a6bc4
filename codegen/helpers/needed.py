"""Which helper functions a program needs, and their source text.

Helper functions are those of this folder and of ``partc.graph.ops``. A file beside the roles gets
the source of the helpers that roles call, and of the helpers that these call
(``files/helper_file.py``); a role's own file has those that read its tables.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from partc.codegen.helpers import (
    arrived,
    attention,
    coded_weights,
    draws,
    islands,
    kernels,
    links,
    low_rank_sums,
    messages,
    narrow_sums,
    nccl,
    picked_sums,
    printed,
    rounded_sums,
    scattered_sums,
    servers,
    voted_sums,
)
from partc.codegen.text import Line, Origin, block, origins, wrap
from partc.graph import ops

# In which functions are printed: `arrived` needs what `links` has, and that needs `Reduced`.
# These send less than all numbers.
NARROW = (
    narrow_sums, rounded_sums, scattered_sums, picked_sums, low_rank_sums, voted_sums,
)  # fmt: skip
ORDER = (
    printed, draws, nccl, messages, coded_weights, *NARROW, links, arrived, attention, kernels,
    islands, servers, ops,
)  # fmt: skip
COMMON = (printed, draws, coded_weights, links, attention, kernels, islands, servers, ops)
# In which functions are looked for: what comes first has some of the names of `printed` and
# replaces them in a program for NCCL, or in one that sends messages over gloo.
MODULES = {"gloo": COMMON, "nccl": (nccl, arrived, *COMMON)}
MESSAGES = (messages, arrived, *COMMON)
OF_TABLES = {"empty"}  # read the tables of a role, and stand in its file
Printed = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Outlined:
    """A function that replaces calls of the graph: the target of the call that stands for them.

    ``outline.py`` makes one of calls that several places of a program repeat, ``compiled.py`` one
    of all calls between two transfers, for torch.compile (then ``compiled`` is True). ``results``
    are the names of what the function returns; those of a compiled function also name the values
    where it is called.
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
    """Collects the helper functions that a program calls.

    ``own_text`` prints those that stand in its own file, ``shared`` are the others.

    ``backend`` is what carries tensors between ranks, ``gloo`` or ``nccl``. With ``messages``,
    which gloo alone has, weights are gathered, and gradients summed and scattered, by the functions
    of ``messages.py``: there ranks send each other what gloo's collectives would copy more often.
    With ``ranges`` blocks and transfers stand in ranges of torch.profiler; with ``hooks`` values go
    through functions of the user's.
    """

    def __init__(
        self, *, messages: bool = False, backend: str = "gloo", ranges: bool = False,
        hooks: bool = False, narrow: bool = False,
    ) -> None:  # fmt: skip
        self.narrow = narrow  # whether sums of gradients are sent in narrow numbers
        self.ranges, self.hooks = ranges, hooks
        self.in_pieces = backend == "gloo" and not messages  # scattered sums, to be added up
        self.modules = MESSAGES if messages else MODULES[backend or "gloo"]
        self.modules = (*NARROW, *self.modules) if narrow else (*self.modules, *NARROW)
        self.used: set[str] = set()
        self.outlined: list[Outlined] = []
        self.bodies: dict[str, list[Origin | None]] = {}  # of functions: their rows' origins

    @property
    def names(self) -> list[str]:
        """Names of this program's own functions, which none of its values may have.

        ``names()`` below has the names of all helper functions, which no value may have either.
        """
        others = {"record_function": self.ranges, "hooks": self.hooks}
        return [*(f.name for f in self.outlined), *(name for name, used in others.items() if used)]

    def use(self, name: str) -> str:
        """Note that the program calls a helper function; returns its name."""
        assert _find(name, self.modules) is not None, name
        self.used.add(name)
        return name

    def called(self, call: str) -> str:
        """Note what the text of a call needs, a helper or a method of an object; returns it."""
        return call if "." in call else self.use(call)

    def block(self, lines: Iterable[Line], indent: int) -> str:
        """The body of a function as ``text.block`` has it; notes which user's calls it makes."""
        lines = [*lines]
        body = block(lines, indent)
        self.bodies.setdefault(body, origins(lines, indent))
        return body

    def origins(self, text: str) -> dict[int, Origin]:
        """The user's call of each line of a finished text, by the number of the line."""
        found: dict[int, Origin] = {}
        for body, each in self.bodies.items():
            at = text.find(f"\n{body}\n")
            while at >= 0:
                first = text.count("\n", 0, at) + 2
                named = {first + i: origin for i, origin in enumerate(each) if origin is not None}
                found = named | found
                at = text.find(f"\n{body}\n", at + 1)
        return dict(sorted(found.items()))

    def own_text(self) -> str:
        """The sources of the helpers of a role's own file, two lines apart."""
        own = [_source(each) for each in self._needed() if each.__name__ in OF_TABLES]
        return "\n\n\n".join([*own, *(function.text for function in self.outlined)])

    def shared(self) -> tuple[Printed, ...]:
        """The helpers that the program needs of the file beside it."""
        return tuple(each for each in self._needed() if each.__name__ not in OF_TABLES)

    def _needed(self) -> list[Printed]:
        """All helpers that the program calls, and those that these call, in a fixed order."""
        needed, todo = set[Printed](), sorted(self.used)
        while todo:
            function = _find(todo.pop(), self.modules)
            if function is not None and function not in needed:
                needed.add(function)
                todo += _called(function)
        return in_order(needed)


def in_order(functions: Iterable[Printed]) -> list[Printed]:
    """Helpers without repeats, by module as in ORDER, and by line within a module."""
    return sorted({*functions}, key=_position)


def sources(functions: Iterable[Printed]) -> str:
    """The sources of helpers as programs print them, two lines apart."""
    return "\n\n\n".join(map(_source, functions))


def names() -> set[str]:
    """The name of every helper function, which no value of a program may have."""
    return {name for module in ORDER for name in vars(module) if _find(name, [module])}


def _find(name: str, modules: Sequence[ModuleType]) -> Printed | None:
    """The helper function or class of this name, from the first module that defines one."""
    for module in modules:
        found = vars(module).get(name)
        # What a module only imports is no helper of that module.
        if (
            inspect.isfunction(found) or inspect.isclass(found)
        ) and found.__module__ == module.__name__:
            return found
    return None


@cache
def _lines(function: Printed) -> tuple[list[str], int]:
    """The lines of a helper, and the number of the first; of a class they take long to find."""
    return inspect.getsourcelines(function)


@cache
def _source(function: Printed) -> str:
    """The source of a helper as programs print it, its signature wrapped to a program's width."""
    text = "".join(_lines(function)[0]).rstrip().replace("``", "`").replace("  # fmt: skip", "")
    statement = ast.parse(text).body[0]
    if not isinstance(statement, ast.FunctionDef):
        return text
    lines, first = text.splitlines(), statement.body[0].lineno - 1
    head = " ".join(line.strip() for line in lines[:first])
    head = head.replace("( ", "(").replace(", )", ")").replace(" )", ")")  # in one line again
    return "\n".join([*wrap(head, 0), *lines[first:]])


@cache
def _called(function: Printed) -> list[str]:
    """The names that a helper calls, and the base classes of a helper class."""
    nodes = [*ast.walk(ast.parse(_source(function)))]
    calls = [n.func for n in nodes if isinstance(n, ast.Call)]
    bases = [base for n in nodes if isinstance(n, ast.ClassDef) for base in n.bases]
    return sorted({f.id for f in (*calls, *bases) if isinstance(f, ast.Name)})


@cache
def _position(function: Printed) -> tuple[int, int]:
    """Sorts helpers by module, as in ORDER, and by line within a module."""
    order = [module.__name__ for module in ORDER]
    return order.index(function.__module__), _lines(function)[1]
