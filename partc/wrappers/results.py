"""What a model returns in a training step that a wrapper compiles: its loss, and named results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partc.errors import RunError, UsageError
from partc.wrong_calls import did_you_mean, quoted


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
    raise UsageError(
        where=f"outputs=[{name!r}]", what="the model returns no such result in a training step",
        why=f"it returns {', '.join(known)}", do=did_you_mean(name, known)
        or "Take one of these, or let the model return it (output_hidden_states=True and alike).",
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
