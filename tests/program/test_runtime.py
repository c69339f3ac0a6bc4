"""Stage in real gloo processes: against the single-device model, through checkpoints."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

import partc
from partc.errors import LoadError, RunError
from partc.plan.mesh import Mesh
from partc.program.stage.runtime import Stage
from partc.program.tensorfile import write_tensors
from partc.verification.processes import Processes
from tests.example_program import (
    BATCH,
    GatedMLP,
    example_batch,
    example_loss,
    example_model,
    example_program,
)

pytestmark = pytest.mark.gloo


def close(found: Tensor, expected: Tensor, name: str = "", exact: bool = False) -> None:
    """Equal up to float32 rounding, or in every bit."""
    rtol, atol = (0.0, 0.0) if exact else (2e-5, 1e-6)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=name or None)


def stage_on(dp: int, tp: int, seed: int = 0) -> Stage:
    stage = example_program(dp, tp).module()
    stage.load_full(example_model(seed))
    return stage


def eager_step(model: GatedMLP) -> Tensor:
    loss = example_loss(model, *example_batch())
    loss.backward()
    return loss


def whole_grads(stage: Stage) -> dict[str, Tensor]:
    """Gradients joined over the ranks, by name."""
    return {
        name: param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        for name, param in stage.named_parameters()
        if param.grad is not None
    }


def compare_grads(stage: Stage, model: GatedMLP, times: float = 1.0) -> None:
    expected = {n: p.grad * times for n, p in model.named_parameters() if p.grad is not None}
    assert whole_grads(stage).keys() == expected.keys()
    for name, grad in whole_grads(stage).items():
        close(grad, expected[name], name)


# a training run ------------------------------------------------------------------------------
def train_both() -> None:
    stage, model = stage_on(2, 2), example_model()
    assert sorted(dict(stage.named_parameters())) == sorted(dict(model.named_parameters()))
    ours = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        close(stage.step(*example_batch()), eager_step(model))
        compare_grads(stage, model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        close(stage.clip_grad_norm_(0.1), norm)
        compare_grads(stage, model)
        ours.step()
        theirs.step()
    whole, expected = stage.full_state_dict(), model.state_dict()
    assert list(whole) == list(expected)
    for name, tensor in whole.items():
        close(tensor, expected[name], name)
    copy.deepcopy(model).load_state_dict(whole)


@pytest.mark.exhaustive
def test_training_follows_the_single_device_model(world: Processes) -> None:
    world.run(train_both)


def backward_twice_over() -> None:
    stage, model = stage_on(2, 2), example_model()
    loss = eager_step(model)
    for times in (3.0, 6.0):
        ours = stage(*example_batch())
        (3 * ours).backward()
        close(ours, loss)
        compare_grads(stage, model, times)
    with torch.no_grad():
        assert not stage(*example_batch()).requires_grad
    compare_grads(stage, model, 6.0)
    assert stage.get_buffer("rows").item() == 3 * BATCH
    loss = stage(*example_batch())
    loss.backward(retain_graph=True)
    with pytest.raises(RunError, match="second time"):
        loss.backward()


def test_loss_backward_works_as_with_ddp(world: Processes) -> None:
    world.run(backward_twice_over)


def norms_of_every_kind() -> None:
    for kind in (1.0, 2.0, 3.5, float("inf")):
        stage, model = stage_on(2, 2), example_model()
        stage.step(*example_batch())
        eager_step(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2, kind)
        close(stage.clip_grad_norm_(1e-2, kind), norm)
        compare_grads(stage, model)
    next(p for p in stage.parameters() if p.grad is not None).grad.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(RunError, match="not finite"):
        stage.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_clipping_counts_every_element_once(world: Processes) -> None:
    world.run(norms_of_every_kind)


def moved_to_float64() -> None:
    stage = stage_on(2, 2).double()
    assert {p.dtype for p in stage.parameters()} == {torch.float64}
    assert stage.get_buffer("scale").dtype == torch.float64
    memory = {p.data_ptr() for p in stage.rank_step.parameters()}
    shown = [p.to_local() for p in stage.parameters() if isinstance(p, DTensor)]
    assert {local.data_ptr() for local in shown} == memory
    assert {id(b) for b in stage.buffers()} == {id(b) for b in stage._rank_step.buffers()}


def test_dtype_conversion_reaches_both_views(world: Processes) -> None:
    world.run(moved_to_float64)


# loading -------------------------------------------------------------------------------------
def load_every_way(folder: Path) -> None:
    model = example_model(3)
    state = model.state_dict()
    untied = {name: tensor for name, tensor in state.items() if not name.startswith("up.")}
    for source in (
        model,
        state,
        untied,
        folder / "one.safetensors",
        folder / "index.safetensors.index.json",
    ):
        stage = stage_on(2, 2)
        stage.load_full(source)
        for name, tensor in stage.full_state_dict().items():
            close(tensor, state[name], exact=True)
    close(stage.get_buffer("scale"), model.scale, exact=True)


def test_full_weights_come_from_anywhere(world: Processes, tmp_path: Path) -> None:
    state = example_model(3).state_dict()
    write_tensors(tmp_path / "one.safetensors", state)
    names = sorted(state)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, held in parts.items():
        write_tensors(tmp_path / file, {name: state[name] for name in held})
    weight_map = ", ".join(f'"{n}": "{file}"' for file, held in parts.items() for n in held)
    (tmp_path / "index.safetensors.index.json").write_text(f'{{"weight_map": {{{weight_map}}}}}')
    world.run(load_every_way, tmp_path)


def refused_weights() -> None:
    stage, state = stage_on(2, 2), example_model(3).state_dict()
    with pytest.raises(
        LoadError, match=r"1 names are missing and 1 unexpected.*\n.*down.bias.*\n.*extra"
    ):
        stage.load_full(
            {**{n: t for n, t in state.items() if n != "down.bias"}, "extra": torch.ones(1)}
        )
    with pytest.raises(LoadError, match=r"down.weight: \[8, 12\] compiled, \[8, 3\] given"):
        stage.load_full({**state, "down.weight": torch.ones(8, 3)})
    with pytest.raises(LoadError, match="meta device"):
        stage.load_full(example_model().to("meta"))
    before = stage.full_state_dict()["down.bias"]
    stage.load_full({n: t for n, t in state.items() if n != "down.bias"}, strict=False)
    after = stage.full_state_dict()
    close(after["down.bias"], before, exact=True)
    close(after["down.weight"], state["down.weight"], exact=True)


def test_weights_that_do_not_fit_are_refused_by_name(world: Processes) -> None:
    world.run(refused_weights)


def refused_inputs() -> None:
    stage = stage_on(2, 2)
    x, y = example_batch()
    for inputs, message in (((x,), "missing a required argument: 'y'"), ((x, y, y), "too many")):
        with pytest.raises(RunError, match=rf"{message}.*it takes \(x, y\)"):
            stage.step(*inputs)
    wrong: list[tuple[Any, ...]] = [(x[:6], y), (x.double(), y)]
    for inputs in wrong:
        with pytest.raises(
            RunError, match=r"expected \(x: float32\[12, 8\] on cpu, y: .*\), got \("
        ):
            stage.step(*inputs)


def test_a_batch_of_another_shape_is_refused(world: Processes) -> None:
    world.run(refused_inputs)


# checkpoints ---------------------------------------------------------------------------------
def save_checkpoint(dp: int, tp: int, folder: Path) -> None:
    stage = stage_on(dp, tp, seed=5)
    state = stage.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    for name, value in state.items():
        close(value.full_tensor(), example_model(5).state_dict()[name], name, exact=True)
    local, (_, piece) = state["down.weight"].to_local(), stage.pieces()["down.weight"]
    assert local.data_ptr() == piece.data_ptr()
    save({"model": state}, checkpoint_id=folder)


def load_checkpoint(dp: int, tp: int, folder: Path) -> None:
    stage = stage_on(dp, tp, seed=0)
    state = {"model": stage.state_dict()}
    load(state, checkpoint_id=folder)
    stage.load_state_dict(state["model"])
    expected = example_model(5).state_dict()
    for name, tensor in stage.full_state_dict().items():
        close(tensor, expected[name], name, exact=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((1, 2), [(2, 2), (1, 3)]), ((2, 2), [(4, 1), (1, 2), (1, 1)])],
    ids=["2 to 4 to 3", "2x2 to 4x1, 2, 1"],
)
def test_checkpoints_load_under_another_mesh(
    world: Processes, tmp_path: Path, saved: tuple[int, int], loaded: list[tuple[int, int]]
) -> None:
    folder = tmp_path / "0"
    world.run(save_checkpoint, *saved, folder, num=saved[0] * saved[1])
    for i, (dp, tp) in enumerate(loaded):
        world.run(load_checkpoint, dp, tp, folder, num=dp * tp)
        folder = tmp_path / str(i + 1)
        world.run(save_checkpoint, dp, tp, folder, num=dp * tp)


def torchs_own_state_dict() -> None:
    stage = stage_on(2, 2, seed=5)
    state = get_model_state_dict(stage)
    other = stage_on(2, 2)
    set_model_state_dict(other, state)
    expected = example_model(5).state_dict()
    for name, tensor in other.full_state_dict().items():
        close(tensor, expected[name], name, exact=True)


def test_torchs_state_dict_functions_accept_a_stage(world: Processes) -> None:
    world.run(torchs_own_state_dict)


def alone_without_a_mesh() -> None:
    """One process, no launcher, no axes: partc then only writes the step out."""
    program = replace(example_program(1, 1), mesh=Mesh(()), roles=((1, "role0.py"),))
    source = program.source().replace('MESH = {"dp": 1, "tp": 1}', "MESH = {}")
    for axis in ("dp", "tp"):
        source = source.replace(f'mesh.get_group("{axis}")', "None")
    source = source.replace('mesh.get_local_rank("dp")', "0")
    source = re.sub(r'\("tp", \d, \d\),|\("dp", \d, \d\),?', "", source)
    stage, model = replace(program, sources={"role0.py": source}).module(), example_model()
    stage.load_full(model)
    close(stage.step(*example_batch()), eager_step(model))
    assert not any(isinstance(value, DTensor) for value in stage.state_dict().values())
    stage.load_state_dict(stage.state_dict())
    close(stage.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    compare_grads(stage, model)


def test_one_rank_needs_no_mesh(world: Processes) -> None:
    world.run(alone_without_a_mesh, num=1)


def test_one_rank_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    try:
        stage, model = stage_on(1, 1), example_model()
        close(stage.step(*example_batch()), eager_step(model))
        refuses_other_dtypes(stage)
    finally:
        dist.destroy_process_group()


def in_half(scale: Tensor) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    """A model whose gradients are 0 in float16 unless the loss is multiplied by a large number."""
    torch.manual_seed(0)
    model, batch = nn.Linear(16, 16), (torch.randn(512, 16), torch.randn(512, 16), scale)

    def loss(model: nn.Module, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        return torch.as_tensor(1e-5 * nn.functional.mse_loss(out.float(), y) * scale)

    return model, batch, loss


def test_a_scale_for_float16_has_to_be_inside_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    model, batch, loss = in_half(torch.tensor(2.0**16))
    try:
        stage = partc.compile(model, "dp=1", batch, loss=loss, plan="ddp").module()
        stage.load_full(model)
        stage(*batch).backward()
        grad = stage.get_parameter("weight").grad
        assert grad is not None
        assert not (grad == 0).all()
        with pytest.raises(RunError, match="multiplied by 8, and the program computes in float16"):
            (8 * stage(*batch)).backward()
        with pytest.raises(RunError, match=r"in float16 .*Leave backward out.*bfloat16"):
            (8 * stage.step(*batch)).backward()
    finally:
        dist.destroy_process_group()


def refuses_other_dtypes(stage: Stage) -> None:
    """Autocast would change what the program's text means; a default dtype is the script's own."""
    batch = example_batch()
    before = stage.step(*batch)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(RunError, match="inside of torch"),
    ):
        stage.step(*example_batch())
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(stage.step(*batch), before)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


class KeepsItsLoss(nn.Linear):
    """Has the loss in an attribute, where scripts of one process read it."""

    last_loss: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last_loss = y.square().mean()
        return y


def kept_loss(model: KeepsItsLoss, x: Tensor) -> Tensor:
    model(x)
    return model.last_loss


def test_attributes_that_no_program_sets_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    program = partc.compile(
        KeepsItsLoss(4, 4), "dp=1", (torch.ones(2, 4),), loss=kept_loss, plan="ddp"
    )
    try:
        program.module()
    finally:
        dist.destroy_process_group()
    assert "the step sets model.last_loss; a program does not. To read it" in caplog.text
