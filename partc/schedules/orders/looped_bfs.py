"""Looped breadth-first: every rank has several stages and sends all microbatches through one first.

Source: Lamy-Poirier, Breadth-First Pipeline Parallelism (arXiv 2211.05953). Use it with sharded
parameters (ZeRO-3): a stage's weights are gathered once per pass instead of once per microbatch,
and its gradients are reduced while the stage before still runs.

The bubble is ``(p - 1) / (v m + p - 1)`` of the time if ``m >= p``, for ``p`` ranks, ``m``
microbatches and ``v`` stages per rank. Every rank holds the activations of all ``m`` microbatches.
Backwards run from the last microbatch to the first.
"""

from __future__ import annotations

from partc.schedules.actions import Action
from partc.schedules.blocks import Orders
from partc.schedules.named import schedule


@schedule("looped-bfs", chunks=(2, None))
def orders(ranks: int, microbatches: int, chunks: int) -> Orders:
    """The orders of all ranks, each with ``chunks`` stages."""
    return [_order(range(rank, ranks * chunks, ranks), microbatches) for rank in range(ranks)]


def _order(stages: range, microbatches: int) -> tuple[Action, ...]:
    forwards = [Action(s, "F", i) for s in stages for i in range(microbatches)]
    return (*forwards, *(Action(s, "B", i) for s, _, i in reversed(forwards)))
