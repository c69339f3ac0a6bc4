"""The names of block classes, and of the lists of their instances."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from partc.codegen.calls.scope import CLASSES, Scope, class_of
from partc.codegen.repeats.runs import Run
from partc.quoting import identifier

SHORT = 3  # letters of a word; a list's name with fewer says nothing of its blocks


def class_names(
    runs: Sequence[Run], classes: Mapping[str, str], scope: Scope, own: str
) -> list[tuple[str, str]]:
    """Class name and attribute of each run: ``Layer`` and ``layers`` for ``model.layers.*``.

    Runs that would have the same name get the name of the module around them as well:
    ``EncoderLayer``, ``DecoderLayer``; if that is the same too, of the module around in which they
    differ: ``TextModelLayer``. A single block has its own class's name, which ``classes``
    gives by path, and an attribute of its path: ``DownBlock`` and ``encoder_down1``. So have the
    blocks of a list whose own name says nothing, ``h``. ``scope`` gives out attributes; ``own`` is
    the class of the program itself.
    """
    parents = [run.module.split(".")[: None if run.is_one_module else -1] for run in runs]
    found = []
    taken = Scope([*CLASSES, own])
    for run, parts in zip(runs, parents, strict=True):
        words = [p for p in parts if not p.isdigit()]
        alike = [p for p in parents if [w for w in p if not w.isdigit()][-1:] == words[-1:]]
        wanted: Sequence[str] = _apart(parts, alike) if len(alike) > 1 else words[-1:] or ["blocks"]
        if run.kin:
            wanted = _shortest(parts, parents)
        several = "s" if wanted == ["layer"] else ""  # a loop's variable has this name
        attribute = scope.fresh("_".join(wanted) + several)
        singular = re.sub(r"(?<=[a-z]{2}[^isu\W\d])s$", "", "_".join(wanted))  # not of a cross
        name = class_of(singular)
        known = classes.get(run.module, "")
        says_nothing = len(words[-1:]) == 1 and len(words[-1]) < SHORT  # ``h`` of a GPT
        if (run.kin or run.is_called or says_nothing) and known.isidentifier():
            name = identifier(known)
        found.append((taken.fresh(name or "Block"), attribute))
    return found


def inner_names(
    runs: Sequence[Run], classes: Mapping[str, str], others: Sequence[str], own: str
) -> list[str]:
    """The class names of runs inside of others: ``T5LayerFF``, as the user's class is called.

    ``others`` has the names that classes have already.
    """
    taken = Scope([*CLASSES, own, *others])
    found: dict[str, str] = {}
    for run in runs:
        if run.kin not in found:
            known = classes.get(run.module, "")
            word = run.module.rpartition(".")[2]
            name = identifier(known) if known.isidentifier() else class_of(word)
            found[run.kin] = taken.fresh(name or "Block")
    return [found[run.kin] for run in runs]


def _apart(parts: Sequence[str], alike: Sequence[Sequence[str]]) -> Sequence[str]:
    """The last two parts of a path; if others end in them, the last part that tells them apart
    takes the place of the first.

    >>> towers = [["text", "encoder", "layers"], ["vision", "encoder", "layers"]]
    >>> _apart(towers[0], towers), _apart(towers[0], towers[:1])
    (['text', 'layers'], ['encoder', 'layers'])
    """
    two = _last_two(parts)
    same = [other for other in alike if _last_two(other) == two]
    for num in range(3, len(parts) + 1):
        ends = [list(other[-num:]) for other in same]
        known = all(len(end) == num and not end[0].isdigit() for end in ends)
        if len(same) > 1 and len(two) == 2 and known and ends.count(list(parts[-num:])) == 1:
            return [parts[-num], parts[-1]]
    return two


def _last_two(parts: Sequence[str]) -> Sequence[str]:
    """The last two parts of a path, and what stands before them if they begin with a number.

    >>> _last_two(["model", "layers"]), _last_two(["down", "0", "0"]), _last_two([])
    (['model', 'layers'], ['down', '0', '0'], ['blocks'])
    """
    end = list(parts[-2:])
    while end[:1] and end[0].isdigit() and len(end) < len(parts):
        end.insert(0, parts[-len(end) - 1])
    return end if end[:1] and not end[0].isdigit() else ["blocks", *end]


def _shortest(parts: Sequence[str], parents: Sequence[Sequence[str]]) -> Sequence[str]:
    """The shortest end of a path that begins with a word and that no other path has.

    >>> _shortest(["model", "layers"], []), _shortest(["3", "0"], [])
    (['model', 'layers'], ['blocks', '3', '0'])
    """
    for num in range(1, len(parts) + 1):
        end = parts[-num:]
        if not end[0].isdigit() and sum(list(p[-num:]) == list(end) for p in parents) == 1:
            return end
    return parts if parts and not parts[0].isdigit() else ["blocks", *parts]
