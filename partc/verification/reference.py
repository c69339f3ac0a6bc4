"""Run the single-device model on the global batch with eager autograd, as the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from partc.errors import UsageError
from partc.plan.mesh import MICROBATCH_AXIS
from partc.trace.capture import named_results, untouched
from partc.trace.cuda_autocast import cuda_autocast_on_cpu
from partc.trace.fingerprint import named_tensors
from partc.trace.places import Reach, restored
from partc.verification.precision import converted, raised_model
from partc.verification.same_draws import SameDraws

Loss = Callable[..., Any]
Tensors = Mapping[str, Tensor]
OPTIMIZERS = ("SGD", "AdamW")


@dataclass(frozen=True)
class Reference:
    """The results of a reference step, as whole tensors by name.

    ``weights``: the values before the step.
    """

    weights: Tensors
    inputs: tuple[Tensor, ...]
    loss: Tensor | None = None
    grads: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    results: Tensors = field(default_factory=dict)

    @cached_property
    def eps(self) -> Mapping[str, float]:
        """AdamW's eps for each parameter: the largest entry of the parameter's gradient.

        For a gradient that is rounding noise, the largest entry of all gradients. The first step of
        AdamW is g / (|g| + eps). With the usual small eps only the signs of g would be compared,
        and where |g| is near eps, rounding would grow by 1 / (4 eps).
        """
        largest = {
            name: float(g.abs().max()) if g.numel() else 0.0 for name, g in self.grads.items()
        }
        most = max(largest.values(), default=0.0)
        return {
            name: (most if is_noise(size, most, self.grads[name].dtype) else size) or 1.0
            for name, size in largest.items()
        }

    def stepped(self, optimizer: str, lr: float) -> dict[str, Tensor]:
        """The trainable parameters after one optimizer step."""
        held = {n: nn.Parameter(self.weights[n].clone()) for n in self.grads}
        for name, param in held.items():
            param.grad = self.grads[name].clone()
        take_step(held, optimizer, lr, self.eps)
        return {name: param.detach() for name, param in held.items()}


@dataclass(frozen=True)
class Pieces:
    """How the batch is cut for a model with batch statistics of single pieces (batch norm).

    Into ``microbatches``, and each microbatch into one piece per data-parallel rank. ``axes`` are
    the mesh axes of these ranks with their sizes, the outermost first.
    """

    ranks: int = 1
    microbatches: int = 1
    axes: tuple[tuple[str, int], ...] = ()

    def place(self, number: int) -> dict[str, int]:
        """The coordinates of a piece on the axes that cut the batch."""
        found = {MICROBATCH_AXIS: number // self.ranks}
        rank = number % self.ranks
        for axis, size in reversed(self.axes):
            rank, found[axis] = divmod(rank, size)
        return found


WHOLE, NO_DRAWS = Pieces(), SameDraws()


def is_noise(size: float, most: float, dtype: torch.dtype) -> bool:
    """Whether a tensor is only rounding noise, and zero in exact arithmetic.

    ``size``: its largest entry. ``most``: the largest entry of all tensors of its kind.
    """
    return dtype.is_floating_point and size <= torch.finfo(dtype).eps ** (2 / 3) * most


def take_step(params: Tensors, optimizer: str, lr: float, eps: Mapping[str, float]) -> None:
    """Take one step of ``SGD`` or ``AdamW`` with the parameters' gradients."""
    made: torch.optim.Optimizer
    if optimizer == "SGD":
        made = torch.optim.SGD(params.values(), lr=lr)
    else:
        groups = [{"params": [param], "eps": eps.get(name, 1.0)} for name, param in params.items()]
        made = torch.optim.AdamW(groups, lr=lr)
    made.step()


def eager(
    model: nn.Module,
    inputs: Sequence[Tensor],
    loss: Loss | None = None,
    dtype: torch.dtype | None = torch.float64,
    train: bool = True,
    pieces: Pieces = WHOLE,
    draws: SameDraws = NO_DRAWS,
) -> Reference:
    """Run a step of the model, in ``dtype`` or, for None, in its own precision.

    The model itself runs, with its hooks and what its functions close over, on copies of its
    tensors; it is left as it was. With several ``pieces`` the loss is the mean over the pieces, and
    buffers are updated by the first rank's pieces only, as a model with batch norm does with
    microbatches and under DDP.
    Random numbers are those of ``draws``. UsageError if the model has no values, or draws where the
    program does not.
    """
    _check_values(model)
    batch = tuple(x if dtype is None else converted(x, dtype) for x in inputs)
    raised = raised_model(model) if dtype == torch.float64 else nullcontext()
    with lent(model, loss, dtype), cuda_autocast_on_cpu(), raised:
        weights = {name: tensor.detach().clone() for name, tensor in named_tensors(model).items()}
        outcome = _trained(model, batch, loss, pieces, draws) if train else {}
        outcome = outcome or _results(model, batch, loss, draws)
        params = dict(model.named_parameters())
        reference = Reference(
            weights=weights,
            inputs=batch,
            loss=outcome["loss"].detach() if train else None,
            grads={name: p.grad for name, p in params.items() if p.grad is not None},
            buffers={name: b.detach() for name, b in model.named_buffers()},
            results={} if train else outcome,
        )
    return reference


@contextmanager
def lent(model: nn.Module, loss: Loss | None, dtype: torch.dtype | None) -> Iterator[None]:
    """Let a model compute on copies of its tensors, in ``dtype`` unless None, without gradients.

    The model is not copied: a copy would lose the hooks of parameters, and closures would still
    have the tensors of the original. Afterwards it is as it was.
    """
    tensors = {id(each): each for each in named_tensors(model).values()}.values()
    before = [(tensor, tensor.data, tensor.grad) for tensor in tensors]
    with untouched(model), restored(Reach.of(model, loss or model.forward)):
        try:
            for tensor, data, _ in before:
                tensor.grad = None
                tensor.data = converted(data, data.dtype if dtype is None else dtype)
            yield
        finally:
            for tensor, data, grad in before:
                tensor.grad = None
                tensor.data, tensor.grad = data, grad


def _trained(
    model: nn.Module, inputs: Sequence[Tensor], loss: Loss | None, pieces: Pieces, draws: SameDraws
) -> dict[str, Tensor]:
    """Run forward and backward of all pieces; return the mean loss."""
    num, losses = pieces.ranks * pieces.microbatches, []
    for i, piece in enumerate(zip(*(x.chunk(num) for x in inputs), strict=True)):
        others = i % pieces.ranks > 0
        before = {n: b.clone() for n, b in model.named_buffers()} if others else {}
        with draws.inside(model, pieces.place(i) if num > 1 else None):
            each = _objective(model, piece, loss)["loss"] / num
            if draws.draws:  # checkpointed blocks draw again in the backward
                each.backward()
        losses.append(each)
        for name, buffer in before.items():
            model.get_buffer(name).data.copy_(buffer)
    whole = torch.stack(losses).sum()
    if not draws.draws:
        whole.backward()  # of all pieces at once, as gradient hooks look at the whole gradient
    return {"loss": whole.detach()}


def _objective(model: nn.Module, inputs: Sequence[Tensor], loss: Loss | None) -> dict[str, Tensor]:
    """The loss as ``partc.compile`` takes it: ``loss(model, *inputs)``, or the model's own loss."""
    outcome = model(*inputs) if loss is None else loss(model, *inputs)
    own = getattr(outcome, "loss", None)
    return {"loss": outcome if own is None else own}


@torch.no_grad()
def _results(
    model: nn.Module, inputs: Sequence[Tensor], loss: Loss | None, draws: SameDraws
) -> dict[str, Tensor]:
    with draws.inside(model):
        return named_results(model(*inputs) if loss is None else loss(model, *inputs))


def _check_values(model: nn.Module) -> None:
    without = sorted(name for name, tensor in named_tensors(model).items() if tensor.is_meta)
    if without:
        raise UsageError(
            where=f"{type(model).__name__}.{without[0]}",
            what="verifying needs values",
            why="this tensor is on the meta device",
            do="Give the model with weights; random ones will do.",
        )
