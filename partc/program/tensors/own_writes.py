"""How often, and with which factors, this process has written to what its stages train.

All ranks do so equally often, and by the same numbers. What one rank alone has written (behind ``if
rank == 0``, or by an optimizer that finds no gradient there), and a learning rate of its own in
``p.data -= lr * p.grad``, is seen in no copy where each rank holds a piece of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from partc.program.role import Shard
from partc.program.tensors.homes import HomeTensor
from partc.program.tensors.op_facts import Op

OF_COPIES = "number of writes to parameters or gradients"
OF_PIECES = "number of writes to sharded parameters or their gradients"
OF_FACTORS = (
    "factor of writes to sharded parameters or their gradients (a learning rate, a norm to clip to)"
)
NAMES = (OF_PIECES, "number of calls of optimizer.load_state_dict", OF_COPIES, OF_FACTORS)
MOST = 2**62


class OwnWrites:
    """Counts of this process, in the order of ``NAMES``: tensors written of which each rank has a
    piece of its own, loads of optimizers' states, and tensors written of which ranks have copies;
    and a number of the factors with which pieces were written.
    """

    def __init__(self) -> None:
        self._now, self._compared = [0, 0, 0, 0], [0, 0, 0, 0]

    def note(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count what an op writes to."""
        for i, name in op.writes_at:
            given = args[i] if i < len(args) else kwargs.get(name)
            for x in given if isinstance(given, list | tuple) else (given,):
                if isinstance(x, HomeTensor) and x.is_own:
                    self.note_one(x.home.shard)
                    if x.home.shard.cuts:
                        self._now[3] = (self._now[3] + factors_of(args, kwargs)) % MOST

    def note_one(self, shard: Shard) -> None:
        """Count one tensor that is written to."""
        self._now[0 if shard.cuts else 2] += 1

    def load(self) -> None:
        """Count a load of an optimizer's states."""
        self._now[1] += 1

    def since(self) -> list[int]:
        """The counts since ranks were last compared."""
        return [(now - then) % MOST for now, then in zip(self._now, self._compared, strict=True)]

    def compared(self) -> None:
        """Ranks are compared now, or begin alike."""
        self._compared = [*self._now]


def factors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """A number of the factors among an op's operands, and of those that these were computed with;
    0 without any. In which order ops run makes no difference.
    """
    found = [_factor(x) for x in pytree.tree_leaves([*args, *kwargs.values()])]
    return sum(found) % MOST


def _factor(x: Any) -> int:
    if isinstance(x, HomeTensor):
        return x.factors
    if type(x) is Tensor and not x.dim() and x.is_cpu and x.is_floating_point():
        x = float(x.detach())
    return hash(x) % MOST if isinstance(x, float) else 0


OWN_WRITES = OwnWrites()  # of all stages of this process
