"""``training_step`` of a LightningModule as a loss that partc compiles.

In: the module and a batch. Out: the loss; and as extras what the step logs, what its metrics are
given and what else it returns, which ``replay`` hands to the trainer behind each step.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from partc.errors import PartcError, TraceError
from partc.own_numbers import OF_RANK
from partc.trace.source_lines import source_of
from partc.trace.swallowed import OF_VALUES
from partc.wrappers.lightning_errors import logged_number


def loss_of(autocast: Callable[[], Any]) -> Callable[..., tuple[Any, Any]]:
    """``loss(module, batch, batch_idx)`` for ``partc.compile``, under the trainer's autocast."""

    def loss(module: Any, batch: Any, batch_idx: Tensor | None = None) -> tuple[Any, Any]:
        calls = _noted(module)
        with autocast(), _naming_number(module, given=batch_idx is not None):
            out = module.training_step(batch, *([] if batch_idx is None else [batch_idx]))
        rest = None
        if isinstance(out, Mapping) and "loss" in out:
            rest = {key: value for key, value in out.items() if key != "loss"}
            out = out["loss"]
        if not isinstance(out, Tensor):
            names = f", but {', '.join(map(str, out))}" if isinstance(out, Mapping) else ""
            raise TraceError(
                where=f"{type(module).__name__}.training_step", what=f"it returned no loss{names}",
                why="a step trains on what it returns",
                do="Return the loss in every step, or a dict that has it: {'loss': loss, ...}.",
            )  # fmt: skip
        return out, {"calls": calls, "rest": rest}

    setattr(loss, OF_RANK, True)  # as the batch_size that a rank logs with
    return loss


@contextmanager
def _naming_number(module: Any, *, given: bool) -> Iterator[None]:
    """TraceError in words where Python decides by the number of the batch."""
    name = [*inspect.signature(module.training_step).parameters][1] if given else ""
    try:
        yield
    except Exception as error:
        line = source_of(error)
        logged = logged_number(line, type(module).__name__)
        if logged and isinstance(error, OF_VALUES):
            raise logged from error
        of_floats = getattr(error, "of_floats", False)  # the number of a batch is a whole one
        if (
            isinstance(error, PartcError)
            or of_floats
            or not re.search(rf"\b{name}\b", line)
            or not name
        ):
            raise
        raise TraceError(
            where=f"{type(module).__name__}.training_step ({line})",
            what=f"Python code asks for the value of {name}",
            why="a program is the same in every step, and the number another one: here it is a "
            "tensor without a value",
            do=f"Compute with it, torch.where({name} % 2 == 0, a, b); or do this in "
            f"on_train_batch_end(outputs, batch, {name}), where it is a number.",
        ) from error


def replay(module: Any, loss: Tensor, extras: Any) -> Any:
    """Make the calls that a step has noted; returns what ``training_step`` returns."""
    results = []
    for what, where, args, kwargs in extras["calls"]:
        if what != "log":
            results.append(getattr(module.get_submodule(where), what)(*args, **kwargs))
            continue
        (kind, value), *args = args
        known = {"metric": lambda x: module.get_submodule(x), "result": lambda x: results[x]}
        module.log(where, known[kind](value) if kind in known else value, *args, **kwargs)
    return loss if extras["rest"] is None else {"loss": loss, **extras["rest"]}


@dataclass(frozen=True)
class _Result:
    """What a metric's call will have returned once it is made: it can be logged, no more."""

    metric: str
    number: int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TraceError(
            where=f"training_step, {self.metric}(...).{name}",
            what="the result of a metric is used for more than self.log",
            why="metrics are updated behind the step, with what the step has given them",
            do="Log the result or the metric itself, or compute with it in on_train_batch_end.",
        )


def _noted(module: Any) -> list[Any]:
    """The list to which the module's ``log`` and its metrics add their calls from now on.

    The tracer takes these attributes away again.
    """
    calls: list[Any] = []
    paths = {m: path for path, m in module.named_modules() if _is_metric(m)}

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if callable(how := kwargs.get("reduce_fx")):
            kwargs["reduce_fx"] = how.__name__
        calls.append(("log", name, [_logged(name, value, paths), *args], kwargs))

    def call(what: str, path: str, *args: Any, **kwargs: Any) -> _Result:
        calls.append((what, path, args, kwargs))
        return _Result(path, sum(each[0] != "log" for each in calls) - 1)

    vars(module)["log"] = log
    for metric, path in paths.items():
        for what in ("forward", "update"):
            vars(metric)[what] = _bound(call, what, path)
    return calls


def _bound(call: Callable[..., Any], what: str, path: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: call(what, path, *args, **kwargs)


def _logged(name: str, value: Any, paths: Mapping[nn.Module, str]) -> tuple[str, Any]:
    if isinstance(value, _Result):
        return "result", value.number
    if _is_metric(value) and value in paths:
        return "metric", paths[value]
    if isinstance(value, Tensor):
        return "value", value
    raise TraceError(
        where=f"training_step, self.log({name!r}, ...)",
        what=f"the value is a {type(value).__name__}",
        why="it would be the same in all later steps",
        do="Log a tensor that the step computes, or log it in on_train_batch_end.",
    )


def _is_metric(part: Any) -> bool:
    return isinstance(part, Metric | MetricCollection)
