"""What a script passes for the model, and is none: a class, its weights, or a wrapper around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, device, dtype, jit, nn
from torch.distributed.tensor import DTensor
from torch.jit._trace import TopLevelTracedModule

from partc.errors import TraceError, UsageError
from partc.trace.odd_tensors import check_held
from partc.wrong_calls import quoted

_WRAPPERS = {  # the name of a wrapper's class, and where it keeps the model
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
}
_QUANTISED = ("torch.ao.nn.quantized", "torch.nn.quantized", "torch.nn.quantizable")
_DO = "Pass the module itself, for example Net()."


def check_model(model: Any, where: str = "compile") -> None:
    """TraceError, with what to pass in its place, for what is no model that can be traced.

    A model is an ``nn.Module`` of Python code with whole parameters: no wrapper around another one,
    no script, no weights that are not dense, none that the first batch has still to make.
    """
    what = f"the model is {quoted(model)}"
    if not isinstance(model, nn.Module):
        raise TraceError(
            where=where, what=what, why="it has to be an nn.Module", do=_instead(model)
        )
    if isinstance(model, TopLevelTracedModule):  # one straight line of torch's own calls
        return
    if torch.get_default_device().type == "meta":
        raise TraceError(
            where=where, what="torch's default device is meta",
            why="what the model makes in its forward, and partc beside it, would have no values",
            do='Make the model alone on it, with torch.device("meta"): model = ...; and end it '
            "before: torch.set_default_device(None).",
        )  # fmt: skip
    if "_modules" not in vars(model):
        raise TraceError(
            where=where, what=f"{what} without parameters and modules",
            why="its __init__ did not call that of nn.Module",
            do="Begin its __init__ with super().__init__().",
        )  # fmt: skip
    if hasattr(type(model), "compile_for"):
        raise TraceError(
            where=where, what=what, why="partc.parallelize gave it, which compiles it by itself",
            do="Pass the model as it was before parallelize; behind its first step model.program "
            "is what was compiled.",
        )  # fmt: skip
    for path, module in model.named_modules():
        _check_parts(where, path, module)
        at = f"the model's {path}" if path else "the model"
        for why, do in _reasons(module, path):
            raise TraceError(where=where, what=f"{at} is {quoted(module)}", why=why, do=do)
    check_held(dict(model.named_parameters()), dict(model.named_buffers()))


def _check_parts(where: str, path: str, module: nn.Module) -> None:
    """TraceError if one of a module's parts is what parallelize gave, which names other modules."""
    for name, part in module._modules.items():
        if hasattr(type(part), "compile_for"):
            at = f"{path}.{name}" if path else name
            raise TraceError(
                where=where, what=f"the model's {at} is {quoted(part)}",
                why="partc.parallelize gave it, which compiles it by itself",
                do="Let the model have that part as it was before parallelize: the whole model is "
                "compiled.",
            )  # fmt: skip


def check_second_of_load(model: Any) -> None:
    """UsageError for what ``torch.load`` and others take there, as ``load(folder, "cuda")``."""
    if isinstance(model, nn.Module):
        check_model(model, "load")
        return
    do = "Leave it out, or pass the module: partc.load(folder, model)."
    if isinstance(model, str | int | device):
        do = f"A device goes to the stage: partc.load(folder).module({_device_of(model)!r})."
    elif isinstance(model, Mapping | PathLike):
        do = "Weights go to the stage: partc.load(folder).module(), then stage.load_full(weights)."
    elif isinstance(getattr(model, "__self__", model), type | nn.Module):
        do = _instead(model)
    elif callable(model) and not isinstance(model, dtype):
        do = "A loss goes to partc.with_model(program, model, loss), and load takes no loss."
    raise UsageError(
        where="load", what=f"the second argument is {quoted(model)}",
        why="it is the model that the program was compiled from, an nn.Module", do=do,
    )  # fmt: skip


def _device_of(given: str | int | device) -> str:
    """The device that is meant, as ``module`` takes it: ``cuda`` for the number of a GPU."""
    if isinstance(given, int):
        return f"cuda:{given}"
    text = str(given)
    return text if text.partition(":")[0] in ("cpu", "cuda") else "cuda"


def _instead(given: Any) -> str:
    """What to pass for something that is no module."""
    if isinstance(given, type) and issubclass(given, nn.Module):
        return f"Make one: {given.__name__}(...)."
    if isinstance(given, str):
        return f"{_DO} The command line takes names: partc compile package.module:callable."
    if isinstance(given, Tensor) or (
        isinstance(given, list | tuple) and any(isinstance(x, Tensor) for x in given)
    ):
        return "This is a batch: pass the module before it."
    if isinstance(given, Mapping):
        return "Pass the module; weights are not needed: stage.load_full(weights) loads them."
    if isinstance(given, list | tuple):
        return "Make them one: nn.Sequential(*layers), or nn.ModuleList in a module of yours."
    if isinstance(getattr(given, "__self__", None), nn.Module):
        return f"Pass the module, without .{given.__name__}."
    if type(given).__name__ == "ExportedProgram":
        return "Pass the module that was exported."
    return _DO


def _reasons(module: nn.Module, path: str) -> Iterator[tuple[str, str]]:
    """Why a module cannot be traced, and what to do; nothing where it can."""
    kind, name = type(module), f"model.{path}" if path else "model"
    if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
        inner = _WRAPPERS[kind.__name__]
        do = f"Pass {name}.{inner}." if not path else f"Put {name}.{inner} in its place."
        yield "it wraps the model for another way of running it", do
    if any(each.__name__ == "FSDPModule" for each in kind.__mro__):
        why = "fully_shard has put its parameters on ranks already"
        yield why, 'Pass the model as it was before fully_shard: plan="fsdp" shards it.'
    if isinstance(module, jit.ScriptModule):
        yield "a script has no Python code to trace", "Pass the module that was scripted."
    if kind.__module__.startswith(_QUANTISED):
        why = "its weights are quantised, and have no gradients"
        yield why, "Pass the model as it was before it was quantised."
    if any(isinstance(x, DTensor) for x in module._parameters.values()):
        why = "its parameters are DTensors, pieces of which are on ranks already"
        yield why, "Pass the model as it was before it was sharded: the plan shards it."
    held = (*module._parameters.values(), *module._buffers.values())
    if any(x is not None and nn.parameter.is_lazy(x) for x in held):
        why = "its parameters get their shapes from the first batch"
        do = "Run it on a batch once before, without partc: loss(model, *inputs), or model(x) with"
        yield why, f"{do} what its forward takes."
