"""Start a program on this rank: join the process group, check the world, build the Stage."""

from __future__ import annotations

import logging
import os
from itertools import count

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from partc.errors import RunError
from partc.imported_again import check_not_imported_again
from partc.plan import Plan
from partc.plan.batch import BY_PLACE, MIXED_ROWS, ONE_RANKS, OTHER_ROWS, ROWS_MEET
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.program.choices import NO_CHOICES, Choices
from partc.program.hooks import check_hooks
from partc.program.ranks import heart
from partc.program.ranks.farewell import has_joined, tell_at_exit
from partc.program.ranks.group_backend import group_backend
from partc.program.ranks.handshake import check_agreement, check_world, device_mesh, world_size
from partc.program.ranks.meeting import (
    NotMetError,
    is_alone,
    keeps_store,
    meet,
    number_of,
    open_store,
    start_group,
)
from partc.program.ranks.missing import check_interface, said_if_alone, said_if_waiting
from partc.program.ranks.other_ranks import of_other_ranks
from partc.program.ranks.waiting import waiting
from partc.program.stage.runtime import Stage
from partc.trace.default_dtype import float32_default
from partc.trace.own_transfers import ASKED
from partc.wrong_calls import quoted

LOG = logging.getLogger("partc")
JOIN_S = 1800.0  # until all ranks are there: some have more to do before it than others
_JOINS = count()


@float32_default()
def start_stage(
    program: Program, device: str = "cpu", mesh: DeviceMesh | None = None,
    choices: Choices = NO_CHOICES,
) -> Stage:  # fmt: skip
    """Join the process group and build this rank's Stage; all ranks call this together.

    RunError if the world has another size, the mesh other axes, or a rank another program.
    """
    tell_at_exit()
    heart.begin(program)
    check_hooks(program.sources.values(), program.hooks)
    check_world(program.mesh, world_size())
    if torch.is_inference_mode_enabled():
        raise RunError(
            where="program.module()", what="it is called under torch.inference_mode()",
            why="tensors that are made there cannot be trained",
            do="Make the stage outside of it; stage.eval() and eval_step compute no gradients.",
        )  # fmt: skip
    with said_if_waiting("program.module()"), of_other_ranks("program.module()"):
        return _started(program, device_of(device), mesh, choices)


def _started(
    program: Program, here: torch.device, mesh: DeviceMesh | None, choices: Choices
) -> Stage:
    """The stage of this rank on a device, once all ranks are there."""
    join(here)
    _check_backend(here)
    _check_library(program, here)
    check_agreement(program, here)
    mesh = device_mesh(program.mesh, here.type) if mesh is None else mesh
    if mesh is not None:
        _check_mesh(mesh, program.mesh)
    if program.recipe is not None:
        program.recipe.keep_twin()
    _tell_what_is_not_set(program)
    return Stage(program, mesh, here, choices)


def join(device: torch.device) -> None:
    """Join the process group, unless the script has."""
    check_not_imported_again("joining the ranks")
    if not dist.is_initialized():
        _join(device)
    has_joined()
    waiting()


def _tell_what_is_not_set(program: Program) -> None:
    """Tell the user, on the first rank, of attributes that a script may read behind a step, of rows
    that it takes by their place, and of what the step asked the process that compiled.
    """
    for note in Plan.parse(program.plan).notes if dist.get_rank() == 0 else ():
        if note.startswith("the step sets "):
            LOG.warning("partc: %s. To read it, return it beside the loss: (loss, extras)", note)
        if note.startswith(BY_PLACE):
            LOG.warning(
                "partc: %s. Give two views of a sample as two inputs; or batch='global'", note
            )
        if note.startswith(ROWS_MEET):
            LOG.warning(
                "partc: %s. To have DDP's, let the model return what is before this line, and "
                "compute the rest in the script; batch='global' gives every rank the rows of all",
                note,
            )
        if note.startswith(ONE_RANKS):
            LOG.warning(
                "partc: %s. Divide by what the tensors say, len(x), which is of all ranks", note
            )
        if note.startswith((ASKED, OTHER_ROWS, MIXED_ROWS)):
            LOG.warning("partc: %s", note)


def _check_backend(device: torch.device) -> None:
    """RunError if the default process group, made by the script, cannot carry the tensors."""
    kinds = dist.get_backend_config().split(",")
    devices = [kind.partition(":")[0] for kind in kinds if ":" in kind]
    if devices and device.type not in devices:
        raise RunError(
            where=f"module({device.type!r})",
            what=f"the default process group has backends for {', '.join(devices)} alone",
            why="it was made before the stage, and cannot send tensors of this device",
            do="Call torch.distributed.init_process_group() without a backend, which serves every "
            f"device, or name one for it; or take module({devices[0]!r}).",
        )


def _check_library(program: Program, device: torch.device) -> None:
    """RunError if the program has the text of gloo, and the group is NCCL's, or the other way."""
    mine, there = Plan.parse(program.plan).backend, group_backend(device.type)
    if program.mesh.num_ranks > 1 and mine and there and there != mine:
        raise RunError(
            where=f"module({device.type!r})",
            what=f"the program has the text for {mine}, and the default process group is {there}'s",
            why="sums over ranks are scattered in another way over each of the two",
            do=f"Compile it with backend={there!r}, for a mesh of machines that have it, or with "
            f'backend = "{there}" in the plan; or start the process group with {mine!r}.',
        )


def _check_mesh(mesh: DeviceMesh, compiled: Mesh) -> None:
    """RunError unless a DeviceMesh has the program's axes, and its ranks in their own order."""
    if not isinstance(mesh, DeviceMesh):
        raise RunError(
            where=f"module(mesh={quoted(mesh)})", what="it is no DeviceMesh",
            why=f"the program has its own mesh, {compiled}, and can take torch's groups of it",
            do="Leave it out, or pass what torch's init_device_mesh gave.",
        )  # fmt: skip
    if Mesh.of(mesh) != compiled:
        raise RunError(
            where=f"mesh {Mesh.of(mesh)}",
            what="is not the mesh of this program",
            why=f"it was compiled for {compiled}",
            do="Pass a DeviceMesh with these axes in this order, or none.",
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(compiled.num_ranks)):
        raise RunError(
            where=f"mesh {compiled}",
            what=f"its ranks stand in the order {ranks}",
            why="a rank's file, and its pieces of the weights, follow from its number",
            do="Pass a DeviceMesh whose ranks are 0, 1, 2, ... in order, or none; to run ranks on "
            "other devices, start them in another order.",
        )


def device_of(device: str, call: str = "module") -> torch.device:
    """The device of this process; ``"cuda"`` is the GPU number ``LOCAL_RANK``.

    Where there are fewer GPUs than processes, processes share them. RunError, in the name of the
    function that was called, where there is none.
    """
    try:
        here = torch.device(device)
    except (RuntimeError, TypeError):
        raise _no_device(call, device, "there is no such device") from None
    if here.type == "meta":
        raise _no_device(call, device, "its tensors have no values")
    if here.type == "cuda" and not torch.cuda.is_available():
        raise _no_device(call, device, "this process sees no GPU")
    if here.type == "cuda" and here.index is None:
        here = torch.device("cuda", _local_rank() % max(torch.cuda.device_count(), 1))
    if here.type == "cuda":
        torch.cuda.set_device(here)
    return here


def _local_rank() -> int:
    """Which of the processes of this host it is; RunError where that is no number."""
    try:
        return number_of("LOCAL_RANK", "0")
    except NotMetError as error:
        raise RunError(
            where="LOCAL_RANK", what="this process has no GPU of its own",
            why=str(error).rstrip("."), do="Start the script with torchrun, or unset LOCAL_RANK.",
        ) from None  # fmt: skip


def _no_device(call: str, device: object, why: str) -> RunError:
    do = 'Pass "cpu", or "cuda" where torch.cuda.is_available().'
    if isinstance(device, nn.Module):
        do = (
            "Leave the model out: weights come from the one that was compiled, from "
            "partc.load(folder, model), or through stage.load_full(model)."
        )
    return RunError(
        where=f"{call}(device={quoted(device)})", what="it cannot run there", why=why, do=do
    )


def _join(device: torch.device) -> None:
    """Start the default process group once all ranks are there; one process needs no launcher.

    RunError on every rank if one ended by an error before this, or never comes.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    check_interface(backend)
    if is_alone():
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return
    try:
        number_of("RANK"), world_size()
        with said_if_alone():
            store = open_store(JOIN_S, keeps_store(), next(_JOINS))
            meet(store, {}, JOIN_S)
        start_group(backend, store)
    except NotMetError as error:
        raise RunError(
            where=f"rank {os.environ.get('RANK', '?')}", what="the ranks do not meet",
            why=str(error), do="Mend that, and start all ranks again.",
        ) from None  # fmt: skip
