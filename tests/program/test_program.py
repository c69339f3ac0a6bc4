"""Programs: roles, the round trip through a folder, run.py, tensor files."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import partc
from partc.audit.edits import accept_edits
from partc.errors import LoadError, PlanError, TraceError, UsageError
from partc.plan.mesh import Mesh
from partc.program import load
from partc.program.role import Role
from partc.program.saved_cost import SavedCost
from partc.program.tensorfile import TensorFile, TensorFiles, write_tensors
from partc.trace.fingerprint import Fingerprint
from tests.example_program import example_model, example_program
from tests.forked_scripts import run_ranks
from tests.patience import patience

Z = torch.ones(4, 4)


def of_one(model: nn.Module, z: Tensor) -> Tensor:
    return torch.as_tensor(model(z).square().mean())


def of_two(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def of_a_pair(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    return of_two(model, *pair)


def test_a_saved_program_loads_as_it_was(tmp_path: Path) -> None:
    program = replace(example_program(), cost=SavedCost("3 GFLOP", {"flops": 3e9}))
    program.save(tmp_path / "build")
    loaded = load(tmp_path / "build", model=example_model(seed=9))
    assert {n: t.tolist() for n, t in loaded.constants.items()} == {
        n: t.tolist() for n, t in program.constants.items()
    }
    assert replace(loaded, constants=program.constants) == program
    assert sorted(path.name for path in (tmp_path / "build").iterdir()) == [
        "constants.safetensors", "plan.toml", "program.json", "role0.py", "run.py",
    ]  # fmt: skip


def test_saving_is_deterministic_and_replaces(tmp_path: Path) -> None:
    for folder in ("one", "two", "two"):
        example_program().save(tmp_path / folder)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]


def test_pipelines_are_replaced_and_leave_no_schedule(tmp_path: Path) -> None:
    pipeline = replace(example_program(), schedule="0F0,0B0\n")
    for program in (pipeline, pipeline, example_program()):
        program.save(tmp_path / "b")
        assert (tmp_path / "b/schedule.csv").exists() == bool(program.schedule)


def test_roles_are_runs_of_ranks() -> None:
    program = replace(
        example_program(),
        mesh=Mesh((("pp", 2), ("dp", 100_000))),
        roles=((100_000, "a.py"), (100_000, "b.py")),
        sources={"a.py": "A", "b.py": "B"},
    )
    assert program.role_of(99_999) == "a.py"
    assert program.source(100_000) == "B"
    with pytest.raises(UsageError, match="rank 200000: there is no such rank"):
        program.source(200_000)


def test_accepted_edits_load_again(tmp_path: Path) -> None:
    example_program().save(tmp_path)
    role = tmp_path / "role0.py"
    role.write_text(role.read_text() + "\n# mine\n")
    with pytest.raises(LoadError, match=r"role0.py: was changed.*--accept-edits"):
        load(tmp_path)
    assert "# mine" in accept_edits(tmp_path).source()
    assert "# mine" in load(tmp_path).source()
    role.write_text("MESH = {}\n")
    with pytest.raises(LoadError, match="is not a rank program"):
        accept_edits(tmp_path)


def test_texts_with_the_line_ends_of_another_system_are_named_as_that(tmp_path: Path) -> None:
    example_program().save(tmp_path)
    texts = [each for each in tmp_path.iterdir() if each.suffix in (".py", ".toml", ".json")]
    for each in texts:
        each.write_bytes(each.read_bytes().replace(b"\n", b"\r\n"))
    for read in (load, accept_edits):
        with pytest.raises(LoadError, match=r"only its line ends differ .*CRLF") as caught:
            read(tmp_path)
    (run,) = run_ranks(tmp_path / "run.py", num=1)
    assert "only its line ends differ" in run.text
    command = caught.value.do.removeprefix("Write LF: ").partition(";")[0]
    subprocess.run(command, shell=True, check=True)
    assert load(tmp_path).source() == example_program().source()


@pytest.mark.parametrize("read", [load, lambda path: partc.Plan.load(path / "plan.toml")])
def test_what_another_rank_may_not_have_saved_yet_is_told(
    read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for world, waits in ("1", False), ("2", True):
        monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises((LoadError, PlanError), match="cannot be read") as caught:
            read(tmp_path / "program")
        assert ("dist.barrier() behind its save" in caught.value.do) == waits


def test_an_error_inside_a_role_shows_its_line() -> None:
    source = example_program().source().replace("self.dp, self.tp =", "missing; self.dp, self.tp =")
    with pytest.raises(NameError) as caught:
        Role.load(source, "role0.py").build(mesh=None)
    import traceback

    assert "missing; self.dp" in "".join(traceback.format_exception(caught.value))


def test_run_py_imports_torch_and_the_standard_library_only(tmp_path: Path) -> None:
    example_program().save(tmp_path)
    names = set()
    for node in ast.walk(ast.parse((tmp_path / "run.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    assert names - {"torch"} <= sys.stdlib_module_names


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_run_py_trains_under_torchrun(tmp_path: Path) -> None:
    example_program(1, 2).save(tmp_path / "build")
    write_tensors(tmp_path / "w.safetensors", example_model().state_dict())
    run = [str(tmp_path / "build" / "run.py"), "--device", "cpu", "--steps", "4", "--lr", "0.02"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--standalone", *run, "--weights", str(tmp_path / "w.safetensors")],
        capture_output=True, text=True, timeout=patience(), cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines()]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)


AND_LIST_THREADS = """
import runpy, sys
from pathlib import Path
threads = lambda: [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
role = runpy.run_path(sys.argv[0])
role["train"].__globals__["train"] = lambda *a, train=role["train"]: (train(*a), print(threads()))
role["main"]()
print(threads())
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed in /proc")
def test_run_py_leaves_no_thread_of_its_process_group(tmp_path: Path) -> None:
    """A thread that still works when the interpreter ends aborts the process now and then."""
    example_program(1, 1).save(tmp_path)
    script = AND_LIST_THREADS.replace("sys.argv[0]", repr(str(tmp_path / "run.py")))
    done = subprocess.run(
        [sys.executable, "-c", script, "--device", "cpu"],
        capture_output=True, text=True, timeout=patience(), cwd=tmp_path, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    during, after = done.stdout.splitlines()[-2:]
    assert "gloo" in during
    assert "gloo" not in after


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_run_py_says_that_it_sees_no_gpu(tmp_path: Path) -> None:
    example_program(1, 1).save(tmp_path)
    (done,) = run_ranks(tmp_path / "run.py", "--device", "cuda", num=1)
    assert done.code == 2
    assert "this process sees no GPU. Give --device cpu." in done.text


# tensor files --------------------------------------------------------------------------------
def test_tensor_files_round_trip(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7), "none": torch.empty(0, 3),
        "c": torch.tensor([True, False]), "d": torch.randn(5).to(torch.bfloat16),
        "e": torch.arange(4.0).view(2, 2).T,
    }  # fmt: skip
    write_tensors(tmp_path / "t.safetensors", tensors)
    found = TensorFile(tmp_path / "t.safetensors")
    assert list(found) == sorted(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu,
     torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128],
    ids=str,
)  # fmt: skip
def test_every_dtype_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    """Those too for which the format has no word; `run.py` reads them as partc does."""
    numbers = torch.arange(64, dtype=torch.uint8).view(dtype)
    tensors = {"one": numbers[:1].reshape(()), "two": numbers[:4].view(2, 2), "none": numbers[:0]}
    write_tensors(tmp_path / "t.safetensors", tensors)
    replace(example_program(1, 1), constants=tensors).save(tmp_path / "build")
    saved = tmp_path / "build/constants.safetensors"
    assert saved.read_bytes() == (tmp_path / "t.safetensors").read_bytes()
    run: Any = runpy.run_path(str(tmp_path / "build/run.py"))
    for found in (
        TensorFile(tmp_path / "t.safetensors"),
        run["read_tensors"](tmp_path / "t.safetensors"),
    ):
        for name, tensor in tensors.items():
            assert (found[name].dtype, found[name].shape) == (dtype, tensor.shape)
            assert bytes(found[name].flatten().view(torch.uint8)) == bytes(
                tensor.flatten().view(torch.uint8)
            )


def test_tensor_files_agree_with_the_safetensors_package(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "h": torch.randn(2).half()}
    write_tensors(tmp_path / "ours.safetensors", tensors)
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    theirs = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    ours = TensorFile(tmp_path / "theirs.safetensors")
    for name, tensor in tensors.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tensors(tmp_path / f"{name}.safetensors", {"w": torch.ones(1)})
    with pytest.raises(LoadError, match="'w' stands also in"):
        TensorFiles(tmp_path)


# fingerprints --------------------------------------------------------------------------------
def test_fingerprints_differ_by_name_shape_and_dtype() -> None:
    mine = Fingerprint.of(example_model())
    assert mine.tensors["scale"].kind == "unsaved buffer"
    assert list(mine.saved_names()) == list(example_model().state_dict())
    assert mine.differences(Fingerprint.of(example_model(7).to("meta"))) == []
    other = example_model().double()
    del other.shift
    assert mine.differences(Fingerprint.of(other))[0] == (
        "down.bias: param float32[8] compiled, param float64[8] given"
    )
    assert "shift: param float32[8] compiled, absent given" in mine.differences(
        Fingerprint.of(other)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "batch", [(Z,), ((Z,),), ({"z": Z},), ([Z],)], ids=["tensor", "tuple", "dict", "list"]
)
def test_another_loss_takes_its_batch_as_compile_does(batch: tuple[Any, ...]) -> None:
    program = partc.compile(nn.Linear(4, 4), "dp=2", (Z, Z), loss=of_two, plan="ddp")
    assert list(program.also(*batch, loss=of_one).inputs) == ["z"]


def test_a_loss_of_one_tuple_takes_it_whole() -> None:
    program = partc.compile(nn.Linear(4, 4), "dp=2", (Z, Z), loss=of_two, plan="ddp")
    assert len(program.also((Z, Z), loss=of_a_pair).inputs) == 2
    with pytest.raises(TraceError, match="z"):
        program.also(Z, Z, Z, loss=of_one)
