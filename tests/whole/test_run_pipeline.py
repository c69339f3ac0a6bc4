"""Pipelines in real gloo processes: trained, clipped, saved, moved to a mesh without stages."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_shared
from torch.distributed.checkpoint.state_dict_saver import save as save_shared

from partc.errors import LoadError, RunError
from partc.plan import Plan
from partc.program import Program, load
from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partc.program.stage.runtime import Stage
from partc.program.tensorfile import TensorFile, write_tensors
from partc.verification.precision import Raised
from partc.verification.processes import Processes
from tests.forked_scripts import run_ranks
from tests.patience import patience

if TYPE_CHECKING:
    from tests.zoo import Case

pytestmark = pytest.mark.gloo
MAX_NORM, LAYOUTS = 0.5, {"pp": "pp=2", "pp-dp": "pp=2,dp=2", "dp": "dp=2"}
TIED, SECOND_NAME = "transformer.wte.weight", "lm_head.weight"
Inputs = tuple[Tensor, ...]


@cache
def case() -> Case:
    """GPT-2: the embedding of the first stage is the head of the last."""
    from tests.zoo import MODELS  # not by the ranks, which would wait for transformers

    return MODELS["gpt2"]()


@cache
def program(mesh: str) -> Program:
    from partc.api import compile as compile_program

    plan = Plan(preset="fsdp" if "dp" in mesh else "ddp")
    pipeline: dict[str, Any] = {}
    if "pp" in mesh:
        plan = plan.changed(stages=("transformer.h.1",))
        pipeline = {"schedule": "1f1b", "microbatches": 2}
    made = case()
    return compile_program(made.model, mesh, made.inputs, loss=made.loss, plan=plan, **pipeline)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs and the model's weights."""
    made = tmp_path_factory.mktemp("pipeline")
    for name, mesh in LAYOUTS.items():
        program(mesh).save(made / name)
    write_tensors(made / "weights.safetensors", case().model.state_dict())
    return made


def begin(folder: Path) -> tuple[Stage, torch.optim.Optimizer]:
    stage = load(folder).module()
    stage.load_full(folder.parent / "weights.safetensors")
    return stage, torch.optim.AdamW(stage.parameters(), lr=1e-3, eps=1e-5)


def train(
    stage: Stage, optimizer: torch.optim.Optimizer, inputs: Inputs, num_steps: int
) -> list[float]:
    """Loss and gradient norm of each step, one after the other."""
    found = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        with Raised():
            loss = stage.step(*inputs)
        norm = stage.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        found += [loss.item(), norm.item()]
    return found


@cache
def single_device() -> tuple[list[float], dict[str, Tensor]]:
    """Three steps without partc: losses and norms, and the weights after them."""
    model, found = copy.deepcopy(case().model), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    for _ in range(3):
        optimizer.zero_grad()
        with Raised():
            loss = case().loss(model, *case().inputs)
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        found += [loss.item(), norm.item()]
    return found, {name: tensor.clone() for name, tensor in model.state_dict().items()}


Found = tuple[list[float], dict[str, Tensor]]


def compare(found: Found, last_steps: int) -> None:
    """What a rank found against the single device, in float64."""
    figures, weights = single_device()
    assert found[0] == pytest.approx(figures[len(figures) - 2 * last_steps :], rel=1e-9)
    assert list(found[1]) == list(weights)
    for name, tensor in found[1].items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-9, atol=1e-9, msg=name)


# trained and moved ---------------------------------------------------------------------------
def train_and_save(folder: Path, saved: Path, inputs: Inputs) -> Found:
    """Three steps; a checkpoint after the second."""
    stage, optimizer = begin(folder)
    found = train(stage, optimizer, inputs, 2)
    save_checkpoint(saved, stage, optimizer, step=2)
    found += train(stage, optimizer, inputs, 1)
    save_shared({"model": stage.state_dict()}, checkpoint_id=saved / "shared")
    return found, stage.full_state_dict()


def resume_and_save(folder: Path, saved: Path, inputs: Inputs) -> Found:
    """The third step; a checkpoint after it. torch's checkpoint of another run holds the same."""
    stage, optimizer = begin(folder)
    assert load_checkpoint(saved, stage, optimizer) == 2
    found = train(stage, optimizer, inputs, 1)
    save_checkpoint(saved, stage, optimizer, step=3)
    whole = stage.full_state_dict()
    state = {"model": stage.state_dict()}
    load_shared(state, checkpoint_id=saved / "shared")
    stage.load_state_dict(state["model"])
    for name, tensor in stage.full_state_dict().items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-9, atol=1e-9, msg=name)
    return found, whole


def load_back(folder: Path, saved: Path) -> Found:
    stage, optimizer = begin(folder)
    assert load_checkpoint(saved, stage, optimizer) == 3
    return [], stage.full_state_dict()


@pytest.mark.exhaustive
def test_training_equals_one_device_and_moves_to_data_parallel_and_back(
    world: Processes, folder: Path, tmp_path: Path
) -> None:
    inputs = case().inputs
    for found in world.run(train_and_save, folder / "pp-dp", tmp_path, inputs):
        compare(found, 3)
    saved = TensorFile(tmp_path / "step-00000002" / "rank-00000.safetensors")
    others = TensorFile(tmp_path / "step-00000002" / "rank-00002.safetensors")
    assert f"model/{TIED}" in saved
    assert f"model/{TIED}" not in others
    for found in world.run(resume_and_save, folder / "dp", tmp_path, inputs, num=2):
        compare(found, 1)
    for found in world.run(load_back, folder / "pp", tmp_path, num=2):
        compare(found, 0)


def train_here(folder: Path, inputs: Inputs) -> Found:
    stage, optimizer = begin(folder)
    held = [name for name, _ in stage.named_parameters()]
    assert TIED in held
    assert ("transformer.h.0.ln_1.weight" in held) == (stage.coords["pp"] == 0)
    assert {SECOND_NAME, TIED} <= stage.state_dict().keys()
    found = train(stage, optimizer, inputs, 3)
    whole = stage.full_state_dict()
    stage.load_state_dict(stage.state_dict())
    stage.load_full(whole)
    return found, whole


@pytest.mark.exhaustive
def test_ranks_that_only_hold_stages_train_alike(world: Processes, folder: Path) -> None:
    for found in world.run(train_here, folder / "pp", case().inputs, num=2):
        compare(found, 3)


# refused -------------------------------------------------------------------------------------
def refused(folder: Path, inputs: Inputs) -> None:
    """Every rank refuses alike, whoever holds what is wrong."""
    stage, _ = begin(folder)
    stage.float()
    with pytest.raises(RunError, match="was cast to float32"):
        stage.step(*inputs)
    stage.double()
    stage.to("cpu")
    whole = stage.full_state_dict()
    without = {name: t for name, t in whole.items() if name != "transformer.h.0.ln_1.bias"}
    with pytest.raises(LoadError, match="1 names are missing"):
        stage.load_full(without)
    with pytest.raises(LoadError, match="1 tensors have other shapes"):
        stage.load_full({**whole, "transformer.ln_f.bias": torch.ones(3)})


def test_what_cannot_be_is_refused_on_every_rank(world: Processes, folder: Path) -> None:
    world.run(refused, folder / "pp", case().inputs, num=2)


# the saved program by itself -----------------------------------------------------------------
def torchrun(num: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num)]
    return subprocess.run(
        [sys.executable, *launch, *arguments], capture_output=True, text=True, timeout=patience(),
        check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.exhaustive
def test_a_saved_pipeline_runs_by_itself(folder: Path) -> None:
    weights, script = str(folder / "weights.safetensors"), str(folder / "pp" / "run.py")
    done = torchrun(2, script, "--weights", weights, "--steps", "2")
    assert done.returncode == 0, done.stderr
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", done.stdout)]
    generator = torch.Generator().manual_seed(0)
    batch = [torch.randint(2, x.shape, generator=generator) for x in case().inputs]
    first = case().loss(case().model, *batch).item()
    assert losses[0] == pytest.approx(first, abs=1e-5)
    assert losses[1] < first


def test_a_saved_pipeline_refuses_a_wrong_world(folder: Path) -> None:
    (done,) = run_ranks(folder / "pp" / "run.py", num=1)
    assert done.code == 2
    assert "has 2 ranks, but 1 processes were started" in done.text


def bare() -> tuple[torch.nn.Module, Tensor]:
    """A model whose first stage has no parameters, and a batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(6, 3)).double()
    return model, torch.randn(4, 6, dtype=torch.float64)


def bare_loss(model: torch.nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().mean()


def norm_of(folder: Path) -> float:
    stage, (model, x) = load(folder).module(), bare()
    stage.load_full(model)
    stage.step(x)
    return stage.clip_grad_norm_(MAX_NORM).item()


def test_a_rank_without_parameters_takes_part(world: Processes, tmp_path: Path) -> None:
    """It knows the device, and the type of the norm, as the others do."""
    from partc.api import compile as compile_program

    model, x = bare()
    compile_program(
        model, "pp=2", (x,), loss=bare_loss, plan="ddp", stages=["1"], microbatches=2
    ).save(tmp_path / "bare")
    bare_loss(model, x).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
    assert world.run(norm_of, tmp_path / "bare", num=2) == [pytest.approx(norm)] * 2


def frozen() -> torch.nn.Module:
    """A model whose first half is frozen."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.GELU()) for _ in range(4)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(6, 3)).double()
    model[:4].requires_grad_(False)
    return model


def losses_of(model: Any, step: Callable[[Tensor], Tensor]) -> list[float]:
    """Steps of an optimizer over all parameters, as scripts make it."""
    optimizer, (_, x) = torch.optim.Adam(model.parameters(), 0.1), bare()
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        found.append(step(x).item())
        optimizer.step()
    return found


def trains_frozen() -> list[float]:
    from partc.wrappers.parallel import parallelize

    model: Any = parallelize(frozen(), "pp=2", loss=bare_loss, plan="ddp", batch="global")
    return losses_of(model, model.step)


def test_a_rank_whose_parameters_are_frozen_takes_part(world: Processes) -> None:
    model = frozen()

    def step(x: Tensor) -> Tensor:
        loss = bare_loss(model, x)
        loss.backward()
        return loss

    expected = pytest.approx(losses_of(model, step), rel=1e-12)
    assert world.run(trains_frozen, num=2) == [expected] * 2
