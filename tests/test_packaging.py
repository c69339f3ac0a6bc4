"""The wheel away from its checkout is whole, runs, and is typed; half a checkout gives no wheel.

What `make` installs, it installs to the end.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parent.parent
READ_BY_BUILD = "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"
LINKS = "passes", "codegen"
BYTECODE = shutil.ignore_patterns("__pycache__")
NOT_PASSED_ON = "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL"
TIMEOUT_S = 600.0  # against what never ends; a loaded machine is only slow
BUILD = "from setuptools import build_meta; print(build_meta.build_{}({!r}))"

USE = '''\
"""What a user of partc writes: all of it is type-checked, main() is run."""

import sys
from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import partc
from partc import Mesh, PartcError, Plan, Program


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).pow(2).mean()
    return loss


def main(out: Path, machines: list[str]) -> None:
    model, inputs = nn.Linear(8, 8), (torch.ones(4, 8),)
    program = partc.compile(model, {"dp": 2}, inputs, loss=loss_of, plan=Plan(preset="fsdp"))
    assert_type(program, Program)
    program.save(out)
    again = assert_type(partc.load(out), Program)
    assert again.source(rank=1) == program.source(rank=1)
    partc.verify(again, model, inputs, loss=loss_of).check()
    assert_type(Plan.load(out / "plan.toml"), Plan)
    for name in machines:
        assert Mesh.load(name).topology is not None
    try:
        partc.load(out / "absent")
    except PartcError as error:
        assert_type(error.do, str)
    print(partc.__file__)


def train(program: Program, model: nn.Module, ids: Tensor) -> float:
    stage = program.module()
    stage.load_full(model)
    optimizer = torch.optim.AdamW(stage.parameters())
    loss: Tensor = stage.step(ids)
    assert_type(stage.clip_grad_norm_(1.0), Tensor)
    optimizer.step()
    return loss.item()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
'''
MISUSE = """\
from torch import nn

import partc
from partc import compiel  # wrong: no such name

model = nn.Linear(8, 8)
program = partc.compile(model, 2, None)  # wrong: 2 is no mesh
program.sauce(rank=0)  # wrong: no such method
partc.lode("build")  # wrong: no such function
"""


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, its links as links, with what an earlier build left behind."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("partc", *LINKS):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=BYTECODE)
    for name in READ_BY_BUILD:
        shutil.copy(ROOT / name, copy)
    (copy / "tests").mkdir()
    (copy / "tests" / "test_nothing.py").touch()
    (copy / "build" / "lib" / "partc").mkdir(parents=True)
    (copy / "build" / "lib" / "partc" / "gone.py").touch()
    return copy


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel; other packages are found in ours."""
    folder = tmp_path_factory.mktemp("user")
    ran([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    install = "install", "--quiet", "--no-deps", "--no-index", str(wheel)
    ran([sys.executable, "-m", "pip", "--python", str(python), *install])
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(ran(asked).stdout.strip())
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


def ran(
    command: list[str], where: Path = Path("/"), code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run away from the checkout, which PYTHONPATH may name, and from `make test`."""
    env = {name: text for name, text in os.environ.items() if name not in NOT_PASSED_ON}
    done = subprocess.run(
        command, cwd=where, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def built_wheel(source: Path, out: Path) -> Path:
    """What ``pip wheel`` makes of a folder or an sdist with the setuptools of this environment."""
    options = "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(out)
    ran([sys.executable, "-m", "pip", "wheel", *options, str(source)])
    (found,) = out.iterdir()
    return found


def files_in(wheel: Path) -> set[str]:
    """The names of what is installed, without the wheel's own records."""
    with ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


def files_of_source() -> set[str]:
    """Every file of partc/, through its links, but bytecode."""
    walked = os.walk(ROOT / "partc", followlinks=True)
    found = {Path(folder, name) for folder, _, names in walked for name in names}
    return {str(path.relative_to(ROOT)) for path in found if path.parent.name != "__pycache__"}


# what is in the wheel -----------------------------------------------------------------------------
def test_wheel_has_the_files_of_the_source_and_no_other(wheel: Path) -> None:
    assert files_in(wheel) == files_of_source()


@pytest.mark.exhaustive
def test_wheel_of_an_sdist_is_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    told = ran([sys.executable, "-c", BUILD.format("sdist", str(tmp_path))], checkout)
    sdist = tmp_path / told.stdout.split()[-1]
    (tmp_path / "wheel").mkdir()
    assert files_in(built_wheel(sdist, tmp_path / "wheel")) == files_in(wheel)
    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    assert not [*(tmp_path / "unpacked").rglob("test_*")]  # they need a checkout


# half a checkout ----------------------------------------------------------------------------------
@pytest.fixture
def half(checkout: Path, tmp_path: Path) -> Path:
    """What git makes of a clone with core.symlinks=false: each link is a file with its target."""
    shutil.copytree(checkout, tmp_path / "half", symlinks=True)
    for name in LINKS:
        link = tmp_path / "half" / "partc" / name
        target = os.readlink(link)
        link.unlink()
        link.write_text(target)
    return tmp_path / "half"


@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_half_a_checkout_is_not_built(half: Path, tmp_path: Path, kind: str) -> None:
    told = ran([sys.executable, "-c", BUILD.format(kind, str(tmp_path))], half, code=1)
    assert told.stderr.startswith("partc/passes and partc/codegen: the code behind these links")
    assert "core.symlinks=false" in told.stderr
    assert "Run `git config core.symlinks true`" in told.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["half"]


def test_half_a_checkout_is_not_imported(half: Path) -> None:
    told = ran([sys.executable, "-c", "import partc.api"], half, code=1)
    assert f"ImportError: {half / 'partc' / 'passes'} and " in told.stderr
    assert "core.symlinks=false" in told.stderr


# away from the checkout ---------------------------------------------------------------------------
@pytest.mark.exhaustive
def test_wheel_compiles_saves_loads_and_verifies(python: Path, wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(USE)
    tables = [Path(name) for name in files_in(wheel) if name.endswith(".toml")]
    machines = sorted(path.stem for path in tables if path.parent.name == "machines")
    assert "cpu" in machines
    told = ran([str(python), "use.py", "build", *machines], tmp_path)
    assert Path(told.stdout.strip()).is_relative_to(python.parent.parent)
    assert (tmp_path / "build" / "run.py").exists()


@pytest.mark.exhaustive
def test_wheel_has_the_command(python: Path, tmp_path: Path) -> None:
    told = ran([str(python.with_name("partc")), "explain", "PTC030"], tmp_path)
    assert told.stdout.startswith("PTC030: sharding")
    assert ran([str(python), "-m", "partc", "explain", "PTC030"], tmp_path).stdout == told.stdout


@pytest.mark.exhaustive
def test_wheel_brings_the_pytest_plugin_with_and_without_a_line_in_conftest(
    python: Path, tmp_path: Path
) -> None:
    (tmp_path / "test_theirs.py").write_text("def test_step(partc_golden):\n    pass\n")
    for line in ("", 'pytest_plugins = ["partc.testing"]\n'):
        (tmp_path / "conftest.py").write_text(line)
        told = ran([str(python), "-m", "pytest", "-p", "no:cacheprovider"], tmp_path, code=1).stdout
        assert "test_theirs.py::test_step takes partc_golden and never calls it" in told


@pytest.mark.exhaustive
@pytest.mark.parametrize("checker", ["mypy", "pyright"] if shutil.which("pyright") else ["mypy"])
def test_type_checkers_know_the_wheel(checker: str, python: Path, tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(USE)
    (tmp_path / "misuse.py").write_text(MISUSE)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    command = mypy if checker == "mypy" else ["pyright", "--pythonpath", str(python)]
    told = ran([*command, "use.py", "misuse.py"], tmp_path, code=1).stdout
    found = re.findall(r"(\w+\.py):(\d+)(?::\d+)?(?: -|:) error", told)
    lines = [i for i, line in enumerate(MISUSE.splitlines(), 1) if "# wrong" in line]
    assert {(file, int(line)) for file, line in found} == {("misuse.py", line) for line in lines}


# make ---------------------------------------------------------------------------------------------
STAND_IN = """\
#!/bin/sh
# stands for Python in a Makefile: makes environments of itself, installs as the file "pip" says
case "$1 $2" in
    "-c "*) exit 0 ;;
    "-m venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip") exit $(cat pip) ;;
esac
"""


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder in which `make .venv/installed` installs nothing."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def test_make_goes_on_after_an_install_that_failed_and_after_a_change(made: Path) -> None:
    make = ["make", "PYTHON=./python", ".venv/installed"]
    is_done = ["make", "--question", *make[1:]]
    (made / "pip").write_text("1")
    ran(make, made, code=2)
    ran(is_done, made, code=1)
    (made / "pip").write_text("0")
    ran(make, made)
    ran(is_done, made)
    later = (made / ".venv" / "installed").stat().st_mtime + 1
    os.utime(made / "pyproject.toml", (later, later))
    ran(is_done, made, code=1)


def test_make_says_which_python_it_needs(made: Path) -> None:
    (made / "python").write_text("#!/bin/sh\nexit 1\n")  # as one that is too old
    told = ran(["make", "PYTHON=./python", "demo"], made, code=2).stderr
    assert told.startswith(".venv: cannot be made by ./python (partc needs Python 3.11 or newer;")
    assert "make PYTHON=/path/to/python" in told
    assert not (made / ".venv").exists()
