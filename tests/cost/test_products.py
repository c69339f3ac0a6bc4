"""What matrix products cost by their shape, against published kernels."""

from __future__ import annotations

import pytest

from partc.cost.products import busy_share
from partc.machines.devices import Device
from partc.machines.topology import Topology

A100 = Topology.load("dgx-a100").device
H100 = Topology.load("dgx-h100").device


def tera(device: Device, batch: int, rows: int, columns: int, inner: int) -> float:
    """TFLOP/s of a bf16 product."""
    flops, written = 2.0 * batch * rows * columns * inner, 2.0 * batch * rows * columns
    moved = written + 2.0 * batch * inner * (rows + columns)
    busy = float(busy_share(device.processors, batch, rows, columns))
    parts = device.parts(flops, "bf16", moved, busy=busy, written_bytes=written)
    return flops / max(parts.values()) / 1e12


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        ((1, 8192, 12288, 4096), 241.6),
        ((1, 8192, 4096, 4096), 234.9),
        ((1, 8192, 16384, 4096), 241.1),
        ((1, 8192, 4096, 16384), 252.8),
        ((1, 8192, 51200, 4096), 255.4),
        ((64, 2048, 256, 2048), 219.0),
        ((128, 1024, 1024, 1024), 227.3),
        ((128, 1024, 1024, 2048), 243.3),
    ],
)
def test_products_of_a_transformer_on_an_a100(
    shape: tuple[int, int, int, int], published: float
) -> None:
    """EleutherAI/cookbook, sizing/sample_results: transformer.out and bmm.out."""
    assert tera(A100, *shape) == pytest.approx(published, rel=0.11)


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        ((2, 2048, 4096, 4096), 779.3),
        ((4, 2048, 4096, 2048), 752.5),
        ((4, 4096, 4096, 1024), 725.5),
        ((1, 8192, 8192, 8192), 762.0),
    ],
)
def test_products_on_an_h100(shape: tuple[int, int, int, int], published: float) -> None:
    """XLA's matmul_interpolator_data.h, sm_90; the last is blackwell-tensorcore-kernels'."""
    assert tera(H100, *shape) == pytest.approx(published, rel=0.08)


def test_a_wave_that_is_hardly_begun_takes_as_long_as_a_full_one() -> None:
    assert busy_share(108, 1, 256 * 108, 128 * 3) == 1.0
    assert busy_share(100, 1, 256 * 101, 128 * 2) == pytest.approx(2.02 / 3)
    assert busy_share(100, 1, 256, 128) == 1.0  # smaller tiles
    assert busy_share(0, 1, 1000, 1000) == 1.0
