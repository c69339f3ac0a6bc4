"""The fixture ``golden``, which compares text of a test with a file; and which tests a run takes.

``golden(str(plan))`` fails if the file differs; ``pytest --update-golden`` writes the file anew.

Of costly tests a run takes a few rows, spread over their table (``@pytest.mark.rows(4)``), or none
(``@pytest.mark.exhaustive``); all where it is asked for with ``--exhaustive``, or a test is named
(``pytest tests/x.py::test_y``). A test of goldens has no such mark: its files would be stale.
"""

import ast
import gc
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from partc.testing.stale import StaleGoldens, first_lines, stem_of

if TYPE_CHECKING:
    from partc.verification.processes import Processes

FOLDER = Path(__file__).parent / "golden"
GARBAGE = 50_000  # new objects between two runs of the garbage collector; graphs are many objects
LONGEST = (  # files whose tests wait for processes; one of them that came last would run alone
    "tests/lowering/test_own_passes.py", "tests/codegen/test_compiled.py",
    "tests/measure/test_calibrate.py", "tests/test_packaging.py", "tests/docs/test_blocks.py",
    "tests/whole/test_checkpoint_meshes.py", "tests/program/test_killed_saves.py",
    "tests/testing/test_pinned_programs.py",
    "tests/launch/test_launched_runs.py", "tests/measure/test_sync.py",
    "tests/failures/test_other_worlds.py",
)  # fmt: skip
collect_ignore = ["golden"]  # golden sources are named after their tests, so they look like tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")
    parser.addoption("--exhaustive", action="store_true", help="take all rows of costly tests")


def pytest_configure(config: pytest.Config) -> None:
    compute_in_one_thread()
    if not hasattr(config, "workerinput"):  # under xdist the controller sees every report
        config.pluginmanager.register(Stale(config, "--update-golden", "golden", [FOLDER]))


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave costly rows out; run the longest files first, then those with many tests."""
    if not takes_all(config):
        left = {*left_out(items)}
        items[:] = [item for item in items if item not in left]
    tests = Counter(file_of(item) for item in items)
    items.sort(key=lambda item: (file_of(item) not in LONGEST, -tests[file_of(item)]))


def takes_all(config: pytest.Config) -> bool:
    """Whether a run takes every row: it is asked for, or tests are named one by one."""
    return bool(config.option.exhaustive) or any("::" in str(name) for name in config.args)


def left_out(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Of tests marked ``rows(4)`` all rows but four; and tests that are marked ``exhaustive``."""
    tables: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive"):
            yield item
        elif item.get_closest_marker("rows"):
            tables[item.nodeid.partition("[")[0]].append(item)
    for rows in tables.values():
        mark = rows[0].get_closest_marker("rows")
        taken = spread(len(rows), mark.args[0] if mark else len(rows))
        yield from (item for at, item in enumerate(rows) if at not in taken)


def spread(length: int, number: int) -> set[int]:
    """So many places of a table, from the first to the last, as even as they can be."""
    last = max(min(number, length) - 1, 1)
    return {round(i * (length - 1) / last) for i in range(min(number, length))}


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
        path = FOLDER / (stem_of(request.node.nodeid) + suffix)
        asked = "golden", path.relative_to(FOLDER.parent.parent).as_posix()
        assert asked not in request.node.user_properties, f"{path.name} is compared twice"
        request.node.user_properties.append(asked)  # travels with the test's report
        if suffix == ".py":
            ast.parse(text, path.name)
        _compare(path, text.rstrip("\n") + "\n", request.config.option.update_golden)

    return compare


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
    return "\n".join(first_lines([*unified_diff(old, new, "golden", "now", n=2, lineterm="")]))


class Stale(StaleGoldens):
    """Golden files that no test asked for."""

    def place_of(self, nodeid: str) -> Path:
        return FOLDER / stem_of(nodeid)
