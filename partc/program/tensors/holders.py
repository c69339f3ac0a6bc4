"""Find which pipeline rank holds which of a model's tensors, and send tensors between the ranks.

A tied parameter stands on several stages. The first pipeline rank that holds the parameter saves it
in checkpoints, counts it in gradient norms, and sends it to the others when a tensor is joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from partc.plan.mesh import ISLAND, PP
from partc.program import Program
from partc.program.role import Role, Shard, dtype_of
from partc.program.weights import kept_aside


@dataclass(frozen=True)
class Holders:
    """All tensors of a program by name in the user's model, and which pipeline ranks hold them."""

    shards: Mapping[str, Shard]  # as its first holder has it; copies are cut alike
    first: Mapping[str, int]  # the first pipeline rank that holds it
    aliases: Mapping[str, str]  # second name of a tied tensor -> first name
    aside: Mapping[str, Shard]  # tensors that no step reads, kept on every rank for checkpoints
    places: Mapping[str, tuple[int, ...]]  # all pipeline ranks that hold it, but of those aside
    params: frozenset[str]  # the parameters among them; the others are buffers
    order: Mapping[str, int]  # the place of each name in the model
    saved: frozenset[str]  # all names in the model's own state dict

    @classmethod
    def of(cls, program: Program) -> Holders:
        """Collect the tensors from the tables in all pipeline ranks' sources."""
        shards: dict[str, Shard] = {}
        first: dict[str, int] = {}
        aliases: dict[str, str] = {}
        places: dict[str, tuple[int, ...]] = {}
        roles = roles_of(program)
        for rank, role in enumerate(roles):
            for shard in role.shards:
                places[shard.name] = (*places.get(shard.name, ()), rank)
                shards.setdefault(shard.name, shard)
                first.setdefault(shard.name, rank)
            aliases |= role.aliases
        kept = kept_aside(program.fingerprint, {*shards, *aliases})
        aside = {
            name: Shard("", name, spec.shape, dtype_of(spec.dtype), ())
            for name, spec in kept.items()
        }
        params = frozenset(shard.name for role in roles for shard in role.params)
        first |= dict.fromkeys(aside, 0)
        names = dict.fromkeys([*program.fingerprint.tensors, *shards, *aside, *aliases])
        order = {name: number for number, name in enumerate(names)}
        saved = frozenset(program.fingerprint.saved_names())
        return cls({**shards, **aside}, first, aliases, aside, places, params, order, saved)

    def is_first_stage(self, shard: Shard, coords: Mapping[str, int]) -> bool:
        """Whether ``coords`` are on the first pipeline rank that holds a tensor."""
        return self.first[shard.name] == coords.get(PP, 0)

    def is_first_copy(self, shard: Shard, coords: Mapping[str, int]) -> bool:
        """Whether the rank at ``coords`` is the first of its island's that hold the same shard."""
        others = {axis: index for axis, index in coords.items() if axis not in (PP, ISLAND)}
        return shard.is_first_copy(others) and self.is_first_stage(shard, coords)


def roles_of(program: Program) -> list[Role]:
    """The role of each pipeline rank."""
    mesh = program.mesh
    return [program.role(mesh.first_rank(number)) for number in range(mesh.pipeline_ranks)]


def from_first(
    tensor: Tensor | None, shard: Shard, first: int, group: Any, device: torch.device
) -> Tensor:
    """Broadcast a tensor from pipeline rank ``first`` to all pipeline ranks; the others pass None.

    The tensor is sent as bytes, since not every backend knows every dtype.
    """
    if tensor is None:
        tensor = torch.empty(shard.shape, dtype=shard.dtype, device=device)
    tensor = tensor.contiguous()
    if tensor.numel():
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), group=group, group_src=first)
    return tensor


def exchange_texts(text: str, group: Any, device: torch.device) -> list[str]:
    """Gather one text from every rank of a group, in rank order."""
    mine = bytes_of(text, device)
    size = torch.tensor([mine.numel()], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    most = max(int(each) for each in sizes)
    padded = torch.cat([mine, mine.new_zeros(most - mine.numel())])
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    pairs = zip(found, sizes, strict=True)
    return [text_of(each[: int(num)]) for each, num in pairs]


def bytes_of(text: str, device: torch.device) -> Tensor:
    """A text as a tensor that can be sent, `u8[n]`."""
    return torch.from_numpy(np.frombuffer(bytearray(text.encode()), np.uint8)).to(device)


def text_of(data: Tensor) -> str:
    return data.cpu().numpy().tobytes().decode()
