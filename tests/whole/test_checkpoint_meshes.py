"""A checkpoint of one mesh is, on any other, the same whole model and moments to the last bit."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import partc
from partc.program.stage.runtime import Stage
from partc.program.tensorfile import write_tensors
from partc.verification.processes import Processes
from tests.zoo import FAMILIES

pytestmark = pytest.mark.gloo
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp=2,tp=2": {"plan": "fsdp+megatron"},
    "pp=4": {"plan": "ddp", "microbatches": 4},
    "dp=3": {"plan": "fsdp"},
    "tp=2": {"plan": "megatron"},
    "dp=1": {"plan": "ddp"},
}
MODELS: dict[str, dict[str, Any]] = {  # gpt2 and t5 are tied
    "gpt2": {"n_layer": 4},
    "t5": {},
    "mixtral": {"num_hidden_layers": 4},
}
LOADED = {
    "gpt2": ["pp=4", "dp=3", "dp=1"],
    "t5": ["dp=2,tp=2", "pp=4", "dp=3"],
    "mixtral": ["dp=2,tp=2", "tp=2", "dp=1"],
}
STEP, ROWS = 2, 12  # rows that 2, 3 and 4 divide


def begin(folder: Path, mesh: str) -> tuple[Stage, torch.optim.Optimizer]:
    stage = partc.load(folder / mesh).module()
    stage.load_full(folder / "weights.safetensors")
    return stage, torch.optim.AdamW(stage.parameters(), lr=0.01)


def digests(stage: Stage, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """A digest of each whole tensor of the model and of the optimizer."""
    whole = stage.full_state_dict()
    for number, state in stage.full_optim_state_dict(optimizer)["state"].items():
        whole |= {f"{number} {field}": value for field, value in state.items()}
    return {
        name: sha256(x.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, x in whole.items()
    }


def save(folder: Path, mesh: str) -> dict[str, str]:
    stage, optimizer = begin(folder, mesh)
    inputs = torch.load(folder / "inputs.pt")
    with partc.Checkpoints(folder / "run", keep_latest_k=1) as checkpoints:
        for step in range(1, STEP + 1):
            stage.step(*inputs)
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(step, stage, optimizer)
    return digests(stage, optimizer)


def load(folder: Path, mesh: str) -> dict[str, str]:
    stage, optimizer = begin(folder, mesh)
    assert partc.Checkpoints(folder / "run").load_latest(stage, optimizer) == STEP
    return digests(stage, optimizer)


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_is_whole_on_every_mesh(world: Processes, name: str, tmp_path: Path) -> None:
    case = FAMILIES[name].case(name, ROWS, **MODELS[name])
    write_tensors(tmp_path / "weights.safetensors", case.model.state_dict())
    torch.save(case.inputs, tmp_path / "inputs.pt")
    for mesh in {"dp=2,tp=2", *LOADED[name]}:
        partc.compile(case.step, mesh, **LAYOUTS[mesh]).save(tmp_path / mesh)
    expected = world.run(save, tmp_path, "dp=2,tp=2")[0]
    assert len(expected) > 3 * len([*case.model.parameters()])
    for mesh in LOADED[name]:
        num = partc.load(tmp_path / mesh).mesh.num_ranks
        for found in world.run(load, tmp_path, mesh, num=num):
            assert found == expected, mesh
