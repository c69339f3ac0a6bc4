"""The statements of a function as lines, with a comment for each module and ``del`` lines.

``# blocks.0.mlp`` stands above the lines of a module; ``del up`` stands behind the last reader of a
value that takes much memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from torch import fx

from partc.codegen.calls.ranges import in_ranges, of_call
from partc.codegen.calls.settle import unmarked
from partc.codegen.calls.storage import num_bytes
from partc.codegen.text import Line, Origin, Text
from partc.graph import value
from partc.graph.moves import gathers_param
from partc.quoting import comment, identifier

# Values up to 1/64 of a function's biggest value are not worth a `del`; from 1/2 of it on they are
# dropped at once, others at the end of a section.
SMALL, BIG = 64, 2


@dataclass
class Statement:
    """A few lines that belong together, the values that they read and bind, and their section.

    The section is the path of the module whose calls the lines are.
    """

    lines: list[Line]
    reads: list[fx.Node] = field(default_factory=list)
    binds: list[fx.Node] = field(default_factory=list)
    calls: list[fx.Node] = field(default_factory=list)  # the nodes whose calls the lines make
    section: str | None = ""  # None: the section of the statement that follows
    lists: Mapping[str, Sequence[fx.Node]] = field(default_factory=dict)  # names of lists of values


@dataclass
class InnerCall(Statement):
    """The call of a method of a block inside of this one.

    ``held`` are the bytes that the method holds while it runs beside what it is given and leaves.
    """

    held: int = 0


def with_sections(
    statements: Iterable[Statement], shown: Callable[[str], str] = str, layer: str = "",
    name_of: Callable[[str], str] | Literal[False] = False,
) -> list[Line]:  # fmt: skip
    """The lines of all statements, with a comment wherever the module changes: ``# blocks.0.mlp``.

    A statement that is the only one of its module and has the module's name needs no comment.
    ``shown`` gives a module's path as comments show it. Each line has its origin, in which a method
    of all blocks has ``blocks.*`` in place of ``layer``, the path of the one it is printed from.
    ``name_of``, where blocks in line have ranges, gives the expression of a block's path.
    """
    written = [s for s in statements if s.lines]
    sections = _sections(written)
    around = [each for each in sections if each]
    lines: list[Line] = []
    current, i = "", 0
    for statement, section in zip(written, sections, strict=True):
        block = of_call(statement.calls, name_of) if name_of else ""
        if section not in ("", current) and not _says_so(statement, around, i):
            current = section
            lines.append(Line(f"# {comment(shown(section))}", around=block))
        i += bool(section)
        origin = _origin(statement, shown, layer)
        here = (replace(line, around=block) for line in statement.lines)
        lines += [x if _is_del(x) else replace(x, origin=origin) for x in here]
    return in_ranges(_with_few_dels(_sent_at_once(lines)))


def _origin(statement: Statement, shown: Callable[[str], str], layer: str) -> Origin | None:
    """The module path and the source line of the first call of a statement that has them."""
    made = (value(node) for node in statement.calls)
    found = next(((v.module, v.source) for v in made if v.module or v.source), None)
    if found is None:
        return None
    path, source = found
    if layer and f"{path}.".startswith(f"{layer}."):
        return f"{layer.rpartition('.')[0]}.*{path.removeprefix(layer)}", source
    return shown(path), source


def _sent_at_once(lines: Sequence[Line]) -> list[Line]:
    """The lines with no name for a dict of one gradient that is sent right away.

    ``grads = {w: d_w}``, ``reduced.append(sum_grads(grads, ...))``, ``del grads`` become
    ``reduced.append(sum_grads({w: d_w}, ...))``, where the last call reads the name once.
    """
    kept: list[Line] = []
    for line in lines:
        made, sent = kept[-2:] if len(kept) > 1 else (None, None)
        name = line.code.removeprefix("del ") if _is_del(line) else ""
        # what is computed in the dict has no place in the range of the transfer
        ours = made and made.code.startswith(f"{name} = {{") and sent and not sent.range
        if made and sent and ours and _reads_once(name, sent.code):
            held = made.code.removeprefix(f"{name} = ")
            code = sent.code.replace(f"({name}, ", f"({held}, ", 1)
            kept[-2:] = [replace(sent, code=code, remark=sent.remark or made.remark)]
        else:
            kept.append(line)
    return kept


def _reads_once(name: str, code: str) -> bool:
    """Whether a name is the first argument of a call, and nothing else in the line."""
    return f"({name}, " in code and len(re.findall(rf"\b{name}\b", code)) == 1


def _with_few_dels(lines: Sequence[Line]) -> list[Line]:
    """The lines without a last ``del``, which frees what the return frees; neighbours are one."""
    kept: list[Line] = []
    for line in lines:
        if _is_del(line) and kept and _is_del(kept[-1]) and _place(kept[-1]) == _place(line):
            both = deleted([*_names(kept[-1]), *_names(line)])
            kept[-1] = replace(both, indent=line.indent, around=line.around)
        else:
            kept.append(line)
    return kept[:-1] if kept and _is_del(kept[-1]) else kept


def _place(line: Line) -> tuple[int, str]:
    return line.indent, line.around


def _is_del(line: Line) -> bool:
    return line.code.startswith("del ")


def _names(line: Line) -> list[str]:
    return line.code.removeprefix("del ").strip("()").split(", ")


def _sections(statements: Sequence[Statement]) -> list[str]:
    """The section of each statement; None becomes the section of the next statement with one."""
    sections: list[str] = []
    behind = ""
    for statement in reversed(statements):
        sections.append(behind if statement.section is None else statement.section)
        if statement.section or (statement.calls and statement.section is not None):
            behind = statement.section
    return sections[::-1]


def _says_so(statement: Statement, sections: Sequence[str], i: int) -> bool:
    """Whether a statement needs no comment above it: it stands alone and has its module's name.

    ``sections`` has the sections of all statements with one, in order; this one's is the ``i``-th.
    """
    around = [*sections[max(i - 1, 0) : i], *sections[i + 1 : i + 2]]
    name = identifier(sections[i].rpartition(".")[2])
    named = any(re.search(rf"(?<![a-z]){name}(?![a-z])", line.code) for line in statement.lines)
    return sections[i] not in around and named


def free_early(
    statements: list[Statement], seen: Callable[[fx.Node], Text], kept: set[fx.Node]
) -> list[Statement]:
    """Add ``del`` lines for the values that no later statement reads, except ``kept``.

    A ``del`` stands at the end of a section, that of a big value right behind its last reader.
    Small values live until the function returns. ``seen`` gives the text of a node.
    """
    last = _last_uses(statements, seen)
    for node in kept:
        last.pop(str(seen(node)), None)
    sizes: dict[str, int] = {}
    for node in (n for s in statements for n in s.binds if not gathers_param(n)):  # empty then
        sizes[str(seen(node))] = max(sizes.get(str(seen(node)), 0), num_bytes(node))
    biggest = max(sizes.values(), default=0)
    dying: dict[int, list[str]] = {}
    for name, i in sorted(last.items()):
        if sizes.get(name, 0) > biggest // SMALL and name.isidentifier():
            dying.setdefault(i, []).append(name)
    codes = (line.code for statement in statements for line in statement.lines)
    waited = {code.removesuffix(".wait()") for code in codes if code.endswith("_done.wait()")}
    dead: list[str] = []
    for i, (statement, following) in enumerate(pairwise(statements)):
        dead += dying.get(i, [])
        now = any(sizes[name] >= biggest // BIG for name in dead)
        if dead and (now or following.section != statement.section):
            handles = [f"{name}_done" for name in dead if f"{name}_done" in waited]
            # The handle of a transfer keeps what it moved alive, so it goes too.
            statement.lines.append(deleted([*dead, *handles]))
            dead = []
    return statements


def deleted(names: Iterable[str]) -> Line:
    """The statement ``del a, b``; a long one in brackets, which may be broken."""
    listed = ", ".join(names)
    return Line(f"del {listed}" if len(unmarked(listed)) < 80 else f"del ({listed})")


def _last_uses(statements: list[Statement], seen: Callable[[fx.Node], Text]) -> dict[str, int]:
    """For each name the index of the last statement that reads or binds it."""
    return {
        str(seen(node)): i
        for i, statement in enumerate(statements)
        for node in [*statement.reads, *statement.binds]
    }
