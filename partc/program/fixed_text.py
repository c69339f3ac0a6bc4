"""The parts of a program's text that have to stay as they were printed.

A text is checked by running it: on one processor, in float64, with fixed numbers in place of random
ones. That cannot judge what it does on another device, with another library of collectives, in
a narrower dtype, or with other random numbers. So a saved program lists the statements that decide
on these (``Fixed.lines``), and the functions and classes that ask for the device
(``Fixed.functions``); ``partc/audit/fixed.py`` compares a text with the list. Comments and layout
are free.
"""

from __future__ import annotations

import ast
import hashlib
import json
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from partc.file_text import toml_table
from partc.plan.coded import BASE, CODED_WEIGHTS
from partc.plan.wires import BASES, HELPERS
from partc.program.fixed_words import (
    CALLED,
    DEVICE,
    ISLAND_HELPERS,
    LOCALS,
    MEETS,
    ROUNDED,
    Names,
    reason_of,
)
from partc.program.helper_file import imported

Json = Mapping[str, Any]
LISTED = "Reduced"  # the class that finishes these sums
NARROW = {
    *BASES,
    *HELPERS,
    BASE,
    *CODED_WEIGHTS,
}  # classes that the check has stand-ins for, so that they stay as a whole


@dataclass(frozen=True)
class Part:
    """A statement, function or class that has to stay; ``key`` is equal for equal ones.

    ``reason``: what it decides on. ``name``: of a function or class that stays as a whole.
    """

    reason: str
    line: int
    text: str
    key: str
    name: str = ""


@dataclass(frozen=True)
class Fixed:
    """What has to stay in one file: statements with their number, and digests by name.

    ``code``: a digest of the whole, without which a change may be one of comments alone.
    """

    lines: Mapping[str, int] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)
    code: str = ""

    @classmethod
    def of(cls, text: str) -> Fixed:
        parts = [*parts_of(text)]
        lines = Counter(part.key for part in parts if not part.name)
        functions = {part.name: part.key for part in parts if part.name}
        return cls(dict(lines), functions, digest_of_code(ast.parse(text)))


@dataclass(frozen=True)
class Found:
    """What has to stay of a program: of each file, and of its plan, whose digest this is."""

    files: Mapping[str, Fixed] = field(default_factory=dict)
    plan: str = ""


@dataclass(frozen=True, eq=False)
class FixedText:
    """What has to stay of a program: as it was saved, or as its sources have it.

    ``sources``: the text as it was printed, with which an edited one is compared.
    """

    known: Found | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    plan: str = ""

    @cached_property
    def found(self) -> Found:
        if self.known is not None:
            return self.known
        files = {name: Fixed.of(text) for name, text in self.sources.items()}
        return Found(files, digest_of_plan(self.plan))

    def as_json(self) -> dict[str, Any]:
        files = {name: asdict(each) for name, each in sorted(self.found.files.items())}
        printed = {name: _packed(text) for name, text in sorted(self.sources.items())}
        return {"plan": self.found.plan, "files": files, "printed": printed}

    @classmethod
    def of_json(cls, data: Json) -> FixedText:
        """Read ``as_json``; KeyError and alike where entries are missing or malformed."""
        files = {str(name): _fixed(entry) for name, entry in data["files"].items()}
        printed = {str(name): _unpacked(str(text)) for name, text in data["printed"].items()}
        if printed and printed.keys() != files.keys():
            raise ValueError(f"it has the printed texts of {[*printed]}, not of {[*files]}")
        return cls(Found(files, str(data["plan"])), printed)


def _packed(text: str) -> str:
    """A text in a few characters of a JSON file."""
    return b64encode(zlib.compress(text.encode(), 9)).decode()


def _unpacked(packed: str) -> str:
    """The text of ``_packed``; ValueError for anything else."""
    try:
        return zlib.decompress(b64decode(packed, validate=True)).decode()
    except zlib.error as error:
        raise ValueError(str(error)) from None


def _fixed(entry: Json) -> Fixed:
    lines = {str(key): int(num) for key, num in entry["lines"].items()}
    functions = {str(name): str(digest) for name, digest in entry["functions"].items()}
    return Fixed(lines, functions, str(entry["code"]))


def digest_of_code(node: ast.AST) -> str:
    """A digest of a text without its comments and docstrings."""
    fresh = ast.parse(ast.unparse(node))
    for each in ast.walk(fresh):
        body = getattr(each, "body", None)
        if isinstance(body, list):
            each.body = [s for s in body if not _is_text(s)] or [ast.Pass()]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.unparse(fresh).encode()).hexdigest()


def digest_of_plan(text: str) -> str:
    """A digest of a plan's entries, alike however they are written; Unreadable for no TOML."""
    entries = json.dumps(toml_table(text), sort_keys=True, default=str)
    return hashlib.sha256(entries.encode()).hexdigest()


# the parts of a text ------------------------------------------------------------------------------
def parts_of(text: str) -> Iterator[Part]:
    """Every part of a text that has to stay, in order."""
    tree = ast.parse(text)
    names = Names.of(tree)
    yield from _doubled(tree.body, (), imported(tree))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not _is_module(node):
            asking = next((p for p in _parts(node, (), names) if p.reason == DEVICE), None)
            if node.name in NARROW or (node.name == LISTED and BASES[0] in names.functions):
                yield Part(ROUNDED, node.lineno, _head(node)[1], digest_of_code(node), node.name)
                continue
            if node.name in ISLAND_HELPERS or _derives(node, names):
                yield Part(MEETS, node.lineno, _head(node)[1], digest_of_code(node), node.name)
                continue
            if asking is not None:
                reason = LOCALS.get(node.name, DEVICE)
                yield Part(reason, asking.line, asking.text, digest_of_code(node), node.name)
                continue
        yield from _parts(node, (), names)


def _is_module(node: ast.AST) -> bool:
    """Whether a class computes a stage or a step; of these single statements stay."""
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    return any(ast.unparse(base) == "nn.Module" for base in bases)


def _derives(node: ast.stmt, names: Names) -> bool:
    """Whether a class is made from another one of the text's own: that of an island from a step."""
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    return any(isinstance(base, ast.Name) and base.id in names.functions for base in bases)


def _parts(node: ast.stmt, path: tuple[str, ...], names: Names) -> Iterator[Part]:
    """The parts of a statement and of what it holds; ``path``: the statements around it."""
    if _is_text(node):
        return
    head, text = _head(node)
    found = next((reason for each in head if (reason := reason_of(each, names))), "")
    if found:
        yield Part(found, node.lineno, text, "; ".join([*path, text]))
    for word, body in (("", "body"), ("else of ", "orelse")):
        inside, here = getattr(node, body, []), (*path, f"{word}{text}")
        yield from _doubled(inside, here)
        for each in inside:
            yield from _parts(each, here, names)


def statements(
    node: ast.AST, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, range, list[ast.AST]]]:
    """Every statement of a text, with what stands around it, its lines and what it says.

    Of a statement that holds others these are the lines in front of them.
    """
    for word, body in (("", "body"), ("else of ", "orelse")):
        inside = [each for each in getattr(node, body, []) if isinstance(each, ast.stmt)]
        here = (*path, f"{word}{_head(node)[1]}") if isinstance(node, ast.stmt) else path
        for each in inside:
            if not _is_text(each):
                held = getattr(each, "body", None)
                behind = held[0].lineno if held else (each.end_lineno or each.lineno) + 1
                head, text = _head(each)
                test = [ast.If(each.test, [], [])] if isinstance(each, ast.If | ast.While) else []
                yield "; ".join([*here, text]), range(each.lineno, behind), [*test, *head]
                yield from statements(each, here)


def _doubled(
    body: list[ast.stmt], path: tuple[str, ...], known: frozenset[str] = frozenset()
) -> Iterator[Part]:
    """Functions and classes that take the name of an earlier one, or are made under a condition."""
    free = not path or path[-1].startswith("class ")
    seen = set(known)
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if not free or node.name in seen:
                text = f"{_head(node)[1]} once more"
                yield Part(CALLED, node.lineno, text, "; ".join([*path, text]))
            seen.add(node.name)


def _head(node: ast.stmt) -> tuple[list[ast.AST], str]:
    """What a statement says without the statements that it holds, and that as text."""
    match node:
        case ast.FunctionDef():
            return [*node.decorator_list, node.args], f"def {node.name}({ast.unparse(node.args)})"
        case ast.ClassDef():
            return [*node.bases], f"class {node.name}"
        case ast.If():
            return [node.test], f"if {ast.unparse(node.test)}"
        case ast.While():
            return [node.test], f"while {ast.unparse(node.test)}"
        case ast.For():
            text = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
            return [node.target, node.iter], text
    return [node], ast.unparse(node)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
