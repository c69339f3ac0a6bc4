"""What a checkpoint of any mesh is exported to: plain transformers loads it, and partc does, on any
other mesh, with the same weights to the bit and the same loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partc
from partc.program.tensorfile import write_tensors
from partc.verification.processes import Processes
from tests.whole.test_checkpoint_meshes import LAYOUTS, MODELS, ROWS
from tests.zoo import AUTO, FAMILIES, Family

pytestmark = pytest.mark.gloo
MESHES = {"gpt2": ("dp=2,tp=2", "pp=4"), "t5": ("dp=3", "tp=2"), "mixtral": ("pp=4", "dp=2,tp=2")}


def trained(folder: Path, mesh: str) -> float:
    """A step, its checkpoint, and the loss behind it."""
    stage = partc.load(folder / mesh).module()
    stage.load_full(folder / "weights.safetensors")
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    inputs = torch.load(folder / "inputs.pt")
    stage.step(*inputs)
    optimizer.step()
    optimizer.zero_grad()
    partc.save_checkpoint(folder / f"run {mesh}", stage, optimizer, step=1)
    return float(stage.step(*inputs))


def loaded(folder: Path, mesh: str, weights: str) -> dict[str, Tensor]:
    """The whole model of a stage that reads exported files, and writes a checkpoint again."""
    stage = partc.load(folder / mesh).module()
    stage.load_full(folder / weights)
    partc.save_checkpoint(folder / f"run of {weights}", stage)
    return stage.full_state_dict()


def from_pretrained(family: Family, folder: Path) -> Any:
    """What transformers loads, without a name that is missing, strange or of another shape."""
    model, told = AUTO[family.task].from_pretrained(
        folder, dtype=family.dtype, output_loading_info=True, local_files_only=True
    )
    assert not any(told.values()), told
    model.config.use_cache = False
    return model.train()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MESHES)
def test_an_export_loads_into_transformers_and_into_any_mesh(
    world: Processes, name: str, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    case = family.case(name, ROWS, **MODELS[name])
    write_tensors(tmp_path / "weights.safetensors", case.model.state_dict())
    torch.save(case.inputs, tmp_path / "inputs.pt")
    config: Any = case.model.config
    config.save_pretrained(tmp_path / "config")
    first, other = MESHES[name]
    for mesh in (first, other):
        partc.compile(case.step, mesh, **LAYOUTS[mesh]).save(tmp_path / mesh)
    num = {mesh: partc.load(tmp_path / mesh).mesh.num_ranks for mesh in (first, other)}
    loss = world.run(trained, tmp_path, first, num=num[first])[0]
    partc.export_safetensors(
        tmp_path / f"run {first}", tmp_path / "out", max_shard_size="20KB",
        config=tmp_path / "config",
    )  # fmt: skip
    plain = from_pretrained(family, tmp_path / "out")
    rounding = 1e-12 if family.dtype == torch.float64 else 1e-6
    assert case.loss(plain, *case.inputs).item() == pytest.approx(loss, rel=rounding)
    state = plain.state_dict()
    for found in world.run(loaded, tmp_path, other, "out", num=num[other]):
        assert found.keys() == state.keys()
        assert all(torch.equal(x, state[each]) for each, x in found.items())
    again = partc.export_safetensors(
        tmp_path / "run of out", tmp_path / "again", max_shard_size="20KB",
        config=tmp_path / "config",
    )  # fmt: skip
    files = {each.name: each.read_bytes() for each in (tmp_path / "out").iterdir()}
    assert {each.name: each.read_bytes() for each in again.iterdir()} == files
