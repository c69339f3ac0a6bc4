import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import partc
from partc import exchange as exchanges
from partc.atomic import atomic_directory, atomic_files, atomic_write, check_output, what_helps
from partc.cli.main import main
from partc.errors import PartcError, UsageError
from partc.metrics import JsonLines
from tests.house import HERE
from tests.patience import patience

FAILURES = [RuntimeError, KeyboardInterrupt]


def ours(folder: Path) -> list[str]:
    return ["program.json", "rank0.py", "rank1.py"]


def _save(path: Path, text: str, failure: type[BaseException] | None = None) -> None:
    with atomic_directory(path, ours) as folder:
        (folder / "program.json").write_text(text)
        if failure:
            raise failure
        (folder / "rank0.py").write_text(text)


def _tree(path: Path) -> dict[str, str]:
    files = (p for p in sorted(path.rglob("*")) if p.is_file())
    return {p.relative_to(path).as_posix(): p.read_text() for p in files}


def test_directory_appears_on_success(tmp_path: Path) -> None:
    _save(tmp_path / "a/build", "1")
    assert _tree(tmp_path) == {"a/build/program.json": "1", "a/build/rank0.py": "1"}


def test_directory_has_ordinary_permissions(tmp_path: Path) -> None:
    _save(tmp_path / "build", "1")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "build").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_saved_program_is_replaced_whole(tmp_path: Path) -> None:
    _save(tmp_path / "build", "1")
    (tmp_path / "build/rank1.py").write_text("left over")
    _save(tmp_path / "build", "2")
    assert _tree(tmp_path) == {"build/program.json": "2", "build/rank0.py": "2"}
    assert os.listdir(tmp_path) == ["build"]


def test_link_to_saved_program_stays_a_link(tmp_path: Path) -> None:
    _save(tmp_path / "build", "1")
    (tmp_path / "link").symlink_to("build")
    _save(tmp_path / "link", "2")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "build/rank0.py").read_text() == "2"


@pytest.mark.parametrize("failure", FAILURES)
def test_interrupted_first_save_leaves_nothing(
    tmp_path: Path, failure: type[BaseException]
) -> None:
    with pytest.raises(failure):
        _save(tmp_path / "a/build", "1", failure)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("failure", FAILURES)
def test_interrupted_save_keeps_earlier_program(
    tmp_path: Path, failure: type[BaseException]
) -> None:
    _save(tmp_path / "build", "1")
    before = _tree(tmp_path)
    with pytest.raises(failure):
        _save(tmp_path / "build", "2", failure)
    assert _tree(tmp_path) == before
    assert os.listdir(tmp_path) == ["build"]


@pytest.mark.parametrize("failure", FAILURES)
def test_interrupted_swap_restores_earlier_program(
    tmp_path: Path, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system cannot exchange two folders in one step."""
    _save(tmp_path / "build", "1")
    rename = Path.rename

    def fail_for_new(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise failure
        return rename(self, target)

    monkeypatch.setattr(exchanges, "_in_one_step", lambda *_: False)
    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(failure):
        _save(tmp_path / "build", "2")
    assert _tree(tmp_path) == {"build/program.json": "1", "build/rank0.py": "1"}
    assert os.listdir(tmp_path) == ["build"]


DIE = """
import os, signal, sys
from pathlib import Path
from partc import atomic, exchange
die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
where = sys.argv[1]
if where == "after the exchange":
    atomic.shutil.rmtree = die
if where == "between two renames":
    exchange._in_one_step = lambda *_: False
    rename = Path.rename
    Path.rename = lambda a, b: die() if a.name == "new" else rename(a, b)
with atomic.atomic_directory("build", lambda _: ["program.json", "rank0.py"]) as folder:
    for name in ("program.json", "rank0.py"):
        (folder / name).write_text("2")
    if where == "while writing":
        die()
"""


@pytest.mark.parametrize(
    ("where", "stands"),
    [("while writing", "1"), ("after the exchange", "2"), ("between two renames", None)],
)
def test_a_killed_save_leaves_one_program_whole_and_the_next_cleans_up(
    tmp_path: Path, where: str, stands: str | None
) -> None:
    _save(tmp_path / "build", "1")
    done = subprocess.run(
        [sys.executable, "-c", DIE, where], cwd=tmp_path, check=False, timeout=patience(),
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    if stands:
        assert _tree(tmp_path / "build") == {"program.json": stands, "rank0.py": stands}
    with pytest.raises(RuntimeError):  # also one that fails puts back what was moved away
        _save(tmp_path / "build", "3", RuntimeError)
    assert os.listdir(tmp_path) == ["build"]
    assert _tree(tmp_path / "build").keys() == {"program.json", "rank0.py"}


def test_what_another_process_is_writing_stays(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "build", ours) as folder:
        _save(tmp_path / "build", "1")  # as a second process would
        assert folder.is_dir()
        (folder / "rank0.py").write_text("2")
    assert _tree(tmp_path) == {"build/rank0.py": "2"}


def test_an_interrupt_takes_effect_when_all_stands(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def save() -> None:
        with atomic_directory(tmp_path / "build", ours) as folder:
            signal.raise_signal(signal.SIGINT)
            (folder / "rank0.py").write_text("1")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with pytest.raises(KeyboardInterrupt):
        save()
    assert _tree(tmp_path) == {"build/rank0.py": "1"}


@pytest.mark.parametrize(
    "stranger",
    ["notes.txt", "train.py", "my.toml", "mine.json", "programs/0/mine.py", "rank0.py/mine.py",
     "__pycache__/mine.txt", "__pycache__/mine.cpython-311.pyc", "sub/__pycache__/x.txt"],
)  # fmt: skip
def test_what_partc_did_not_write_is_never_deleted(tmp_path: Path, stranger: str) -> None:
    (tmp_path / "build" / stranger).parent.mkdir(parents=True)
    (tmp_path / "build" / stranger).write_text("mine")
    with pytest.raises(UsageError, match="which partc did not write"):
        _save(tmp_path / "build", "2")
    assert _tree(tmp_path) == {f"build/{stranger}": "mine"}


def test_an_empty_folder_of_the_user_is_not_deleted(tmp_path: Path) -> None:
    _save(tmp_path / "build", "1")
    (tmp_path / "build/results").mkdir()
    with pytest.raises(UsageError, match="it also holds results/"):
        _save(tmp_path / "build", "2")


def test_directory_filled_meanwhile_is_refused(tmp_path: Path) -> None:
    def save() -> None:
        with atomic_directory(tmp_path / "build", ours):
            atomic_write(tmp_path / "build/notes.txt", "mine")

    with pytest.raises(UsageError, match="partc did not write"):
        save()
    assert _tree(tmp_path) == {"build/notes.txt": "mine"}


def test_file_is_not_replaced_by_a_directory(tmp_path: Path) -> None:
    (tmp_path / "build").write_text("mine")
    with pytest.raises(UsageError, match="it is a file"):
        _save(tmp_path / "build", "2")


def test_empty_and_run_directories_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    _save(tmp_path / "build", "1")
    (tmp_path / "build/__pycache__").mkdir()
    (tmp_path / "build/__pycache__/rank0.cpython-311.pyc").write_text("")
    _save(tmp_path / "build", "2")
    assert _tree(tmp_path / "build")["rank0.py"] == "2"


@pytest.mark.parametrize("name", ["a.txt/build", "x" * 256, "a\0b", "x/" * 3000])
def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("mine")
    with pytest.raises(UsageError, match="cannot be written"):
        _save(tmp_path / name, "1")
    with pytest.raises(UsageError, match="cannot be written"):
        atomic_write(tmp_path / name, "1")
    with pytest.raises(UsageError, match="cannot be written"):
        check_output(tmp_path / name, ours)
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_name_as_long_as_the_system_allows(tmp_path: Path) -> None:
    for text in "12":
        _save(tmp_path / ("x" * 255), text)
    assert os.listdir(tmp_path) == ["x" * 255]


@pytest.mark.parametrize(
    ("number", "do"),
    [
        (errno.ENOSPC, "Make room"),
        (errno.EEXIST, "A file stands where a folder is needed"),
        (errno.ENOTDIR, "A file stands where a folder is needed"),
        (errno.EROFS, "where you may write."),
        (errno.EIO, "where you may write, with room"),
    ],
)
def test_each_reason_has_its_remedy(number: int, do: str) -> None:
    assert do in what_helps(OSError(number, os.strerror(number)))


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> int:
        raise OSError(28, os.strerror(28))

    _save(tmp_path / "build", "1")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UsageError, match=r"\(No space left on device.*Make room on its disk"):
        _save(tmp_path / "build", "2")
    monkeypatch.undo()
    assert _tree(tmp_path) == {"build/program.json": "1", "build/rank0.py": "1"}


def test_write_replaces_file(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a/plan.toml", "1\n")
    atomic_write(tmp_path / "a/plan.toml", "2\n")
    assert _tree(tmp_path) == {"a/plan.toml": "2\n"}


@pytest.mark.parametrize("failure", FAILURES)
def test_interrupted_write_keeps_earlier_file(
    tmp_path: Path, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, target: Path) -> None:
        raise failure

    atomic_write(tmp_path / "plan.toml", "1")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(failure):
        atomic_write(tmp_path / "plan.toml", "2")
    assert _tree(tmp_path) == {"plan.toml": "1"}
    assert os.listdir(tmp_path) == ["plan.toml"]


@pytest.mark.parametrize("write", [atomic_write, atomic_files, JsonLines, partc.load])
def test_no_folder_is_called_as_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    more = {atomic_write: ("",), atomic_files: ({"a": ""},)}.get(write, ())
    with pytest.raises(PartcError, match=r"a shell reads ~.* Write /home/ada/x"):
        write("~/x", *more)
    assert main(["picture", "b", "--out=~/x.svg"]) == 2
    assert _tree(tmp_path) == {}
