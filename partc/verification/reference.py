"""Run the single-device model on the global batch with eager autograd, as the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from partc.collecting import no_collecting
from partc.errors import RunError, UsageError
from partc.graph.given_back import differentiated
from partc.program.step.step_failures import THEIRS, described
from partc.trace.arguments import Given
from partc.trace.capture import named_results
from partc.trace.cuda_autocast import cuda_autocast_on_cpu
from partc.trace.default_dtype import users_default
from partc.trace.fingerprint import named_tensors
from partc.trace.places import Reach, restored
from partc.trace.portable_kernels import modules_of_one_device
from partc.trace.returns import Returns
from partc.trace.returns import described as described_results
from partc.trace.source_lines import module_of, source_of
from partc.trace.tensor_caches import caches_restored
from partc.trace.untouched import untouched
from partc.verification.piece_norms import Key, PieceNorms, Pieces, seen_norms
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


WHOLE, NO_DRAWS = Pieces(), SameDraws()


def is_noise(size: float, most: float, dtype: torch.dtype) -> bool:
    """Whether a tensor is only rounding noise, and zero in exact arithmetic.

    ``size``: its largest entry. ``most``: the largest entry of all tensors of its kind.
    """
    return dtype.is_floating_point and size <= torch.finfo(dtype).eps ** (2 / 3) * most


def take_step(params: Tensors, optimizer: str, lr: float, eps: Mapping[str, float]) -> None:
    """Take one step of ``SGD`` or ``AdamW`` with the parameters' gradients."""
    if not params:  # torch refuses to make an optimizer of none
        return
    made: torch.optim.Optimizer
    if optimizer == "SGD":
        made = torch.optim.SGD(params.values(), lr=lr)
    else:
        groups = [{"params": [param], "eps": eps.get(name, 1.0)} for name, param in params.items()]
        made = torch.optim.AdamW(groups, lr=lr)
    made.step()


def eager(
    model: nn.Module,
    inputs: Any,
    loss: Loss | None = None,
    dtype: torch.dtype | None = torch.float64,
    train: bool = True,
    pieces: Pieces = WHOLE,
    draws: SameDraws = NO_DRAWS,
    rounded: Callable[[str, Tensor], Tensor] | None = None,
) -> Reference:
    """Run a step of the model, in ``dtype`` or, for None, in its own precision.

    The model itself runs, with its hooks and what its functions close over, on copies of its
    tensors; it is left as it was. With several ``pieces`` batch norms take the statistics of each
    piece, and running statistics are updated by the first rank's pieces only, as with microbatches
    and under DDP; the loss is that of the whole batch.
    Random numbers are those of ``draws``. The step computes with what ``rounded`` makes of a
    weight, by its name; the reference's weights are exact. UsageError if the model has no values,
    or draws where the program does not.
    """
    given, returns = Given.of(model, inputs, loss), Returns(own=loss is None)
    _check_values(model, given)
    batch = tuple(x if dtype is None else converted(x, dtype) for x in given.tensors)
    objective = returns.objective(given.function)
    raised = raised_model(model) if dtype == torch.float64 else nullcontext()
    with lent(model, loss, dtype), cuda_autocast_on_cpu(), raised, modules_of_one_device():
        weights = {name: tensor.detach().clone() for name, tensor in named_tensors(model).items()}
        if rounded is not None:
            for name, weight in model.named_parameters():
                weight.data = rounded(name, weight.data)
        with _naming_model(model, given.arguments.names, batch):
            if train:
                whole, *others = _trained(model, batch, objective, pieces, draws)
                results = dict(zip(returns.names, others, strict=True))
            else:
                whole, results = None, _results(model, batch, given.function, draws)
        params = dict(model.named_parameters())
        reference = Reference(
            weights=weights,
            inputs=batch,
            loss=whole,
            grads={name: p.grad for name, p in params.items() if p.grad is not None},
            buffers={name: b.detach() for name, b in model.named_buffers()},
            results=results,
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
    around = restored(Reach.of(model, model.forward if loss is None else loss))
    with no_collecting(), untouched(model), around, caches_restored():
        try:
            for tensor, data, _ in before:
                tensor.grad = None
                tensor.data = converted(data, data.dtype if dtype is None else dtype)
            yield
        finally:
            for tensor, data, grad in before:
                tensor.grad = None
                tensor.data, tensor.grad = data, grad


@contextmanager
def _naming_model(
    model: nn.Module, names: Sequence[str], inputs: Sequence[Tensor]
) -> Iterator[None]:
    """Say of an error of the model itself at which line it arose, and of which inputs."""
    try:
        yield
    except THEIRS:
        raise
    except Exception as error:
        path, source = module_of(error, model) or type(model).__name__, source_of(error)
        reason = (str(error).strip().splitlines() or [""])[0]
        read = ", ".join(map(described, names, inputs))
        raise RunError(
            where=f"{path} ({source})" if source else path,
            what="the model itself does not compute this batch",
            why=f"{type(error).__name__}: {reason}",
            do=f"Give a batch that it takes; this one has {read}.",
        ) from error


def _trained(
    model: nn.Module, inputs: Sequence[Tensor], objective: Loss, pieces: Pieces, draws: SameDraws
) -> list[Tensor]:
    """Run forward and backward of the whole batch, batch norms by pieces; return the loss, and
    behind it the extras.
    """
    norms = None
    if pieces.num > 1:
        norms = PieceNorms(pieces, _norms_of_a_piece(model, inputs, objective, pieces, draws))
    inside = norms.inside(model) if norms else nullcontext()
    with users_default(), draws.inside(model), inside:
        whole, *others = objective(model, *inputs)
        extras = [each.clone() for each in others]
        inputs = differentiated(whole)
        if inputs or any(param.requires_grad for param in model.parameters()):
            whole.backward()  # checkpointed blocks draw and normalise again
            extras += [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
    return [whole.detach(), *extras]


def _norms_of_a_piece(
    model: nn.Module, inputs: Sequence[Tensor], objective: Loss, pieces: Pieces, draws: SameDraws
) -> set[Key] | None:
    """The batch norms in a forward of one piece of the batch alone; None if that does not run.

    What has the same shape there as in the whole batch is not cut with it.
    """
    before, found = {n: b.clone() for n, b in model.named_buffers()}, set[Key]()
    try:
        drawn = draws.inside(model, pieces.first_place())
        with users_default(), torch.no_grad(), drawn, seen_norms(found):
            objective(model, *pieces.first(inputs))
    except (RuntimeError, ValueError, TypeError, IndexError):  # it knows the size of the batch
        return None
    finally:
        for name, buffer in before.items():
            model.get_buffer(name).data.copy_(buffer)
    return found


@torch.no_grad()
def _results(
    model: nn.Module, inputs: Sequence[Tensor], function: Loss, draws: SameDraws
) -> dict[str, Tensor]:
    with users_default(), draws.inside(model):
        return named_results(described_results(function(model, *inputs))[1])


def _check_values(model: nn.Module, given: Given) -> None:
    name = type(model).__name__
    without = sorted(f"{name}.{n}" for n, tensor in named_tensors(model).items() if tensor.is_meta)
    without += [f"input {i}" for i, tensor in enumerate(given.tensors) if tensor.is_meta]
    if without:
        raise UsageError(
            where=without[0],
            what="verifying needs values",
            why="this tensor is on the meta device",
            do="Give the model with weights, and the batch with values; random ones will do.",
        )
