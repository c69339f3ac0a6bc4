"""The loss of a step of which the script itself computes the loss, from what the model returns.

Without a function of the loss a step is recorded all the same: its results are given out, and its
backward starts at the gradients that come back (``graph/given_back.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from partc.errors import TraceError, UsageError
from partc.graph.given_back import GIVEN_BACK
from partc.trace.arguments import Given
from partc.trace.trees import TreeError, tensors_of
from partc.wrong_calls import did_you_mean, quoted


class ScriptLoss:
    """Stands for a loss that the script computes itself, from what the model returns.

    A stage that was compiled with it is called as the model is, ``logits = stage(x)``; what the
    script computes of the results has a ``backward``. ``partc.parallelize`` without ``loss`` takes
    it by itself, for a model that returns no loss. Parts of a batch can take no turns then:
    pipelines and microbatches need the loss.

    Args:
        model: the model that is compiled, whose arguments a step takes.
        inputs: names of inputs that get a gradient, as what another model has computed.

    Example::

        program = partc.compile(model, "dp=4", batch, loss=partc.ScriptLoss(model), plan="fsdp")
        stage = program.module()
        loss = criterion(stage(x), y)
        loss.backward()
    """

    # called as a loss is, it gives 0, whose gradients by the results are what the script gives back

    def __init__(self, model: nn.Module, inputs: Sequence[str] = ()) -> None:
        _check_model(model)
        _check_names(model, inputs)
        first = inspect.Parameter("model", inspect.Parameter.POSITIONAL_ONLY)
        taken = inspect.signature(model.forward).parameters.values()
        self.__signature__ = inspect.Signature([first, *taken])
        self.inputs = tuple(inputs)

    def __call__(self, model: nn.Module, *args: Any, **named: Any) -> Any:
        return of_script(model, args, named, self.inputs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScriptLoss) and self.inputs == other.inputs

    def __hash__(self) -> int:
        return hash(self.inputs)


def _check_model(given: Any) -> None:
    """UsageError for what is no model, as the criterion or the loss of a script."""
    if isinstance(given, nn.Module) and type(given).__module__ != "torch.nn.modules.loss":
        return
    do = "Pass the model: loss=partc.ScriptLoss(model)."
    if callable(given) and not isinstance(given, type):
        do = (
            "Pass the model, loss=partc.ScriptLoss(model), and compute the loss in the script: "
            "loss = criterion(stage(x), y), then loss.backward(). Or let the step compute it: "
            "loss=lambda model, x, y: criterion(model(x), y)."
        )
    raise UsageError(
        where=f"ScriptLoss({getattr(given, '__name__', type(given).__name__)})",
        what="a loss stands where the model is needed" if callable(given) else "it is no model",
        why="it stands for a loss that the script computes from what the model returns, and takes "
        "what the model takes", do=do,
    )  # fmt: skip


def _check_names(model: nn.Module, inputs: Any) -> None:
    """UsageError unless these are names of what the model takes; ``"batch.ids"`` is an entry of an
    argument.
    """
    taken = inspect.signature(model.forward).parameters
    texts = isinstance(inputs, list | tuple) and all(isinstance(each, str) for each in inputs)
    if not texts:
        raise UsageError(
            where="ScriptLoss(inputs=...)", what=f"it is {quoted(inputs)}", why="it has the names "
            "of inputs that get a gradient", do=f"Pass a list: [{next(iter(taken), 'x')!r}].",
        )  # fmt: skip
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in taken.values()):
        return
    known = {*taken, *(f"input_{name}" for name in taken)}  # where a parameter is called so too
    for name in (each for each in inputs if each.partition(".")[0] not in known):
        raise UsageError(
            where=f"ScriptLoss(inputs=[{name!r}])", what="the model takes no such input",
            why=f"it takes {', '.join(taken)}",
            do=did_you_mean(name, taken) or "Name one of these.",
        )  # fmt: skip


class GivenOut(tuple[Tensor, Any]):
    """``(0, what the model returns)``. ``inputs``: names of inputs that have a gradient, too."""

    inputs: tuple[str, ...]


def of_script(
    model: nn.Module, args: Sequence[Any], named: Mapping[str, Any], inputs: tuple[str, ...] = ()
) -> GivenOut:
    """``(0, returned)``, a loss whose gradients by what a model returns the script gives back.

    ``inputs``: the names of inputs by which the model is differentiated, too.
    """
    args, named, leaves = with_leaves(model, args, named, inputs)
    return given_out(model(*args, **named), type(model).__name__, inputs, leaves)


def given_out(
    returned: Any, model: str, inputs: tuple[str, ...] = (), leaves: Sequence[Tensor] = ()
) -> GivenOut:
    """The same of what a model has returned."""
    apply: Any = _HandedOut.apply
    found = GivenOut((apply(leaves, *_results(returned, model)), returned))
    found.inputs = inputs
    return found


class _HandedOut(Function):
    """Zero, whose gradients by the results are those that are given back for them."""

    @staticmethod
    def forward(ctx: Any, leaves: Sequence[Tensor], *results: Tensor) -> Tensor:
        ctx.leaves = leaves
        ctx.save_for_backward(*results)
        return next(x for x in results if x.is_floating_point()).new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        results = list(ctx.saved_tensors)
        found = GIVEN_BACK([x.detach() for x in results], [])
        pairs = zip(found, results, strict=True)
        return None, *(grad if x.is_floating_point() else None for grad, x in pairs)


def with_leaves(
    model: nn.Module, args: Sequence[Any], named: Mapping[str, Any], inputs: Sequence[str]
) -> tuple[Sequence[Any], Mapping[str, Any], list[Tensor]]:
    """The arguments with a leaf of autograd's in the place of each of these inputs."""
    if not inputs:
        return args, named, []
    given = Given.of_call(model, args, named)
    tensors = dict(zip(given.names, given.tensors, strict=True))
    leaves = {name: tensors[name].detach().requires_grad_() for name in inputs}
    bound = given.filled([*(tensors | leaves).values()])
    return bound.args, bound.kwargs, [*leaves.values()]


def _results(returned: Any, model: str) -> list[Tensor]:
    """The tensors of what a model returns; TraceError where none could be trained."""
    if isinstance(returned, Iterator):
        raise TraceError(
            where=model, what=f"it returns {quoted(returned)}, a generator or an iterator",
            why="a program gives all results at once", do="Return a list or a tuple: [*results].",
        )  # fmt: skip
    try:
        results = [*tensors_of(returned)]
    except TreeError:
        results = []
    grad = torch.is_grad_enabled()  # a reference may look at a forward alone
    if not any(x.is_floating_point() and (x.requires_grad or not grad) for x in results):
        raise TraceError(
            where=model, what="what it returns has no gradient",
            why="the script is to compute its loss from it",
            do="Return a tensor that the parameters have made, without detach() or no_grad().",
        )  # fmt: skip
    return results
