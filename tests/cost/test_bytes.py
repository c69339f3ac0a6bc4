"""Bytes moved through memory and sent over axes."""

from __future__ import annotations

import pytest

from partc.cost.bytes import moved_bytes, sent_bytes, total_moved_bytes, traffic
from partc.cost.storage import replay
from partc.graph import Graph, collectives
from partc.plan.sharding import U, cut
from tests.build import Build, aten, mlp


def test_operands_and_results_are_moved_views_are_not() -> None:
    b = Build("dp=1")
    x = b.tensor("input", "x", [8, 4])
    view = b(aten.view.default, x, [32])
    twice = b(aten.add.Tensor, view, view)
    graph = b.done(results={"y": twice})
    ran = replay(graph)
    assert moved_bytes(view, ran) == 0
    assert moved_bytes(twice, ran) == total_moved_bytes(graph) == 128 + 128


@pytest.mark.parametrize(
    ("kind", "named", "sent"),
    [
        ("all_reduce", {}, 2 * 128 * 3 // 4),
        ("reduce_scatter", {"dim": 0, "after": cut(0)}, 128 * 3 // 4),
        ("all_gather", {"dim": 0}, 128 * 3),
        ("all_to_all", {"dim": 0, "to_dim": 1, "after": cut(1)}, 128 * 3 // 4),
    ],
)
def test_ring_formulas(kind: str, named: dict[str, object], sent: int) -> None:
    """The operand has 128 bytes on each of four ranks."""
    b = Build("tp=4")
    before = cut(0) if kind in ("all_gather", "all_to_all") else U
    shape = [32, 4] if before != U else [8, 4]
    x = b.tensor("input", "x", shape, tp=before)
    assert sent_bytes(b.collective(getattr(collectives, kind), x, "tp", **named)) == sent


def test_large_sums_are_exact() -> None:
    b = Build("tp=7")
    x = b.tensor("input", "x", [2**27, 2**28], tp=U)
    started = b.collective(collectives.all_reduce, x, "tp")
    assert sent_bytes(started) == 2 * 2**57 * 6 // 7


def test_traffic_by_axis_and_kind() -> None:
    graph: Graph = mlp()
    found = [(t.axis, t.kind, t.count, t.sent_bytes) for t in traffic(graph)]
    assert found == [
        ("dp", "all_reduce", 3, 4 + 4 * 10 * 8 + 4 * 8 * 12),
        ("tp", "all_reduce", 1, 160),
    ]
