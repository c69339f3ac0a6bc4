"""``optimizer.load_state_dict`` of one process's states: each rank keeps its shard, and goes on."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import partc
from partc.errors import LoadError, RunError
from partc.program import load
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.program.training import Residuals, batch_of, loss_of

pytestmark = pytest.mark.gloo
Optimizer = torch.optim.Optimizer
LAYOUTS = [
    ("dp=4", "fsdp"), ("dp=4", "zero1"), ("dp=2,tp=2", "fsdp+megatron"), ("pp=2,dp=2", "fsdp"),
]  # fmt: skip
LOADED_FIRST, PIECES_FIRST, DTENSORS, WHOLE = "loaded first", "pieces first", "dtensors", "whole"


def in_groups(module: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def named(module: nn.Module) -> Any:
    return module.named_parameters()


MAKERS: dict[str, tuple[Callable[[nn.Module], Optimizer], tuple[str, ...]]] = {
    "AdamW": (
        lambda m: torch.optim.AdamW(in_groups(m), 1e-2, amsgrad=True),
        (DTENSORS, LOADED_FIRST, PIECES_FIRST, WHOLE),
    ),
    "fused": (lambda m: torch.optim.Adam(m.parameters(), 1e-2, fused=True), (LOADED_FIRST,)),
    "SGD": (lambda m: torch.optim.SGD(named(m), 1e-2, 0.9), (DTENSORS, LOADED_FIRST)),
    "Adagrad": (lambda m: torch.optim.Adagrad(m.parameters(), 1e-2), (PIECES_FIRST,)),
    "RMSprop": (
        lambda m: torch.optim.RMSprop(m.parameters(), 1e-3, momentum=0.9), (LOADED_FIRST,),
    ),
    "Adafactor": (lambda m: torch.optim.Adafactor(in_groups(m), 1e-2), (DTENSORS, WHOLE)),
}  # fmt: skip


def model_of() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Residuals().double()


def double_batch() -> tuple[Tensor, ...]:
    return tuple(x.double() for x in batch_of())


def train(module: nn.Module, optimizer: Optimizer, num: int) -> list[float]:
    losses = []
    for _ in range(num):
        optimizer.zero_grad()
        if isinstance(module, Stage):
            loss = module.step(*double_batch())
        else:
            loss = loss_of(module, *double_batch())
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def alone(kind: str) -> tuple[nn.Module, bytes, nn.Module, list[float]]:
    """A model behind two steps and its optimizer's states, and how one process goes on."""
    model = model_of()
    optimizer = MAKERS[kind][0](model)
    train(model, optimizer, 2)
    then, state = copy.deepcopy(model), saved(optimizer.state_dict())
    losses = train(model, optimizer, 2)
    return then, state, model, losses


def save_program(folder: Path, mesh: str, plan: str) -> Path:
    batch, microbatches = double_batch(), 2 if "pp" in mesh else 1
    partc.compile(
        model_of(), mesh, batch, loss=loss_of, plan=plan, microbatches=microbatches
    ).save(folder / "program")  # fmt: skip
    return folder / "program"


def resumed(stage: Stage, kind: str, route: str, state: bytes) -> Optimizer:
    """An optimizer over a stage that took one process's states, before it steps."""
    optimizer = MAKERS[kind][0](stage)
    if route == WHOLE:
        stage.step_on_whole(optimizer)
    if route == PIECES_FIRST:
        stage.step_on_pieces(optimizer)
    optimizer.load_state_dict(torch.load(io.BytesIO(state)))
    if route == LOADED_FIRST:
        check_sharded(optimizer)
        stage.step_on_pieces(optimizer)
    return optimizer


def moments(optimizer: Optimizer) -> Iterator[tuple[DTensor, Tensor, str]]:
    for param, fields in optimizer.state.items():
        for field, value in fields.items():
            if field in ("step", "row_var", "col_var") or not isinstance(value, Tensor):
                continue
            assert isinstance(param, DTensor)
            yield param, value, field


def check_sharded(optimizer: Optimizer) -> None:
    """Every moment has as many elements here as this rank's piece of its parameter."""
    found = list(moments(optimizer))
    assert found
    for param, value, field in found:
        local = value.to_local() if isinstance(value, DTensor) else value
        assert local.shape == param.to_local().shape, field
    params = [param for param, _, _ in found]
    assert sum(p.to_local().numel() for p in params) <= 0.6 * sum(p.numel() for p in params)


def every_kind(path: Path) -> None:
    for kind, (_, routes) in MAKERS.items():
        then, state, after, losses = alone(kind)
        for route in routes:
            stage = load(path).module()
            stage.load_full(then)
            optimizer = resumed(stage, kind, route, state)
            if route != WHOLE:
                check_sharded(optimizer)
            assert train(stage, optimizer, 2) == pytest.approx(losses, rel=1e-9), (kind, route)
            if route != WHOLE:
                check_sharded(optimizer)
            close_to(stage, after)


def close_to(stage: Stage, model: nn.Module) -> None:
    expected = model.state_dict()
    for name, found in stage.full_state_dict().items():
        torch.testing.assert_close(found, expected[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan"), LAYOUTS, ids=[plan for _, plan in LAYOUTS[:3]] + ["pp"])
def test_states_of_one_process_are_sharded_and_go_on(
    world: Processes, tmp_path: Path, mesh: str, plan: str
) -> None:
    world.run(every_kind, save_program(tmp_path, mesh, plan))


def set_by_hand(path: Path) -> None:
    """A script that copies states into ``optimizer.state`` itself."""
    then, state, _, losses = alone("AdamW")
    stage = load(path).module()
    stage.load_full(then)
    optimizer, given = MAKERS["AdamW"][0](stage), torch.load(io.BytesIO(state))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, fields in given["state"].items():
        optimizer.state[params[number]] = fields
    stage.step_on_pieces(optimizer)
    check_sharded(optimizer)
    assert train(stage, optimizer, 2) == pytest.approx(losses, rel=1e-9)


def test_whole_states_that_a_script_sets_become_pieces(world: Processes, tmp_path: Path) -> None:
    world.run(set_by_hand, save_program(tmp_path, "dp=2", "fsdp"), num=2)


def refused(path: Path) -> None:
    """On every rank, also on those of a pipeline that have not got the parameter."""
    _, state, _, _ = alone("AdamW")
    for route in (DTENSORS, "step_on_pieces", "step_on_whole"):
        stage = load(path).module()
        optimizer, full = MAKERS["AdamW"][0](stage), stage.load_full_optim_state_dict
        if route != DTENSORS:
            getattr(stage, route)(optimizer)
        given = torch.load(io.BytesIO(state))
        for shape in ([5, 12], [12], [1, 12], [24, 12, 1]):
            given["state"][0]["exp_avg_sq"] = torch.zeros(shape)
            why = f"blocks.0.up.weight, exp_avg_sq: has the shape {shape}, the parameter [24, 12]"
            for take in (optimizer.load_state_dict, partial(full, optimizer)):
                with pytest.raises(LoadError, match=re.escape(why)):
                    take(given)
        given["param_groups"][0]["params"].pop()
        with pytest.raises(LoadError, match=r"it has groups of \[4, 10\] param.* of \[5, 10\]"):
            optimizer.load_state_dict(given)
        with pytest.raises(LoadError, match=r"AdamW.load_state_dict: .* none of an optimizer"):
            optimizer.load_state_dict({"model": {}, "optimizer": given})
        assert not optimizer.state


def of_the_head(module: nn.Module) -> list[dict[str, Any]]:
    """A group that is empty on the pipeline ranks without the head."""
    return [{"params": [p for n, p in module.named_parameters() if n.startswith("head")]}]


def of_the_blocks(module: nn.Module) -> Any:
    """Some of them are stand-ins on each pipeline rank."""
    return module.get_submodule("blocks").parameters()


def over_a_part(path: Path) -> None:
    """An optimizer over one part, and a rank's own state dict of it."""
    for part in (of_the_head, of_the_blocks):
        model, stage = model_of(), load(path).module()
        theirs = torch.optim.AdamW(part(model), 1e-2)
        train(model, theirs, 2)
        stage.load_full(model)
        ours, again = torch.optim.AdamW(part(stage), 1e-2), torch.optim.AdamW(part(stage), 1e-2)
        ours.load_state_dict(torch.load(io.BytesIO(saved(theirs.state_dict()))))
        expected = train(model, theirs, 2)
        assert train(stage, ours, 1) == pytest.approx(expected[:1], rel=1e-9)
        again.load_state_dict(copy.deepcopy(ours.state_dict()))
        assert train(stage, again, 1) == pytest.approx(expected[1:], rel=1e-9)
        if again.state:
            check_sharded(again)
        close_to(stage, model)


def several_pipelines(path: Path) -> None:
    """Nothing says whose states they are, on a rank whose groups are empty."""
    stages = [load(path).module() for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": []}], 1e-2)
    with pytest.raises(RunError, match=r"AdamW.load_state_dict: .* has \d stages of pipelines"):
        optimizer.load_state_dict(optimizer.state_dict())
    assert len(stages) == 2  # they are alive up to here


@pytest.mark.exhaustive
def test_an_optimizer_over_a_part_takes_its_states(world: Processes, tmp_path: Path) -> None:
    path = save_program(tmp_path, "pp=2,dp=2", "fsdp")
    world.run(over_a_part, path)
    world.run(several_pipelines, path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_states_of_other_shapes_are_refused_by_name(
    world: Processes, tmp_path: Path, mesh: str
) -> None:
    world.run(refused, save_program(tmp_path, mesh, "fsdp" if mesh == "dp=2" else "ddp"), num=2)
