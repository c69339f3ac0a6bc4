"""What a command refuses before torch is imported, and what it takes without a word."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from partc.cli.early import check_compile, check_saved
from partc.cli.main import main
from partc.cli.model_names import model_types
from partc.errors import LoadError, PartcError
from tests.patience import patience

FAULTS = {
    "--plan megabroken": "Did you mean 'megatron'",
    "--plan fsdp+ddp": "exclude each other",
    "--plan none.toml": "none.toml",
    "--mesh dp:2": "Write 'dp=2'",
    "--mesh none.toml": "none.toml",
    "--out file": "it is a file",
    "--out full": "it has no program.json",
    "hf:lama": "Did you mean 'llama'",
    "hf:none/config.json": "there is no such file",
    "trian:setup": "Did you mean 'train'?",
    "/none/train.py:setup": "Change to its folder, and name the module: cd /none; train:setup",
    "train.py:setup": "Write the module, as Python imports it from here: train:setup",
    "llama": "Write hf:llama",
    "hf:tiny.json": 'line 2: "model_type": "llama",: nothing follows this comma',
    "hf:tiny": "nothing follows this comma: delete it",
    "broken:setup": "does not parse (SyntaxError: '(' was never closed, at broken.py:2: x = (1",
}


def given(fault: str) -> list[str]:
    """A right command line with one fault in it."""
    words = {"model": "train:setup", "--mesh": "dp=2", "--plan": "fsdp", "--out": "build"}
    option, _, value = fault.rpartition(" ")
    words[option or "model"] = value
    return ["compile", words.pop("model"), *(x for pair in words.items() for x in pair)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('it was run')")
    (tmp_path / "file").write_text("")
    (tmp_path / "broken.py").write_text("import torch\nx = (1\n")
    (tmp_path / "tiny").mkdir()
    for name in ("tiny.json", "tiny/config.json"):
        (tmp_path / name).write_text('{\n"model_type": "llama",\n}\n')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    return tmp_path


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_with_what_may_be_meant(
    fault: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given(fault)) == 2
    assert FAULTS[fault] in capsys.readouterr().err
    assert not (here / "build").exists()


def test_torch_is_not_imported_for_it(here: Path) -> None:
    asked = f"""
import sys
from partc.cli.main import main
for arguments in {[given(fault) for fault in FAULTS]}:
    assert main(arguments) == 2, arguments
print([name for name in ("torch", "sympy", "transformers") if name in sys.modules])
"""
    ran = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, timeout=patience(),
        cwd=here, env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert ran.stdout.splitlines()[-1:] == ["[]"], ran.stderr


@pytest.mark.parametrize("plan", ["auto", "ddp", "fsdp+megatron-sp", 'preset = "ddp"\n'])
def test_what_is_right_passes(plan: str, here: Path) -> None:
    for model in ("train:setup", "hf:llama", "package_of_nobody_else:f"):
        (here / "package_of_nobody_else").mkdir(exist_ok=True)
        check_compile(argparse.Namespace(model=model, mesh="dp=2,tp=2", plan=plan, out="build"))


def test_model_types_are_those_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert {*CONFIG_MAPPING.keys()} <= {*model_types()}


def test_a_missing_folder_names_the_one_beside_it(here: Path) -> None:
    (here / "build").mkdir()
    (here / "build" / "program.json").write_text("{}")
    with pytest.raises(LoadError, match=r"no such folder .*Did you mean 'build'\?"):
        check_saved("biuld")
    check_saved("build")


def test_what_passes_early_is_refused_later_if_it_is_wrong(here: Path) -> None:
    """A folder with a program is looked at closely once all is imported."""
    build = here / "build"
    build.mkdir()
    (build / "program.json").write_text("{}")
    check_compile(argparse.Namespace(model="hf:llama", mesh="dp=2", plan="ddp", out="build"))
    from partc.atomic import check_output
    from partc.program.written import written_files

    with pytest.raises(PartcError, match="does not say which files are partc's own"):
        check_output("build", written_files)
