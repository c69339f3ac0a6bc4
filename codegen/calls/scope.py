"""The names that generated functions have taken, and the final names of their values.

While a function is written each value has a mark, ``mul__v3__``, in place of its name. When the
functions are complete, all values that have a line are known, and ``Scope.settled`` gives each its
name (``settle.py`` says which).
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx, nn

from partc.codegen.calls.settle import MARK, Marked, settle
from partc.codegen.calls.wishes import Wishes
from partc.codegen.helpers import needed as helpers
from partc.codegen.safety import FORBIDDEN
from partc.codegen.text import Line
from partc.errors import PlanError
from partc.plan.mesh import Mesh
from partc.quoting import identifier

# Names that no value gets: Python's and a program's own, and those of helper functions.
RESERVED = {
    "self",
    "torch",
    "dist",
    "F",
    "nn",
    "Tensor",
    "saved",
    "layer",
    "following",
    "reduced",
    "before",
    "done",
    *dir(builtins),
    *FORBIDDEN,
    *helpers.names(),
}
# Methods and attributes of a program's modules, and of torch's: no parameter or buffer gets these.
OWN = {
    *dir(nn.Module),
    "step", "seed", "rng", "n", "name", "begin", "backward", "weights", "finish", "gather", "whole",
    "regather", "saved", "kept", "left", "losses", "results", "reduce", "reduced", "last", "stages",
    "links", "partials", "island", "island_rank", "microbatches", "meet", "met", "taken",
    "pull",
}  # fmt: skip


# A list of blocks may have this one, which a pipeline's module has, in which no list stands.
OF_PIPELINES = {"stages"}
# Classes that a program has beside those of blocks; its stages are Stage0, Stage1 ...
CLASSES = {"Step", "DeviceMesh"}
LETTERS = 3  # of an abbreviation, which stays in capitals


class Scope:
    """The identifiers that some generated functions use; a name that is taken gets a number.

    The functions of one scope are the methods of a class: a name means one value in all of them.
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = {*RESERVED, *taken}
        self.marked: dict[fx.Node | int, Marked] = {}
        self.final: list[str] = []

    def fresh(self, wish: str) -> str:
        """A new identifier for a wanted name: ``x``, then ``x_1``, then ``x_2``."""
        name = base = identifier(wish)
        number = 0
        while name in self.taken:
            number += 1
            name = f"{base}_{number}"
        self.taken.add(name)
        return name

    def value(self, node: fx.Node, wishes: Wishes, wish: str = "", *, first: bool = False) -> str:
        """The mark of a value, the same wherever the scope's functions read or make it.

        ``wish`` is its wanted name, by default that in ``wishes``. A value that is ``first`` gets
        this name before all others: an argument, a weight.
        """
        if node not in self.marked:
            wanted = identifier(wish or wishes.get(node) or "value").replace("__v", "_v")
            self.marked[node] = Marked(node, wanted, len(self.marked), wishes, first)
        return self.marked[node].mark

    def passing(self, wish: str) -> str:
        """The mark of a list or dict: behind its last line its name may be used for another one."""
        number = len(self.marked)
        self.marked[number] = Marked(None, wish, number, Wishes({}))
        return self.marked[number].mark

    def settled(self, functions: Sequence[Sequence[Line]]) -> list[list[Line]]:
        """The lines of all functions of the scope, each mark replaced by the value's name."""
        codes = [[line.code for line in lines] for lines in functions]
        self.final = settle(list(self.marked.values()), codes, self.taken)
        return [
            [replace(x, code=self.named(x.code), remark=self.named(x.remark)) for x in lines]
            for lines in functions
        ]

    def named(self, text: str) -> str:
        """A text with the names of values in place of their marks."""
        return re.sub(MARK, lambda found: self.final[int(found[1])], text)


def attributes(mesh: Mesh, *others: str) -> Scope:
    """The names of a module's parameters and buffers; a program's own names are taken.

    PlanError for an axis that has such a name, as programs have an attribute for each axis.
    """
    axes: list[str] = []
    for axis in mesh.names:
        if axis in OWN or axis in axes or f"{axis}_rank" in axes or keyword.iskeyword(axis):
            raise _no_axis(axis, mesh)
        axes += axis, f"{axis}_rank"
    return Scope([*OWN, *axes, *others])


def lists(mesh: Mesh) -> Scope:
    """The names of lists of blocks."""
    axes = [name for axis in mesh.names for name in (axis, f"{axis}_rank")]
    return Scope([*(OWN - OF_PIPELINES), *axes])


def class_of(words: str) -> str:
    """The name of a class for what is called so, none that a program has for something else.

    >>> class_of("encoder_layer"), class_of("SHARDS"), class_of("stage0"), class_of("MLP")
    ('EncoderLayer', 'Shards', 'Stage0Block', 'MLP')
    """
    name = "".join(w[:1].upper() + w[1:] for w in re.split(r"[^A-Za-z0-9]+|_", words) if w)
    if len(name) > LETTERS and name.isupper():  # as tables are
        name = name.capitalize()
    return f"{name}Block" if re.fullmatch(r"Stage\d+", name) else name


def _no_axis(axis: str, mesh: Mesh) -> PlanError:
    return PlanError(
        where=f"mesh {mesh}",
        what=f"an axis is called {axis!r}",
        why="programs keep each axis as an attribute, and use this name for something else",
        do="Rename the axis, for example to dp.",
    )
