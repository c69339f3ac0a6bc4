"""Let batch norms of the single-device model take the statistics of pieces of the batch.

A program with local batch norm normalises each rank's piece of each microbatch by itself; all else,
the loss too, is that of the whole batch. So the model runs once on the whole batch, and its batch
norms alone see the pieces.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from partc.plan.mesh import MICROBATCH_AXIS

COUNT = "num_batches_tracked"
Key = tuple[int, tuple[int, ...]]  # of a batch norm's call: its running mean, and its input's shape


@dataclass(frozen=True)
class Pieces:
    """How the batch is cut for a model with batch statistics of single pieces (batch norm).

    Into ``microbatches``, and each microbatch into one piece per data-parallel rank. ``axes`` are
    the mesh axes of these ranks with their sizes, the outermost first. ``dims`` has the dim of each
    input that is cut, None for one that is whole.
    """

    ranks: int = 1
    microbatches: int = 1
    axes: tuple[tuple[str, int], ...] = ()
    dims: tuple[int | None, ...] = ()

    @property
    def num(self) -> int:
        return self.ranks * self.microbatches

    def first(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The first piece of the batch."""
        cut = zip(inputs, self.dims, strict=True)
        return [x if dim is None else x.chunk(self.num, dim)[0] for x, dim in cut]

    def first_place(self) -> dict[str, int]:
        """The coordinates of the first piece on the axes that cut the batch."""
        return dict.fromkeys((MICROBATCH_AXIS, *(axis for axis, _ in self.axes)), 0)


@dataclass
class _Arguments:
    """The arguments of one call of a batch norm."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    momentum: float
    eps: float

    @property
    def key(self) -> Key:
        return id(self.running_mean), tuple(self.input.shape)


@dataclass
class _Update:
    """What one piece adds to running statistics."""

    microbatch: int
    running: Tensor
    now: Tensor
    momentum: float

    def apply(self) -> None:
        self.running.mul_(1 - self.momentum).add_(self.now, alpha=self.momentum)


class _Norms(TorchFunctionMode):
    """While this is open, ``compute`` takes the place of batch norms in training."""

    def __init__(self, compute: Callable[[_Arguments], Tensor | None]) -> None:
        super().__init__()
        self.compute = compute

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        norm = _norm_of(func, args, kwargs)
        result = None if norm is None else self.compute(norm)
        return func(*args, **kwargs) if result is None else result


def _norm_of(func: Any, args: Sequence[Any], kwargs: Any) -> _Arguments | None:
    """The arguments of a batch norm in training; None for any other call."""
    if func is nn.functional.batch_norm:
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
    elif func is torch.batch_norm:
        names = "input weight bias running_mean running_var training momentum eps cudnn_enabled"
        given = {**dict(zip(names.split(), args, strict=False)), **kwargs}
    else:
        return None
    if not given.pop("training"):
        return None
    given.pop("cudnn_enabled", None)
    return _Arguments(**given)


@dataclass
class PieceNorms:
    """Batch norms on ``pieces`` of the batch, with which ``of_batch`` says that they compute.

    Running statistics get the updates of the first rank's piece of each microbatch in turn, and
    counters of batches count microbatches.
    """

    pieces: Pieces
    of_pieces: set[Key] | None  # the calls of a run on one piece; None if it does not run alone
    updates: list[_Update] = field(default_factory=list)
    local: set[int] = field(default_factory=set)  # running means of what saw pieces

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """While this is open, the batch norms of ``model`` see pieces; then buffers are updated."""
        counts = {n: b.clone() for n, b in model.named_buffers() if n.endswith(COUNT)}
        with _Norms(self._on_pieces):
            yield
        with torch.no_grad():
            for update in sorted(self.updates, key=lambda each: each.microbatch):
                update.apply()
            for name, before in counts.items():
                owner = model.get_submodule(name.rpartition(".")[0])
                if id(getattr(owner, "running_mean", None)) in self.local:
                    count = model.get_buffer(name)
                    count.copy_(before + self.pieces.microbatches * (count - before))

    def _on_pieces(self, norm: _Arguments) -> Tensor | None:
        """The result with the statistics of each piece; None for what is not of the batch."""
        x = norm.input
        if x.shape[0] % self.pieces.num or not self._is_of_batch(norm):
            return None
        self.local.add(id(norm.running_mean))
        return torch.cat([self._one(norm, i, p) for i, p in enumerate(x.chunk(self.pieces.num))])

    def _is_of_batch(self, norm: _Arguments) -> bool:
        if self.of_pieces is None:
            return True
        running, (size, *rest) = norm.key
        return (running, (size // self.pieces.num, *rest)) in self.of_pieces

    def _one(self, norm: _Arguments, number: int, piece: Tensor) -> Tensor:
        """The result of one piece; the first rank's piece updates the running statistics."""
        mean = var = None
        if number % self.pieces.ranks == 0 and norm.running_mean is not None:
            assert norm.running_var is not None
            mean, var = torch.zeros_like(norm.running_mean), torch.ones_like(norm.running_var)
            microbatch = number // self.pieces.ranks
            for running, now in ((norm.running_mean, mean), (norm.running_var, var)):
                self.updates.append(_Update(microbatch, running, now, norm.momentum))
        y = nn.functional.batch_norm(piece, mean, var, norm.weight, norm.bias, True, 1.0, norm.eps)
        if self.pieces.microbatches == 1:
            with torch.no_grad():
                while self.updates:
                    self.updates.pop(0).apply()
        return y


@contextmanager
def seen_norms(found: set[Key]) -> Iterator[None]:
    """While this is open, add the key of every batch norm's call to ``found``."""

    def note(norm: _Arguments) -> None:
        found.add(norm.key)

    with _Norms(note):
        yield
