"""Read whole tensors from a model, a state dict or files, and match their names to a program's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partc.errors import LoadError
from partc.plan.sharding import dtype_name
from partc.program.tensorfile import TensorFiles
from partc.trace.fingerprint import Fingerprint, TensorSpec, named_tensors, table
from partc.wrong_calls import quoted

_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")  # of wrappers around a model
_NESTED = ("model", "state_dict", "model_state_dict", "module")
Source = nn.Module | Mapping[str, Tensor] | str | Path | Sequence[str | Path]


def whole_tensors(source: Source) -> Mapping[str, Tensor]:
    """The tensors of a model, a state dict or safetensors files (an index, a folder), by name.

    LoadError for a model on the meta device, and for malformed files.
    """
    if isinstance(source, nn.Module):
        tensors = named_tensors(source)
        without = sorted(name for name, tensor in tensors.items() if tensor.is_meta)
        if without:
            raise LoadError(
                where=f"{type(source).__name__}.{without[0]}",
                what="has no values to load",
                why="it is on the meta device",
                do="Give a model with weights, a state dict, or safetensors files.",
            )
        return tensors
    if isinstance(source, Mapping):
        _check_tensors(source)
        return source
    paths = source if isinstance(source, list | tuple) else [source]
    if not paths or not all(isinstance(path, str | Path) for path in paths):
        raise LoadError(
            where="load_full", what=f"the source is {quoted(source)}", why="it has no weights",
            do="Give a model, its state dict, or the path of safetensors files.",
        )  # fmt: skip
    return TensorFiles(*paths)


def named_state(given: Any) -> Mapping[str, Any]:
    """What ``load_state_dict`` is given; LoadError for what has no values by name."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise LoadError(
            where="load_state_dict", what=f"the state is {quoted(given)}",
            why="a state dict has tensors by the names of the model",
            do="Pass model.state_dict(), or load a model or files by stage.load_full(...).",
        )  # fmt: skip
    return given


@dataclass(frozen=True)
class Matched:
    """The given name for each held tensor, and the names of either side without a partner."""

    found: dict[str, str]  # name held -> name given
    missing: list[str]
    unexpected: list[str]


def match(
    given: Mapping[str, Any], held: Sequence[str], aliases: Mapping[str, str], model: Fingerprint
) -> Matched:
    """Match given names to held tensors.

    A tied tensor may come under any of its names. A tensor that is not in the model's own state
    dict (a non-persistent buffer, a constant found by tracing) may be absent.
    """
    names_of: dict[str, list[str]] = {name: [name] for name in held}
    for second, first in aliases.items():
        names_of.setdefault(first, [first]).append(second)
    found = {
        first: next(n for n in names if n in given)
        for first, names in names_of.items()
        if any(n in given for n in names)
    }
    needed = set(model.saved_names())
    missing = [name for name in held if name not in found and needed.intersection(names_of[name])]
    known = {*model.tensors, *(n for names in names_of.values() for n in names)}
    return Matched(found, missing, sorted(set(given) - known))


def check_names(
    matched: Matched, why: str = "the program holds what the model had when it was compiled"
) -> None:
    """LoadError, with a table of names, if a name of either side has no partner."""
    if not matched.missing and not matched.unexpected:
        return
    hint = _hint(matched)
    lines = [f"missing     {name}" for name in matched.missing]
    lines += [f"unexpected  {name}" for name in matched.unexpected]
    raise LoadError(
        where="weights",
        what=f"{len(matched.missing)} names are missing and {len(matched.unexpected)} unexpected",
        why=why,
        do=f"{hint or 'Rename or add them, or pass strict=False to keep what there is'}:"
        f"{table(lines)}",
    )


def check_known_names(model: nn.Module, given: Mapping[str, Any]) -> None:
    """LoadError for a state dict whose names show what was done to it, for one that torch refuses
    for a model that has no program yet.
    """
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}.keys()
    matched = Matched({}, sorted(held - given.keys()), sorted(map(str, given.keys() - held)))
    if _hint(matched):
        check_names(matched, "weights go by the names that the model has")


def check_any(matched: Matched) -> None:
    """LoadError if names were given, and none is one of the model's: ``strict`` or not."""
    if matched.found or not matched.unexpected:
        return
    lines = [f"given       {name}" for name in matched.unexpected[:3]]
    lines += [f"the model's {name}" for name in matched.missing[:3]]
    raise LoadError(
        where="weights",
        what=f"none of the {len(matched.unexpected)} names is one of the model's",
        why="with strict=False names without a partner are left out, so nothing would be loaded",
        do=f"{_hint(matched) or 'Rename them as in the model'}:{table(lines)}",
    )


def _hint(matched: Matched) -> str:
    """What was done to a state dict so that its names differ; "" if nobody knows."""
    for name in matched.unexpected:
        prefix = next((p for p in _PREFIXES if name.startswith(p)), None)
        if prefix is not None:
            inner = prefix.removesuffix(".")
            return (
                f"These are names of a wrapper: take the state dict of model.{inner}, or of a file "
                f"{{name.removeprefix({prefix!r}): each for name, each in state.items()}}"
            )
        if name in _NESTED:
            return f"This is a dict of several things: pass checkpoint[{name!r}]"
    if _are_of_experts(matched):
        return (
            "These are names of the hub, where each expert has its own tensors. transformers joins "
            "them: AutoModelForCausalLM.from_pretrained(name)"
            '.save_pretrained("here", save_original_format=False), and load "here"'
        )
    if "param_groups" in matched.unexpected:
        return "This is the state of an optimizer: pass that of the model"
    return ""


def _are_of_experts(matched: Matched) -> bool:
    """Whether experts have a tensor each, where the model has one of all: ``experts.gate_up_proj``
    for ``experts.0.w1.weight``.
    """
    joined = any(re.search(r"\.experts\.[a-z_]+$", name) for name in matched.missing)
    return joined and any(re.search(r"\.experts\.\d+\.", name) for name in matched.unexpected)


def _check_tensors(given: Mapping[str, Any]) -> None:
    """LoadError for a value of a state dict that is neither a tensor nor nested."""
    several = next((n for n in _NESTED if isinstance(given.get(n), Mapping)), None)
    if several is not None:
        raise LoadError(
            where="weights", what=f"they are a dict with {', '.join(map(str, given))}",
            why="weights are tensors by name", do=f"Pass those of the model: "
            f"checkpoint[{several!r}].",
        )  # fmt: skip
    for name, each in given.items():
        if not isinstance(each, Tensor) and name not in (*_NESTED, "state", "param_groups"):
            raise LoadError(
                where=f"weights, {quoted(name)}", what=f"it is {quoted(each)}",
                why="weights are tensors by name", do="Pass model.state_dict(), or make tensors of "
                "its values: torch.as_tensor.",
            )  # fmt: skip


def check_shapes(
    given: Mapping[str, Any], matched: Matched, shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
) -> None:  # fmt: skip
    """LoadError, with a table, if a given tensor has another shape than the model's, or is complex
    where the model's is not, or has whole numbers (is quantized) where the model's has fractions.
    """
    wrong = [
        f"{name}: {list(shapes[name])} compiled, {list(given[key].shape)} given"
        for name, key in matched.found.items()
        if tuple(given[key].shape) != shapes[name]
    ]
    wrong += [
        f"{name}: {dtype_name(dtypes[name])} compiled, a complex tensor given"
        for name, key in matched.found.items()
        if given[key].is_complex() and not dtypes[name].is_complex
    ]
    wrong += [
        f"{name}: {dtype_name(dtypes[name])} compiled, {dtype_name(given[key].dtype)} given"
        for name, key in matched.found.items()
        if dtypes[name].is_floating_point and not given[key].dtype.is_floating_point
    ]
    if wrong:
        raise LoadError(
            where="weights",
            what=f"{len(wrong)} tensors have other shapes or dtypes than the model's",
            why="whole tensors are needed, not pieces",
            do=f"Load weights of the model that was compiled:{table(wrong)}",
        )


def kept_aside(model: Fingerprint, in_program: set[str]) -> dict[str, TensorSpec]:
    """The tensors of the model's state dict that no program reads, kept for checkpoints."""
    return {name: model.tensors[name] for name in model.saved_names() if name not in in_program}
