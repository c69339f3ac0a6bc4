"""Stand-ins for the printed classes that gather weights with fewer bytes.

In: a loaded role. Out: the same, whose text gathers weights as they are, or as they are said to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from partc.plan.coded import CODED_WEIGHTS
from partc.program.role import Role


class Gathering:
    """Stands for a printed class: the shards of all ranks, each as ``made`` of what it is."""

    def __init__(
        self, dist: Any, shards: list[Tensor], num: int, group: Any,
        made: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        self.pieces = []
        for shard in shards:
            flat = shard.new_empty(num * shard.numel())
            dist.all_gather_single(flat, made(shard).flatten(), group=group)
            self.pieces.append(flat.view(num, *shard.shape))

    def wait(self) -> bool:
        return True


def gather_by(role: Role, made: Callable[[Tensor], Tensor]) -> None:
    """Let a role's text gather each shard as ``made`` of what it is."""
    module = role.module.__dict__

    def stand_in(shards: list[Tensor], num: int, block: int, group: Any) -> Gathering:
        return Gathering(module["dist"], shards, num, group, made)

    module.update(dict.fromkeys(classes_of(role), stand_in))


def gather_exactly(role: Role) -> None:
    """Let a role's text gather weights as they are."""
    gather_by(role, lambda shard: shard)


def classes_of(role: Role) -> dict[str, Any]:
    """The classes of a text that gather weights with fewer bytes, by name."""
    module = role.module.__dict__
    return {name: module[name] for name in sorted(CODED_WEIGHTS) if name in module}


@contextmanager
def gathering_by(role: Role, classes: Mapping[str, Any]) -> Iterator[None]:
    """Inside, a role's text has these in the place of its classes, by name."""
    before = classes_of(role)
    role.module.__dict__.update(classes)
    try:
        yield
    finally:
        role.module.__dict__.update(before)
