"""Run a rank's text on tensors without data, and record its transfers: starts and waits, in order.

While it runs, CheckError for a call that touches memory of a transfer under way, for a transfer
that nobody waits for, and for a second wait (``dryrun/streams.py`` has the meaning of these).
"""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from partc.audit.recording import Record, RecordingDist, Transfer
from partc.dryrun.alone import alone
from partc.dryrun.live_memory import LiveMemory
from partc.errors import CheckError, PartcError, RunError
from partc.program.role import Role
from partc.program.user_lines import TEXT, file_of


def record(role: Role, rank: int, library: str = "gloo") -> Record:
    """Record one step of a rank. ``library``: the library of collectives, gloo or nccl.

    CheckError where the text cannot be run on this rank's shapes, or misuses a transfer.
    """
    found = Record(rank)
    live = LiveMemory(role.module.Step.__init__.__code__.co_filename)
    eager = torch.compiler.set_stance("force_eager") if role.compiles else nullcontext()
    with alone(role, rank, library, live) as here, torch.no_grad(), FakeTensorMode(), eager:
        role.module.__dict__["dist"] = RecordingDist(found, role.mesh, live, library)
        try:
            _run(role, here, live, found)
        except Exception as error:
            fail(role, rank, error)
    return found


def _run(role: Role, here: Any, live: LiveMemory, found: Record) -> None:
    step: Any = role.build(here)
    check_pieces(role, step, found.rank)
    inputs = [torch.empty(shape, dtype=dtype) for shape, dtype in role.inputs.values()]
    live.leave_out([*step.parameters(), *step.buffers(), *inputs])
    kept_whole = {**dict(step.named_parameters()), **dict(zip(role.inputs, inputs, strict=True))}
    written = {name: tensor._version for name, tensor in kept_whole.items()}
    with live:
        loss, kept = role.run(step, inputs)
    live.streams.end()
    del kept
    for name, tensor in kept_whole.items():
        if tensor._version != written[name]:
            raise changed(role, found.rank, name)
    if not role.is_inference:
        _check_loss(role, loss)
        check_grads(role, step, found.rank)
    waited = {number for what, number in found.events if what == "wait"}
    for number, transfer in enumerate(found.transfers):
        if number not in waited:
            raise unwaited(transfer)


def check_pieces(role: Role, step: nn.Module, rank: int) -> None:
    """CheckError if a parameter or buffer has not the shape and dtype that its table says."""
    held = role.tensors(step)
    coords = role.mesh.coords(rank)
    for shard in role.shards:
        whole = torch.empty(shard.shape, dtype=shard.dtype)
        piece, mine = shard.take(whole, role.mesh, coords), held[shard.name]
        if piece.shape != mine.shape or piece.dtype != mine.dtype:
            raise CheckError(
                where=f"{_file(role)}, rank {rank}, {shard.key}",
                what=f"it is {mine.dtype}{list(mine.shape)}",
                why=f"SHARDS says a piece {piece.dtype}{list(piece.shape)} of {shard.name}",
                do="Undo the edit of the table or of the parameter.",
            )


def check_grads(role: Role, step: nn.Module, rank: int) -> None:
    """CheckError if a trained parameter has no gradient after a step, or one of another shape."""
    held = role.tensors(step)
    for shard in role.params:
        param = held[shard.name]
        grad = param.grad
        if param.requires_grad and grad is None:
            raise CheckError(
                where=f"{_file(role)}, rank {rank}, {shard.name}",
                what="the step adds nothing to its gradient",
                why="the parameter is trained: the text makes it with requires_grad",
                do="Add its gradient, or make it with requires_grad=False.",
            )
        if grad is not None and (grad.shape != param.shape or grad.dtype != param.dtype):
            raise CheckError(
                where=f"{_file(role)}, rank {rank}, {shard.name}",
                what=f"its gradient is {grad.dtype}{list(grad.shape)}",
                why=f"the parameter is {param.dtype}{list(param.shape)}",
                do="Reduce the gradient to this rank's piece.",
            )


def _check_loss(role: Role, loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.dim():
        raise CheckError(
            where=_file(role),
            what="the step does not return a loss",
            why="a loss is a tensor without dims, the same on every rank",
            do="Return the loss.",
        )


def fail(role: Role, rank: int, error: Exception) -> NoReturn:
    """Raise CheckError for a text that torch cannot run, with its line; partc's own errors as they
    are.
    """
    if isinstance(error, RunError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # torch's, which the step has explained for its users
    if isinstance(error, PartcError):
        raise error
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{file_of(f.filename)}:{f.lineno}" for f in frames if f.filename.startswith(TEXT)]
    raise CheckError(
        where=f"{lines[-1] if lines else _file(role)}, rank {rank}",
        what=f"the text cannot be run: {type(error).__name__}",
        why=str(error).strip().partition("\n")[0],
        do="Undo the edit of this line, or of what it reads.",
    ) from error


def changed(role: Role, rank: int, name: str) -> CheckError:
    return CheckError(
        where=f"{_file(role)}, rank {rank}, {name}",
        what="the step changes this tensor",
        why="a step leaves the batch as it is, and parameters to the optimizer",
        do="Undo the edit, or work on a copy.",
    )


def unwaited(transfer: Transfer) -> CheckError:
    return CheckError(
        where=transfer.place,
        what=f"nobody waits for {transfer.kind}",
        why="what it brings may arrive after it is read, or its memory be gone",
        do="Wait for it before the step ends.",
    )


def _file(role: Role) -> str:
    return role.file
