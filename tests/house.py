"""The rooms (folders) of the source in their order, and which modules of a room import others.

A room imports from rooms before it alone. ``python -m tests.house [FOLDER]`` counts a checkout:
modules and lines of each room, files above 300 lines, imports that break the order, circles of
imports, lines of the README.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx as nx

HERE = Path(__file__).resolve().parents[1]
GROUND = "partc (ground)"  # words that all rooms use, directly in partc/
TOP = "partc (top)"  # what joins all rooms, directly in partc/
FACE = "partc"  # the package file alone, which gives each public name from its module
LONG = 300  # lines of a file

# Each room imports from rooms before it alone.
ROOMS = (
    GROUND,
    "partc.schedules",
    "partc.machines",
    "partc.plan",
    "partc.data",
    "partc.graph",
    "partc.rules",
    "partc.cost",
    "partc.trace",
    "partc.checks",
    "partc.passes",
    "partc.passes.canonical",
    "partc.passes.shard",
    "partc.passes.recompute",
    "partc.passes.overlap",
    "partc.passes.stages",
    "partc.passes.search.solver",
    "partc.passes.search.shardings",
    "partc.passes.search.plans",
    "partc.program",
    "partc.codegen",
    "partc.codegen.helpers",
    "partc.codegen.repeats",
    "partc.codegen.calls",
    "partc.codegen.bodies",
    "partc.codegen.files",
    "partc.codegen.account",
    "partc.dryrun",
    "partc.reports",
    "partc.pictures",
    "partc.live",
    "partc.verification",
    "partc.audit",
    "partc.measure",
    "partc.launch",
    "partc.doctor",
    TOP,
    "partc.control",
    "partc.wrappers",
    "partc.testing",
    "partc.failures",
    "partc.cli",
)
_TOP_NAMES = [
    "accounts",
    "api",
    "assemble",
    "cache_folder",
    "carried_plan",
    "compile_cache",
    "dumps",
    "further_plans",
    "given_plan",
    "idle_keys",
    "key_readers",
    "lowering",
    "partition_given",
    "other_inputs",
    "own_numbers",
    "pass_calls",
    "printing",
    "recipe",
    "replanned",
    "result_rows",
    "same_step",
    "sent_counts",
    "traced",
    "ways",
    "whole_batch",
]
_TOP_MODULES = {f"partc.{name}" for name in _TOP_NAMES}
_COMMAND_LINE = {"partc.__main__"}
_PASSES, _SEARCH = (
    "partc.passes",
    "partc.passes.search",
)  # folders of rooms, with no module of theirs
_DOTTED = re.compile(r"partc(\.[A-Za-z_]\w*)+\Z")
_OWN_OPS = "partc.ops."  # how rules and errors name the functions of partc.graph.ops


@dataclass(frozen=True)
class Import:
    """An import of one module of partc by another, or a string that names a module."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


@dataclass(frozen=True)
class House:
    """The modules of partc in a checkout, without tests."""

    root: Path

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of every module, by its import name."""
        found = {}
        for folder in ("partc", "passes", "codegen"):
            for path in sorted((self.root / folder).rglob("*.py")):
                inside = path.relative_to(self.root)
                linked = folder == "partc" and inside.parts[1] in ("passes", "codegen")
                if not linked and "__pycache__" not in inside.parts:
                    found[_name(inside)] = path
        return found

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of a module of partc by another, wherever it stands in its file."""
        return [
            Import(name, imported, line)
            for name, path in self.files.items()
            for imported, line in sorted(self._imported(path))
            if imported != name
        ]

    def _imported(self, path: Path) -> set[tuple[str, int]]:
        """The modules of partc that a file imports or names in a string, with line numbers."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {(alias.name, node.lineno) for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found.add((inner if inner in self.files else node.module, node.lineno))
            elif isinstance(node, ast.Constant) and str(node.value) in self.files:
                found.add((str(node.value), node.lineno))
        return {each for each in found if each[0] in self.files}

    def stale_names(self) -> list[str]:
        """Strings that look like a module of partc, or a name in one, where no module exists."""
        return [
            f"{name}:{node.lineno} says {node.value!r}"
            for name, path in self.files.items()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if _DOTTED.match(node.value) and not node.value.startswith(_OWN_OPS)
            if not {node.value, node.value.rpartition(".")[0]} & {*self.files}
        ]

    def upward(self) -> list[Import]:
        """The imports from a room that comes later in ROOMS; there should be none."""
        place = {room: number for number, room in enumerate(ROOMS)}
        return [
            each
            for each in self.imports
            if FACE not in (each.importer, each.imported)
            if place[room_of(each.imported)] > place[room_of(each.importer)]
        ]

    def circles(self) -> list[set[str]]:
        """The sets of modules that import each other, directly or through other modules."""
        graph = nx.DiGraph((each.importer, each.imported) for each in self.imports)
        graph.remove_nodes_from([FACE])
        return [found for found in nx.strongly_connected_components(graph) if len(found) > 1]

    def lines(self, name: str) -> int:
        """The number of lines of a module."""
        return len(self.files[name].read_text(encoding="utf-8").splitlines())


def _name(path: Path) -> str:
    """A module's import name: ``passes/shard/propagate.py -> partc.passes.shard.propagate``."""
    parts = [*path.parts[:-1], path.stem]
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "partc" else ["partc", *parts])


def room_of(module: str) -> str:
    """The room of a module: its folder, or the nearest folder around it that is a room."""
    if module in _COMMAND_LINE:
        return "partc.cli"
    if module in _TOP_MODULES:
        return TOP
    if module == _SEARCH:
        return "partc.passes.search.solver"
    room = module
    while room not in ROOMS:
        room = room.rpartition(".")[0]
        if room == "partc":
            return GROUND
    return room


def part_of(module: str, files: Mapping[str, Path]) -> str:
    """The folder of a module inside of its room, which has parts: ``partc.program.ranks``; ""
    directly in the room.
    """
    folder = module if files[module].name == "__init__.py" else module.rpartition(".")[0]
    return "" if folder in (room_of(module), FACE) or room_of(module) in (GROUND, TOP) else folder


def report(house: House) -> Iterator[str]:
    """The counts as lines of text."""
    sizes: dict[str, list[int]] = {}
    parts: dict[str, list[int]] = {}
    for name in house.files:
        sizes.setdefault(room_of(name) if name != FACE else GROUND, []).append(house.lines(name))
        if name != FACE and (part := part_of(name, house.files)):
            parts.setdefault(part, []).append(house.lines(name))
    for room in ROOMS:
        if room in sizes:
            yield f"{room:32} {len(sizes[room]):4} modules {sum(sizes[room]):7,} lines"
        for part in sorted(each for each in parts if room_of(each) == room):
            inside = f"  of it {part.removeprefix(room)}"
            yield f"{inside:32} {len(parts[part]):4} modules {sum(parts[part]):7,} lines"
    every = [size for each in sizes.values() for size in each]
    readme = (house.root / "README.md").read_text(encoding="utf-8")
    yield f"{'all':32} {len(every):4} modules {sum(every):7,} lines"
    yield f"files above {LONG} lines: {sum(size > LONG for size in every)}"
    yield f"imports that run upward: {len(house.upward())}"
    yield f"circles: {len(house.circles())}, of {sum(map(len, house.circles()))} modules"
    yield f"lines of README.md: {len(readme.splitlines())}"


if __name__ == "__main__":
    print("\n".join(report(House(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE))))
