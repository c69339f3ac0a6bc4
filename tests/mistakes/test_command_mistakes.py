"""Mistakes on the command line: one line that names the culprit and the remedy, exit code 2."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

import partc
from partc.cli import models
from partc.cli.main import main
from partc.cli.target import Sizes, Target
from partc.errors import PartcError
from partc.program import Program
from tests.forked_scripts import run_ranks
from tests.mistakes.test_own_code_mistakes import Words, squares
from tests.mistakes.things import Net, compiled, program

MODELS = "tests.mistakes.targets:"
COMPILE = ("compile", MODELS + "right", "--mesh", "dp=2", "--out", "OUT")
MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a command": (("complie", "m:f"), ("'complie'", "Did you mean 'compile'")),
    "an option": ((*COMPILE, "--plann", "ddp"), ("'--plann'", "Did you mean '--plan'")),
    "run": (("run", "BUILD"), ("'run'", "torchrun --nproc-per-node 2 FOLDER/run.py")),
    "bytes": ((*COMPILE, "--memory-bytes", "80GB"), ("'80GB'", "Write 80000000000")),
    "a second program": (("report", "BUILD", "."), ("takes one program", "partc diff ONE OTHER")),
    "two ways": (
        ("replan", "BUILD", "--devices", "2", "--mesh", "dp=4", "--out", "OUT"),
        ("Write --devices 2, or --mesh dp=4.",),
    ),
    "a file of no program": (("diff", "BUILD", __file__), ("that program.save(), or",)),
    "json": (("check", "BUILD", "--jsno"), ("'--jsno'", "Did you mean '--json'")),
    "no mesh": (COMPILE[:2], ("--mesh", "partc compile --help")),
    "a number": ((*COMPILE, "--microbatches", "two"), ("'two' is no whole number",)),
    "percent": (("verify", "BUILD", "--model", "m:f", "--tolerance", "0.1%"), ("Write 0.001.",)),
    "a comma": (("verify", "BUILD", "--model", "m:f", "--tolerance", "0,1"), ("Write 0.1.",)),
    "no digits": (("verify", "BUILD", "--model", "m:f", "--tolerance", "low"), ("or 1e-3.",)),
    "a compiler": ((*COMPILE, "--compile", "inducter"), ("Did you mean 'inductor'",)),
    "a preset": ((*COMPILE, "--plan", "mgatron"), ("Did you mean 'megatron'",)),
    "a schedule": ((*COMPILE, "--schedule", "gipe"), ("Did you mean 'gpipe'",)),
    "a plan": ((*COMPILE, "--plan", "no.toml"), ("no.toml", "program.save")),
    "nothing": (("compile", MODELS + "nothing", *COMPILE[2:]), ("it gives None",)),
    "no inputs": (("compile", MODELS + "alone", *COMPILE[2:]), ("(model, inputs, loss)",)),
    "another model": (("verify", "BUILD", "--model", MODELS + "other"), ("up.weight", "Compile")),
    "a model with other names": (
        ("verify", "BUILD", "--model", MODELS + "unlike"),
        ("than Sequential", "Give the Net that it was compiled for (--model", 'plan="fsdp"'),
    ),
    "a hub's name": (
        ("compile", "meta-llama/Llama-2-7b", *COMPILE[2:]),
        ("AutoConfig.from_pretrained('meta-llama/Llama-2-7b')", "hf:Llama-2-7b/config.json"),
    ),
    "a hub's address": (
        ("compile", "https://huggingface.co/a/b", *COMPILE[2:]),
        ("nothing is downloaded", "AutoConfig.from_pretrained('a/b')", "hf:b/config.json"),
    ),
    "a type alone": (("compile", "llama", *COMPILE[2:]), ("llama", "Write hf:llama.")),
    "a file alone": (("compile", "./m.py", *COMPILE[2:]), ("m:CALLABLE",)),
    "a rank without text": (("explain", "BUILD", "--rank", "1"), ("--rank 1", "add --source")),
    "a rank of rules": (("explain", "--rules", "--rank", "0"), ("--rank 0", "of a program")),
    "a text of an error": (("explain", "PTC010", "--source"), ("--source", "name the folder")),
    "sizes of no model": (("explain", "BUILD", "--batch", "4"), ("--batch 4", "add --model")),
    "dropout of no model": (("check", "BUILD", "--no-dropout"), ("--no-dropout", "add --model")),
    "a short op": (("explain", "--rules", "mm"), ("'mm'", "Did you mean aten.mm?")),
    "a function of torch": (("explain", "--rules", "F.gelu"), ("Did you mean aten.gelu?",)),
    "no build": (("check", "."), (".: it has no program.json", "partc compile --out")),
    "no build, simulated": (("simulate", "."), (".: it has no program.json",)),
    "above builds": (("check", "ABOVE"), ("it has no program.json", "wrote: ", "build.")),
    "no folder": (("check", "nowhere"), ("nowhere", "partc compile --out")),
    "a file": (("check", __file__), ("Not a directory", "Name the folder")),
    "a file of models": (
        ("compile", "m.py:f", *COMPILE[2:]),
        ("m.py:f", "imports it from here: m:f"),
    ),
    "a function": (("compile", MODELS + "rigth", *COMPILE[2:]), ("Did you mean 'right'",)),
    "a model type": (("compile", "hf:lama", *COMPILE[2:]), ("hf:lama", "Did you mean 'llama'")),
    "a hub": (("compile", "hf:meta-llama/Llama", *COMPILE[2:]), ("nothing is downloaded",)),
    "a config": (("compile", "hf:no.json", *COMPILE[2:]), ("hf:no.json", "no such file")),
    "no rows": (("compile", "hf:llama", *COMPILE[2:], "--batch", "0"), ("--batch 0", "1 or more")),
    "a length": ((*COMPILE, "--seq", "16"), ("--seq", "return inputs of that size")),
    "a tolerance": (
        ("verify", "BUILD", "--model", MODELS + "right", "--tolerance", "-1"),
        ("above 0",),
    ),
    "devices": (("simulate", "BUILD", "--devices", "0"), ("--devices 0", "from 1", "1 or more")),
    "stages": ((*COMPILE, "--virtual-stages", "0"), ("--virtual-stages 0", "1 or more")),
    "no bytes": ((*COMPILE, "--memory-bytes", "0"), ("--memory-bytes 0", "leave it out")),
    "a preset by name": ((*COMPILE, "--preset", "ddp"), ("'--preset'", "--plan ddp")),
    "a strategy": ((*COMPILE, "--strategy=ddp"), ("'--strategy=ddp'", "--plan fsdp")),
    "a mesh in two words": ((*COMPILE, "tp=2"), ("'tp=2'", "--mesh dp=2,tp=2")),
    "a plan's folder": ((*COMPILE, "--plan", "BUILD"), ("a folder", "build/plan.toml'")),
    "another folder": ((*COMPILE, "--plan", "ABOVE"), ("a folder", "names a file in it")),
    "ranks of a bench": (
        ("bench", "BUILD", "--nproc", "4"),
        ("'--nproc'", "mesh of the program says how many ranks", "partc compile --mesh dp=4"),
    ),
    "ranks of a bench alone": (("bench", "--nproc_per_node=4"), ("starts all of them",)),
    "ranks of torchrun": ((*COMPILE, "--nproc_per_node", "2"), ("--mesh dp=4; torchrun starts",)),
    "ranks of calibrate": (("calibrate", "--nproc", "2"), ("Write --ranks 4.",)),
    "a mesh of a program": (("bench", "BUILD", "--mesh", "dp=4"), ("partc compile makes another",)),
    "an underscore": ((*COMPILE, "--memory_bytes", "1"), ("Write --memory-bytes.",)),
    "no dashes": (
        ("watchdog", "--stall", "9", "torchrun", "--nproc", "2", "train.py", "a b"),
        ("no -- stands", "partc watchdog --stall 9 -- torchrun --nproc 2 train.py 'a b'."),
    ),
    "a watchdog's option": (
        ("watchdog", "--step-timout", "5", "torchrun", "train.py"),
        ("Did you mean '--step-timeout'",),
    ),
    "a quoted launcher": (
        ("watchdog", "--", "torchrun train.py"),
        ("Leave out its quotation marks: partc watchdog -- torchrun train.py.",),
    ),
    "no function": (("compile", MODELS + "setup", *COMPILE[2:]), ("has right, other, nothing",)),
    "a number of a file": (
        ("compile", MODELS + "SIZE", *COMPILE[2:]),
        ("it is 4, and no function",),
    ),
    "no configuration": (("plan", "--from", "no.json"), ("no.json", "Name the configuration's")),
    "a factor": (("simulate", "BUILD", "--peak", "fast"), ("fast", "--peak 2")),
}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "build"
    program().save(folder)
    return folder


def said(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that fails prints on stderr."""
    try:
        code = main(arguments)
    except SystemExit as error:  # an option that nobody knows
        code = int(error.code or 0)
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(
    mistake: str, build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = MISTAKES[mistake]
    places = {"ABOVE": str(build.parent), "BUILD": str(build), "OUT": str(tmp_path / "out")}
    text = said(tuple(places.get(each, each) for each in arguments), capsys)
    assert [word for word in words if word not in text] == [], text
    assert not (tmp_path / "out").exists()


def test_another_model_is_refused_before_it_has_values(
    build: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    filled: list[bool] = []
    plain = models.find_model

    def found(name: str, sizes: Sizes, values: bool = False) -> Target:
        filled.append(values)
        return plain(name, sizes, values=values)

    monkeypatch.setattr(models, "find_model", found)
    text = said(("verify", str(build), "--model", "hf:bert", "--layers", "1"), capsys)
    assert "compiled for another model than" in text
    assert filled == [False]


# strangers -----------------------------------------------------------------------------------
EDITS = {
    "raises": ("", "\nraise ValueError\n", "raise does not belong"),
    "opens": ("open('canary', 'w')\n", "", "it reads the name open"),
    "imports": ("import os\n", "", "it imports os"),
    "a misspelt name": (
        "",
        "\nMES\n",
        "it reads the name MES, which no line sets. Did you mean ",
    ),
    "ends": ("", "\nquit()\n", "it reads the name quit"),
    "never ends": ("", "\nwhile True: pass\n", "a loop outside of functions"),
    "no Python": ("", "\n)(\n", "does not parse"),
    "no text": ("", "\0", "does not parse"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_accepting_edits_runs_nothing_before_it_is_checked(
    edit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program().save("build")
    before, behind, words = EDITS[edit]
    role = Path("build", program().role_of(0))
    role.write_text(before + role.read_text() + behind)
    text = said(("check", "build", "--accept-edits"), capsys)
    assert words in text
    assert f"{role.name}:" in text
    assert not Path("canary").exists()


def test_accepting_edits_refuses_a_mesh_without_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program().save(tmp_path / "build")
    role = tmp_path / "build" / program().role_of(0)
    role.write_text(role.read_text().replace('"dp": 2', '"dp": 1000000000000'))
    assert "fewer ranks" in said(("check", str(tmp_path / "build"), "--accept-edits"), capsys)


@pytest.mark.parametrize("content", ["pipe", "device"])
def test_a_manifest_that_is_no_file_is_not_read(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.json").symlink_to("/dev/zero")
    if content == "pipe":
        (tmp_path / "program.json").unlink()
        os.mkfifo(tmp_path / "program.json")
    assert "program.json" in said(("explain", str(tmp_path)), capsys)


def test_a_terminal_obeys_no_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "Net\x1b[2J\u202e"
    error = PartcError(where=name, what="x", why="", do="")
    assert str(error) == "Net\\x1b[2J\\u202e: x."
    named: Program = compiled(model=type(name, (Net,), {})())
    named.save(tmp_path / "build")
    for command in ("check", "explain"):
        main((command, str(tmp_path / "build")))
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err
    assert "\u202e" not in told.out + told.err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--device=gpu", "--device gpu: there is no such device"),
        ("--epochs=3", "unrecognized arguments: --epochs=3. Its options are --help, --steps, --lr"),
        ("--steps=many", "invalid int value: 'many'. Its options are"),
        ("--timeout=nan", "--timeout nan: give a number from 0 to 100,000,000."),
        ("--join-timeout=-1", "--join-timeout -1.0: give a number from 0"),
        ("--steps=-1", "--steps -1: give a number from 0"),
    ],
)
def test_run_py_refuses_an_option_in_one_line(
    build: Path, option: str, words: str,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Read in this process, as a process of its own would first import torch."""
    monkeypatch.setattr(sys, "argv", [str(build / "run.py"), option])
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script takes its folder out
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert ended.value.code == 2
    told = capfd.readouterr().err
    assert words in told
    assert len(told.splitlines()) == 1


def test_run_py_says_which_number_was_too_high(tmp_path: Path) -> None:
    partc.compile(Words(), "dp=1", (torch.arange(8),), loss=squares, plan="ddp").save(
        tmp_path / "b"
    )
    (done,) = run_ranks(tmp_path / "b/run.py", "--high", "999", "--device", "cpu", num=1)
    assert done.code != 0
    assert "self.table(ids)" in done.text
    assert "--high 999: the whole numbers of the batch go up to it" in done.text
