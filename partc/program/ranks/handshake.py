"""Check before a run that the world has the mesh's size, and all ranks have the same program."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from partc.errors import RunError
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.program.manifest import sha256
from partc.program.ranks.meeting import NotMetError, number_of
from partc.program.ranks.other_programs import told_differences

PART_BYTES = 8  # four parts make 32 bytes; they catch accidents, not attackers


def check_world(mesh: Mesh, world: int) -> None:
    """RunError unless as many processes run as the mesh has ranks."""
    if world == mesh.num_ranks:
        return
    more = "more" if world > mesh.num_ranks else "fewer"
    started = "process was" if world == 1 else "processes were"
    raise RunError(
        where=f"mesh {mesh}",
        what=f"{world} {started} started for {mesh.num_ranks} ranks",
        why=f"that is {more} than the program was compiled for",
        do=f"Use torchrun --nproc-per-node {mesh.num_ranks}, or compile for {world} ranks.",
    )


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh | None:
    """A torch DeviceMesh with the axes of a mesh; None if the mesh has no axes."""
    if not mesh.axes:
        return None
    sizes = tuple(size for _, size in mesh.axes)
    return init_device_mesh(device_type, sizes, mesh_dim_names=mesh.names)


def world_size() -> int:
    """The number of processes of this run, known before any process group exists."""
    if dist.is_initialized():
        return dist.get_world_size()
    try:
        return number_of("WORLD_SIZE", "1")
    except NotMetError as error:
        raise RunError(
            where="WORLD_SIZE", what="this process was not started as one of several ranks",
            why=str(error).rstrip("."), do="Start the script with torchrun, or unset WORLD_SIZE.",
        ) from None  # fmt: skip


def parts_of(program: Program) -> dict[str, str]:
    """The digests that must be equal on all ranks: sources, plan, mesh and torch's version."""
    return {**program.digests(), "torch": sha256(torch.__version__.encode())}


def check_agreement(program: Program, device: torch.device) -> None:
    """RunError on every rank, with a table of the ranks, if their digests (32 bytes) differ."""
    mine = parts_of(program)
    found = [_table(row, mine) for row in _exchange(_as_bytes(mine), device)]
    differing = [name for name in mine if len({row[name] for row in found}) > 1]
    if not differing:
        return
    told = told_differences(program, device)
    error = RunError(
        where=f"rank {dist.get_rank()}",
        what=f"the ranks do not run the same program: {', '.join(differing)} differ"
        + (f"; {told}" if told else ""),
        why="their collectives would be paired wrongly",
        do="Copy one saved program to all hosts."
        if program.recipe is None
        else "Build the same model, loss and options on every rank, outside of `if rank == 0`; or "
        "compile once, program.save(folder), and load that on all.",
    )
    print(error, file=sys.stderr, flush=True)
    raise error


def _exchange(mine: bytes, device: torch.device) -> list[bytes]:
    sent = torch.tensor(list(mine), dtype=torch.uint8, device=device)
    got: list[Tensor] = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(got, sent)
    return [bytes(each.tolist()) for each in got]


def _as_bytes(parts: Mapping[str, str]) -> bytes:
    return b"".join(bytes.fromhex(digest)[:PART_BYTES] for digest in parts.values())


def _table(row: bytes, names: Mapping[str, str]) -> dict[str, str]:
    return {name: row[i * PART_BYTES : (i + 1) * PART_BYTES].hex() for i, name in enumerate(names)}
