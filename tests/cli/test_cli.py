"""The command line: text and JSON, exit codes, errors in four parts."""

from __future__ import annotations

import argparse
import importlib
import json
import linecache
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from partc import __version__
from partc.cli.main import main
from partc.cli.models import find_model
from partc.cli.options import COMMANDS
from partc.cli.target import Sizes, parameters_on_meta
from partc.errors import UsageError
from tests.example_program import example_batch, example_loss, example_model, example_program
from tests.patience import patience

MODEL = "tests.example_program:cli_target"


def build(folder: Path, edit: tuple[str, str] = ("", "")) -> str:
    from dataclasses import replace

    program = example_program()
    source = program.source().replace(*edit)
    replace(program, sources={"role0.py": source}).save(folder)
    return str(folder)


def last_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_explain_shows_the_plan_and_the_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build(tmp_path)
    assert main(["explain", folder]) == 0
    shown = capsys.readouterr().out
    assert "GatedMLP on dp=2 tp=2" in shown
    assert "ranks 0 to 3: role0.py" in shown
    assert main(["explain", folder, "--source", "--rank", "3"]) == 0
    assert capsys.readouterr().out.strip() == example_program().source(3).strip()
    assert main(["explain", folder, "--json"]) == 0
    assert last_json(capsys)["mesh"] == {"dp": 2, "tp": 2}


def test_explain_with_the_model_shows_formulas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Callable[..., None]
) -> None:
    out = str(tmp_path / "build")
    named = ["compile", MODEL, "--mesh", "dp=2,tp=2", "--plan", "fsdp+megatron", "--out", out]
    assert main(named) == 0
    capsys.readouterr()
    assert main(["explain", out, "--model", MODEL]) == 0
    shown = capsys.readouterr().out
    golden(shown[shown.index("  formulas") : shown.index("\nchoices")])
    assert main(["explain", out, "--model", MODEL, "--json"]) == 0
    formulas = last_json(capsys)["cost"]["formulas"]
    assert {"flops", "moved_bytes", "param_bytes", "saved_bytes"} <= formulas.keys()
    assert main(["explain", out, "--model", "tests.example_program:other_target"]) == 2
    assert "compiled for another model" in capsys.readouterr().err


def test_explain_shows_error_codes_and_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "ptc030"]) == 0
    assert "PTC030: sharding" in capsys.readouterr().out
    assert main(["explain", "--rules", "--json"]) == 0
    assert last_json(capsys)["aten.mm"] == "mk,kn->mn"
    assert main(["explain", "--rules", "aten.mm"]) == 0
    assert capsys.readouterr().out == (
        "aten.mm: a rule in partc/rules/families/matmul.py\n  letters  mk,kn->mn\n  linear   0|1\n"
    )
    assert main(["explain", "--rules", "aten::gelu", "--json"]) == 0
    (gelu,) = last_json(capsys)["ops"]
    assert (gelu["op"], gelu["how"]) == ("aten.gelu.default", "elementwise")
    assert main(["explain", "--rules", "aten.mmm", "--json"]) == 2
    assert "Did you mean aten.mm" in last_json(capsys)["error"]["do"]


def test_verify_says_equal_or_different(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", build(tmp_path / "right"), "--model", MODEL]) == 0
    assert "equal within 1.0e-09" in capsys.readouterr().out
    wrong = build(tmp_path / "wrong", ("(2 / 96)", "(1 / 96)"))
    assert main(["verify", wrong, "--model", MODEL, "--json"]) == 1
    report = last_json(capsys)
    assert not report["ok"]
    assert report["worst"]["error"] == pytest.approx(0.5)


def test_verify_refuses_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", build(tmp_path), "--model", "tests.example_program:other_target"]) == 2
    assert "compiled for another model" in capsys.readouterr().err


def test_check_accepts_edits_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = build(tmp_path)
    assert main(["check", folder]) == 0
    with (tmp_path / "role0.py").open("a") as file:
        file.write("# mine\n")
    assert main(["check", folder]) == 2
    assert main(["check", folder, "--accept-edits"]) == 0
    assert main(["check", folder]) == 0
    capsys.readouterr()


def test_diff_shows_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = build(tmp_path / "one"), build(tmp_path / "two", ("(2 / 96)", "(1 / 96)"))
    assert main(["diff", one, one]) == 0
    assert main(["diff", one, two]) == 1
    assert "role0.py: 1 line gone, 1 new" in capsys.readouterr().out
    assert main(["diff", one, two, "--source"]) == 1
    assert "+        d_down = sub * (1 / 96) * self.scale" in capsys.readouterr().out


def test_errors_have_a_code_and_four_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(tmp_path), "--json"]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("PTC060 ")
    assert set(json.loads(told.out)["error"]) == {"code", "where", "what", "why", "do"}
    assert main(["explain"]) == 2
    with pytest.raises(SystemExit) as caught:
        main(["compile"])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [([], 2), (["--help"], 0), (["--version"], 0), (["compile"], 2), (["explain"], 2)],
)
def test_help_and_usage_errors_do_not_wait_for_torch(arguments: list[str], code: int) -> None:
    asked = f"""
import sys
from partc.cli.main import main
try:
    code = main({arguments})
except SystemExit as exit:
    code = exit.code
print(code, "torch" in sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, timeout=patience()
    )
    assert ran.stdout.splitlines()[-1] == f"{code} False"


def test_a_bare_call_shows_the_help_as_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert (told.out, told.err) == ("", capsys.readouterr().out)


def test_version_tells_what_a_report_of_a_bug_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    told = f"partc {__version__}, torch {version('torch')}, Python {platform.python_version()}\n"
    assert capsys.readouterr().out == told


def test_version_without_torch_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", absent)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert ", no torch, Python" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_has_a_help(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = argparse.ArgumentParser()
    COMMANDS[command].add_options(alone)
    assert " ".join((COMMANDS[command].function().__doc__ or "").split()) == COMMANDS[command].help
    assert [action.dest for action in alone._actions if not action.help] == []
    with pytest.raises(SystemExit):
        main([command, "--help"])  # a stray % would raise here
    assert capsys.readouterr().out.startswith(f"usage: partc {command}")


def test_what_was_called_a_report_still_is() -> None:
    import partc
    from partc.reports.report import ReportPage
    from partc.verification.report import Report, Verification

    assert partc.Report is partc.ReportPage is ReportPage
    assert Report is Verification


def test_public_names_are_no_modules_names() -> None:
    import partc

    for name in partc.__all__:
        assert getattr(partc, name).__name__ == name
        assert find_spec(f"partc.{name}") is None  # importing it would hide the public name


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``partc.api`` with a compile that gives the example: these tests are about the command."""
    import partc

    importlib.import_module("partc.api")  # what is put in its place now comes back
    api = ModuleType("partc.api")
    api.compile = lambda *args, **options: example_program()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "partc.api", api)
    monkeypatch.setattr(partc, "api", api, raising=False)
    return api


def test_compile_writes_a_folder(
    tmp_path: Path, compiles: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "build")
    command = ["compile", MODEL, "--mesh", "dp=2,tp=2", "--plan", "megatron", "--out", out]
    assert main(command) == 0
    told = capsys.readouterr()
    assert f"torchrun --nproc-per-node 4 {out}/run.py" in told.out
    assert "compiling for dp=2,tp=2, plan megatron" in told.err
    assert main(["check", out]) == 0


def test_compile_deletes_no_file_of_yours(
    tmp_path: Path, compiles: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "build"
    command = ["compile", MODEL, "--mesh", "dp=2,tp=2", "--plan", "megatron", "--out", str(out)]
    assert main(command) == 0
    (out / "train.py").write_text("mine")
    assert main(command) == 2
    assert "it also holds train.py, which partc did not write" in capsys.readouterr().err
    assert (out / "train.py").read_text() == "mine"


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:recompute says nothing here")  # the model has no blocks
@pytest.mark.parametrize(("said", "written"), [("block", '"block"'), ("up,down", '["up", "down"]')])
def test_what_is_computed_again_is_a_word_or_paths(
    tmp_path: Path, said: str, written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "build"
    named = ["compile", MODEL, "--mesh", "dp=2", "--plan", "fsdp", "--out", str(out)]
    assert main([*named, "--recompute", said]) == 0
    assert f"recompute = {written}" in (out / "plan.toml").read_text()
    assert main([*named, "--recompute", "blocks"]) == 2
    assert "'block'" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_reader_that_has_enough_ends_a_command_quietly(tmp_path: Path) -> None:
    """As ``partc explain build | head -1``: no error, no traceback."""
    command = [sys.executable, "-m", "partc", "explain", build(tmp_path / "build")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as told:
        assert told.stdout is not None
        assert told.stderr is not None
        told.stdout.close()
        said = told.stderr.read().decode()
        assert (told.wait(patience(60)), said) == (141, "")


def test_an_interrupt_is_one_line_and_writes_nothing(
    tmp_path: Path, compiles: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    compiles.compile = interrupt
    assert main(["compile", MODEL, "--mesh", "dp=2", "--out", str(tmp_path / "build")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_an_error_not_a_traceback(
    tmp_path: Path, compiles: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "build")
    assert main(["compile", MODEL, "--mesh", "dp=2", "--out", out]) == 2
    assert "cannot be written (Not a directory" in capsys.readouterr().err


# models --------------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("llama", "no colon"),
        ("nowhere:setup", "No module named"),
        ("tests.example_program:nothing", "no attribute 'nothing'"),
        ("tests.example_program:example_batch", "it gives \\(Tensor, Tensor\\)"),
        ("tests.example_program:example_model", "without example inputs"),
        ("hf:nothing", "nothing"),
        ("hf:no/config.json", "no/config.json"),
        ("hf:sam2_video", "inference_session"),
        ("hf:clipseg_vision_model", "It is a part of hf:clipseg"),
    ],
)
def test_names_that_are_no_model_are_explained(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        find_model(name, Sizes())


USERS_MISTAKES = {
    "def make():\n    raise ValueError('my own')": "it raises ValueError: my own (mistake.py:2",
    "def make(n):\n    pass": "it needs the argument",
    "import not_installed": "it raises ModuleNotFoundError: No module named 'not_installed'",
    "import argparse\nargparse.ArgumentParser().parse_known_args()": "it parses the command line "
    "when it is imported (that is partc's own here: mistake.py:2",
    "def make():\n    raise SystemExit(3)": "it ends the process when it is called, SystemExit(3)",
    "from torch.distributed import init_process_group\ninit_process_group('gloo')": "it joins a "
    "process group when it is imported, and this command is one process (mistake.py:2",
    "make = = 1": "it raises SyntaxError: invalid syntax (mistake.py:1: make = = 1)",
    "": "does not name a model (module 'mistake' has no attribute 'make')",
}


@pytest.mark.parametrize("text", USERS_MISTAKES)
def test_an_error_in_the_users_own_code_is_told(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mistake.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "mistake", raising=False)
    importlib.invalidate_caches()
    linecache.clearcache()
    with pytest.raises(UsageError) as error:
        find_model("mistake:make", Sizes())
    assert USERS_MISTAKES[text] in str(error.value)


def test_texts_name_commands_that_there_are() -> None:
    root = Path(__file__).parents[2]
    files = [*(root / "docs").rglob("*.md"), root / "README.md", *(root / "partc").rglob("*.py")]
    named = {
        word
        for file in files
        for word in re.findall(r"`partc ([a-z]+)", file.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    assert named <= COMMANDS.keys()


@pytest.mark.exhaustive
def test_modules_of_partc_are_there_when_asked_for() -> None:
    fresh = "import partc; print(partc.metrics.Meter.__name__, hasattr(partc, 'nothing'))"
    done = subprocess.run([sys.executable, "-c", fresh], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Meter", "False"]


@pytest.mark.exhaustive
def test_a_configuration_becomes_a_small_model_without_values() -> None:
    target = find_model("hf:llama", Sizes(batch=2, seq=8, layers=1))
    assert all(param.is_meta for param in target.model.parameters())
    assert not any(buffer.is_meta for buffer in target.model.buffers())
    assert len(target.model.model.layers) == 1  # type: ignore[union-attr, arg-type]
    assert [tuple(x.shape) for x in target.inputs] == [(2, 8), (2, 8)]


def test_dropout_can_be_left_out(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 16,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = Sizes(batch=2, seq=4, dropout=False)
    target = find_model(f"hf:{tmp_path}/config.json", sizes, values=True)
    assert target.loss is not None
    state = torch.get_rng_state()
    assert target.loss(target.model, *target.inputs).isfinite()
    assert torch.equal(state, torch.get_rng_state())


def test_parameters_on_meta_is_undone() -> None:
    with parameters_on_meta():
        assert torch.nn.Linear(2, 2).weight.is_meta
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_the_command_line_target_is_the_example() -> None:
    target = find_model(MODEL, Sizes())
    assert target.loss is example_loss
    assert torch.equal(target.inputs[0], example_batch()[0])
    assert type(target.model) is type(example_model())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("compile m:f --mesh pp=2 --stages a.1 a.2 --out b", "Write --stages a.1,a.2."),
        ("compile m:f --mesh dp=2 --dtype bf16 --out b", "m:f does not follow --dtype"),
        ("compile hf:llama --mesh dp=2 --dtype bf16 --out b", "Did you mean 'bfloat16'"),
        ("explain linear", "Write partc explain --rules aten.linear."),
        ("plan --from trainer.json", 'lines: preset = "zero2", recompute = "block"'),
    ],
)
def test_what_is_meant_is_told(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    args = {"output_dir": "x", "fsdp": "shard_grad_op auto_wrap", "gradient_checkpointing": True}
    Path("trainer.json").write_text(json.dumps(args))
    with suppress(SystemExit):
        assert main(words.split()) == 2
    assert told in capsys.readouterr().err
