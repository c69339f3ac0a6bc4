import os
from pathlib import Path

import pytest

from partc.atomic import atomic_directory, atomic_write
from partc.errors import UsageError

FAILURES = [RuntimeError, KeyboardInterrupt]


def _save(path: Path, text: str, failure: type[BaseException] | None = None) -> None:
    with atomic_directory(path) as folder:
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
    _save(tmp_path / "build", "1")
    rename = Path.rename

    def fail_for_new(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise failure
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(failure):
        _save(tmp_path / "build", "2")
    assert _tree(tmp_path) == {"build/program.json": "1", "build/rank0.py": "1"}
    assert os.listdir(tmp_path) == ["build"]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (["notes.txt"], "it has no program.json"),
        (["program.json", "checkpoints"], "it also holds checkpoints"),
        (["program.json", "weights.safetensors"], "it also holds weights.safetensors"),
    ],
)
def test_foreign_directory_is_refused(tmp_path: Path, files: list[str], why: str) -> None:
    (tmp_path / "build").mkdir()
    for name in files:
        (tmp_path / "build" / name).write_text("mine")
    with pytest.raises(UsageError, match=why):
        _save(tmp_path / "build", "2")
    assert sorted(os.listdir(tmp_path / "build")) == sorted(files)


def test_directory_filled_meanwhile_is_refused(tmp_path: Path) -> None:
    def save() -> None:
        with atomic_directory(tmp_path / "build"):
            atomic_write(tmp_path / "build/notes.txt", "mine")

    with pytest.raises(UsageError, match="partc did not write it"):
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
    _save(tmp_path / "build", "2")
    assert _tree(tmp_path / "build")["rank0.py"] == "2"


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
