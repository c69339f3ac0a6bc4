"""Files that tests compare with: which test has which, and those that no test asks for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

DIFF_LINES = 40  # that a failure shows
LONGEST = 100  # characters of the name of a test's file
_SELECT = (  # options that leave tests out
    "keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise", "collectonly"
)  # fmt: skip


def stem_of(nodeid: str) -> str:
    """The name of a test's files: ``tests/test_plan.py::test_cut[tp-2]`` ->
    ``test_plan/test_cut-tp-2``.
    """
    file, _, test = nodeid.partition("::")
    name = re.sub("[^A-Za-z0-9_]+", "-", test).strip("-")
    if len(name) > LONGEST:
        name = f"{name[:LONGEST]}-{sha256(nodeid.encode()).hexdigest()[:8]}"
    return f"{Path(file).stem}/{name}"


def first_lines(lines: Sequence[str]) -> list[str]:
    """The first lines of a diff, and how many there are more."""
    rest = len(lines) - DIFF_LINES
    return [*lines[:DIFF_LINES], *[f"... {rest} more lines"] * (rest > 0)]


class StaleGoldens:
    """After a full and successful run, fail on files that no test asked for.

    With the option that writes files such ones are removed. ``key``: of the entries in a report's
    ``user_properties`` that name what a test asked for, from the root of the tests. ``roots``: the
    folders that are looked through.
    """

    def __init__(
        self, config: pytest.Config, option: str, key: str, roots: Iterable[Path] = ()
    ) -> None:
        self.config, self.option, self.key = config, option, key
        self.roots = {*roots}
        self.asked_for: set[Path] = set()
        self.skipped: set[Path] = set()
        self.chosen = False  # whether a plugin left tests out
        self.stale: list[Path] = []
        self.removed: list[Path] = []

    def place_of(self, nodeid: str) -> Path:
        """The path of a test's files, without what tells several of them apart."""
        raise NotImplementedError

    def pytest_deselected(self) -> None:
        self.chosen = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:  # a whole file: none of its tests is heard of
            self.skipped.add(self.place_of(f"{report.nodeid}::x").parent)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        names = (name for key, name in report.user_properties if key == self.key)
        self.asked_for |= {self.config.rootpath / str(name) for name in names}
        if report.skipped:
            self.skipped.add(self.place_of(report.nodeid))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(self.config, "workeroutput"):  # a worker of xdist: the controller decides
            told = {"roots": [str(path) for path in self.roots], "chosen": self.chosen}
            self.config.workeroutput[self.key] = told
            return
        if exitstatus != pytest.ExitCode.OK or self.chosen:
            return
        self.stale = [path for root in sorted(self.roots) for path in self._stale_in(root)]
        if self.config.getoption(self.option):
            while self.stale:
                self._remove(self.stale.pop())
        if self.stale:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """What a worker of xdist has seen."""
        told = getattr(node, "workeroutput", {}).get(self.key, {})
        self.roots |= {Path(path) for path in told.get("roots", ())}
        self.chosen |= told.get("chosen", False)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for paths, what in ((self.stale, "files that no test asks for"), (self.removed, "removed")):
            if paths:
                terminalreporter.section(f"golden {what}", red=paths is self.stale)
                for path in paths:
                    terminalreporter.line(self._name_of(path))
        if self.stale:
            terminalreporter.line(f"remove with: pytest {self.option}")

    def _stale_in(self, root: Path) -> Iterator[Path]:
        if is_full_run(self.config, root):
            yield from (path for path in sorted(root.rglob("*")) if self._is_stale(path, root))

    def _is_stale(self, path: Path, root: Path) -> bool:
        """Whether nobody asked for a file, nor for a folder around it, and no test was skipped that
        might have.
        """
        inside = path.relative_to(root).parts
        if not path.is_file() or any(part.startswith((".", "__")) for part in inside):
            return False
        file, test = (*inside, "")[:2]
        places = {root / file, root / file / test.partition(".")[0]}
        return self.asked_for.isdisjoint({path, *path.parents}) and places.isdisjoint(self.skipped)

    def _remove(self, path: Path) -> None:
        path.unlink()
        self.removed.append(path)
        for folder in path.parents:
            if folder in self.roots or any(folder.iterdir()):
                return
            folder.rmdir()

    def _name_of(self, path: Path) -> str:
        root = self.config.rootpath
        return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def is_full_run(config: pytest.Config, root: Path) -> bool:
    """Whether pytest was to run all tests of the folder in which a folder of goldens is."""
    selects = any(getattr(config.option, name, None) for name in _SELECT)
    here = config.invocation_params.dir
    run = {(here / argument).resolve() for argument in config.args if "::" not in argument}
    return not selects and not run.isdisjoint(root.resolve().parents)
