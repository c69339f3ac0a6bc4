"""Whether rows that fill up a batch leave loss and gradients as they are, found by trying it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from partc.graph import Graph, value
from partc.program.expected import seeded_weight
from partc.verification.expected_step import expected_of, is_small
from partc.verification.run_graph import run_graph
from partc.verification.steady_draws import WholeDraws, as_on_any_device

TOLERANCE = 1e-9  # in float64, relative to the largest element


def why_not_ignored(whole: Graph, filled: Graph, values: Sequence[float | None]) -> str:
    """Why the filled batch gives another loss or gradient than the batch; empty if it does not.

    Both graphs are those of one step without folds, the second for more rows. They run in float64
    on seeded weights and rows; the second gets the rows of the first and ``values`` for the rest.
    """
    if not is_small(filled):
        return "the step is too large to be tried on one device"
    expected = expected_of(whole, {})
    if expected is None:
        return "seeded weights and rows give no finite loss"
    batch = expected.seeds.batch(
        {n: (value(x).shape, value(x).dtype) for n, x in whole.inputs.items()}
    )
    more = {}
    for (name, node), number in zip(filled.inputs.items(), values, strict=True):
        more[name] = _filled(batch[name], value(node).shape, number)
    one, other = _outputs(whole, batch), _outputs(filled, more)
    return next((f"{name} differs" for name in one if _differs(one[name], other[name])), "")


def _filled(x: Tensor, shape: Sequence[int], number: float | None) -> Tensor:
    missing = [want - has for want, has in zip(shape, x.shape, strict=True)]
    sides = [side for more in reversed(missing) for side in (0, more)]
    return F.pad(x, sides, value=number or 0.0)


def _outputs(graph: Graph, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Loss, gradients and new values of buffers of a step on seeded weights."""
    params = _seeded(graph.params)
    buffers = {**_seeded(graph.buffers), **{n: x.clone() for n, x in graph.constants.items()}}
    with as_on_any_device(WholeDraws({})):  # constants, for any number of rows
        found: Mapping[str, Any] = run_graph(graph, params, buffers, batch)
    tables = {kind: found.get(kind) or {} for kind in ("grads", "buffers", "results")}
    named = {f"{kind} {name}": x for kind, table in tables.items() for name, x in table.items()}
    return named if found.get("loss") is None else {"loss": found["loss"], **named}


def _seeded(nodes: Mapping[str, Any]) -> dict[str, Tensor]:
    return {n: seeded_weight(n, value(x).shape, value(x).dtype) for n, x in nodes.items()}


def _differs(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return True
    one, other = one.double(), other.double()
    largest = max(float(one.abs().max()) if one.numel() else 0.0, 1e-12)
    return not torch.allclose(one / largest, other / largest, rtol=0, atol=TOLERANCE)
