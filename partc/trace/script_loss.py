"""The loss of a step of which the script itself computes the loss, from what the model returns.

Without a function of the loss a step is recorded all the same: its results are given out, and its
backward starts at the gradients that come back (``graph/given_back.py``).
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from partc.errors import TraceError
from partc.graph.given_back import GIVEN_BACK
from partc.trace.trees import TreeError, tensors_of


class ScriptLoss:
    """Stands for a loss that the script computes itself, from what the model returns.

    A stage that was compiled with it is called as the model is, ``logits = stage(x)``; what the
    script computes of the results has a ``backward``. ``partc.parallelize`` without ``loss`` takes
    it by itself, for a model that returns no loss. Parts of a batch can take no turns then:
    pipelines and microbatches need the loss.

    Args:
        model: the model that is compiled, whose arguments a step takes.

    Example::

        program = partc.compile(model, "dp=4", batch, loss=partc.ScriptLoss(model), plan="fsdp")
        stage = program.module()
        loss = criterion(stage(x), y)
        loss.backward()
    """

    # called as a loss is, it gives 0, whose gradients by the results are what the script gives back

    def __init__(self, model: nn.Module) -> None:
        first = inspect.Parameter("model", inspect.Parameter.POSITIONAL_ONLY)
        taken = inspect.signature(model.forward).parameters.values()
        self.__signature__ = inspect.Signature([first, *taken])

    def __call__(self, model: nn.Module, *args: Any, **named: Any) -> Any:
        return of_script(model(*args, **named), type(model).__name__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScriptLoss)

    def __hash__(self) -> int:
        return hash(ScriptLoss)


class GivenOut(tuple[Tensor, Any]):
    """``(0, what the model returns)``."""


def of_script(returned: Any, model: str) -> GivenOut:
    """``(0, returned)``, a loss whose gradients by what a model returned the script gives back."""
    apply: Any = _HandedOut.apply
    return GivenOut((apply(*_results(returned, model)), returned))


class _HandedOut(Function):
    """Zero, whose gradients by the results are those that are given back for them."""

    @staticmethod
    def forward(ctx: Any, *results: Tensor) -> Tensor:
        ctx.save_for_backward(*results)
        return next(x for x in results if x.is_floating_point()).new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        results = list(ctx.saved_tensors)
        found = GIVEN_BACK([x.detach() for x in results])
        pairs = zip(found, results, strict=True)
        return tuple(grad if x.is_floating_point() else None for grad, x in pairs)


def _results(returned: Any, model: str) -> list[Tensor]:
    """The tensors of what a model returns; TraceError where none could be trained."""
    try:
        results = [*tensors_of(returned)]
    except TreeError:
        results = []
    if not any(x.is_floating_point() and x.requires_grad for x in results):
        raise TraceError(
            where=model, what="what it returns has no gradient",
            why="the script is to compute its loss from it",
            do="Return a tensor that the parameters have made, without detach() or no_grad().",
        )  # fmt: skip
    return results
