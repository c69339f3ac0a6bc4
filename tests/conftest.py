"""The fixture ``golden``, which compares text of a test with a file under tests/golden.

``golden(str(plan))`` fails if the file differs; ``pytest --update-golden`` writes the file anew.
"""

import ast
import gc
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from partc.verification.processes import Processes

FOLDER = Path(__file__).parent / "golden"
DIFF_LINES = 40
GARBAGE = 10_000  # new objects between two runs of the garbage collector; graphs are many objects
LONGEST = (  # files whose tests wait for processes; one of them that came last would run alone
    "tests/lowering/test_own_passes.py", "tests/codegen/test_compiled.py",
    "tests/measure/test_calibrate.py", "tests/test_packaging.py", "tests/docs/test_blocks.py",
    "tests/whole/test_checkpoint_meshes.py", "tests/program/test_killed_saves.py",
    "tests/launch/test_launched_runs.py", "tests/doctor/test_doctor_of_ranks.py",
)  # fmt: skip
collect_ignore = ["golden"]  # golden sources are named after their tests, so they look like tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")


def pytest_configure(config: pytest.Config) -> None:
    compute_in_one_thread()
    if not hasattr(config, "workerinput"):  # under xdist the controller sees every report
        config.pluginmanager.register(StaleGoldens(config))


def compute_in_one_thread() -> None:
    """Let torch compute in one thread: several test processes would fight for the same cores.

    torch reads these variables when it is imported, in this process and in ranks that tests start;
    so conftest.py must not import torch before. The second variable limits torch.compile.
    """
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, "1")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Tensors that a test file draws as it is imported are the same whatever came before."""
    if isinstance(collector, pytest.Module):
        same_draws()


@pytest.fixture(autouse=True)
def draws() -> None:
    """So are those that a test draws, alone or behind others."""
    same_draws()


@pytest.fixture(autouse=True)
def group_of_a_test() -> Iterator[None]:
    yield from no_group_stays()


@pytest.fixture(autouse=True, scope="module")
def group_of_a_file() -> Iterator[None]:
    yield from no_group_stays()


def no_group_stays() -> Iterator[None]:
    """End the process group that a stage of one rank begins where there is none: the next test may
    begin its own.
    """
    before = has_group()
    yield
    if has_group() and not before:
        sys.modules["torch.distributed"].destroy_process_group()


def has_group() -> bool:
    dist = sys.modules.get("torch.distributed")  # not imported here: most tests need none
    return dist is not None and bool(dist.is_initialized())


def same_draws() -> None:
    import torch

    random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, then files with many tests before those with few."""
    tests = Counter(file_of(item) for item in items)
    items.sort(key=lambda item: (file_of(item) not in LONGEST, -tests[file_of(item)]))


def file_of(item: pytest.Item) -> str:
    """The file of a test from the root of the checkout, with slashes."""
    return item.nodeid.partition("::")[0]


@pytest.fixture(scope="module")
def world() -> Iterator["Processes"]:
    """Four gloo processes for the tests of a file that ask for them."""
    from partc.verification.processes import Processes
    from tests.patience import patience

    with Processes(4, timeout=patience()) as processes:
        yield processes


def pytest_collection_finish() -> None:
    from partc.verification.processes import PRELOADED

    PRELOADED.extend(["partc.api", "torch._dynamo", "tests.warm"])
    gc.collect()
    gc.freeze()  # imported modules stay: to look through them at every collection takes long
    gc.set_threshold(GARBAGE)


@pytest.fixture(scope="module")
def laws_once() -> Iterator[None]:
    """Lets tests of one module that search plans for the same graph share its scaling models."""
    from tests.laws import read_once  # here, as it imports torch, which other tests need not do

    with read_once():
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compare text with tests/golden/<test file>/<test name><suffix>; a .py must also parse.

    A test may compare one text for each suffix.
    """

    def compare(text: str, suffix: str = ".txt") -> None:
        name = _stem(request.node.nodeid) + suffix
        assert ("golden", name) not in request.node.user_properties, f"{name} is compared twice"
        request.node.user_properties.append(("golden", name))  # travels with the test's report
        if suffix == ".py":
            ast.parse(text, name)
        _compare(FOLDER / name, text.rstrip("\n") + "\n", request.config.option.update_golden)

    return compare


def _stem(nodeid: str) -> str:
    """`tests/test_plan.py::test_cut[tp-2]` becomes `test_plan/test_cut-tp-2`."""
    file, _, test = nodeid.partition("::")
    return f"{Path(file).stem}/{re.sub('[^A-Za-z0-9_]+', '-', test).strip('-')}"


def _compare(path: Path, text: str, update: bool) -> None:
    """Fail with a diff if a golden file differs from a text; with ``update`` write it first."""
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    expected = path.read_text(encoding="utf-8") if path.exists() else None
    if expected != text:
        name = path.relative_to(FOLDER.parent.parent).as_posix()
        body = "there is no such file" if expected is None else _diff(expected, text)
        pytest.fail(f"{name}\n{body}\naccept with: pytest --update-golden", pytrace=False)


def _diff(expected: str, text: str) -> str:
    """The first lines of a unified diff from the golden text to the present one."""
    old, new = expected.splitlines(), text.splitlines()
    lines = list(unified_diff(old, new, "golden", "now", n=2, lineterm=""))
    rest = len(lines) - DIFF_LINES
    return "\n".join(lines[:DIFF_LINES] + [f"... {rest} more lines"] * (rest > 0))


class StaleGoldens:
    """After a full and successful run, fail on golden files that no test asked for.

    With --update-golden such files are removed.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.asked_for: set[str] = set()
        self.skipped: set[str] = set()
        self.stale: list[Path] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.asked_for |= {str(name) for key, name in report.user_properties if key == "golden"}
        if report.skipped:
            self.skipped.add(_stem(report.nodeid))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.OK or not _is_full_run(self.config):
            return
        self.stale = [path for path in sorted(FOLDER.rglob("*")) if self._is_stale(path)]
        if self.config.option.update_golden:
            while self.stale:
                self.stale.pop().unlink()
        if self.stale:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.stale:
            terminalreporter.section("golden files that no test asks for", red=True)
            for path in self.stale:
                terminalreporter.line(path.relative_to(FOLDER.parent.parent).as_posix())
            terminalreporter.line("remove with: pytest --update-golden")

    def _is_stale(self, path: Path) -> bool:
        name = path.relative_to(FOLDER)
        skipped = name.with_suffix("").as_posix() in self.skipped
        return path.is_file() and name.as_posix() not in self.asked_for and not skipped


def _is_full_run(config: pytest.Config) -> bool:
    """Whether pytest was called bare, so that every test of the project has run."""
    options = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise")
    selects = any(getattr(config.option, name, None) for name in (*options, "collectonly"))
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not selects
