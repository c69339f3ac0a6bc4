"""Checkpoints: training resumes on any mesh as if nothing had happened; damage is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from partc.errors import LoadError, RunError
from partc.program.checkpoints import writing
from partc.program.checkpoints.checkpoint import latest, load_checkpoint, save_checkpoint
from partc.program.checkpoints.checkpoints import Checkpoints
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.example_program import example_model
from tests.program.trained import begin, rewrite, train

pytestmark = pytest.mark.gloo


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


@pytest.mark.exhaustive
def test_training_resumes_on_any_mesh(world: Processes, tmp_path: Path) -> None:
    (expected, *_) = world.run(run_and_save, 2, 2, tmp_path)
    names = sorted(path.name for path in tmp_path.rglob("*"))
    assert names == [
        "checkpoint.json", "rank-00000.frozen.safetensors",
        *(f"rank-0000{r}.safetensors" for r in range(4)), "step-00000002",
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


@pytest.mark.exhaustive
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
        with pytest.raises(LoadError, match="it was saved without an optimizer"):
            load_checkpoint(folder / "alone", stage, adamw)
        dist.barrier()
        if dist.get_rank() == 0:
            rewrite(path, lambda fields: fields["optimizer"][0].update(amsgrad=True))
        dist.barrier()
        with pytest.raises(LoadError, match="has no max_exp_avg_sq, which its hyperparameters ask"):
            load_checkpoint(path, stage, adamw)
        dist.barrier()
        if dist.get_rank() == 0:
            rewrite(path, lambda fields: fields["optimizer"][0].update(amsgrad=False))
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
        patch.setattr(writing, "write_file", interrupt)
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


def into_several(folder: Path) -> list[str]:
    """What is said where each rank names a folder of its own, to save and to load."""
    stage, optimizer = begin(2, 2, 0)
    own = folder / f"run_{dist.get_rank()}"
    told, runs = list[str](), Checkpoints(own, async_save=False)

    def refuse(call: Callable[[], object]) -> None:
        with pytest.raises((LoadError, RunError)) as error:
            call()
        told.append(str(error.value))

    refuse(lambda: save_checkpoint(own, stage, optimizer))
    refuse(lambda: runs.save(1, stage, optimizer))
    if dist.get_rank() == 0:
        assert not [*own.iterdir()]
    save_checkpoint(folder / "run_0", stage, optimizer, step=1)
    refuse(lambda: load_checkpoint(own, stage, optimizer))
    refuse(lambda: runs.load_latest(stage, optimizer))
    return told


def test_folders_of_single_ranks_are_named(world: Processes, tmp_path: Path) -> None:
    for told in world.run(into_several, tmp_path):
        for text in told:
            assert f"rank 0 names the folder '{tmp_path}/run_0', and rank 1 '{tmp_path}/run" in text
            assert "Give all ranks the same folder: leave the rank out of its name." in text


def damage(path: Path) -> None:
    """Flip one bit of a weight."""
    file = path / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_damage_is_refused_by_file(world: Processes, tmp_path: Path) -> None:
    world.run(refusals, tmp_path, num=2)
