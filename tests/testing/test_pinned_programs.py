"""A repository of somebody's pins its model with ``partc.testing``, and is told what differs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from partc import Plan
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
TEST = "tests/test_model.py::test_step"
PINNED = "tests/partc_golden/test_model"
MODEL = """
import torch
from torch import nn


def made(hidden):
    model = nn.Sequential(nn.Linear(16, hidden), nn.GELU(), nn.Linear(hidden, 16))
    return model, (torch.zeros(8, 16), torch.zeros(8, 16)), loss_of


def loss_of(model, x, target):
    return nn.functional.mse_loss(model(x), target)
"""
TESTS = """
import partc
from theirs import made


def compiled(hidden, plan):
    model, batch, loss_of = made(hidden)
    return partc.compile(model, "dp=2", batch, loss=loss_of, plan=plan)


def test_step(partc_golden):
    partc_golden(compiled(24, "ddp"), graph=True)


def test_plans(partc_golden):
    partc_golden(compiled(24, "ddp"), name="plain")
    partc_golden(compiled(24, "zero1"), name="zero1")


def test_as_before(partc_golden):
    partc_golden(compiled(24, "ddp"))


def test_other_versions(partc_golden):
    partc_golden(compiled(24, "ddp"))
"""
FILES = {
    "conftest.py": 'pytest_plugins = ["partc.testing"]\n',
    "pyproject.toml": '[project]\nname = "theirs"\nversion = "1"\n',
    "theirs.py": MODEL,
    "tests/test_model.py": TESTS,
}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def change(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text(encoding="utf-8")
    assert old in text
    write(folder, name, text.replace(old, new))


def run_pytest(folder: Path, *words: str, **variables: str) -> tuple[int, str]:
    """Exit code and output of pytest in a folder, on a machine of somebody's."""
    path = os.pathsep.join([str(ROOT), str(folder)])
    kept = {n: v for n, v in os.environ.items() if n != "CI" and not n.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=folder, env={**kept, "PYTHONPATH": path, **variables}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=patience(), check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def pinned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with its model pinned."""
    folder = tmp_path_factory.mktemp("pinned")
    for name, text in FILES.items():
        write(folder, name, text)
    code, said = run_pytest(folder, "--partc-update")
    assert code == 0, said
    return folder


@pytest.fixture
def theirs(pinned: Path, tmp_path: Path) -> Path:
    """A clone of it."""
    return Path(shutil.copytree(pinned, tmp_path / "theirs"))


def in_order(said: str, *parts: str) -> None:
    """Fail unless the parts stand in a text one behind the other."""
    at = 0
    for part in parts:
        assert part in said[at:], f"{part!r} is not in what follows {parts}\n{said}"
        at = said.index(part, at) + len(part)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.exhaustive
def test_what_is_pinned(pinned: Path) -> None:
    files = files_in(pinned / PINNED / "test_step")
    assert {*files} == {"plan.toml", "stage0.py", "helpers.py", "graph.txt", "pinned.toml"}
    assert {*files_in(pinned / PINNED / "test_plans.zero1")} == {*files} - {"graph.txt"}
    assert Plan.load(pinned / PINNED / "test_step/plan.toml").preset == "ddp"
    assert "forward 0" in files["graph.txt"].decode()
    head = files["pinned.toml"].decode()
    in_order(head, f"# Written by: pytest {TEST} --partc-update", "[versions]", "torch =", "step_s")


@pytest.mark.exhaustive
def test_what_failures_print(theirs: Path) -> None:
    """Of a changed model, of a changed plan, of a changed model under another torch; the command at
    the end of the first accepts it.
    """
    for name in ("test_as_before", "test_other_versions"):
        head = (theirs / PINNED / name / "pinned.toml").read_text(encoding="utf-8")
        write(theirs, f"{PINNED}/{name}/pinned.toml", re.sub('torch = ".*"', 'torch = "2.9"', head))
    tests = TESTS.replace('(24, "ddp"), graph=True', '(40, "ddp"), graph=True')
    tests = tests.replace('(24, "zero1")', '(24, "fsdp")')
    before, _, last = tests.rpartition("24")
    write(theirs, "tests/test_model.py", f"{before}40{last}")
    files = files_in(theirs / "tests")
    code, said = run_pytest(theirs)
    assert code == 1
    assert "1 passed" in said
    assert files_in(theirs / "tests") == files  # nothing is written unless asked for
    _, model, rest = said.partition("_ test_step _")
    model, _, rest = rest.partition("_ test_plans _")
    plan, _, versions = rest.partition("_ test_other_versions _")
    in_order(
        model, f"{PINNED}/test_step is not what this test compiles", "plan       no key differs",
        "cost       step: ", "peak: ", "more than the +5% that the test allows", "bytes over dp: ",
        f"--- {PINNED}/test_step/stage0.py\n+++ now/stage0.py", '-    "_0_weight": ("0.weight"',
        f"accept with: pytest {TEST} --partc-update",
    )  # fmt: skip
    shown = model[model.index("--- tests") : model.index("\naccept with")].splitlines()
    assert len(shown) == 41
    assert re.fullmatch(r"\.\.\. \d+ more lines", shown[-1])
    in_order(
        plan, "test_plans.zero1 is not what this test compiles", "plan       preset: zero1 -> fsdp",
        "gather: { dp = step } -> { dp = use }", "cost       step: ", "--- ", "accept with: pytest",
    )  # fmt: skip
    in_order(
        versions, "is not what", "pinned with torch 2.9; this is torch 2.", "plan  ", "cost  ",
        "--- ", "as pinned, with other versions", "test_as_before: pinned with torch 2.9; this is",
    )  # fmt: skip
    accept = shlex.split(re.findall("accept with: pytest (.*)", model)[0])
    assert run_pytest(theirs, *accept)[0] == 0
    assert run_pytest(theirs, TEST)[0] == 0


@pytest.mark.exhaustive
def test_nothing_is_written_under_ci(theirs: Path) -> None:
    before = files_in(theirs / "tests")
    code, said = run_pytest(theirs, "--partc-update", CI="true")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "nothing is written where the variable CI is set" in said
    shutil.rmtree(theirs / PINNED / "test_step")
    code, said = run_pytest(theirs, TEST, CI="true")
    assert code == 1
    in_order(said, "test_step is not", "nothing to compare with: it does not exist", "accept with")
    kept = {
        name: each for name, each in before.items() if "golden/test_model/test_step/" not in name
    }
    assert files_in(theirs / "tests") == kept


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [(), ("-n", "2")])
def test_a_full_run_fails_on_stale_files(theirs: Path, processes: tuple[str, ...]) -> None:
    """A run of some tests does not, as it cannot know."""
    write(theirs, "tests/test_model.py", "def test_step():\n    pass\n")
    for words in (["-k", "step"], [TEST], ["tests/test_model.py"], ["-m", "not slow"]):
        if not processes:
            assert run_pytest(theirs, *words)[0] == 0
    for folder in ((), ("tests",)):
        code, said = run_pytest(theirs, *processes, *folder)
        assert code == pytest.ExitCode.TESTS_FAILED
        in_order(
            said, "no test asks for", f"{PINNED}/test_step/helpers.py", "remove with: pytest --pa"
        )
    if processes:
        code, said = run_pytest(theirs, *processes, "--partc-update")
        assert code == 0
        assert "removed" in said
        assert not (theirs / PINNED).exists()


@pytest.mark.exhaustive
def test_skipped_tests_keep_their_files(theirs: Path) -> None:
    tests = "".join(
        f"@pytest.mark.skip\ndef {name}():\n    pass\n"
        for name in ("test_step", "test_plans", "test_as_before", "test_other_versions")
    )
    write(theirs, "tests/test_more.py", "def test_nothing():\n    pass\n")
    for skipped in (tests, "pytest.importorskip('no_such_package')\n"):
        write(theirs, "tests/test_model.py", f"import pytest\n\n{skipped}")
        code, said = run_pytest(theirs)
        assert code == 0, said


UNCALLED = """
import pytest


@pytest.fixture
def later(partc_golden):
    yield
    with pytest.raises(Exception, match="no program"):
        partc_golden(None)


def test_uncalled(partc_golden):
    pass


def test_skipped(partc_golden):
    pytest.skip()


def test_failed(partc_golden):
    assert False


def test_called_later(later):
    pass
"""


@pytest.mark.exhaustive
def test_a_test_that_takes_the_fixture_and_never_calls_it_fails(tmp_path: Path) -> None:
    write(tmp_path, "conftest.py", FILES["conftest.py"])
    write(tmp_path, "test_uncalled.py", UNCALLED)
    code, said = run_pytest(tmp_path)
    assert code == 1
    assert "test_uncalled.py::test_uncalled takes partc_golden and never calls it" in said
    assert said.count("and never calls it, so") == 1
    assert re.search("1 failed, 2 passed, 1 skipped, 1 error", said)


def test_the_plugin_imports_no_torch() -> None:
    code = "import partc.testing, sys; assert 'torch' not in sys.modules"
    path = {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **path})
