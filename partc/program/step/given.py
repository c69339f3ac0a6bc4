"""What a step is given: plain tensors or DTensors, of the shapes for which it was compiled."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from partc.errors import RunError
from partc.plan.batch import data_axes
from partc.plan.sharding import dtype_name
from partc.program.role import Role, Shard
from partc.trace.odd_tensors import dense_of, odd_kind


def plain_inputs(inputs: Sequence[Tensor], role: Role, *, known: bool = True) -> tuple[Tensor, ...]:
    """The inputs, a DTensor as the piece that this rank holds; RunError if it is cut otherwise.

    ``known``: they are the inputs of the role, and not of another program.
    """
    for x in inputs:
        if kind := odd_kind(x):
            raise RunError(
                where="step", what=f"an input is a {kind} tensor",
                why="programs compute with dense tensors", do=dense_of(kind),
            )  # fmt: skip
    if not any(isinstance(x, DTensor) for x in inputs):
        return tuple(inputs)
    of_role = [*(role.batch if known else ()), *[None] * len(inputs)]
    pairs = zip(inputs, of_role[: len(inputs)], strict=True)
    return tuple(_local(x, of) if isinstance(x, DTensor) else x for x, of in pairs)


def _local(x: DTensor, of: Shard | None) -> Tensor:
    names = x.device_mesh.mesh_dim_names or ()
    cuts = {axis: dim for axis, dim, _ in of.cuts} if of else {}
    placed = dict(zip(names, x.placements, strict=False))
    fits = len(placed) == len(x.placements) and all(
        each.is_shard(cuts[axis]) if axis in cuts else each.is_replicate()
        for axis, each in placed.items()
    )
    if not fits or cuts.keys() - placed.keys():
        raise _other_placements(x, of, cuts)
    return x.to_local()


def _other_placements(x: DTensor, of: Shard | None, cuts: dict[str, int]) -> RunError:
    wanted = ", ".join(f"Shard({dim}) on {axis}" for axis, dim in cuts.items())
    return RunError(
        where=f"step, {of.name if of else 'an input'}",
        what=f"it is a DTensor with placements {list(x.placements)} on {x.device_mesh}",
        why=f"the program takes it {f'as {wanted}, and' if wanted else ''} whole on other axes",
        do="Redistribute it so, or pass this rank's tensor: x.to_local().",
    )


def check_inputs(inputs: Sequence[Tensor], role: Role, device: str) -> None:
    """RunError if the inputs have other shapes, dtypes or devices than the program takes."""
    wanted = [(shape, dtype, device) for shape, dtype in role.inputs.values()]
    given = [(tuple(x.shape), x.dtype, x.device.type) for x in inputs]
    if given == wanted:
        return
    expected = [f"{n}: {_typed(*w)}" for n, w in zip(role.inputs, wanted, strict=True)]
    got = [_typed(*each) for each in given]
    whole = [(each.shape, each.dtype, device) for each in role.batch]
    raise RunError(
        where="step",
        what=f"expected ({', '.join(expected)}), got ({', '.join(got)})",
        why=_contract(role),
        do=_elsewhere(given, wanted, role) or _advice(given, whole, role),
    )


def _contract(role: Role) -> str:
    cut = {axis: role.mesh.size(axis) for each in role.batch for axis, *_ in each.cuts}
    if not cut:
        return 'the program was compiled for one global batch (batch="global"), whole on every rank'
    along = " and ".join(f"{axis}={cut[axis]}" for axis in role.mesh.names if axis in cut)
    return f'it takes each rank\'s piece of the batch, along {along} (batch="local")'


def _elsewhere(given: Sequence[Any], wanted: Sequence[Any], role: Role) -> str:
    """What to do about inputs of the right shapes with another dtype or device; "" for others."""
    if [shape for shape, *_ in given] != [shape for shape, *_ in wanted]:
        return ""
    for name, (_, dtype, device), (_, is_now, here) in zip(role.inputs, wanted, given, strict=True):
        if dtype != is_now:
            return f"Give {name} as it was compiled, {name}.to({dtype}), or compile for this dtype."
        if device != here:
            return f"Move {name} to where the stage computes: {name}.to({device!r})."
    return ""


def _advice(given: Sequence[Any], whole: Sequence[Any], role: Role) -> str:
    """What to do about inputs of other shapes, by the contract that they seem to keep."""
    if any(each.cuts for each in role.batch):
        if given == whole:
            return (
                'Pass this rank\'s rows alone, or compile with batch="global" for the whole batch.'
            )
        return (
            "Pass a piece of this shape on every rank (DataLoader(..., drop_last=True) leaves out "
            "a smaller last one), or compile for this shape."
        )
    ranks = prod(role.mesh.size(axis) for axis in data_axes(role.mesh))
    if ranks > 1 and all(_is_piece(*pair, ranks) for pair in zip(given, whole, strict=False)):
        return (
            'These look like one rank\'s piece, as DDP takes it: compile with batch="local" and '
            "one rank's inputs for that. Or pass the whole batch on every rank."
        )
    names = ", ".join(role.inputs)
    if len(given) > 1 and given != whole and sorted(map(str, given)) == sorted(map(str, whole)):
        return f"These are in another order: pass step({names})."
    return (
        "Pass the whole batch on every rank, or compile for this shape. A smaller last batch is "
        "left out by DataLoader(..., drop_last=True); module(partial=...) leaves it out or "
        "computes it where the stage came of partc.compile, and not of partc.load."
    )


def _is_piece(given: Any, whole: Any, ranks: int) -> bool:
    """Whether a shape is the whole one, or that with one dim divided by the data ranks."""
    mine, all_ranks = given[0], whole[0]
    if len(mine) != len(all_ranks):
        return False
    differing = [(a, b) for a, b in zip(mine, all_ranks, strict=True) if a != b]
    return all(a * ranks == b for a, b in differing) and len(differing) <= 1


def _typed(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> str:
    return f"{dtype_name(dtype)}{list(shape)} on {device}"
