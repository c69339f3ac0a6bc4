"""Inputs and losses that do not fit each other: which argument is at fault, and what to write."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from partc.errors import TraceError
from partc.wrong_calls import is_word, quoted

_MODELS = ("model", "m", "module", "net", "network", "self")  # as losses call their first argument
_KINDS = ("step", "forward")  # of Traced, which has them behind the loss
_CALLED = "a loss is called as loss(model, *inputs), and computes predictions too"


def check_loss(loss: Any) -> None:
    """TraceError for torch's losses of predictions and targets, which take no model, and for
    what torch.compile has wrapped, which no trace can look into.
    """
    if any(hasattr(loss, mark) for mark in ("_orig_mod", "_torchdynamo_orig_callable")):
        raise TraceError(
            where=f"loss={quoted(loss)}", what="it was compiled by torch.compile",
            why="partc traces the loss together with the model", do="Pass the function itself; "
            'compile="inductor" has the program compiled.',
        )  # fmt: skip
    kind = loss if isinstance(loss, type) else type(loss)
    name = kind.__name__ if kind.__module__ == "torch.nn.modules.loss" else ""
    if getattr(loss, "__module__", "") == "torch.nn.functional":
        name = str(getattr(loss, "__name__", "a function"))
    if isinstance(loss, type) and not name:
        raise TraceError(
            where=f"loss={loss.__name__}", what="it is a class, of which none is made",
            why=_CALLED, do=f"Make one: loss={loss.__name__}(model)."
            if loss.__name__ == "ScriptLoss" else f"Make one: loss={loss.__name__}(...).",
        )  # fmt: skip
    if name or (loss is not None and not callable(loss)):
        do = "Write loss=lambda model, x, y: criterion(model(x), y), for inputs (x, y)."
        raise TraceError(
            where=f"loss={name or quoted(loss)}",
            what="it takes no model" if name else "it is no function", why=_CALLED,
            do=f"Write kind={loss!r}." if is_word(loss, _KINDS) else do,
        )  # fmt: skip


def check_batch(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """TraceError for what stands in the place of a batch: a loss, the keys of a dict, and what
    deals out batches, loaders and datasets.
    """
    _check_no_keys(signature, args, kwargs)
    if len(args) == 1 and isinstance(args[0], FunctionType):
        raise TraceError(
            where="inputs", what=f"the function {args[0].__name__} stands where a batch is needed",
            why="inputs are the tensors of one step", do="Pass the batch there, a tuple (x, y), "
            f"and what computes the loss as loss={args[0].__name__}.",
        )  # fmt: skip
    for given in (*args, *kwargs.values()):
        if not isinstance(given, DataLoader | Dataset):
            continue
        is_loader = isinstance(given, DataLoader)
        batch = "loader" if is_loader else "DataLoader(dataset, batch_size=16)"
        raise TraceError(
            where="inputs", what=f"{quoted(given)} stands where one batch is needed",
            why=f"it has {'many batches' if is_loader else 'rows, one after the other'}, and "
            "inputs are the tensors of one step", do=f"Pass one batch: next(iter({batch})).",
        )  # fmt: skip


def _check_no_keys(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """TraceError for the keys of a dict in the place of its tensors: ``model(*batch)``."""
    names = [each for each in args if isinstance(each, str) and each.isidentifier()]
    several = len(names) > 1 or any(name in signature.parameters for name in names)
    if kwargs or len(names) < len(args) or not several:
        return
    raise TraceError(
        where="inputs", what=f"the names {', '.join(map(repr, names))} stand where tensors are "
        "needed", why="the batch is a dict, and * before a dict gives its keys",
        do="Pass the dict as inputs of a compile; in a call write two stars, model(**batch), or "
        "none where it is one argument, model(batch).",
    )  # fmt: skip


def _renamed(signature: Signature, kwargs: Mapping[str, Any]) -> str:
    """What to do about entries of a dict that are no argument; "" where all are."""
    taken = signature.parameters
    wrong = [name for name in kwargs if name not in taken]
    free = [n for n, p in taken.items() if n not in kwargs and p.default is p.empty]
    if not wrong or any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return ""
    named = f"Inputs that are a dict are given by name, and {wrong[0]!r} is no argument"
    if free:
        return (
            f"{named}: rename that entry to {free[0]!r}, or the argument to {wrong[0]!r}. As one "
            "argument they are ({...},)."
        )
    return f"{named}: leave that entry out."


def unbound(
    model: nn.Module, loss: Any, signature: Signature, args: Sequence[Any],
    kwargs: Mapping[str, Any], error: TypeError,
) -> TraceError:  # fmt: skip
    call = "loss(model, {})" if loss is not None else f"{type(model).__name__}({{}})"
    inner = ", ".join([*(type(a).__name__ for a in args), *(f"{name}=..." for name in kwargs)])
    taken = ", ".join(map(str, signature.parameters.values()))
    if loss is not None and not kwargs and str(error).startswith("too many"):
        first = next(iter(_parameters(loss)), None)
        if first is None or first.name not in _MODELS:
            raise _without_model(loss, args)
    do = _as_takes(len(args)) if loss is not None else (
        "Give inputs that the model takes, or loss=, a function of the model and these inputs: "
        "loss=lambda model, x, y: F.cross_entropy(model(x), y)."
    )  # fmt: skip
    if type(loss).__name__ == "ScriptLoss":
        do = _of_script(signature)
    by_name = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    if args and by_name and "positional" in str(error):
        entries = ", ".join(f"{name!r}: ..." for name in by_name[: len(args)])
        do = f"Its arguments go by name: pass inputs as a dict, {{{entries}}}."
    elif not args and not kwargs:
        do = f"Pass example tensors for ({taken})."
    elif len(args) == 1 and isinstance(args[0], int | float | str):
        do += " Inputs are tensors of the shapes of a batch: (torch.zeros(8, 256), ...)."
    elif len(args) == 1 and isinstance(args[0], Iterator):
        do += " Several inputs are a tuple: tuple(inputs)."
    elif len(args) == 1 and not isinstance(args[0], Tensor):
        do += " Inputs are a tuple: (x, y)."
    elif len(args) > 1 and all(
        isinstance(a, list | tuple) and len(a) == len(args[0]) for a in args
    ):
        do += " A list of samples becomes a batch by torch.utils.data.default_collate(samples)."
    elif len(args) == 1 and str(error).startswith("missing"):
        do += " Several inputs are a tuple: (x, y)."
    if kwargs:
        do = _renamed(signature, kwargs) or (
            f"{do} Inputs that are a dict are given by name; as one argument they are ({{...}},)."
        )
    return TraceError(
        where=f"inputs, {call.format(inner)}",
        what=str(error),
        why=f"it takes ({taken})",
        do=do,
    )


def check_takes(
    model: nn.Module, loss: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """TraceError for a loss that takes no model beside its inputs, though it takes an argument."""
    parameters = _parameters(loss)
    try:
        if parameters:
            Signature(parameters).bind(model, *args, **kwargs)
    except TypeError as error:
        raise unbound(model, loss, Signature(parameters[1:]), args, kwargs, error) from None


def _parameters(loss: Any) -> list[Parameter]:
    """The parameters of a loss, the model among them; none where Python does not know them."""
    if loss is None:
        return []
    try:
        called = loss.forward if isinstance(loss, nn.Module) else loss
        found = inspect.signature(called).parameters.values()
    except (ValueError, TypeError):  # of a function in C
        return []
    return [each.replace(annotation=Parameter.empty) for each in found]


def _names(count: int) -> list[str]:
    """Names for so many inputs of a loss: x, y."""
    return ["x", "y"][:count] if count < 3 else [f"x{i}" for i in range(count)]


def _as_takes(count: int) -> str:
    """How a loss is written that takes the model and so many inputs."""
    one = " If it takes a batch as one argument, inputs are a tuple with that in it: ((x, y),)."
    return (
        "Let the loss take the model and then the inputs: "
        f"def loss_of({', '.join(['model', *_names(count)])})." + one * (count > 1)
    )


def _of_script(signature: Signature) -> str:
    """What a step takes whose loss the script computes."""
    return (
        f"Pass what the model takes, ({', '.join(signature.parameters)}): the script computes the "
        "loss from what the model returns, and the labels go into that."
    )


def _without_model(loss: Any, args: Sequence[Any]) -> TraceError:
    """The refusal of a loss of predictions and targets: ``loss(output, target)``."""
    name = getattr(loss, "__name__", "")
    by_name = name.isidentifier() and name != "forward"
    inputs = _names(len(args))
    given = ", ".join([f"model({inputs[0]})", *inputs[1:]])
    written = f"loss=lambda model, {', '.join(inputs)}: {{}}({given})"
    do = (
        written.format(name)
        if by_name
        else f"{written.format('criterion')}, with yours as criterion"
    )
    if not by_name and len(args) == 2:
        do = f"{written.format('F.cross_entropy')}, or with another criterion"
    return TraceError(
        where=f"loss={name if by_name else quoted(loss)}{_line(loss)}",
        what=f"it takes ({', '.join(map(str, _parameters(loss)))}), and is given the model and "
        f"{', '.join(inputs)}", why=_CALLED, do=f"Write {do}.",
    )  # fmt: skip


def _line(loss: Any) -> str:
    """Where a loss is written, `` (train.py:12)``; "" for one of which Python does not know."""
    code = getattr(getattr(loss, "forward", loss), "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
