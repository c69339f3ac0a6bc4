"""Write tensors as the files of weights that Hugging Face's loaders read, one tensor at a time.

``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on with an index that says
which file has which tensor. Tensors are dealt out to files as ``save_pretrained`` does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path

from torch import Tensor

from partc.errors import LoadError, RunError, UsageError
from partc.program.tensorfile import NAMES, TensorFile, Typed, bytes_of, header_of
from partc.wrong_calls import quoted

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
OWN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?\Z", re.ASCII)
# Loaders of transformers refuse a file without the format; by the writer it is known again.
NOTES = {"format": "pt", "writer": "partc"}
MOST = "5GB"  # of a file
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def num_bytes(given: object, where: str) -> int:
    """A number of bytes that is written as ``5GB``, ``200MB`` or ``1000``; UsageError for none."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-zA-Z]*)", str(given), re.ASCII)
    unit = _UNITS.get(found[2].upper()) if found else None
    size = int(float(found[1]) * unit) if found and unit else 0
    if isinstance(given, bool) or size < 1:
        raise UsageError(
            where=f"{where}{quoted(given)}", what="it is no size of a file",
            why="files of weights are at most so large, in bytes",
            do='Write a number of bytes, or one with its unit: "5GB", "200MB".',
        )  # fmt: skip
    return size


def write_weights(
    folder: Path, typed: Mapping[str, Typed], read: Callable[[str], Tensor], most_bytes: int
) -> list[str]:
    """Write tensors into a folder, durably; the names of the files.

    One tensor is in memory at a time.

    Args:
        folder: is there.
        typed: shape and dtype of each tensor, by name.
        read: gives a tensor of a name, when it is written.
        most_bytes: of a file, unless a single tensor is larger.
    """
    _check_dtypes(typed)
    parts = dealt_out({name: _size(each) for name, each in typed.items()}, most_bytes)
    files = {_file(number, len(parts)): names for number, names in enumerate(parts, 1)}
    for file, names in files.items():
        _write(folder / file, {name: typed[name] for name in names}, read)
    if len(files) == 1:
        return [*files]
    (folder / INDEX).write_text(_index(files, typed), encoding="utf-8")
    _flush(folder / INDEX)
    return [*files, INDEX]


def written_weights(folder: Path) -> set[str]:
    """The names of files that ``write_weights`` has written into a folder."""
    names = {each.name for each in folder.iterdir() if OWN.match(each.name)}
    files = {name for name in names if name != INDEX}
    with suppress(LoadError):
        if files and all(TensorFile(folder / name).notes == NOTES for name in files):
            return names
    return set()


def dealt_out(sizes: Mapping[str, int], most_bytes: int) -> list[list[str]]:
    """The names of each file's tensors, in order: a file ends before it would be too large.

    A tensor that is too large by itself has a file of its own, behind which the file before goes
    on.

    >>> dealt_out({"a": 3, "b": 9, "c": 2, "d": 1}, 5)
    [['b'], ['a', 'c'], ['d']]
    """
    found: list[list[str]] = []
    open_file: list[str] = []
    held = 0
    for name, size in sizes.items():
        if size > most_bytes:
            found.append([name])
            continue
        if held + size > most_bytes:
            found.append(open_file)
            open_file, held = [], 0
        open_file.append(name)
        held += size
    return [*found, open_file] if open_file or not found else found


def _file(number: int, of: int) -> str:
    return ONE if of == 1 else f"model-{number:05d}-of-{of:05d}.safetensors"


def _size(typed: Typed) -> int:
    shape, dtype = typed
    return prod(shape) * dtype.itemsize


def _write(path: Path, typed: Mapping[str, Typed], read: Callable[[str], Tensor]) -> None:
    # the widest first, so that each begins at a multiple of its elements' size
    ordered = dict(sorted(typed.items(), key=lambda each: (-each[1][1].itemsize, each[0])))
    with path.open("wb") as file:
        file.write(header_of(ordered, NOTES))
        for name in ordered:
            file.write(bytes_of(read(name)))
        file.flush()
        os.fsync(file.fileno())


def _index(files: Mapping[str, list[str]], typed: Mapping[str, Typed]) -> str:
    places = {name: file for file, names in files.items() for name in names}
    total = sum(map(_size, typed.values()))
    fields = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(fields, indent=2) + "\n"


def _check_dtypes(typed: Mapping[str, Typed]) -> None:
    """RunError for a tensor that no other reader of safetensors would understand."""
    for name, (_, dtype) in typed.items():
        if dtype not in NAMES:
            raise RunError(
                where=name, what=f"safetensors has no word for its dtype, {dtype}",
                why="other readers of the files would take it for whole numbers",
                do="Make the model of other dtypes, or write it by torch.save: "
                "stage.full_state_dict().",
            )  # fmt: skip


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
