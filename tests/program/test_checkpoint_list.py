"""A checkpoint's list that is damaged, forged or another one on some rank is refused on all."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from partc.errors import LoadError, PartcError, RunError, UsageError
from partc.program.checkpoints.checkpoint import latest, load_checkpoint, save_checkpoint
from partc.program.checkpoints.saved_checkpoint import Saved
from partc.program.optimizer.same_optimizer import plain_values, take_values
from partc.verification.processes import Processes
from tests.example_program import example_model
from tests.program.trained import begin, rewrite, train

pytestmark = pytest.mark.gloo


def save_here(folder: Path) -> None:
    stage, optimizer = begin(2, 2, seed=0)
    train(stage, optimizer, 1)
    save_checkpoint(folder, stage, optimizer, step=3)


def flipped(fields: dict[str, Any]) -> None:
    fields["tensors"]["model/up.weight"][2][0][2] = 1  # of 2: the halves of a fused weight


FILE = "rank-00003.safetensors"
FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "other rows": (flipped, "are not sharded as checkpoint.json says"),
    "an axis twice": (
        lambda f: f["tensors"]["model/up.weight"][2].append(["tp", 1, 1]), "cannot be sharded over"
    ),
    "an unknown axis": (
        lambda f: f["tensors"]["model/up.weight"][2].append(["x", 1, 1]), "cannot be sharded over"
    ),
    "a size of a dim": (lambda f: f["tensors"]["model/shift"].__setitem__(0, [9]), "another shape"),
    "a dtype": (lambda f: f["tensors"]["model/shift"].__setitem__(1, "int32"), "another shape"),
    "a tensor more": (
        lambda f: f["tensors"].update({"model/new": [[8], "float32", []]}), "differ in model/new"
    ),
    "a state's name": (
        lambda f: f["tensors"].update(
            {"optimizer/exp_avgg/shift": f["tensors"].pop("optimizer/exp_avg/up.bias")}
        ),
        "differ in optimizer/exp_avg",
    ),
    "a code as a dtype": (
        lambda f: f["tensors"]["model/shift"].__setitem__(1, "load"), "no dtype of torch"
    ),
    "a step below 0": (lambda f: f.update(step=-1), "is below 0"),
    "a fraction of a step": (lambda f: f.update(step=3.5), "is no whole number"),
    "no seed": (lambda f: f.update(random=None), "TypeError"),
    "a table as lr": (lambda f: f["optimizer"][0].update(lr={}), "lr is no plain value"),
    "an lr without end": (lambda f: f["optimizer"][0].update(lr=1e300), "more than float32 holds"),
    "an entry": (lambda f: f.update(run="rm"), "its entries differ in"),
    "a file": (lambda f: f["files"].pop(FILE), "does not name a file for each rank"),
    "a digest": (lambda f: f["files"][FILE].__setitem__(1, "../x"), "ValueError"),
    "a size": (lambda f: f["files"][FILE].__setitem__(0, -1), "is below 0"),
    "a file elsewhere": (lambda f: f["files"].update({"../x": [1, "00" * 32]}), "no.* rank's file"),
    "a rank too many": (
        lambda f: f["files"].update({"rank-00004.safetensors": [1, "00" * 32]}), "rank's file"
    ),
    "no plan": (lambda f: f.update(plan=None), "is no text"),
}  # fmt: skip


@pytest.mark.exhaustive
def test_a_damaged_or_forged_list_is_refused(world: Processes, tmp_path: Path) -> None:
    world.run(save_here, tmp_path)
    path = tmp_path / "step-00000003"
    text = (path / "checkpoint.json").read_text()
    draw = random.Random(11)
    for _ in range(150):  # any digit, letter or line
        at = draw.randrange(len(text))
        damaged = text[:at] + draw.choice(["", "7", "x", "[", "\n}", text[:9]]) + text[at + 1 :]
        (path / "checkpoint.json").write_text(damaged)
        if damaged.split() != text.split():
            with pytest.raises(LoadError, match="step-00000003"):
                Saved.read(path)
    for text_of_all in ("", "[]", "null", "[" * 100_000, "\x00", '{"schema": 3}', "1e999"):
        (path / "checkpoint.json").write_text(text_of_all)
        with pytest.raises(LoadError, match="step-00000003"):
            Saved.read(path)
    for change, why in FORGED.values():
        (path / "checkpoint.json").write_text(text)
        rewrite(path, change)
        with pytest.raises(LoadError, match=why):
            prove_all(path)
    (path / "checkpoint.json").write_text(text)
    prove_all(path)


def prove_all(path: Path) -> None:
    saved = Saved.read(path)
    for rank in range(saved.mesh.num_ranks):
        saved.prove(rank)


def refused(match: str, act: Callable[[], Any], kind: type[PartcError] = LoadError) -> None:
    with pytest.raises(kind, match=match):
        act()


def disagree(folder: Path) -> None:
    """Whatever ranks do not have alike is refused on all of them, and nothing is loaded."""
    stage, optimizer = begin(1, 2, seed=0)
    train(stage, optimizer, 1)
    first = dist.get_rank() == 0
    for step in (2, 3):
        save_checkpoint(folder, stage, optimizer, step=step)
    stage.load_full(example_model(1))
    mine, state = stage.full_state_dict(), {**optimizer.state}
    one = folder / f"step-0000000{2 + first}"
    refused("rank 0 names the folder", lambda: load_checkpoint(one, stage, optimizer))
    refused(
        "rank 0 names the folder",
        lambda: load_checkpoint(folder / "x" if first else folder, stage, optimizer),
    )
    refused(
        "not the same optimizer",
        lambda: load_checkpoint(folder, stage, optimizer if first else None),
    )
    for key, tensor in stage.full_state_dict().items():
        assert torch.equal(tensor, mine[key])
    assert {**optimizer.state} == state
    for what, save in {
        "the same step": lambda: save_checkpoint(folder, stage, step=4 + first),
        "the same optimizer": lambda: save_checkpoint(
            folder, stage, optimizer if first else None, step=4
        ),
    }.items():
        refused(what, save, RunError)
    wrong: tuple[Any, ...] = (-1, 1.0, True, None)
    for step in wrong:
        refused(
            "not the number of a step",
            partial(save_checkpoint, folder, stage, step=step),
            UsageError,
        )
    if first:
        optimizer.param_groups[0]["lr"] = 1.0
    refused(
        "same hyperparameters", lambda: save_checkpoint(folder, stage, optimizer, step=4), RunError
    )
    optimizer.param_groups[0]["lr"] = 1e-3
    if not first:
        optimizer.state.clear()
    refused(
        "same states of the opt",
        lambda: save_checkpoint(folder, stage, optimizer, step=4),
        RunError,
    )
    if first:
        (folder / "a file").write_text("mine")
    refused(
        "it is a file|rank 0 cannot go on",
        lambda: save_checkpoint(folder / "a file", stage, step=4),
        UsageError if first else PartcError,
    )
    assert latest(folder).name == "step-00000003"


def test_ranks_that_differ_all_refuse_a_checkpoint(world: Processes, tmp_path: Path) -> None:
    world.run(disagree, tmp_path, num=2)


def other_values(folder: Path) -> None:
    """Hyperparameters that this optimizer does not know, or in other groups."""
    stage, adamw = begin(1, 2, seed=0)
    path = save_checkpoint(folder, stage, adamw, step=1)
    cases: tuple[tuple[Callable[[dict[str, Any]], Any], str], ...] = (
        (lambda g: g.update(weight_deca=0.5), "this AdamW does not know weight_deca"),
        (lambda g: g.update(lr="fast"), "lr of group 0 is 'fast', here it is 0.001"),
        (lambda g: g.update(betas=[0.9]), r"betas of group 0 is \[0.9\]"),
        (lambda g: g.update(amsgrad=1), "amsgrad of group 0 is 1"),
        (lambda g: g.update(betas=[1, 0.999]), "refuses: Invalid beta parameter at index 0"),
        (lambda g: g["params"].remove("up.bias"), "up.bias is in group 0 here"),
    )
    for change, why in cases:
        text = (path / "checkpoint.json").read_text()
        dist.barrier()
        if dist.get_rank() == 0:
            rewrite(path, lambda fields: change(fields["optimizer"][0]))  # noqa: B023
        dist.barrier()
        refused(why, lambda: load_checkpoint(path, stage, adamw))
        dist.barrier()
        if dist.get_rank() == 0:
            (path / "checkpoint.json").write_text(text)
        dist.barrier()
    rate = torch.optim.AdamW([p for p in stage.parameters() if p.requires_grad], torch.tensor(0.5))
    save_checkpoint(folder, stage, rate, step=2)
    rate.param_groups[0]["lr"].fill_(0.1)
    load_checkpoint(folder, stage, rate)
    assert rate.param_groups[0]["lr"] == torch.tensor(0.5)


def test_values_that_an_optimizer_does_not_know_are_refused(
    world: Processes, tmp_path: Path
) -> None:
    world.run(other_values, tmp_path, num=2)


def test_how_an_optimizer_computes_is_its_own() -> None:
    """A checkpoint of GPUs may say ``capturable``, with which no step runs on a CPU."""
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    [group] = optimizer.param_groups
    take_values(group, {**plain_values(group), "capturable": True, "fused": True, "lr": 0.5})
    assert (group["capturable"], group["fused"], group["lr"]) == (False, None, 0.5)
    weight.sum().backward()
    optimizer.step()
