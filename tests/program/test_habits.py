"""What scripts do to a module: hooks, registrations, groups by type, pickles, torch.compile."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations

import partc
from partc.errors import PlanError, RunError
from partc.program import Program, load
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.patience import patience
from tests.program.training import (
    Residuals,
    batch_of,
    loss_of,
    model_of,
    save_program,
    stage_of,
    train_alone,
    train_stage,
)

pytestmark = pytest.mark.gloo


class Grouped(Residuals):
    """Makes its own optimizer, by the types of its modules, as nanoGPT and minGPT do."""

    width: int = 12

    def __init__(self) -> None:
        super().__init__()
        self.rate = 1e-2

    def configure_optimizers(self, decay: float) -> torch.optim.AdamW:
        without = {
            id(p)
            for m in self.modules()
            for name, p in m.named_parameters(recurse=False)
            if isinstance(m, nn.LayerNorm) or name == "bias" or p.dim() == 0
        }
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.parameters() if id(p) not in without]},
            {"params": [p for p in self.parameters() if id(p) in without], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.rate, weight_decay=decay)


def grouped(seed: int = 0) -> Grouped:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Grouped()


def compiled(model: nn.Module, mesh: str, plan: str) -> Program:
    microbatches = 2 if "pp" in mesh else 1
    return partc.compile(
        model, mesh, batch_of(), loss=loss_of, plan=plan, microbatches=microbatches
    )


# the modules ---------------------------------------------------------------------------------
def optimized_by_the_model(mesh: str, plan: str) -> None:
    model, alone = grouped(), grouped()
    stage = compiled(model, mesh, plan).module()
    ours, theirs = stage.configure_optimizers(0.5), alone.configure_optimizers(0.5)
    assert train_stage(stage, ours, 3) == pytest.approx(train_alone(alone, theirs, 3), rel=1e-5)
    if "pp" not in mesh:
        sizes = [[p.shape for p in g["params"]] for g in theirs.param_groups]
        assert [[p.shape for p in g["params"]] for g in ours.param_groups] == sizes


def like_the_model() -> None:
    model = grouped()
    program = compiled(model, "dp=2,tp=2", "fsdp+megatron")
    stage = program.module()
    kinds = {name: type(m) for name, m in model.named_modules() if name}
    assert {name: type(m) for name, m in stage.named_modules() if name} == kinds
    assert [n for n, _ in stage.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert stage.blocks[1].up.out_features == 24
    assert (stage.rate, stage.width, len(stage.blocks)) == (1e-2, 12, 2)
    with torch.no_grad():
        stage.apply(zeroed)
    assert stage.full_state_dict()["head.weight"].count_nonzero() == 0
    twin = copy.deepcopy(stage)
    assert isinstance(twin.blocks[0].norm, nn.LayerNorm)
    assert twin.blocks[0].norm is not stage.blocks[0].norm
    stage.blocks[0].norm.eps = 1.0
    with pytest.raises(RunError, match=r"blocks.0.norm.eps: was 1e-05, is 1.0"):
        stage.step(*batch_of())
    gone = weakref.ref(model.head.weight)
    del model, program
    gc.collect()
    assert gone() is None  # its memory is not held by the stage
    twin.step(*batch_of())


def zeroed(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.weight)


def without_the_model(path: Path) -> None:
    stage = stage_of(path)
    with pytest.raises(RunError, match=r"stage.apply: the stage does not know the classes"):
        stage.apply(zeroed)
    with pytest.raises(AttributeError, match="configure_optimizers") as error:
        stage.configure_optimizers(0.1)
    assert "partc.load(folder, model)" in str(error.value)
    ignored(stage)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan"), [("dp=2,tp=2", "fsdp+megatron"), ("pp=2,dp=2", "fsdp")])
def test_groups_by_the_models_own_method(world: Processes, mesh: str, plan: str) -> None:
    world.run(optimized_by_the_model, mesh, plan)


@pytest.mark.exhaustive
def test_modules_look_like_the_models(world: Processes, tmp_path: Path) -> None:
    world.run(like_the_model)
    world.run(without_the_model, save_program(tmp_path / "saved", "dp=2,tp=2", "fsdp+megatron"))


# what the program would ignore ---------------------------------------------------------------
def at(stage: Stage, name: str) -> nn.Module:
    return stage.get_submodule(f"blocks.0.{name}")


def assign_weight(stage: Stage) -> None:
    stage.head.weight = nn.Parameter(torch.zeros(8, 12))


def assign_module(stage: Stage) -> None:
    stage.get_submodule("blocks.0").up = nn.Linear(12, 24)


def assign_at_the_top(stage: Stage) -> None:
    stage.extra = nn.Linear(2, 2)


IGNORED: dict[str, Callable[[Any], Any]] = {
    "the hook would never run": lambda stage: stage.head.register_forward_hook(print),
    "the hook would never run.*": lambda stage: at(stage, "up").register_forward_pre_hook(print),
    "full_backward_hook of a": lambda stage: stage.head.register_full_backward_hook(print),
    "register_full_backward_hook": lambda stage: stage.register_full_backward_hook(print),
    "full_backward_pre_hook": lambda stage: stage.register_full_backward_pre_hook(print),
    "x of a stage's module: a Tensor": lambda stage: stage.register_buffer("x", torch.ones(1)),
    "gain of a stage's module: a Para": lambda stage: stage.register_parameter(
        "gain", nn.Parameter(torch.ones(()))
    ),
    "weight of a stage's module: a Parameter was": assign_weight,
    "up of a stage's module: a Linear": assign_module,
    "extra of a stage's module": assign_at_the_top,
    "more of a stage's module": lambda stage: stage.add_module("more", nn.Identity()),
    "registered, assigned|to be taken away": lambda stage: parametrizations.weight_norm(
        at(stage, "down")
    ),
    "cannot be moved or cast by itself": lambda stage: stage.head.double(),
    "it computes nothing by itself": lambda stage: stage.head(torch.ones(1, 12)),
    "a stage cannot be pickled": lambda stage: torch.save(stage, io.BytesIO()),
    "pickle of a stage's module": lambda stage: torch.save(stage.head, io.BytesIO()),
}


def ignored(stage: Stage) -> None:
    for pattern, do in IGNORED.items():
        with pytest.raises(RunError, match=pattern):
            do(stage)
    seen: list[Tensor] = []
    handle = stage.register_forward_hook(lambda module, inputs, loss: seen.append(loss))
    stage(*batch_of())
    assert len(seen) == 1
    with pytest.raises(RunError, match="the stage has forward hooks, which step does not run"):
        stage.step(*batch_of())
    handle.remove()
    stage.step(*batch_of())
    stage.half()  # to export it
    assert stage.full_state_dict()["head.weight"].dtype == torch.float16
    with pytest.raises(RunError, match="gain: was cast to float16"):
        stage.step(*batch_of())
    stage.float().step(*batch_of())


def ignored_with_the_model() -> None:
    ignored(compiled(model_of(), "dp=2,tp=2", "fsdp+megatron").module())


@pytest.mark.exhaustive
def test_what_the_program_would_ignore_is_refused(world: Processes) -> None:
    world.run(ignored_with_the_model)


# pickled pieces ------------------------------------------------------------------------------
def saved_by_rank_0(path: Path, folder: Path) -> None:
    """As scripts save: rank 0 its state dicts; every rank loads the file."""
    stage, rank = stage_of(path), dist.get_rank()
    optimizers = [torch.optim.AdamW(stage.parameters(), 1e-2) for _ in range(2)]
    stage.step_on_pieces(optimizers[1])
    for optimizer in optimizers:
        stage.step(*batch_of())
        optimizer.step()
    states = [stage.state_dict(), *(each.state_dict() for each in optimizers)]
    for number, state in enumerate(states):
        own, first = folder / f"{number}-{rank}.pt", folder / f"{number}-0.pt"
        torch.save(state, own)
        dist.barrier()
        torch.load(own)  # a rank's own pieces are right
        if rank == 0:
            torch.load(first)
            continue  # the others
        for weights_only in (True, False):
            with pytest.raises(RunError, match="the file has one rank's pieces of tensors"):
                torch.load(first, weights_only=weights_only)
    dist.barrier()


READS = """
import sys, torch, partc.program
found, expected = (torch.load(file) for file in sys.argv[1:])
assert all(type(each) is torch.Tensor for each in found.values()), found
assert all(torch.equal(found[name], each) for name, each in expected.items())
"""


def read_elsewhere(folder: Path) -> None:
    with pytest.raises(RunError, match="the file has one rank's pieces"):
        torch.load(folder / "0-0.pt")


def replicated_states_are_whole(path: Path, folder: Path) -> None:
    stage = stage_of(path)
    torch.save(stage.state_dict(), folder / f"ddp-{dist.get_rank()}.pt")
    dist.barrier()
    other = stage_of(path, 3)
    other.load_state_dict(torch.load(folder / "ddp-0.pt"))
    for name, tensor in other.full_state_dict().items():
        assert torch.equal(tensor, model_of().state_dict()[name])


@pytest.mark.exhaustive
def test_pieces_of_one_rank_are_not_anothers(world: Processes, tmp_path: Path) -> None:
    path = save_program(tmp_path / "saved", "dp=2,tp=2", "fsdp+megatron")
    world.run(saved_by_rank_0, path, tmp_path)
    world.run(read_elsewhere, tmp_path, num=2)
    ddp = save_program(tmp_path / "ddp", "dp=4", "ddp")
    world.run(replicated_states_are_whole, ddp, tmp_path)
    torch.save(model_of().state_dict(), tmp_path / "model.pt")
    files = tmp_path / "ddp-0.pt", tmp_path / "model.pt"
    subprocess.run([sys.executable, "-c", READS, *files], check=True, timeout=patience())


# torch.compile -------------------------------------------------------------------------------
class Saved(Residuals):
    """Writes its own tensors, as models of transformers do."""

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        torch.save(self.state_dict() if state_dict is None else state_dict, folder / "saved.pt")


def saved_by_its_own_method(folder: Path) -> None:
    model = Saved()
    stage = partc.compile(model, "dp=2", batch_of(), loss=loss_of, plan="fsdp").module()
    with pytest.raises(RunError, match=r"stage.save_pretrained: it would write this rank's pieces"):
        stage.save_pretrained(folder)
    whole = stage.full_state_dict()
    if dist.get_rank() == 0:
        stage.save_pretrained(folder, state_dict=whole)
        model.load_state_dict(torch.load(folder / "saved.pt"))


def test_a_models_own_method_writes_whole_tensors(world: Processes, tmp_path: Path) -> None:
    world.run(saved_by_its_own_method, tmp_path, num=2)


def compiled_by_torch(path: Path) -> None:
    stage, model = stage_of(path), model_of()
    fast = torch.compile(stage)
    loss_of(model, *batch_of()).backward()
    for run in (fast, torch.compile(lambda *batch: stage(*batch))):
        stage.zero_grad()
        run(*batch_of()).backward()
        for name, param in stage.named_parameters():
            torch.testing.assert_close(param.grad.full_tensor(), model.get_parameter(name).grad)  # type: ignore[union-attr]
    assert torch.compile(stage.step)(*batch_of()).isfinite()


@pytest.mark.exhaustive
def test_torch_compile_of_a_stage_runs_the_program(world: Processes, tmp_path: Path) -> None:
    world.run(compiled_by_torch, save_program(tmp_path / "saved", "dp=2,tp=2", "fsdp+megatron"))


# process groups ------------------------------------------------------------------------------
def groups_of_every_kind(path: Path) -> None:
    store, expected = dist.distributed_c10d._get_default_store(), loss_of(model_of(), *batch_of())
    old = stage_of(path)
    for number, name in enumerate((None, "gloo", "cpu:gloo", "cpu:gloo,cuda:gloo")):
        begin_again(store, number, name)
        stage = stage_of(path)
        assert stage.step(*batch_of()).item() == pytest.approx(expected.item())
        stage.clip_grad_norm_(1.0)
        assert stage.full_state_dict()["gain"].item() == 1.0
        with pytest.raises(RunError, match="the process group in which the stage was made is gone"):
            old.step(*batch_of())
        old = stage
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    load(path).module(mesh=mesh["dp", "tp"])
    with pytest.raises(RunError, match="is not the mesh of this program"):
        load(path).module(mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    with pytest.raises(PlanError, match="no named axes"):
        load(path).module(mesh=init_device_mesh("cpu", (2, 2)))
    begin_again(store, "last", "cuda:gloo")
    with pytest.raises(RunError, match="has backends for cuda alone"):
        load(path).module()


def begin_again(store: Any, number: object, backend: str | None) -> None:
    rank, num = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = PrefixStore(f"again {number}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num)


@pytest.mark.exhaustive
def test_process_groups_that_scripts_make(world: Processes, tmp_path: Path) -> None:
    world.run(groups_of_every_kind, save_program(tmp_path / "saved", "dp=2,tp=2", "fsdp+megatron"))
