"""Is an optimizer the one whose states a checkpoint has?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from partc.errors import LoadError

CLASS = "optimizer"  # of a saved group: the name of the optimizer's class
PLAIN = (bool, int, float, str, tuple)  # hyperparameters that are saved
Optimizer = torch.optim.Optimizer


def check_same_optimizer(
    path: Path, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]
) -> None:
    """LoadError if the groups of a checkpoint are not those of this optimizer.

    Optimizers of two classes are taken for the same if they have the same hyperparameters (Adam and
    AdamW). A checkpoint that names no class is refused where either side has one of its own.
    """
    mine = type(optimizer).__name__
    if len(groups) != len(optimizer.param_groups):
        num = len(optimizer.param_groups)
        raise _other(path, f"it has {len(groups)} groups of parameters, the {mine} has {num}")
    wanted = {name for name, value in optimizer.defaults.items() if isinstance(value, PLAIN)}
    saved = {name for group in groups for name in group} - {CLASS, "params"}
    known = {name for group in optimizer.param_groups for name in group}
    missing, left = sorted(wanted - saved), sorted(saved - known - {"initial_lr"})
    theirs = {str(group[CLASS]) for group in groups if CLASS in group}
    differ = bool(missing or left) if theirs else bool(missing and left)
    if groups and differ and mine not in theirs:
        their = " and ".join(sorted(theirs)) or "another optimizer"
        names = ", ".join((left or missing)[:3])
        raise _other(path, f"it has the states of {their}, not of {mine} ({names})")


def _other(path: Path, what: str) -> LoadError:
    return LoadError(
        where=str(path),
        what="cannot be loaded into this optimizer",
        why=what,
        do="Load with the optimizer that was saved, in the same groups, or leave it out: "
        "load_checkpoint(folder, stage) reads the model alone.",
    )
