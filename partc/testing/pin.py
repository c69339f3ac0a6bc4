"""What is pinned of a program, and its files: plan, roles, versions, cost."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import torch

from partc.atomic import atomic_directory
from partc.errors import UsageError
from partc.file_text import Unreadable, file_text, toml_table
from partc.program import PLAN, SCHEDULE, Program
from partc.program.hooks import NAME as HOOKS
from partc.program.manifest import OTHERS
from partc.reports.numbers_of import FULLEST, STEP, message_bytes, peaks, seconds, transfers
from partc.version import __version__

HEAD = "pinned.toml"
GRAPH = "graph.txt"
OURS = (".py", ".toml", ".txt", ".csv")  # what the files of a pinned program are called
PIPELINE = "messages between stages"


@dataclass(frozen=True)
class Pin:
    """A program as it is pinned.

    ``texts``: by the name of their files, as ``plan.toml``. ``versions``: of partc, torch and
    packages that the model's modules come from. ``step_s``: predicted seconds. ``peak_bytes``: of
    the fullest rank. ``sent_bytes``: what a rank sends, by axis. None where nothing predicts it.
    """

    texts: Mapping[str, str]
    versions: Mapping[str, str] = field(default_factory=dict)
    step_s: float | None = None
    peak_bytes: int | None = None
    sent_bytes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, *, graph: bool = False) -> Self:
        """What is pinned of a program; UsageError for what is none, or for a graph of no model."""
        if not isinstance(program, Program):
            raise UsageError(
                where="partc_golden", what=f"a {type(program).__name__} is no program",
                why="it compares plan, text and cost of one",
                do="Give what partc.compile returned.",
            )  # fmt: skip
        texts = dict(_texts(program))
        if graph:
            texts[GRAPH] = _graph_of(program)
        step, peak = seconds(program).get(STEP), peaks(program).get(FULLEST)
        return cls(
            {name: f"{text.rstrip()}\n" for name, text in texts.items()},
            dict(_versions(program)),
            None if step is None else float(f"{step:.6g}"),
            None if peak is None else int(peak),
            _sent(program),
        )

    @classmethod
    def read(cls, folder: Path) -> Self | Unreadable:
        """What is pinned in a folder, or why there is nothing that can be read."""
        if not folder.is_dir():
            return Unreadable("it does not exist")
        names = sorted(
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*")
            if path.is_file() and path.suffix in OURS
        )
        try:
            texts = {name: file_text(folder / name) for name in names}
            head = toml_table(texts.pop(HEAD, ""))
            return cls(texts, **_numbers(head))
        except Unreadable as error:
            return Unreadable(f"{folder.name}: {error}")

    def write(self, folder: Path, command: str) -> None:
        """Put the files in the place of those that were there, whole or not at all.

        UsageError if the folder holds other files. ``command``: what writes them again.
        """
        with atomic_directory(folder, _written) as new:
            for name, text in {HEAD: self._head(command), **self.texts}.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_text(text, encoding="utf-8", newline="\n")

    def _head(self, command: str) -> str:
        lines = [f"# Written by: {command}", "", "[versions]"]
        lines += [f'{name} = "{version}"' for name, version in self.versions.items()]
        lines += ["", "[cost]"]
        numbers = {"step_s": self.step_s, "peak_bytes": self.peak_bytes}
        lines += [f"{name} = {each}" for name, each in numbers.items() if each is not None]
        lines += ["", "[cost.sent_bytes]  # of a rank, by mesh axis"]
        lines += [f'"{axis}" = {num}' for axis, num in self.sent_bytes.items()]
        return "\n".join([*lines, ""])


def check_name(name: str, *, taken: bool = False) -> str:
    """The name of one of several programs; UsageError for what is none."""
    if taken or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UsageError(
            where=f"partc_golden(name={name!r})",
            what="a second program has this name" if taken else "it is no name of a program",
            why="a folder is called so",
            do="Give each program of a test a name of letters, digits, _ and -.",
        )
    return name


def _texts(program: Program, place: str = "") -> Iterator[tuple[str, str]]:
    """The texts of a program, and of those of other shapes and modes."""
    yield f"{place}{PLAN}", program.plan
    yield from ((f"{place}{name}", text) for name, text in sorted(program.sources.items()))
    if program.schedule:
        yield f"{place}{SCHEDULE}", program.schedule
    if program.hooks:
        yield f"{place}{HOOKS}", program.hooks
    for number, other in enumerate(program.others):
        yield from _texts(other, f"{place}{OTHERS}/{number}/")


def _graph_of(program: Program) -> str:
    if program.recipe is None:
        raise UsageError(
            where="partc_golden(graph=True)", what="a loaded program has no model to trace",
            why="its graph is that of a model", do="Compile it in the test, or leave graph out.",
        )  # fmt: skip
    return str(program.recipe.graph(program))


def _sent(program: Program) -> dict[str, int]:
    """Bytes that a rank sends in a step (of a pipeline: all stages in a microbatch), by axis."""
    found: dict[str, int] = {}
    for (axis, _), (_, num) in sorted(transfers(program).items()):
        found[axis] = found.get(axis, 0) + num
    sent = message_bytes(program)
    return found if sent is None else {**found, PIPELINE: sent}


def _versions(program: Program) -> Iterator[tuple[str, str]]:
    """Of torch without the machine that it was built for, as 2.13.0 of 2.13.0+cpu."""
    yield "partc", __version__
    yield "torch", torch.__version__.partition("+")[0]
    model = program.recipe and program.recipe.held()
    modules = model.modules() if model else ()
    for name in sorted({type(module).__module__.partition(".")[0] for module in modules}):
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        if name != "torch" and "site-packages" in Path(file).parts:
            try:
                yield name, metadata.version(name)
            except metadata.PackageNotFoundError:  # its distribution is called otherwise
                continue


def _numbers(head: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a Pin in the table of a pinned.toml; Unreadable for what has none."""
    try:
        cost = head["cost"]
        step, peak = cost.get("step_s"), cost.get("peak_bytes")
        return {
            "versions": {str(name): str(each) for name, each in head["versions"].items()},
            "step_s": None if step is None else float(step),
            "peak_bytes": None if peak is None else int(peak),
            "sent_bytes": {str(a): int(num) for a, num in cost.get("sent_bytes", {}).items()},
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Unreadable(f"{HEAD} has no [versions] and [cost] as partc writes them") from None


def _written(folder: Path) -> list[str]:
    """The files of a pinned program; none where there is none."""
    if not (folder / HEAD).is_file():
        return []
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix in OURS)
    return [path.relative_to(folder).as_posix() for path in files]
