"""Compiled programs in real gloo processes: verified, trained, and moved from plan to plan."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from partc.cli.main import main
from partc.program import Program, load
from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partc.program.stage.runtime import Stage
from partc.program.tensorfile import write_tensors
from partc.verification.processes import Processes
from partc.verification.verification import verify
from tests.patience import patience

if TYPE_CHECKING:
    from tests.zoo import Case

pytestmark = pytest.mark.gloo
FLOAT32 = 1e-6  # the model computes its loss in float32 whatever it is itself
Inputs = tuple[Tensor, ...]


@cache
def case() -> Case:
    """GPT-2: tied weights, and a fused q, k, v weight that tp cuts third by third."""
    from tests.zoo import MODELS  # not by the ranks, which would wait for transformers

    return MODELS["gpt2"]()


@cache
def program(mesh: str, plan: str) -> Program:
    from partc.api import compile as compile_program

    return compile_program(case().model, mesh, case().inputs, loss=case().loss, plan=plan)


@pytest.mark.exhaustive
def test_processes_give_what_the_model_gives() -> None:
    made = program("dp=2,tp=2", "fsdp+megatron")
    report = verify(
        made, case().model, case().inputs, case().loss, processes=True, timeout=patience()
    )
    assert report.check().worst.error < 1e-12


def begin(folder: Path) -> tuple[Stage, torch.optim.Optimizer]:
    stage = load(folder).module()
    stage.load_full(folder.parent / "weights.safetensors")
    return stage, torch.optim.AdamW(stage.parameters(), lr=1e-3, eps=1e-5)


def train(stage: Stage, optimizer: torch.optim.Optimizer, inputs: Inputs) -> list[float]:
    """Two steps as with DDP; their losses."""
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = stage(*inputs)
        loss.backward()
        stage.clip_grad_norm_(0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_and_save(folder: Path, checkpoints: Path, inputs: Inputs) -> dict[str, Tensor]:
    stage, optimizer = begin(folder)
    losses = train(stage, optimizer, inputs)
    save_checkpoint(checkpoints, stage, optimizer, step=2)
    return {"losses": torch.tensor(losses), **stage.full_state_dict()}


def resume(folder: Path, checkpoints: Path, inputs: Inputs) -> list[float]:
    stage, optimizer = begin(folder)
    load_checkpoint(checkpoints, stage, optimizer)
    return train(stage, optimizer, inputs)


def single_device(num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same training without partc; weights after two steps."""
    model, losses, after = copy.deepcopy(case().model), [], {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = case().loss(model, *case().inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
        if step == 1:
            after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return losses, after


@pytest.mark.exhaustive
def test_training_moves_from_plan_to_plan(world: Processes, tmp_path: Path) -> None:
    plans = {"one": ("dp=2,tp=2", "megatron"), "two": ("dp=2", "fsdp")}
    for name, (mesh, plan) in plans.items():
        program(mesh, plan).save(tmp_path / name)
    write_tensors(tmp_path / "weights.safetensors", case().model.state_dict())
    saved, inputs = tmp_path / "saved", case().inputs
    losses, weights = single_device(4)
    found = world.run(train_and_save, tmp_path / "one", saved, inputs)[0]
    assert found.pop("losses").tolist() == pytest.approx(losses[:2], rel=FLOAT32)
    assert list(found) == list(weights)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, weights[name], rtol=FLOAT32, atol=FLOAT32)
    for resumed in world.run(resume, tmp_path / "two", saved, inputs, num=2):
        assert resumed == pytest.approx(losses[2:], rel=FLOAT32)


LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip


def test_the_command_line_from_configuration_to_verified_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model, out = f"hf:{tmp_path}/config.json", str(tmp_path / "build")
    sizes = ["--batch", "4", "--seq", "8", "--layers", "1"]
    where = ["--mesh", "dp=2,tp=2", "--plan", "megatron", "--out", out]
    assert main(["compile", model, *sizes, *where, "--json"]) == 0
    told: Any = json.loads(capsys.readouterr().out)
    assert told["mesh"] == {"dp": 2, "tp": 2}
    assert main(["verify", out, "--model", model, "--layers", "1", "--tolerance", "1e-12"]) == 0


def test_an_inference_program_gives_the_model_s_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model, out = f"hf:{tmp_path}/config.json", str(tmp_path / "build")
    sizes = ["--batch", "4", "--seq", "8", "--layers", "1"]
    where = ["--mesh", "tp=2", "--plan", "megatron", "--out", out, "--inference"]
    assert main(["compile", model, *sizes, *where]) == 0
    capsys.readouterr()
    assert main(["verify", out, "--model", model, "--layers", "1", "--json"]) == 0
    report: Any = json.loads(capsys.readouterr().out)
    assert {(row["kind"], row["name"]) for row in report["rows"]} >= {("result", "logits")}
