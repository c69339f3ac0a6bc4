"""Tools of torch over a stage's parameters compute what they compute on one device, or refuse."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from partc.errors import RunError
from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.program.training import (
    MAKERS,
    batch_of,
    difference,
    in_double,
    loss_of,
    model_of,
    save_program,
    stage_of,
    train_stage,
)

pytestmark = pytest.mark.gloo
ON_WHOLE_TENSORS = ("Adafactor", "Rprop")  # DTensor has not all of their ops
ON_PIECES, ON_WHOLE = "step_on_pieces", "step_on_whole"
FEW_STEPS = 2  # the second reads the first one's states


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "sharded"
    return save_program(path, "dp=2,tp=2", "fsdp+megatron")


# optimizers ----------------------------------------------------------------------------------
ROUTES_OF = {
    "AdamW": ("", ON_WHOLE), "AdamW foreach": ("",), "AdamW fused": ("", ON_PIECES), "SGD": ("",),
    "Adagrad": (ON_PIECES, ON_WHOLE), "Rprop": ("", ON_PIECES), "Whitened": ("", ON_PIECES),
    "LARS": ("", ON_PIECES), "Muon": ("", ON_PIECES, ON_WHOLE),
    "Adafactor": ("", ON_PIECES, ON_WHOLE), "LBFGS": ("", ON_PIECES, ON_WHOLE),
}  # fmt: skip


class Wide(ModuleType):
    """The module torch, whose 16 bits are 64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "bfloat16" else getattr(torch, name)


def every_route(path: Path) -> dict[tuple[str, str], float | str]:
    """The difference from one process, or why it was refused, by optimizer and route."""
    found: dict[tuple[str, str], float | str] = {}
    with in_double(), pytest.MonkeyPatch.context() as patch:
        # Muon rounds to 16 bits, where rounding errors of 64 bits flip digits on one device too
        patch.setattr(Tensor, "bfloat16", Tensor.clone)
        patch.setattr("torch.optim._muon.torch", Wide("torch"))  # torch 2.15 asks for the dtype
        for maker, routes in ROUTES_OF.items():
            for route in routes:
                try:
                    slow = not route and maker in ON_WHOLE_TENSORS
                    found[maker, route] = difference(path, maker, route, 2 if slow else FEW_STEPS)
                except RunError as error:
                    found[maker, route] = str(error)
    return found


@pytest.mark.exhaustive
def test_optimizers_are_those_of_one_process_or_refused(world: Processes, tmp_path: Path) -> None:
    with in_double():
        path = save_program(tmp_path / "double", "dp=2,tp=2", "fsdp+megatron")
    found = world.run(every_route, path)[0]
    refused = {route: why for route, why in found.items() if isinstance(why, str)}
    for maker in ("Muon", "Whitened", "LARS", "Adafactor", "LBFGS"):
        assert f"step_on_pieces({maker})" in str(refused.pop((maker, ON_PIECES)))
    assert refused == {}
    right = {route: error for route, error in found.items() if isinstance(error, float)}
    assert len(right) == 18
    assert {route: error for route, error in right.items() if error > 1e-12} == {}


class LargeScaled(torch.optim.SGD):
    """Scales the gradients of large tensors alone."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.numel() > 100:
                p.grad.mul_(2)
        return super().step()


def misused(path: Path) -> None:
    stage = stage_of(path)
    with pytest.raises(RunError, match=r"step_on_pieces\(LargeScaled\).* shapes of its parameters"):
        stage.step_on_pieces(LargeScaled(stage.parameters(), lr=0.1))
    optimizer = stage.step_on_pieces(MAKERS["AdamW"](stage.parameters()))
    with pytest.raises(RunError, match="it steps on pieces already"):
        stage.step_on_whole(optimizer)
    with pytest.raises(RunError, match=r"shape \[\] that is none of the stage's"):
        stage.step_on_pieces(MAKERS["AdamW"](model_of().parameters()))


@pytest.mark.exhaustive
def test_an_optimizer_goes_one_way_over_the_stages_own(world: Processes, sharded: Path) -> None:
    world.run(misused, sharded)


# torch's tools -------------------------------------------------------------------------------
def clipped_and_counted(path: Path) -> None:
    stage, model = stage_of(path), model_of()
    assert sum(p.numel() for p in stage.parameters()) == sum(p.numel() for p in model.parameters())
    stage.step(*batch_of())
    loss_of(model, *batch_of()).backward()
    norm = torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.1)
    assert isinstance(norm, DTensor)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(norm.full_tensor(), expected)
    for name, param in stage.named_parameters():
        assert isinstance(param.grad, DTensor)
        torch.testing.assert_close(param.grad.full_tensor(), model.get_parameter(name).grad)
    with pytest.raises(RunError, match="broadcast_"):  # of pieces, it would mix them
        dist.broadcast(next(stage.parameters()), 0)


@pytest.mark.exhaustive
def test_torchs_clip_grad_norm_is_over_all_shards(world: Processes, sharded: Path) -> None:
    world.run(clipped_and_counted, sharded)


def verdicts(path: Path, route: str) -> list[float]:
    """The scale after steps in which no rank, or one rank, had an infinite gradient."""
    stage, scales = stage_of(path), []
    for bad in (None, 0, 1, 2, 3):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = MAKERS["AdamW fused"](stage.parameters())
        if route:
            getattr(stage, route)(optimizer)
        optimizer.zero_grad()
        scaler.scale(stage(*batch_of())).backward()
        grad = stage.get_parameter("head.weight").grad
        assert isinstance(grad, DTensor)
        if bad == dist.get_rank():
            grad.to_local().fill_(torch.inf)
        before = stage.full_state_dict()["head.bias"]
        scaler.step(optimizer)
        scaler.update()
        same = torch.equal(before, stage.full_state_dict()["head.bias"])
        scales.append(scaler.get_scale() if same == (bad is not None) else -1.0)
    return scales


@pytest.mark.parametrize("route", ["", ON_PIECES])
def test_gradscaler_skips_on_all_ranks_or_none(world: Processes, sharded: Path, route: str) -> None:
    assert world.run(verdicts, sharded, route) == [[8.0, 4.0, 4.0, 4.0, 4.0]] * 4


def stage_in(average: AveragedModel) -> Stage:
    assert isinstance(average.module, Stage)
    return average.module


def averaged(path: Path) -> None:
    stage, model = stage_of(path), model_of()
    every: tuple[dict[str, Any], ...] = ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)})
    for options in every:
        ours, theirs = AveragedModel(stage, **options), AveragedModel(model, **options)
        for _ in range(3):
            with torch.no_grad():
                for param in (*stage.parameters(), *model.parameters()):
                    param.mul_(1.1)
            ours.update_parameters(stage)
            theirs.update_parameters(model)
        expected = theirs.module.state_dict()
        for name, tensor in stage_in(ours).full_state_dict().items():
            torch.testing.assert_close(tensor, expected[name])
        torch.testing.assert_close(ours(*batch_of()), loss_of(theirs, *batch_of()))


@pytest.mark.exhaustive
def test_averaged_models_are_those_of_one_process(world: Processes, sharded: Path) -> None:
    world.run(averaged, sharded)


def copied(path: Path) -> None:
    stage = stage_of(path)
    stage.get_parameter("head.bias").requires_grad_(False)
    twin, before = copy.deepcopy(stage), stage.full_state_dict()
    train_stage(twin, MAKERS["SGD"](twin.parameters()), 2)
    after = stage.full_state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    trained = twin.full_state_dict()
    same = [name for name in before if torch.equal(trained[name], before[name])]
    assert same == ["head.bias"]


def test_a_copied_stage_trains_alone(world: Processes, sharded: Path) -> None:
    world.run(copied, sharded)


# checkpoints ---------------------------------------------------------------------------------
ROUTES = ("", ON_PIECES, ON_WHOLE)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def begin(path: Path, route: str, seed: int) -> tuple[Stage, torch.optim.Optimizer]:
    stage = stage_of(path, seed)
    optimizer = MAKERS["AdamW"](stage.parameters())
    if route:
        getattr(stage, route)(optimizer)
    return stage, optimizer


def run_and_save(path: Path, folder: Path) -> list[float]:
    """Two steps, a checkpoint of each route, two more steps: their losses."""
    losses = []
    for route in ROUTES:
        stage, optimizer = begin(path, route, 0)
        train_stage(stage, optimizer, 2)
        model, state = get_state_dict(stage, optimizer, options=FLAT)
        save_dcp({"model": model, "optimizer": state}, checkpoint_id=folder / (route or "dtensors"))
        losses = train_stage(stage, optimizer, 2)
    return losses


def resume(path: Path, folder: Path, later: int) -> dict[str, list[float]]:
    """The two losses after a checkpoint of each route was loaded, by another route."""
    found = {}
    for number, saved in enumerate(ROUTES):
        route = ROUTES[number - 1 - later]
        stage, optimizer = begin(path, route, 7)
        model, state = get_state_dict(stage, optimizer, options=FLAT)
        both: dict[str, Any] = {"model": model, "optimizer": state}
        load_dcp(both, checkpoint_id=folder / (saved or "dtensors"))
        set_state_dict(
            stage, optimizer, model_state_dict=both["model"],
            optim_state_dict=both["optimizer"], options=FLAT,
        )  # fmt: skip
        found[f"{saved} to {route}"] = train_stage(stage, optimizer, 2)
    return found


@pytest.mark.exhaustive
def test_torchs_checkpoints_resume_on_any_mesh(
    world: Processes, sharded: Path, tmp_path: Path
) -> None:
    expected = world.run(run_and_save, sharded, tmp_path / "saved")[0]
    other = save_program(tmp_path / "other", "tp=2", "megatron")
    for path, num, later in ((sharded, 4, 1), (other, 2, 0)):
        for losses in world.run(resume, path, tmp_path / "saved", later, num=num)[0].values():
            assert losses == pytest.approx(expected, rel=1e-6)


def copied_states(path: Path, folder: Path) -> None:
    """A checkpoint of ours, and a copy of the optimizer's own state dict."""
    for route in ROUTES:
        stage, optimizer = begin(path, route, 0)
        train_stage(stage, optimizer, 2)
        save_checkpoint(folder / route, stage, optimizer)
        model = {name: tensor.clone() for name, tensor in stage.state_dict().items()}
        states = copy.deepcopy(optimizer.state_dict())
        expected = train_stage(stage, optimizer, 2)
        for own in (True, False):
            stage, optimizer = begin(path, route, 7)
            if own:
                load_checkpoint(folder / route, stage, optimizer)
            else:
                stage.load_state_dict(model)
                optimizer.load_state_dict(states)
            assert train_stage(stage, optimizer, 2) == pytest.approx(expected, rel=1e-6)


@pytest.mark.exhaustive
def test_states_of_every_kind_resume(world: Processes, sharded: Path, tmp_path: Path) -> None:
    world.run(copied_states, sharded, tmp_path)


def pickled(path: Path) -> None:
    """The states that ``torch.load`` gives are torch's own DTensors."""
    stage = stage_of(path)
    optimizer, file = MAKERS["LAMB"](stage.parameters()), io.BytesIO()
    train_stage(stage, optimizer, 2)
    torch.save({"model": stage.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train_stage(stage, optimizer, 2)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    stage = stage_of(path, 7)
    optimizer = MAKERS["LAMB"](stage.parameters())
    stage.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert train_stage(stage, optimizer, 2) == pytest.approx(expected, rel=1e-6)


@pytest.mark.exhaustive
def test_pickled_states_resume(world: Processes, sharded: Path) -> None:
    world.run(pickled, sharded)


def whole_states(path: Path) -> None:
    """A whole state dict in and out, as rank 0 of a script saves it with ``torch.save``."""
    whole = StateDictOptions(full_state_dict=True)
    for route in ROUTES:
        stage, optimizer = begin(path, route, 0)
        train_stage(stage, optimizer, 2)
        saved = copy.deepcopy(get_state_dict(stage, optimizer, options=whole))
        expected = train_stage(stage, optimizer, 2)
        stage, optimizer = begin(path, route, 7)
        set_state_dict(
            stage, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1], options=whole
        )
        assert train_stage(stage, optimizer, 2) == pytest.approx(expected, rel=1e-6)


@pytest.mark.exhaustive
def test_whole_state_dicts_go_in_and_out(world: Processes, sharded: Path) -> None:
    world.run(whole_states, sharded)
