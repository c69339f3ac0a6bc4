"""How often this process has written to the parameters and gradients of its stages.

All ranks do so equally often. What one rank alone has written (behind ``if rank == 0``, or by an
optimizer that finds no gradient there) is seen in no copy where each rank holds a piece of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partc.program.role import Shard
from partc.program.tensors.homes import HomeTensor
from partc.program.tensors.op_facts import Op

OF_COPIES = "number of writes to parameters or gradients"
NAMES = (
    "number of writes to sharded parameters or their gradients",
    "number of calls of optimizer.load_state_dict", OF_COPIES,
)  # fmt: skip


class OwnWrites:
    """Counts of this process, in the order of ``NAMES``: tensors written of which each rank has a
    piece of its own, loads of optimizers' states, and tensors written of which ranks have copies.
    """

    def __init__(self) -> None:
        self._now, self._compared = [0, 0, 0], [0, 0, 0]

    def note(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count what an op writes to."""
        for i, name in op.writes_at:
            given = args[i] if i < len(args) else kwargs.get(name)
            for x in given if isinstance(given, list | tuple) else (given,):
                if isinstance(x, HomeTensor) and x.is_own:
                    self.note_one(x.home.shard)

    def note_one(self, shard: Shard) -> None:
        """Count one tensor that is written to."""
        self._now[0 if shard.cuts else 2] += 1

    def load(self) -> None:
        """Count a load of an optimizer's states."""
        self._now[1] += 1

    def since(self) -> list[int]:
        """The counts since ranks were last compared."""
        return [now - then for now, then in zip(self._now, self._compared, strict=True)]

    def compared(self) -> None:
        """Ranks are compared now, or begin alike."""
        self._compared = [*self._now]


OWN_WRITES = OwnWrites()  # of all stages of this process
