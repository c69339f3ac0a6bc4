"""The classes that are printed for all runs of equal blocks of a file, each text once.

Runs share a class if their texts are the same: the blocks that an interleaved schedule gives two
stages of one rank, or two lists of blocks that compute the same.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from partc.codegen.bodies.block_init import init_arguments, init_lines
from partc.codegen.bodies.classes import BlockClass
from partc.codegen.files.stored_tables import block_rows
from partc.codegen.repeats.runs import PHASES, Run
from partc.codegen.text import WIDTH, block, wrap
from partc.quoting import comment

if TYPE_CHECKING:
    from partc.codegen.files.emit import RoleText

NAMELESS = "Block"  # while texts are compared, which name tables after their class


def shared_blocks(texts: Iterable[RoleText]) -> list[dict[str, Any]]:
    """The block classes of a step, or of a rank's stages, for the template.

    A class has the name of its first run; where another class has that name, the stage's label
    tells them apart.
    """
    known: list[tuple[object, list[BlockClass]]] = []
    texts = [*texts]
    alone = sum(cls.lead is None for step in texts for cls in step.classes.values()) == 1
    for step in texts:
        for cls in step.classes.values():
            cls.span = step.span(cls.run)
        check_alike(step.classes.values())
        for cls in step.classes.values():
            if cls.lead is not None:
                next(found for _, found in known if cls.lead in found).append(cls)
                continue
            key = None if alone else _nameless(step, cls)  # it takes as long as printing
            same = next((classes for other, classes in known if other == key), None)
            if same is not None:
                same.append(cls)
            else:
                taken = {classes[0].name for _, classes in known}
                cls.name += step.label if cls.name in taken else ""
                known.append((key, [cls]))
    for _, classes in known:
        span = spans([cls.span for cls in classes])
        for cls in classes:
            cls.name, cls.span = classes[0].name, span
    return [_values(classes[0]) for _, classes in known]


class Unlike(Exception):
    """Raised where the text of a block's class does not serve blocks of other sizes, ``layers``."""

    def __init__(self, layers: Sequence[tuple[str, ...]]) -> None:
        super().__init__(layers)
        self.layers = layers


def check_same_calls(runs: Collection[Run]) -> None:
    """Raise Unlike for the runs whose blocks have other calls than those of their kin.

    That is so where a function took the place of calls in the one and not in the other: the
    backward of a norm stands in many blocks of one size, and in a single one of another size.
    """
    leads = {run.layers[0]: _calls(run) for run in runs if not run.follows}
    unlike = [run.layers for run in runs if run.follows and _calls(run) != leads.get(run.kin)]
    if unlike:
        raise Unlike(unlike)


def _calls(run: Run) -> list[list[object]]:
    """What each phase of a run's first block calls."""
    return [[node.target for node in run.of(phase)[0].nodes] for phase in PHASES if run.of(phase)]


def check_alike(classes: Iterable[BlockClass]) -> None:
    """Raise Unlike for the runs whose own class would have other statements than that of their kin.

    Each class is written from calls of its own, in its own sizes. So a text that serves all has in
    it no size, and no choice made by a size, that differs. Only what memory is freed early, and
    comments, may differ.
    """
    followers = [cls for cls in classes if cls.lead is not None]
    leads = {cls.lead: _code(cls.lead) for cls in followers if cls.lead is not None}
    unlike = [cls for cls in followers if cls.lead is not None and _code(cls) != leads[cls.lead]]
    if unlike:
        raise Unlike([cls.run.layers for cls in unlike])


def _code(cls: BlockClass) -> object:
    lines = [line.code for line in init_lines(cls)]
    gathers = [(method["name"], method["body"]) for method in cls.gather_methods()]
    cls.functions()
    return init_arguments(cls), lines, gathers, cls.codes


def _nameless(step: RoleText, cls: BlockClass) -> object:
    """What runs must have in common to share a class: its text, and the tables that it reads."""
    name, span = cls.name, cls.span
    cls.name, cls.span = NAMELESS, ""
    key = _values(cls), block_rows(step, cls)
    cls.name, cls.span = name, span
    return key


def spans(each: Sequence[str]) -> str:
    """The blocks of several runs as comments show them.

    >>> spans(["model.layers.0 .. 1", "model.layers.6 .. 7"])
    'model.layers.0 .. 1, 6 .. 7'
    """
    first, *others = dict.fromkeys(each)
    path = f"{first.partition(' ')[0].rpartition('.')[0]}."
    return ", ".join([first, *(other.removeprefix(path) for other in others)])


def _doc(cls: BlockClass) -> str:
    """The docstring of a block's class: which blocks of the model it is."""
    said = f"{cls.span}." if cls.run.is_called else f"One of {cls.span}."
    if not cls.run.kin:
        return said
    rest = f"Comments have the sizes of {comment(cls.run.layers[0])}."
    return "\n    ".join([*textwrap.wrap(said, WIDTH - 4), "", rest, ""]).replace("    \n", "\n")


def _values(cls: BlockClass) -> dict[str, Any]:
    arguments = ["self", *filter(None, [init_arguments(cls)])]
    return {
        "name": cls.name,
        "doc": _doc(cls),
        "init": "\n".join(wrap(f"def __init__({', '.join(arguments)}) -> None:", 4)),
        "declarations": block(init_lines(cls), 2),
        "functions": cls.functions(),
        "gathers": cls.gather_methods(),
    }
