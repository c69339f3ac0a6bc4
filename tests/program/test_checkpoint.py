"""Checkpoints: training resumes on any mesh as if nothing had happened; damage is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from partc.errors import LoadError, PartcError, RunError, UsageError
from partc.program import checkpoint
from partc.program.checkpoint import latest, load_checkpoint, save_checkpoint
from partc.program.runtime import Stage
from partc.program.saved_checkpoint import Saved, digest_of
from partc.program.tensorfile import TensorFile
from partc.verification.processes import Processes
from tests.example_program import example_batch, example_model, example_program

pytestmark = pytest.mark.gloo


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change checkpoint.json as someone would who also makes its digest right."""
    fields = json.loads((path / "checkpoint.json").read_text())
    change(fields)
    fields.pop("sha256", None)
    (path / "checkpoint.json").write_text(json.dumps({**fields, "sha256": digest_of(fields)}))


def begin(dp: int, tp: int, seed: int) -> tuple[Stage, torch.optim.Optimizer]:
    stage = example_program(dp, tp).module()
    stage.load_full(example_model(seed))
    return stage, torch.optim.AdamW([p for p in stage.parameters() if p.requires_grad], lr=1e-3)


def train(stage: Stage, optimizer: torch.optim.Optimizer, num_steps: int) -> float:
    loss = torch.zeros(())
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = stage.step(*example_batch())
        optimizer.step()
    return loss.item()


def run_and_save(dp: int, tp: int, folder: Path) -> float:
    """Two steps, a checkpoint, two more steps: the last loss."""
    stage, optimizer = begin(dp, tp, seed=0)
    train(stage, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 5e-4
    save_checkpoint(folder, stage, optimizer, step=2)
    return train(stage, optimizer, 2)


def resume(dp: int, tp: int, folder: Path) -> tuple[int, float]:
    stage, optimizer = begin(dp, tp, seed=1)
    step = load_checkpoint(folder, stage, optimizer)
    assert optimizer.param_groups[0]["lr"] == 5e-4
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    return step, train(stage, optimizer, 2)


def test_training_resumes_on_any_mesh(world: Processes, tmp_path: Path) -> None:
    (expected, *_) = world.run(run_and_save, 2, 2, tmp_path)
    names = sorted(path.name for path in tmp_path.rglob("*"))
    assert names == [
        "checkpoint.json", *(f"rank-0000{r}.safetensors" for r in range(4)), "step-00000002"
    ]  # fmt: skip
    for dp, tp in ((2, 2), (4, 1), (1, 3), (1, 1)):
        for step, loss in world.run(resume, dp, tp, tmp_path, num=dp * tp):
            assert step == 2
            assert loss == pytest.approx(expected, rel=1e-5)


ROUTES = ("", "step_on_pieces", "step_on_whole")


def begin_by(route: str, dp: int, tp: int, seed: int) -> tuple[Stage, torch.optim.Optimizer]:
    stage, optimizer = begin(dp, tp, seed)
    if route:
        getattr(stage, route)(optimizer)
    return stage, optimizer


def save_by_each(folder: Path) -> float:
    """A checkpoint after two steps by each route, and the loss after two more."""
    loss = 0.0
    for number, route in enumerate(ROUTES):
        stage, optimizer = begin_by(route, 2, 2, seed=0)
        train(stage, optimizer, 2)
        save_checkpoint(folder, stage, optimizer, step=number)
        loss = train(stage, optimizer, 2)
    return loss


def resume_by_each(folder: Path, dp: int, tp: int) -> list[float]:
    """The loss two steps after a checkpoint of each route, in an optimizer of each route."""
    losses = []
    for number in range(len(ROUTES)):
        for route in ROUTES:
            stage, optimizer = begin_by(route, dp, tp, seed=1)
            load_checkpoint(folder / f"step-{number:08d}", stage, optimizer)
            losses.append(train(stage, optimizer, 2))
    return losses


def test_states_move_between_pieces_whole_tensors_and_dtensors(
    world: Processes, tmp_path: Path
) -> None:
    expected = world.run(save_by_each, tmp_path)[0]
    for dp, tp in ((2, 2), (1, 3)):
        losses = world.run(resume_by_each, tmp_path, dp, tp, num=dp * tp)[0]
        assert losses == pytest.approx([expected] * 9, rel=1e-5)


def foreign(folder: Path) -> None:
    stage, _ = begin(1, 2, seed=0)
    pieces = [p for p in stage.rank_step.parameters() if p.requires_grad]
    with pytest.raises(RunError, match="none of the stage's"):
        save_checkpoint(folder, stage, torch.optim.SGD(pieces, lr=0.1), step=0)


def test_an_optimizer_of_other_tensors_is_refused(world: Processes, tmp_path: Path) -> None:
    world.run(foreign, tmp_path, num=2)


OTHERS = {"SGD": {"momentum": 0.9}, "NAdam": {}, "RMSprop": {}}


def into_others(folder: Path) -> None:
    """States of AdamW, which names itself in new checkpoints and not in old ones."""
    stage, adamw = begin(1, 2, seed=0)
    train(stage, adamw, 1)
    path = save_checkpoint(folder, stage, adamw, step=1)
    save_checkpoint(folder / "alone", stage, step=1)
    params = [p for p in stage.parameters() if p.requires_grad]
    before = stage.full_state_dict()
    stage.load_full(example_model(1))
    mine = stage.full_state_dict()
    for named in (True, False):
        for name, options in OTHERS.items():
            other = getattr(torch.optim, name)(params, lr=0.1, **options)
            if named or name != "NAdam":  # it has one hyperparameter more, as later versions may
                with pytest.raises(LoadError, match=rf"not of {name}"):
                    load_checkpoint(path, stage, other)
                assert not other.state
                assert other.param_groups[0]["lr"] == 0.1
        groups = [{"params": params[:1]}, {"params": params[1:]}]
        with pytest.raises(LoadError, match="1 groups of parameters, the AdamW has 2"):
            load_checkpoint(path, stage, torch.optim.AdamW(groups))
        with pytest.raises(LoadError, match="0 groups of parameters"):
            load_checkpoint(folder / "alone", stage, adamw)
        for key, tensor in stage.full_state_dict().items():
            assert torch.equal(tensor, mine[key])  # nothing was loaded
        dist.barrier()
        if dist.get_rank() == 0 and named:
            rewrite(path, lambda fields: fields["optimizer"][0].pop("optimizer"))
        dist.barrier()
    load_checkpoint(path, stage, torch.optim.Adam(params))  # the same states
    for key, tensor in stage.full_state_dict().items():
        assert torch.equal(tensor, before[key])


def test_states_of_another_optimizer_are_refused(world: Processes, tmp_path: Path) -> None:
    world.run(into_others, tmp_path, num=2)


def save_twice(folder: Path) -> None:
    stage, _ = begin(1, 2, seed=0)
    save_checkpoint(folder, stage, step=1)
    with pytest.raises(RunError, match="never overwritten"):
        save_checkpoint(folder, stage, step=1)
    save_checkpoint(folder, stage, step=12)
    assert latest(folder).name == "step-00000012"


def cut_off(folder: Path) -> None:
    """A save that dies before its commit leaves the older step the newest; the next save works."""
    stage, _ = begin(1, 2, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(folder, stage, step=30)
    assert latest(folder).name == "step-00000012"
    dist.barrier()
    save_checkpoint(folder, stage, step=30)
    assert latest(folder).name == "step-00000030"


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_steps_commit_or_leave_no_trace(world: Processes, tmp_path: Path) -> None:
    world.run(save_twice, tmp_path, num=2)
    world.run(cut_off, tmp_path, num=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001", "step-00000012", "step-00000030"
    ]  # fmt: skip


def refusals(folder: Path) -> None:
    stage, _ = begin(1, 2, seed=0)
    with pytest.raises(LoadError, match="no committed step"):
        load_checkpoint(folder, stage)
    path = save_checkpoint(folder, stage, step=0)
    if dist.get_rank() == 0:
        damage(path)
    dist.barrier()
    with pytest.raises(
        LoadError, match=r"rank-00001\.safetensors: cannot be loaded .it is missing or dam"
    ):
        load_checkpoint(folder, stage)
    dist.barrier()
    if dist.get_rank() == 0:
        (path / "checkpoint.json").write_text(json.dumps({"schema": 7}))
    dist.barrier()
    with pytest.raises(LoadError, match="schema 7"):
        load_checkpoint(path, stage)


def damage(path: Path) -> None:
    """Flip one bit of a weight."""
    file = path / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_damage_is_refused_by_file(world: Processes, tmp_path: Path) -> None:
    world.run(refusals, tmp_path, num=2)


# damage of the list --------------------------------------------------------------------------
def save_here(folder: Path) -> None:
    stage, optimizer = begin(2, 2, seed=0)
    train(stage, optimizer, 1)
    save_checkpoint(folder, stage, optimizer, step=3)


def flipped(fields: dict[str, Any]) -> None:
    fields["tensors"]["model/up.weight"][2][0][2] = 1  # of 2: the halves of a fused weight


FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "other rows": (flipped, "are not sharded as checkpoint.json says"),
    "an axis twice": (
        lambda f: f["tensors"]["model/up.weight"][2].append(["tp", 1, 1]), "cannot be sharded over"
    ),
    "an unknown axis": (
        lambda f: f["tensors"]["model/up.weight"][2].append(["x", 1, 1]), "cannot be sharded over"
    ),
    "a size": (lambda f: f["tensors"]["model/shift"].__setitem__(0, [9]), "another shape"),
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
    "an entry": (lambda f: f.update(run="rm"), "its entries differ in"),
    "a file": (lambda f: f["files"].pop(), "does not name a file for each rank"),
    "a digest": (lambda f: f["files"].__setitem__(0, "../x"), "ValueError"),
}  # fmt: skip


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
    for text_of_all in ("", "[]", "null", "[" * 100_000, "\x00", '{"schema": 2}', "1e999"):
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
        file = path / f"rank-{rank:05d}.safetensors"
        saved._prove(file, TensorFile(file), saved.mesh.coords(rank))


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
    refused("not the same step:?", lambda: load_checkpoint(one, stage, optimizer))
    refused(
        "rank 0 cannot go|no committed",
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
        "cannot be read or written|rank 0 cannot go on",
        lambda: save_checkpoint(folder / "a file", stage, step=4),
        RunError,
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
