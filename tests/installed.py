"""A package that somebody has installed, and commands of partc in new processes that find it."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from partc.cli.main import main
from partc.verification.processes import Processes
from tests.patience import patience

TRAIN = """
import torch
from torch import nn


def loss_of(model, x, target):
    return nn.functional.mse_loss(model(x), target)


def setup():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    return model, (torch.randn(12, 8), torch.randn(12, 8)), loss_of
"""


@dataclass(frozen=True)
class Folder:
    """A folder with modules, on the path of the processes that are started in it."""

    path: Path

    def write(self, **modules: str) -> None:
        """Modules by name; ``train:setup`` is a model of three layers."""
        for name, text in {"train": TRAIN, **modules}.items():
            (self.path / f"{name}.py").write_text(text)

    def install(self, group: str, entry: str, package: str = "theirs") -> None:
        """The entry point of a package, as pip leaves it behind."""
        info = self.path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{package} = {entry}\n")

    def partc(self, *words: str, code: int = 0) -> str:
        """What a command prints, in a new process."""
        with Processes(1, timeout=patience()) as process:
            ((found, printed, told),) = process.run(command, self.path, words)
        assert found == code, printed + told
        return str(printed)

    def refused(self, *words: str) -> dict[str, str]:
        """The parts of the error that a command ends with; none of them is empty."""
        parts: dict[str, str] = json.loads(self.partc(*words, "--json", code=2))["error"]
        assert all(parts.values()), parts
        return parts

    def texts(self, folder: str) -> dict[str, str]:
        """The plan and the rank programs of a compile."""
        files = (self.path / folder).glob("*.*")
        return {
            file.name: file.read_text() for file in files if file.suffix in (".py", ".toml")
        }  # fmt: skip


def command(folder: Path, words: tuple[str, ...]) -> tuple[int, str, str]:
    """The exit code of a command in a folder, what it prints, and what it says of errors."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()) as told:
        code = main(list(words))
    return code, printed.getvalue(), told.getvalue()
