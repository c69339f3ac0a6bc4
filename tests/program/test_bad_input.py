"""What is damaged, edited, foreign or started wrongly is refused, in words, before it does harm."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from partc import program as program_module
from partc.api import compile
from partc.cli.main import main
from partc.errors import LoadError, PartcError, RunError, UsageError
from partc.program import load
from partc.program.manifest import _digest_of
from partc.program.tensorfile import TensorFile, TensorFiles
from partc.program.written import refuse_code_beside
from partc.verification.processes import Processes
from tests.example_program import example_model, example_program
from tests.forked_scripts import run_ranks
from tests.patience import patience


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    example_program().save(tmp_path / "build")
    return tmp_path / "build"


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change program.json as someone would who also makes its digest right."""
    path = folder / "program.json"
    fields = json.loads(path.read_text())
    change(fields)
    fields.pop("sha256")
    path.write_text(json.dumps({**fields, "sha256": _digest_of(fields)}))


# folders -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["plan.toml", "role0.py", "run.py", "constants.safetensors", "program.json"]
)
@pytest.mark.parametrize("damage", ["truncated", "edited", "missing", "linked"])
def test_a_damaged_folder_is_refused_by_file(folder: Path, name: str, damage: str) -> None:
    path = folder / name
    content = path.read_bytes()
    if damage in ("missing", "linked"):
        path.unlink()
    if damage == "linked":
        (folder.parent / "elsewhere").write_bytes(content)
        path.symlink_to(folder.parent / "elsewhere")
    elif damage != "missing":
        path.write_bytes(content[:-20] if damage == "truncated" else content.replace(b"e", b"a", 1))
    with pytest.raises(LoadError, match=name) as caught:
        load(folder)
    assert caught.value.do


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another schema": (lambda m: m.update(schema=1), "schema 1, this partc reads 6"),
    "a file outside": (lambda m: m["files"].update({"../x.py": ""}), r"'../x.py' is no name"),
    "an absolute file": (lambda m: m["files"].update({"/etc/x.py": ""}), "is no name"),
    "a role without a file": (lambda m: m.update(roles=[[4, "b.py"]]), "a role has no file"),
    "too few ranks": (lambda m: m.update(roles=[[3, "role0.py"]]), "do not cover its mesh"),
    "a later torch": (lambda m: m.update(torch=["99.0", "99.1"]), r"needs torch 99\.0"),
    "an unknown field": (lambda m: m.update(run="rm"), r"its fields differ in .'run'."),
    "a missing field": (lambda m: m.pop("cost"), r"its fields differ in .'cost'."),
    "a hostile axis": (lambda m: m.update(mesh=[["a b", 4]]), "cannot name an axis"),
    "a wrong type": (lambda m: m.update(inputs=[1]), "malformed"),
    "no digest of the constants": (
        lambda m: m["files"].pop("constants.safetensors"),
        "no digest of constants.safetensors",
    ),
    "a source that no rank runs": (
        lambda m: m["files"].update({"json.py": "0" * 64}),
        "no rank runs json.py",
    ),
    "a negative size": (lambda m: m.update(inputs={"x": [[-1], "float32"]}), "not a size"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_out_of_order_is_refused(folder: Path, case: str) -> None:
    change, message = MANIFESTS[case]
    rewrite_manifest(folder, change)
    with pytest.raises(LoadError, match=message):
        load(folder)


@pytest.mark.parametrize("text", ["", "[]", "null", '{"schema": 1}', "[" * 100_000, "\x00", "NaN"])
def test_what_is_no_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / "program.json").write_text(text)
    with pytest.raises(LoadError, match=r"program\.json"):
        load(folder)


def test_another_model_is_refused_with_a_table(folder: Path) -> None:
    other = example_model()
    other.down = nn.Linear(12, 9)
    other.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(LoadError) as caught:
        load(folder, model=other)
    assert "down.weight: param float32[8, 12] compiled, param float32[9, 12] given" in str(
        caught.value
    )
    assert "extra: absent compiled, param float32[1] given" in str(caught.value)
    assert "3 of its tensors differ" in str(caught.value)


def test_a_model_with_other_hooks_or_forwards_is_refused(folder: Path) -> None:
    hooked, moved = example_model(), example_model()
    hooked.down.register_forward_hook(lambda module, given, result: result * 2)
    moved.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(LoadError, match="down: none compiled, 1 forward hook given"):
        load(folder, model=hooked)
    with pytest.raises(LoadError, match="the model itself: none compiled, a forward of its own"):
        load(folder, model=moved)


def test_a_program_of_a_model_with_hooks_is_loaded_with_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    hook = model[0].register_forward_hook(lambda module, given, result: result * 2)
    compile(model, "dp=1", torch.randn(2, 4), loss=lambda m, x: m(x).sum()).save(tmp_path / "it")
    assert load(tmp_path / "it", model=model).fingerprint.touched == {"0": "1 forward hook"}
    hook.remove()
    with pytest.raises(LoadError, match="0: 1 forward hook compiled, none given"):
        load(tmp_path / "it", model=model)


@pytest.mark.parametrize("before", ["nothing", "a program"])
def test_an_interrupted_save_leaves_what_was_there(
    tmp_path: Path, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "build"
    if before == "a program":
        example_program(1, 2).save(target)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program_module, "write_tensors", interrupt)
    with pytest.raises(KeyboardInterrupt):
        example_program().save(target)
    if before == "nothing":
        assert list(tmp_path.iterdir()) == []
    else:
        assert [path.name for path in tmp_path.iterdir()] == ["build"]
        assert load(target).mesh.num_ranks == 2


def test_a_folder_of_other_things_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="will not be replaced"):
        example_program().save(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_users_file_in_a_programs_folder_is_never_lost(folder: Path) -> None:
    for name in ("train.py", "my.toml", "results.json", "programs/0/train.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
        with pytest.raises(
            UsageError, match=f"it also holds {name.partition('0')[0]}, which partc did not write"
        ):
            example_program().save(folder)
        assert (folder / name).read_text() == "mine"
        (folder / name).unlink()
    (folder / "programs/0").rmdir()
    (folder / "programs").rmdir()
    example_program().save(folder)
    (folder / "program.json").write_text('{"name": "of another tool", "files": {}}')
    with pytest.raises(UsageError, match="does not say which files are partc's own"):
        example_program().save(folder)


# tensor files --------------------------------------------------------------------------------
def tensor_file(path: Path, header: object, data: bytes = b"\0" * 8) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS = {
    "no table": [],
    "an unknown dtype": {"a": {**ENTRY, "dtype": "PICKLE"}},
    "a negative size": {"a": {**ENTRY, "shape": [-2]}},
    "past the end": {"a": {**ENTRY, "shape": [4], "data_offsets": [0, 16]}},
    "sizes that do not fit": {"a": {**ENTRY, "shape": [3]}},
    "an entry that is no table": {"a": 3},
    "backwards": {"a": {**ENTRY, "data_offsets": [8, 0]}},
    "a hole": {"a": {**ENTRY, "shape": [1], "data_offsets": [4, 8]}},
    "bytes of no tensor": {"a": {**ENTRY, "shape": [1], "data_offsets": [0, 4]}},
    "bytes of two tensors": {"a": ENTRY, "b": ENTRY},
    "a code as a dtype": {"a": ENTRY, "__metadata__": {"partc.dtypes": '{"a": "load"}'}},
    "a dtype that does not fit": {"a": ENTRY, "__metadata__": {"partc.dtypes": '{"a": "int8"}'}},
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_malformed_tensor_file_is_refused(tmp_path: Path, case: str) -> None:
    path = tensor_file(tmp_path / "t.safetensors", HEADERS[case])
    with pytest.raises(LoadError, match=r"t.safetensors: not a whole safetensors file"):
        TensorFile(path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\xff" * 100])
def test_bytes_that_are_no_tensor_file_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.safetensors").write_bytes(content)
    with pytest.raises(LoadError, match="not a whole safetensors file"):
        TensorFile(tmp_path / "t.safetensors")


def test_a_name_twice_in_a_tensor_file_is_refused(tmp_path: Path) -> None:
    entry = json.dumps(ENTRY)
    text = f'{{"a": {entry}, "a": {entry}}}'.encode()
    path = tmp_path / "t.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(LoadError, match="stands in its header twice"):
        TensorFile(path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[" * 100_000, "\x00", '{"weight_map": 5}', '{"weight_map": {"a": 5}}',
     '{"weight_map": {"a": "../w.safetensors"}}', '{"weight_map": {"a": "w.bin"}}',
     '{"weight_map": {"a": ["w"]}}', '{"weight_map": {"a": "no.safetensors"}}'],
)  # fmt: skip
def test_a_malformed_index_of_weights_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.index.json").write_text(text)
    with pytest.raises(LoadError, match=r"m\.index\.json|no\.safetensors: cannot be read"):
        TensorFiles(tmp_path / "m.index.json")
    with pytest.raises(LoadError, match=r"no \.safetensors file in it"):
        TensorFiles(tmp_path)


# runs ----------------------------------------------------------------------------------------
def refusal_of(difference: str) -> str:
    """What this rank is told when rank 2 differs; nothing else may happen in the group."""
    program = example_program()
    if dist.get_rank() == 2 and difference == "sources":
        program = replace(program, sources={"role0.py": program.source() + "# edited\n"})
    elif dist.get_rank() == 2:
        program = replace(program, plan=program.plan + "# edited\n")
    try:
        program.module()
    except RunError as error:
        return str(error)
    return "accepted"


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize("difference", ["sources", "plan"])
def test_ranks_that_differ_are_all_refused_with_what_differs(
    world: Processes, difference: str
) -> None:
    told = world.run(refusal_of, difference)
    for rank, message in enumerate(told):
        assert f"rank {rank}: the ranks do not run the same program: {difference} differ" in message
        file = "role0.py" if difference == "sources" else "the plan"
        assert f"rank 2: {file} has `# edited`, and nothing more on rank 0" in message
        assert "Copy one saved program to all hosts." in message


def module_refusal() -> str:
    with pytest.raises(PartcError) as caught:
        example_program().module()
    return str(caught.value)


@pytest.mark.gloo
def test_a_world_of_another_size_than_the_mesh_is_refused(world: Processes) -> None:
    for message in world.run(module_refusal, num=2):
        assert "mesh dp=2 tp=2: 2 processes were started for 4 ranks" in message
        assert "torchrun --nproc-per-node 4" in message


def test_the_world_is_checked_before_any_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(RunError, match="8 processes were started for 4 ranks"):
        example_program().module()
    assert not dist.is_initialized()


def run_script(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, folder / "run.py", "--device", "cpu"], check=False, text=True,
        env={**os.environ, **environment}, capture_output=True, timeout=patience(),
    )  # fmt: skip


def test_run_py_refuses_a_wrong_world_with_exit_code_2(folder: Path) -> None:
    (done,) = run_ranks(folder / "run.py", "--device", "cpu", num=1, WORLD_SIZE="3")
    assert done.code == 2
    assert "the mesh dp=2 tp=2 has 4 ranks, but 3 processes were started" in done.text


def test_run_py_refuses_an_edited_role_with_exit_code_2(folder: Path) -> None:
    (folder / "role0.py").write_text("import os\n")
    (done,) = run_ranks(folder / "run.py", "--device", "cpu", num=1, WORLD_SIZE="4")
    assert done.code == 2
    assert "role0.py: missing, damaged or edited" in done.text
    assert f"partc check {folder} --accept-edits" in done.text


def edit(folder: Path, name: str, change: Callable[[str], str]) -> None:
    (folder / name).write_text(change((folder / name).read_text()))


def linked(path: Path) -> None:
    path.symlink_to(path.rename(path.parent.parent / "elsewhere"))


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    with path.open("wb") as file:  # takes no room on the disk
        file.truncate(40_000_000_000)


def package(path: Path) -> None:
    path.mkdir()
    (path / "__init__.py").write_text("")


RUN_REFUSES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a word": (
        lambda f: edit(f, "program.json", lambda t: t.replace("GatedMLP", "MLP")), "digest"
    ),
    "a number": (lambda f: edit(f, "program.json", lambda t: t.replace("24", "25", 1)), "digest"),
    "no JSON": (lambda f: edit(f, "program.json", lambda t: t[: len(t) // 2]), "program.json"),
    "no text": (lambda f: (f / "program.json").write_bytes(b"\xff\xfe"), "program.json"),
    "a list": (lambda f: edit(f, "program.json", lambda t: "[]"), "program.json"),
    "brackets": (lambda f: edit(f, "program.json", lambda t: "[" * 100_000), "program.json"),
    "nothing": (lambda f: (f / "program.json").unlink(), "program.json"),
    "a pipe": (lambda f: as_pipe(f / "program.json"), "program.json"),
    "a role without its line": (
        lambda f: rewrite_manifest(f, lambda m: m["files"].pop("role0.py")), "no digest of role0.py"
    ),
    "constants without their line": (
        lambda f: rewrite_manifest(f, lambda m: m["files"].pop("constants.safetensors")),
        "no digest of constants.safetensors",
    ),
    "a role that is a link": (lambda f: linked(f / "role0.py"), "role0.py"),
    "a role without end": (lambda f: endless(f / "role0.py"), "role0.py"),
    "a list without end": (lambda f: endless(f / "program.json"), "64,000,000 bytes"),
    "a module beside": (lambda f: (f / "torch.py").write_text(""), "torch.py: is code that"),
    "a package beside": (lambda f: package(f / "json"), "json: is code"),
    "compiled code beside": (lambda f: (f / "json.so").write_text(""), "json.so: is code"),
}  # fmt: skip


@pytest.mark.parametrize("case", RUN_REFUSES)
def test_run_py_refuses_what_was_not_saved_so(
    folder: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, why = RUN_REFUSES[case]
    run: Any = runpy.run_path(str(folder / "run.py"))
    assert run["read_manifest"]()[1].keys() > {"role0.py", "run.py"}
    damage(folder)
    with pytest.raises(SystemExit) as caught:
        run["read_manifest"]()
    assert caught.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.exhaustive
def test_run_py_imports_nothing_from_its_folder(folder: Path) -> None:
    for name in ("json.py", "torch.py", "argparse.py"):
        (folder / name).write_text(f"open({str(folder.parent / 'ran')!r}, 'w')\n")
    done = run_script(folder, WORLD_SIZE="4")
    assert done.returncode == 2
    assert "argparse.py: is code that program.json does not list" in done.stderr
    assert not (folder.parent / "ran").exists()


def test_code_beside_the_roles_does_not_pass_a_check(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "notes.txt").write_text("mine")
    refuse_code_beside(folder)
    (folder / "json.py").write_text("mine")
    for options in ([], ["--accept-edits"]):
        assert main(["check", str(folder), *options]) == 2
        assert "json.py: is no part of the program" in capsys.readouterr().err


def test_run_py_says_which_word_stands_before_each_name(folder: Path) -> None:
    run: Any = runpy.run_path(str(folder / "run.py"))
    told = run["not_there"]("fc.weight", {"module.fc.weight": 1})
    assert "it has module.fc.weight for fc.weight" in told
    assert "n.removeprefix('module.')" in told
    assert "it has w, v. Give" in run["not_there"]("fc.weight", {"w": 1, "v": 2})


@pytest.mark.parametrize("case", [*HEADERS, "all right"])
def test_run_py_reads_weights_as_partc_does(
    folder: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run: Any = runpy.run_path(str(folder / "run.py"))
    path = tensor_file(folder / "t.safetensors", HEADERS.get(case, {"a": ENTRY}))
    if case == "all right":
        assert torch.equal(run["read_tensors"](path)["a"], torch.zeros(2))
        return
    with pytest.raises(SystemExit):
        run["read_tensors"](path)
    assert "cannot be read as a safetensors file" in capsys.readouterr().err
