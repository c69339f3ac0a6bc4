"""Shardings: notation, local shapes, cutting and joining are inverse."""

import pytest
import torch

from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, M, R, Sharding, U, cut

MESH = Mesh.of("dp=2,tp=3")


@pytest.mark.parametrize(
    ("layouts", "text"),
    [
        ({}, "f32[12,36]"),
        ({"tp": cut(1)}, "f32[12,36@tp]"),
        ({"dp": cut(1), "tp": cut(1)}, "f32[12,36@tp+dp]"),
        ({"tp": cut(1, 2)}, "f32[12,(2 18@tp)]"),
        ({"dp": cut(1), "tp": cut(1, 4)}, "f32[12,(4@dp 9@tp)]"),
        ({"dp": U, "tp": cut(0)}, "f32[12@tp,36]{U:dp}"),
        ({"tp": M}, "f32[12,36]{M:tp}"),
    ],
)
def test_typed(layouts: dict[str, Layout], text: str) -> None:
    assert Sharding.of(layouts, MESH).typed((12, 36), torch.float32) == text


@pytest.mark.parametrize(
    "layouts",
    [
        {},
        {"tp": cut(0)},
        {"dp": cut(0), "tp": cut(0)},
        {"dp": cut(1), "tp": cut(1, 4)},
        {"dp": cut(1, 3), "tp": cut(1, 6)},
        {"dp": cut(0, 2), "tp": cut(1)},
    ],
)
def test_cutting_and_joining_are_inverse(layouts: dict[str, Layout]) -> None:
    whole = torch.arange(12.0 * 36).view(12, 36)
    sharding = Sharding.of(layouts, MESH)
    pieces = [sharding.local(whole, at, MESH) for at in MESH.all_coords()]
    assert {tuple(p.shape) for p in pieces} == {sharding.local_shape(whole.shape, MESH)}
    assert torch.equal(sharding.whole(pieces, MESH), whole)


def test_unfinished_values_are_summed_or_maximised() -> None:
    pieces = [torch.tensor([float(r)]) for r in range(6)]
    assert Sharding.of({"dp": U}, MESH).whole(pieces, MESH).item() == 0 + 3
    assert Sharding.of({"dp": U, "tp": M}, MESH).whole(pieces, MESH).item() == (0 + 3) + 2 * 1 + 2


def test_what_does_not_divide_has_no_local_shape() -> None:
    assert Sharding.of({"tp": cut(0)}, MESH).local_shape((4, 6), MESH) is None
    assert Sharding.of({"tp": cut(0), "dp": cut(0)}, MESH).local_shape((9, 6), MESH) is None
    assert Sharding.of({"tp": cut(2)}, MESH).local_shape((9, 6), MESH) is None


def test_equal_shardings_compare_equal() -> None:
    assert Sharding.of({"tp": cut(0), "dp": R}, MESH) == Sharding.of({"tp": cut(0)}, MESH)
