"""The names of block classes, and of the lists of their instances."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from partc.codegen.calls.scope import Scope
from partc.codegen.repeats.blocks import Run


def class_names(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Class name and attribute of each run: ``Layer`` and ``layers`` for ``model.layers.*``.

    Runs that would have the same name get the name of the module around them as well:
    ``EncoderLayer``, ``DecoderLayer``.
    """
    parents = [run.layers[0].split(".")[:-1] for run in runs]
    found = []
    scope, classes = Scope(dir(nn.Module)), Scope(dir(nn.Module))
    for parts in parents:
        words = [p for p in parts if not p.isdigit()]
        alike = [p for p in parents if [w for w in p if not w.isdigit()][-1:] == words[-1:]]
        wanted = parts[-2:] if len(alike) > 1 else words[-1:] or ["blocks"]
        attribute = scope.fresh("_".join(wanted))
        singular = re.sub(r"(?<=[a-z]{3})s$", "", "_".join(wanted))
        name = "".join(
            word[:1].upper() + word[1:] for word in re.split(r"[^A-Za-z0-9]+|_", singular) if word
        )
        found.append((classes.fresh(name or "Block"), attribute))
    return found
