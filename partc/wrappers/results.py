"""What a model returns in a training step that a wrapper compiles: its loss, and named results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from partc.errors import RunError, UsageError
from partc.trace.script_loss import given_out, with_leaves
from partc.wrong_calls import did_you_mean, quoted


def returned_loss(
    model: nn.Module, outputs: Sequence[str], inputs: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """``loss(model, *inputs)`` of a model that returns its loss, in a tensor, a tuple or by name.

    It has the arguments of the model's forward, so that a step takes them by place and by name.
    Where the script computes the loss itself, ``inputs`` name those that get a gradient, too.
    """

    def loss_of(model: nn.Module, /, *args: Any, **named: Any) -> Any:
        given, by_name, leaves = with_leaves(model, args, named, inputs)
        results = model(*given, **by_name)
        loss = loss_in(results)
        if loss is None and not outputs:
            return given_out(results, type(model).__name__, inputs, leaves)
        if loss is None or (outputs and isinstance(results, Tensor)):
            raise no_loss(type(model).__name__, _told(results))
        if isinstance(results, Tensor):
            return results
        return loss, {name: picked(results, name) for name in outputs}

    if (called := called_as(model)) is not None:
        loss_of.__signature__ = inspect.signature(called)  # type: ignore[attr-defined]
    return loss_of


def _told(results: Any) -> str:
    if isinstance(results, Tensor):
        return f"a tensor of shape {tuple(results.shape)}"
    return ", ".join(map(str, results)) if isinstance(results, Mapping) else quoted(results)


def loss_in(results: Any) -> Any:
    """The loss in what a model returns; None where a script computes it from the results."""
    if isinstance(results, Mapping):
        return results.get("loss")
    first = results[0] if isinstance(results, tuple | list) and results else results
    is_loss = isinstance(first, Tensor) and not first.dim() and first.is_floating_point()
    return first if is_loss else None


def called_as(model: nn.Module) -> Callable[..., Any] | None:
    """What has the arguments of a model's forward behind the model, which may be let go; None of a
    forward in C.
    """

    def call(model: nn.Module, *args: Any, **named: Any) -> Any:
        raise AssertionError("it stands for its arguments")

    try:
        given = inspect.signature(model.forward).parameters.values()
    except (ValueError, TypeError):
        return None
    first = inspect.Parameter("_model", inspect.Parameter.POSITIONAL_ONLY)
    call.__signature__ = inspect.Signature([first, *given])  # type: ignore[attr-defined]
    return call


def picked(results: Any, name: str) -> Any:
    """The result of a name; UsageError where the model returns none of it."""
    if isinstance(results, Mapping) and name in results:
        return results[name]
    if not isinstance(results, Mapping):
        raise UsageError(
            where=f"outputs=[{name!r}]", what=f"the model returns {quoted(results)}",
            why="its results have no names",
            do="Let it return a dict, or give loss=fn(model, *inputs) that returns (loss, extras).",
        )  # fmt: skip
    known = [str(each) for each in results]
    others = [each for each in known if each != "loss"]  # which is returned in any case
    raise UsageError(
        where=f"outputs=[{name!r}]", what="the model returns no such result in a training step",
        why=f"it returns {', '.join(known)}", do=did_you_mean(name, others)
        or f"{f'Take outputs={quoted(others)}, or let' if others else 'Let'} the model return it "
        "(output_hidden_states=True and alike).",
    )  # fmt: skip


def no_loss_of_trainer(model: str, returned: str) -> RunError:
    """The refusal of a model that a Trainer cannot train as it is."""
    return RunError(
        where=f"a training step of {model}",
        what=f"it returns {returned}, and no loss",
        why="a Trainer trains on the loss that the model returns, or that is computed of its "
        "results by compute_loss",
        do="Let forward take labels and return {'loss': ..., 'logits': ...}, and the dataset have "
        "labels; or pass Trainer(compute_loss_func=fn(outputs, labels, num_items_in_batch)), or "
        "write compute_loss in a subclass.",
    )


def no_loss(model: str, returned: str) -> RunError:
    return RunError(
        where=f"a training step of {model}",
        what=f"it returns {returned}, and no loss",
        why="a program computes the gradients together with the loss, which a script cannot "
        "compute behind it",
        do="Pass labels, where the model computes its loss of them; or name a loss that computes "
        "predictions too, Accelerator(loss=loss_of) or parallelize(loss=loss_of) of def "
        "loss_of(model, x, y), and call the model for the loss: loss = model(x, y).",
    )
