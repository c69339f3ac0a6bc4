"""A pytest plugin that pins compiled programs; pytest loads it where partc is installed.

In: a program that a test has compiled. Out: nothing if it is the one in the files beside the test,
else a failure that says what differs. Start: ``partc_golden`` here; ``pin.py`` reads and writes the
files, ``told.py`` says what differs, ``stale.py`` finds files that no test asks for. Never: torch
before a test has imported it; a file written where the variable CI is set.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from partc.testing.stale import StaleGoldens, stem_of

if TYPE_CHECKING:
    from partc.program import Program

FOLDER = "partc_golden"  # beside the files with the tests
OPTION = "--partc-update"
KEY = "partc_golden"  # of what a test's report says it has compared with
PASSED = pytest.StashKey[bool]()
OTHER_VERSION = "partc_golden: equal, but other versions"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--partc-update``."""
    group = parser.getgroup("partc", "programs that partc compiles")
    group.addoption(
        OPTION, action="store_true",
        help="write the programs that partc_golden compares with; refused where CI is set",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to write under CI, and look for stale files when all tests have run."""
    if config.getoption(OPTION) and os.environ.get("CI", "").lower() not in ("", "0", "false"):
        raise pytest.UsageError(
            f"{OPTION}: nothing is written where the variable CI is set. Run it on a machine of "
            "yours, read `git diff`, and commit the files."
        )
    config.pluginmanager.register(PinnedPrograms(config), "partc-pinned-programs")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note of a test that it has passed, for the fixture's end."""
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture
def partc_golden(request: pytest.FixtureRequest) -> Iterator[Golden]:
    """Compare a program with the one in ``partc_golden/<test file>/<test>/`` beside the test file.

    See ``Golden``. A test that passes without a call of it has compared nothing, and fails.
    """
    yield Golden(request)
    node = request.node
    if node.stash.get(PASSED, False) and KEY not in dict(node.user_properties):
        pytest.fail(
            f"{node.nodeid} takes partc_golden and never calls it, so that nothing was compared. "
            "Call it with the program, partc_golden(program), or leave the argument out.",
            pytrace=False,
        )


@dataclass(frozen=True)
class Golden:
    """What the fixture ``partc_golden`` is: a function of a program, for one test."""

    request: pytest.FixtureRequest

    def __call__(
        self, program: Program, *, name: str = "", graph: bool = False,
        step: float | None = 0.05, peak: float | None = 0.05, sent: float | None = 0.05,
    ) -> None:  # fmt: skip
        """Fail unless plan and text of a program are the pinned ones, and its cost is not larger.

        Args:
            program: what ``partc.compile`` gave; from ``partc.load`` it may be too, without graph.
            name: tells several programs of one test apart; letters, digits, ``_`` and ``-``.
            graph: pin the graph of the model's step, too, as it was before any plan. The model is
                traced once more for it.
            step: by how much the predicted seconds may grow: 0.05 for 5 %. None: by any.
            peak: the same for the bytes of the fullest rank at its peak.
            sent: the same for the bytes that a rank sends over each axis.

        Raises:
            UsageError: a name or a bound is none; ``graph`` of a program that was loaded; two
                programs of a test have one name; a file that partc did not write is in the way.
        """
        from partc.testing.pin import Pin
        from partc.testing.told import Bounds, told

        bounds = Bounds(step=step, peak=peak, sent=sent)
        folder = self._folder(name)
        new = Pin.of(program, graph=graph)
        if self.request.config.getoption(OPTION):
            new.write(folder, f"pytest {shlex.quote(self.request.node.nodeid)} {OPTION}")
        found = told(Pin.read(folder), new, bounds, self._name_of(folder))
        if found.other_versions and not found.lines:
            said = f"{self._name_of(folder)}: {found.other_versions}"
            self.request.node.user_properties.append((OTHER_VERSION, said))
        if found.lines:
            lines = [f"{self._name_of(folder)} is not what this test compiles", *found]
            accept = f"accept with: {accept_command(self.request)}"
            pytest.fail("\n".join([*lines, accept]), pytrace=False)

    def _folder(self, name: str) -> Path:
        """Where the program stands; it is noted that the test has asked for it."""
        from partc.testing.pin import check_name

        folder = folder_of(self.request.config.rootpath, self.request.node.nodeid)
        folder = folder.with_name(f"{folder.name}.{check_name(name)}") if name else folder
        asked = KEY, self._name_of(folder)
        if asked in self.request.node.user_properties:
            check_name(name, taken=True)
        self.request.node.user_properties.append(asked)  # travels with the test's report
        return folder

    def _name_of(self, folder: Path) -> str:
        """The path of a folder from the root of the tests, as reports name it."""
        return os.path.relpath(folder, self.request.config.rootpath).replace(os.sep, "/")


def accept_command(request: pytest.FixtureRequest) -> str:
    """What to type to pin what a test compiles."""
    test = str(request.config.cwd_relative_nodeid(request.node.nodeid))
    return f"pytest {shlex.quote(test)} {OPTION}"


def folder_of(root: Path, nodeid: str) -> Path:
    """Where the programs of a test stand."""
    file = root / nodeid.partition("::")[0]
    return file.parent / FOLDER / stem_of(nodeid)


class PinnedPrograms(StaleGoldens):
    """Programs that no test asks for; and those that were pinned with other versions."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config, OPTION, KEY)
        self.other_versions: list[str] = []

    def place_of(self, nodeid: str) -> Path:
        return folder_of(self.config.rootpath, nodeid)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Pinned programs are no tests; and here is where they are seen."""
        if collection_path.name != FOLDER or not collection_path.is_dir():
            return None
        self.roots.add(collection_path)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        super().pytest_runtest_logreport(report)
        if report.when == "call":
            self.other_versions += [str(t) for n, t in report.user_properties if n == OTHER_VERSION]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        super().pytest_terminal_summary(terminalreporter)
        if self.other_versions:
            terminalreporter.section("programs that are as pinned, with other versions")
            for line in self.other_versions:
                terminalreporter.line(line)
