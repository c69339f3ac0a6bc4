"""Resharding: every transition between layouts keeps the whole, by the cheapest collectives."""

import itertools

import pytest
import torch

from partc.passes.shard.reshard import reshard_steps
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, R, Sharding, U, cut
from tests import simulate

MESH = Mesh.of("dp=2,tp=3")
LAYOUTS = [R, U, cut(0), cut(1), cut(0, 2), cut(1, 3)]
SHARDINGS = [
    s
    for a, b in itertools.product(LAYOUTS, LAYOUTS)
    if (s := Sharding.of({"dp": a, "tp": b}, MESH)).local_shape((36, 72), MESH)
]


@pytest.mark.parametrize("have", SHARDINGS, ids=str)
def test_every_way_keeps_the_whole(have: Sharding) -> None:
    whole = torch.randn(36, 72, dtype=torch.float64)
    for want in SHARDINGS:
        if "U" in {want.on(a).kind for a in MESH.names}:
            continue
        pieces = _pieces(whole, have)
        for step in reshard_steps(have, want, MESH):
            pieces = simulate._MEANING[step.target](pieces, MESH, **step.kwargs)
        for piece, at in zip(pieces, MESH.all_coords(), strict=True):
            torch.testing.assert_close(piece, want.local(whole, at, MESH), rtol=1e-12, atol=1e-12)


def _pieces(whole: torch.Tensor, sharding: Sharding) -> list[torch.Tensor]:
    """What every rank holds of ``whole``; unfinished sums get random parts."""
    num = {a: MESH.size(a) for a, layout in sharding.layouts if layout.kind == "U"}
    parts = {at: torch.randn_like(whole) for at in itertools.product(*map(range, num.values()))}
    first = (0,) * len(num)
    parts[first] = whole - sum(
        (p for at, p in parts.items() if at != first), torch.zeros_like(whole)
    )
    return [sharding.local(parts[tuple(at[a] for a in num)], at, MESH) for at in MESH.all_coords()]


@pytest.mark.parametrize(
    ("have", "want", "names"),
    [
        ({"dp": U}, {}, ["all_reduce"]),
        ({"dp": U}, {"dp": cut(0)}, ["reduce_scatter"]),
        ({"tp": cut(0), "dp": U}, {"tp": cut(0), "dp": cut(0)}, ["reduce_scatter"]),
        ({"tp": U, "dp": cut(0)}, {"tp": cut(1), "dp": cut(0)}, ["reduce_scatter"]),
        ({"tp": cut(0)}, {"tp": cut(1)}, ["all_to_all"]),
        ({"tp": cut(0)}, {}, ["all_gather"]),
        ({}, {"tp": cut(0)}, ["keep_piece"]),
        ({"tp": cut(0), "dp": cut(0)}, {"tp": cut(0)}, ["all_gather"]),
        ({"tp": cut(0), "dp": cut(0)}, {"dp": cut(0)}, ["all_gather", "all_gather", "keep_piece"]),
    ],
)
def test_the_cheapest_collectives(
    have: dict[str, Layout], want: dict[str, Layout], names: list[str]
) -> None:
    steps = reshard_steps(Sharding.of(have, MESH), Sharding.of(want, MESH), MESH)
    assert [step.target.__name__ for step in steps] == names
