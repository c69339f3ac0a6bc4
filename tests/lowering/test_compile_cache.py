"""Programs of the cache: taken where nothing differs, made where anything does."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc import cache_folder
from partc.cache_folder import CacheFolder
from partc.errors import UsageError
from partc.program import Program
from tests.patience import patience


class Scaled(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(6, 8), nn.Linear(8, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x))) * self.scale
        return y


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6), torch.randn(rows, 4)


def compiled(folder: Path, model: nn.Module | None = None, **options: Any) -> Program:
    given = {"mesh": "dp=2", "inputs": batch(), "loss": loss_of, "plan": "fsdp", **options}
    return partc.compile(model or Scaled(), cache=folder, **given)


def entries(folder: Path) -> int:
    return len(list(folder.glob("*/key.json")))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    compiled(folder)
    assert entries(folder) == 1
    return folder


@pytest.fixture
def kept(filled: Path, tmp_path: Path) -> Path:
    """A folder with the program of ``compiled``."""
    return Path(shutil.copytree(filled, tmp_path / "kept"))


@pytest.fixture
def no_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was compiled")

    monkeypatch.setattr("partc.api.Job.with_plan", fails)


@pytest.mark.exhaustive
def test_what_is_taken_is_what_is_compiled(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled(1.0)
    with monkeypatch.context() as patched:
        patched.setattr("partc.api.Job.with_plan", None)
        program = compiled(kept, model)
    made = partc.compile(model, "dp=2", batch(), loss=loss_of, plan="fsdp")
    assert program.digests() == made.digests()
    assert str(program.cost) == str(made.cost)
    assert program.wanted == made.wanted
    assert program.mesh.topology == made.mesh.topology
    assert program.basis.as_json() == made.basis.as_json()
    names = [sorted(each.name for each in p.numbers.numbers) for p in (program, made)]
    assert names[0] == names[1]
    model.scale = 2.0
    assert program.numbers.all_changes() == ["model.scale was 1.0 when compiled and is 2.0 now"]
    partc.verify(program, Scaled(), batch(), loss=loss_of).check()


CHANGES: dict[str, dict[str, Any]] = {
    "the model": {"model": Scaled(2.0)},
    "mesh": {"mesh": "dp=4"},
    "machines": {"mesh": replace(partc.Mesh.load("dgx-h100", 2), axes=(("dp", 2),))},
    "plan": {"plan": "ddp"},
    "an entry": {"plan": partc.Plan(preset="fsdp", bucket_mb=1.0)},
    "rows": {"inputs": batch(4)},
    "batch": {"batch": "local"},
    "recompute": {"recompute": "none"},
    "strict": {"strict": True},
    "disable": {"disable": ["fuse_bias"]},
    "memory": {"memory_bytes": 1 << 30},
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.usefixtures("no_compile")
def test_a_change_is_compiled(kept: Path, name: str) -> None:
    with pytest.raises(AssertionError, match="it was compiled"):
        compiled(kept, **CHANGES[name])


@pytest.mark.parametrize("part", ["torch", "partc"])
@pytest.mark.usefixtures("no_compile")
def test_other_versions_are_compiled(
    kept: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if part == "torch":
        monkeypatch.setattr(torch, "__version__", "2.13.99")
    else:
        monkeypatch.setattr("partc.compile_cache._source_digest", lambda: "another checkout")
    with pytest.raises(AssertionError, match="it was compiled"):
        compiled(kept)


def damage(kept: Path) -> None:
    (source,) = kept.glob("*/program/stage0.py")
    source.write_text(source.read_text() + "\n")


def cut_off(kept: Path) -> None:
    (manifest,) = kept.glob("*/program/program.json")
    manifest.unlink()


@pytest.mark.exhaustive
@pytest.mark.parametrize("hurt", [damage, cut_off])
def test_a_damaged_entry_is_made_anew(
    kept: Path, hurt: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    hurt(kept)
    with caplog.at_level(logging.WARNING, "partc"):
        compiled(kept)
    assert "cannot be read, and is made anew" in caplog.text
    assert entries(kept) == 1
    caplog.clear()
    compiled(kept)
    assert not caplog.text


@pytest.mark.exhaustive
def test_a_batch_that_is_not_along_dim_0(tmp_path: Path) -> None:
    """What was found of its dims holds while the step is the same with each of the inputs."""
    seen = {"width": 2.0}

    def loss(model: nn.Module, x: Tensor) -> Any:
        return (model(x.cumsum(0)) * (seen["width"] if x.shape == (5, 4, 6) else 1.0)).mean()

    given: dict[str, Any] = {"inputs": torch.randn(5, 2, 6), "loss": loss, "batch": "local"}
    plan = partc.Plan(preset="ddp")
    first = compiled(tmp_path, plan=plan, **given)
    assert list(first.inputs.values()) == [((5, 4, 6), "float32")]
    assert compiled(tmp_path, plan=plan, **given).digests() == first.digests()
    seen["width"] = 3.0  # seen with the whole batch alone
    assert compiled(tmp_path, plan=plan, **given).digests() != first.digests()


def test_programs_on_demand_are_kept(kept: Path) -> None:
    compiled(kept).for_shapes(batch(4), modes=("train", "eval"))
    assert entries(kept) == 3
    again = compiled(kept).for_shapes(batch(4), modes=("train", "eval"))
    assert (entries(kept), len(again.others)) == (3, 2)


def test_the_oldest_entries_go(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "MOST_ENTRIES", 2)
    for rows in (4, 6):
        compiled(kept, inputs=batch(rows))
    assert entries(kept) == 2
    compiled(kept, inputs=batch(4))
    assert entries(kept) == 2


def test_what_others_register_is_compiled_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from partc.rules.table import RULES, Rule

    monkeypatch.setitem(RULES._entries, "aten.gcd", Rule("..., ...->...", module="my_rules"))
    with caplog.at_level(logging.WARNING, "partc"):
        compiled(tmp_path)
    assert "compiled without the cache: the rule of aten.gcd" in caplog.text
    assert entries(tmp_path) == 0


def test_a_traced_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was traced earlier"):
        partc.compile(partc.Traced(Scaled(), batch(), loss_of), "dp=2", cache=tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, "partc"):
        assert compiled(tmp_path / "file" / "cache").sources
    assert "cannot be written" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "partc"):
        assert compiled(tmp_path / "file").sources
    [said] = [each.getMessage() for each in caplog.records]
    assert "it is a file, and programs are kept in a folder. Name a folder" in said


HOLDER = """
import fcntl, sys, time
lock = open(sys.argv[1], "a")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_a_process_that_dies_lets_others_go_on(tmp_path: Path) -> None:
    entered = threading.Event()

    def enter() -> None:
        with CacheFolder(tmp_path).alone("Net-" + "0" * 40):
            entered.set()

    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock-0")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        waiting = threading.Thread(target=enter)
        waiting.start()
        assert not entered.wait(0.2)
        holder.kill()
        waiting.join(timeout=patience())
        assert entered.is_set()
