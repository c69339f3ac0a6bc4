"""The entries of ``checkpoint.json``, each checked: ValueError or TypeError for a malformed one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import inf, prod
from pathlib import Path
from typing import Any

import torch

from partc.plan.mesh import PP, Mesh
from partc.program.checkpoints.files import NAME, FileEntry, file_name
from partc.program.checkpoints.residuals import MET
from partc.program.folders import CHECKPOINT
from partc.program.optimizer.same_optimizer import CLASS
from partc.program.role import Shard, dtype_of

MAX_BYTES = 512_000_000
LARGEST = torch.finfo(torch.float32).max


def fields_of(file: Path) -> Any:
    if not file.is_file() or file.is_symlink() or file.stat().st_size > MAX_BYTES:
        raise ValueError(f"{CHECKPOINT} is no plain file of at most {MAX_BYTES} bytes")
    return json.loads(file.read_text(encoding="utf-8"))


def shard(mesh: Mesh, key: str, shape: Any, dtype: Any, cuts: Any) -> Shard:
    """A tensor's entry; ValueError for cuts that its mesh or shape does not allow."""
    sizes, left = tuple(map(whole, shape)), [*map(whole, shape)]
    each = tuple((axis, whole(dim), whole(outer)) for axis, dim, outer in cuts)
    axes = [axis for axis, _, _ in each]
    if len({*axes}) < len(axes) or not {*axes} <= {*mesh.names} - {PP}:
        raise ValueError(f"{key} cannot be sharded over {axes}")
    for axis, dim, outer in each:
        if not outer or left[dim] % (outer * mesh.size(axis)):
            raise ValueError(f"dim {dim} of {key} cannot be sharded over {axis}")
        left[dim] //= mesh.size(axis)
    if prod(sizes) >= 1 << 63:
        raise ValueError(f"{key} has more elements than a tensor may have")
    return Shard("", key, sizes, dtype_of(text(dtype)), each)


def stage(mesh: Mesh, stage: Any = 0) -> int:
    if whole(stage) >= mesh.pipeline_ranks:
        raise ValueError(f"there is no pipeline rank {stage}")
    return int(stage)


def model(entry: Any, shards: Mapping[str, Shard]) -> dict[str, str]:
    """The names of the model's state dict, each with that of the tensor which it stands for."""
    if not entry:
        return {}
    names, tied = entry["names"], entry["tied"]
    if not isinstance(names, list) or not {*tied} <= {*names} or len({*names}) != len(names):
        raise ValueError("the names of the model's state dict are malformed")
    found = {text(name): text(tied.get(name, name)) for name in names}
    if lacking := sorted({f"model/{first}" for first in found.values()} - shards.keys()):
        raise ValueError(f"it lacks {lacking[0]}, which the model's state dict has")
    return found


def met(entry: Any) -> dict[str, Any]:
    """How islands met; behind how many steps they have met last is a whole number."""
    found = dict(entry)
    if MET in found:
        integer(found[MET])
    return found


def group(entry: Any) -> dict[str, Any]:
    """Hyperparameters of a group, with the names of its parameters."""
    for name, value in entry.items():
        parts = value if isinstance(value, list) else [value]
        plain = str if name in ("params", CLASS) else (bool, int, float, str)
        if not all(isinstance(part, plain) for part in parts):
            raise ValueError(f"the optimizer's {name} is no plain value")
        if any(isinstance(part, int | float) and LARGEST < abs(part) < inf for part in parts):
            raise ValueError(f"the optimizer's {name} = {value} is more than float32 holds")
    if not isinstance(entry["params"], list) or isinstance(entry.get(CLASS), list):
        raise ValueError("a group of the optimizer is malformed")
    return dict(entry)


def file(name: str, mesh: Mesh, size: Any, digest: Any) -> FileEntry:
    """A file's entry; ValueError for a name that is no rank's."""
    found = NAME.match(name)
    if found is None or not int(found[1]) < mesh.num_ranks or name != _own_name(found):
        raise ValueError(f"{name!r} is not the name of a rank's file")
    if len(bytes.fromhex(text(digest))) != 32:
        raise ValueError(f"{digest!r} is no digest")
    return FileEntry(whole(size), digest)


def _own_name(found: re.Match[str]) -> str:
    return file_name(int(found[1]), frozen=found[2] is not None)


def text(entry: Any) -> str:
    if not isinstance(entry, str):
        raise TypeError(f"{entry!r} is no text")
    return entry


def integer(entry: Any) -> int:
    if type(entry) is not int:
        raise TypeError(f"{entry!r} is no whole number")
    return entry


def whole(entry: Any) -> int:
    if integer(entry) < 0:
        raise ValueError(f"{entry!r} is below 0")
    return int(entry)
