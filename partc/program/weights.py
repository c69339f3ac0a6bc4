"""Whole tensors from wherever a user has them, matched by name with what a program holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from partc.errors import LoadError
from partc.program.tensorfile import TensorFiles
from partc.trace.fingerprint import Fingerprint, TensorSpec, named_tensors, table

Source = nn.Module | Mapping[str, Tensor] | str | Path | Sequence[str | Path]


def whole_tensors(source: Source) -> Mapping[str, Tensor]:
    """A model, a state dict, or safetensors files (an index file, a folder) as one mapping."""
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
        return source
    return TensorFiles(*([source] if isinstance(source, (str, Path)) else source))


@dataclass(frozen=True)
class Matched:
    """Which given name serves each held tensor, and the names without a partner."""

    found: dict[str, str]  # name held -> name given
    missing: list[str]
    unexpected: list[str]


def match(
    given: Mapping[str, Any], held: Sequence[str], aliases: Mapping[str, str], model: Fingerprint
) -> Matched:
    """Pair names. A tied tensor may come under any of its names; what the model's own state dict
    lacks (unsaved buffers, constants that tracing found) may be left out."""
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


def check_names(matched: Matched) -> None:
    """LoadError with the table of names that have no partner."""
    if not matched.missing and not matched.unexpected:
        return
    lines = [f"missing     {name}" for name in matched.missing]
    lines += [f"unexpected  {name}" for name in matched.unexpected]
    raise LoadError(
        where="weights",
        what=f"{len(matched.missing)} names are missing and {len(matched.unexpected)} unexpected",
        why="the program holds what the model had when it was compiled",
        do=f"Rename or add them, or pass strict=False to keep what there is:{table(lines)}",
    )


def check_shapes(
    given: Mapping[str, Any], matched: Matched, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """LoadError with the table of tensors that are not whole tensors of the model's shapes."""
    wrong = [
        f"{name}: {list(shapes[name])} compiled, {list(given[key].shape)} given"
        for name, key in matched.found.items()
        if tuple(given[key].shape) != shapes[name]
    ]
    if wrong:
        raise LoadError(
            where="weights",
            what=f"{len(wrong)} tensors have other shapes than the model's",
            why="whole tensors are needed, not pieces",
            do=f"Load weights of the model that was compiled:{table(wrong)}",
        )


def kept_aside(model: Fingerprint, in_program: set[str]) -> dict[str, TensorSpec]:
    """The model's saved tensors that no step reads, kept so that checkpoints stay complete."""
    return {name: model.tensors[name] for name in model.saved_names() if name not in in_program}
