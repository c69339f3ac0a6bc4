"""Calibration: fits of synthetic measurements, refusals, and a small run on two ranks."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partc.cost.collective_cost import collective_seconds
from partc.errors import RunError, UsageError
from partc.machines.topology import COLLECTIVES, Topology
from partc.measure.calibrate import calibrate
from partc.measure.calibrate_links import SIZES, level_groups
from partc.measure.calibrated import Fitted, check_found, fitted_topology
from partc.measure.measured import fit_line
from partc.plan.mesh import Mesh
from tests.forked_scripts import run_ranks
from tests.measure.measurements import TINY, TRUE, found, samples


# lines --------------------------------------------------------------------------------------------
@settings(deadline=None, max_examples=100)
@given(
    st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-7), st.integers(0, 2**32),
    st.integers(0, len(SIZES)),
)  # fmt: skip
def test_a_line_is_found_through_noise_and_a_point_that_is_far_off(
    latency_s: float, s_per_byte: float, seed: int, far_off: int
) -> None:
    noise = [0.97 + 0.06 * ((seed >> 3 * i) % 8) / 7 for i in range(len(SIZES))]
    points = [
        (n, (latency_s + s_per_byte * n) * noise[i] * (5 if i == far_off else 1))
        for i, n in enumerate(SIZES)
    ]
    line = fit_line("toy", points)
    near = [n for i, n in enumerate(SIZES) if i != far_off]
    off = [abs(math.log(line.seconds(n) / (latency_s + s_per_byte * n))) for n in near]
    assert sorted(off)[len(off) // 2] < 0.1


def test_exact_points_give_the_exact_line() -> None:
    line = fit_line("toy", [(n, 3e-4 + 2e-9 * n) for n in SIZES])
    assert (line.latency_s, line.s_per_byte) == pytest.approx((3e-4, 2e-9))
    assert line.worst == pytest.approx(1)


def test_larger_messages_that_take_no_longer_are_refused() -> None:
    with pytest.raises(RunError, match="no latency and bandwidth above 0"):
        fit_line("toy", [(n, 1 / n) for n in SIZES])


# topologies ---------------------------------------------------------------------------------------
def test_a_topology_gives_the_measured_times_back(tmp_path: Path) -> None:
    everything = found()
    check_found(everything)
    fitted = fitted_topology(everything)
    (tmp_path / "mesh.toml").write_text(str(fitted))
    topology = Topology.read(tmp_path / "mesh.toml")
    assert topology == fitted.topology
    mesh = Mesh((("dp", 4),), topology)
    for kind, (latency_s, s_per_byte) in TRUE.items():
        for size in (SIZES[0], SIZES[-1]):
            true = latency_s + s_per_byte * size
            assert collective_seconds(kind, size, mesh, "dp") == pytest.approx(true, rel=0.01)
    device = topology.device
    assert device.launch_s == 0
    assert device.call_s == pytest.approx(2e-6, rel=0.01)
    assert device.seconds(1e9, "f32", 0) == pytest.approx(1e9 / 8e10, rel=0.01)
    assert device.memory_seconds(1e7, "optimizer") == pytest.approx(1e7 / 6e9, rel=0.01)
    assert topology.contention == pytest.approx(0.5)
    assert "spread" in str(fitted)


def test_a_fit_for_four_ranks_predicts_two() -> None:
    topology = fitted_topology(found()).topology
    mesh = Mesh((("dp", 2), ("tp", 2)), topology)
    for kind in TRUE:
        of_two, of_four = (
            collective_seconds(kind, 10**8, Mesh(axes, topology), "tp")
            for axes in (mesh.axes, (("tp", 4),))
        )
        assert 0 < of_two <= of_four


def test_one_rank_has_no_links() -> None:
    alone = found(ranks=1, sizes=(), links=(), beside=())
    check_found(alone)
    assert fitted_topology(alone).topology.num_devices == 1


def test_ranks_of_several_machines_have_two_levels() -> None:
    assert level_groups(4, 4) == [[[0, 1, 2, 3]]]
    assert level_groups(4, 2) == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]


def test_times_that_no_machine_has_are_refused() -> None:
    links = [
        replace(each, samples=samples(5000 * each.seconds)) if each.work == "all_gather" else each
        for each in found().links[0]
    ]
    with pytest.raises(RunError, match=r"machine that cannot be: .*above 0"):
        fitted_topology(found(links=(tuple(links),)))


# refusals -----------------------------------------------------------------------------------------
def test_noise_is_refused_unless_it_is_to_be_kept_and_then_marked() -> None:
    steady = found()
    shaky = replace(steady.compute[3], samples=samples(steady.compute[3].seconds, 0.9))
    noisy = replace(steady, compute=(*steady.compute[:3], shaky, *steady.compute[4:]))
    with pytest.raises(RunError, match=r"1 of \d+ measurements vary too much") as caught:
        check_found(noisy)
    assert shaky.what in caught.value.why
    check_found(noisy, keep_noisy=True)
    assert str(fitted_topology(noisy)).count("NOISY") == 1


@pytest.mark.parametrize(("work", "peak"), [("matmul f32", 2e12), ("pointwise", 1e12)])
def test_rates_beyond_any_data_sheet_are_refused(work: str, peak: float) -> None:
    fast = [
        replace(each, samples=samples(each.amount / peak)) if each.work == work else each
        for each in found().compute
    ]
    with pytest.raises(RunError, match="cannot be") as caught:
        check_found(found(compute=tuple(fast)), keep_noisy=True)
    assert "data sheet of cpu" in caught.value.why


def test_devices_without_a_data_sheet_are_not_held_against_one() -> None:
    fast = [replace(m, samples=samples(m.seconds / 1e3)) for m in found().compute]
    check_found(found(compute=tuple(fast), library="nccl", device="NVIDIA Toy"))


@pytest.mark.parametrize(("ranks", "backend"), [(2, "mpi"), (0, "gloo"), (999, "nccl")])
def test_what_cannot_be_measured_is_refused(ranks: int, backend: str) -> None:
    with pytest.raises(UsageError):
        calibrate(ranks, backend)


# measuring ----------------------------------------------------------------------------------------
def measured_at_last(heard: list[str]) -> Fitted:
    """Two ranks measured; again, as the refusal asks, where other programs made a machine of it
    that cannot be.
    """
    for _ in range(4):
        heard.clear()
        with suppress(RunError):
            return calibrate(2, keep_noisy=True, scale=TINY, tell=heard.append)
    return calibrate(2, keep_noisy=True, scale=TINY, tell=heard.append)


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_two_ranks_are_measured() -> None:
    heard: list[str] = []
    fitted = measured_at_last(heard)
    topology = fitted.topology
    assert (topology.num_devices, topology.library) == (2, "gloo")
    assert 0 <= topology.contention <= 1
    assert set(topology.levels[0].factors) == set(COLLECTIVES)
    assert len(heard) == 3


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_torchrun_ranks_measure_themselves(tmp_path: Path) -> None:
    """What they do with each other; what each computes by itself is known here."""
    script = tmp_path / "calibrates.py"
    script.write_text(
        "import os\n"
        "import partc.measure.calibrate as calibrate\n"
        "from tests.measure.measurements import TINY, found\n"
        "calibrate.measure_compute = lambda watch: list(found().compute)\n"
        "fitted = calibrate.calibrate(keep_noisy=True, scale=TINY)\n"
        "line = f\"{os.environ['RANK']} {fitted.topology.num_devices}\\n\"\n"
        "os.write(1, line.encode())\n"
    )
    for rank, ran in enumerate(run_ranks(script)):
        assert f"{rank} 2\n" in ran.text
