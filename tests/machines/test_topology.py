"""Topologies: the shipped ones, text and back, refusals; meshes over them and what axes cross."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import partc
from partc.errors import PartcError, PlanError
from partc.machines.devices import Device
from partc.machines.topology import Level, Topology
from partc.machines.topology_text import parse_topology, shipped
from partc.plan.mesh import Mesh

H100 = Topology.load("dgx-h100")


# shipped ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", shipped())
def test_shipped_machines_are_sound(name: str) -> None:
    topology = Topology.load(name)
    assert topology.name == name
    assert parse_topology(str(topology)) == topology
    device = topology.device
    for work in ("matmul", "attention"):
        assert 0.01 < device.fraction(work, 1e12) < 1
    bandwidths = [level.attained_bytes_per_s for level in topology.levels]
    assert bandwidths == sorted(bandwidths, reverse=True)  # links get slower outward
    assert topology.resized(topology.num_devices) == topology


@pytest.mark.parametrize(
    ("devices", "sizes"), [(1, (1, 1)), (4, (4, 1)), (8, (8, 1)), (24, (8, 3)), (1024, (8, 128))]
)
def test_inner_levels_are_filled_first(devices: int, sizes: tuple[int, ...]) -> None:
    topology = Topology.load("dgx-h100", devices)
    assert topology.num_devices == devices
    assert tuple(level.size for level in topology.levels) == sizes


def test_devices_that_fill_no_whole_node_are_refused() -> None:
    with pytest.raises(PlanError, match=r"cannot have 12 devices \(nvlink joins 8 units"):
        Topology.load("dgx-h100", 12)


def test_direct_links_are_fewer_where_there_are_fewer_devices() -> None:
    whole, half = (Topology.load("mi300x", n).levels[0].bytes_per_s for n in (8, 4))
    assert half == pytest.approx(whole * 3 / 7)


# devices ------------------------------------------------------------------------------------------
def test_a_call_takes_as_long_as_its_slowest_part() -> None:
    chip = Device(
        "chip", 10**9, 1e9, {"f32": 1e12}, 1e-6, 100, efficiency={"matmul": ((1e9, 0.5),)}
    )
    assert chip.seconds(0, "f32", 0) == 0
    assert chip.seconds(10, "f32", 10) == 1e-6  # a launch
    assert chip.seconds(1e9, "bf16", 10) == pytest.approx(2e-3)  # arithmetic, at f32's peak
    assert chip.seconds(1e9, "f32", 1e7) == pytest.approx(1e-2)  # memory
    host = replace(chip, launch_s=0.0, call_s=1e-6)  # makes its calls itself
    assert host.seconds(0, "f32", 0) == 0
    assert host.seconds(1e9, "f32", 1e7) == pytest.approx(1e-2 + 1e-6)


@given(st.floats(1, 1e16), st.floats(1, 1e3), st.sampled_from(shipped()))
def test_more_work_never_takes_less_time(work: float, factor: float, name: str) -> None:
    device = Topology.load(name).device
    for kind in ("matmul", "attention"):
        less, more = (device.seconds(w, "bf16", 0, kind) for w in (work, work * factor))
        assert more >= less * (1 - 1e-12)


def test_a_fleet_of_two_kinds() -> None:
    fast, slow = H100.device, Topology.load("dgx-a100").device
    mixed = replace(H100, groups=((fast, 64), (slow, 192)))
    assert parse_topology(str(mixed)) == mixed
    assert mixed.device == slow
    assert [mixed.device_of(rank).name for rank in (0, 63, 64, 255)] == [
        fast.name, fast.name, slow.name, slow.name
    ]  # fmt: skip
    assert [count for _, count in mixed.resized(32).groups] == [8, 24]
    with pytest.raises(PlanError, match="stay in proportion"):
        mixed.resized(2)


# refusals -----------------------------------------------------------------------------------------
ABSURD = [
    ("memory_bytes_per_s = 3.35e+12", "memory_bytes_per_s = 1.1e14", "memory_bytes_per_s"),
    ("memory_bytes = 80_000_000_000", "memory_bytes = 0", "memory_bytes"),
    ("memory_bytes = 80_000_000_000", "memory_bytes = 8.0e10", "a whole number"),
    ("bf16 = 9.89e+14", "bf16 = -1", "flops_per_s.bf16"),
    ("bf16 = 9.89e+14", "bf16 = 1.1e17", "at most 1e+17"),
    ("bf16 = 9.89e+14", "bf17 = 1e12", "'bf17' is unknown"),
    ("f32 = 6.7e+13\n", "", "f32 is missing"),
    ("launch_s = 5e-06", "launch_s = inf", "launch_s"),
    ("launch_s = 5e-06", "launch_s = nan", "launch_s"),
    ("watts = 700", "watts = true", "watts"),
    ("watts = 700\n", "", "watts is missing"),
    ("0.31]", "1.31]", "efficiency.attention"),
    ("[[6.9e+10, 0.31], [", "[[6.9e+10, 0.31], [1.0, 0.5], [", "work ascends"),
    ("pointwise = [[1e+06, 0.85]]", "pointwise = 0.85", "list of pairs"),
    ("bytes_per_s = 4.5e+11", "bytes_per_s = 0.0", "level nvlink, bytes_per_s"),
    ("latency_s = 1.4e-05", "latency_s = 1.5", "level infiniband ndr, latency_s"),
    ("efficiency = 0.82", "efficiency = 1.01", "efficiency"),
    ("efficiency = 0.82", "efficiency = 82", "82 % are 0.82."),
    ("latency_s = 1.4e-05", "latency_s = 14", "6 us are 6e-6"),
    ("size = 32", "size = 31", "8 x 31 units are not 256 devices"),
    ("size = 32", "size = 31", "agree, such as infiniband ndr size = 32: [[devices]] has H100"),
    ("size = 32", 'size = "32"', "a whole number"),
    ("size = 32", "sise = 32", "'sise' is unknown"),
    ("in_network = 0.61", "in_network = 6.1", "in_network"),
    ("size = 32", "size = 32\noversubscription = 0.5", "oversubscription"),
    ("size = 32", "size = 32\ndirect = 1", "direct"),
    ('library = "nccl"', 'library = "mpi"', "library"),
    ('library = "nccl"', 'libary = "nccl"', "'libary' is unknown"),
    ('name = "dgx-h100"', "", "name is missing"),
    ("[[levels]]", "[levels]", "cannot be read"),
]


@pytest.mark.parametrize(("old", "new", "told"), ABSURD)
def test_absurd_figures_are_refused(old: str, new: str, told: str, tmp_path: Path) -> None:
    text = str(H100)
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(PlanError, match=re.escape(told)) as caught:
        Topology.read(path)
    assert caught.value.where.startswith(str(path))
    assert caught.value.why
    assert caught.value.do


def test_unknown_machines_are_refused_with_those_there_are() -> None:
    with pytest.raises(PlanError, match=r"dgx-a100.*dgx-h100"):
        Topology.load("dgx-h1000")


# meshes -------------------------------------------------------------------------------------------
def test_a_mesh_file_has_axes_or_machines_or_both(tmp_path: Path) -> None:
    def read(text: str) -> Mesh:
        path = tmp_path / "mesh.toml"
        path.write_text(text)
        return Mesh.of(path)

    axes = "[axes]\ndp = 64\ntp = 4\n"
    assert read(axes).topology is None
    assert read("dp = 64\ntp = 4\n") == read(axes)
    by_name = read('machine = "dgx-h100"\n' + axes)
    written = read(f"{H100}\n{axes}")
    assert by_name == written == Mesh.of("dp=64,tp=4")
    assert by_name.topology == written.topology == H100
    bare = read('machine = "dgx-h100"\ndevices = 64\n')
    assert bare.is_open
    assert bare.hardware.num_devices == 64
    for wrong in ('machine = "dgx-h100"\ndevices = 9\n', 'machine = "dgx-h100"\nrack = 1\n',
                  f"{H100}\n[axes]\ndp = 8\n", "axes = 3\n", f"rack = 1\n{axes}"):  # fmt: skip
        with pytest.raises(PlanError):
            read(wrong)


def test_an_open_mesh_takes_its_axes_from_the_plan() -> None:
    model, inputs = nn.Linear(4, 4), (torch.zeros(4, 4),)

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = m(x).sum()
        return out

    mesh = Mesh.load("cpu", devices=2)
    with pytest.raises(PartcError, match="its axes are open"):
        partc.compile(model, mesh, inputs, loss=loss, plan="ddp")
    plan = partc.Plan.parse('preset = "ddp"\n[mesh]\ndp = 2\n')
    assert partc.compile(model, mesh, inputs, loss=loss, plan=plan).mesh == Mesh.of("dp=2")


def test_hardware_does_not_change_what_a_mesh_is() -> None:
    over = Mesh((("dp", 2), ("tp", 8)), Topology.load("dgx-h100", 16))
    assert over == Mesh.of("dp=2,tp=8")
    assert hash(over) == hash(Mesh.of("dp=2,tp=8"))
    assert Mesh.of("dp=2,tp=8").hardware.name == "cpu"


# crossing levels ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("axes", "crosses"),
    [
        ("dp=4,tp=8", {"tp": (8, 1), "dp": (1, 4)}),
        ("dp=8,tp=4", {"tp": (4, 1), "dp": (2, 4)}),
        ("tp=8,dp=4", {"tp": (2, 4), "dp": (4, 1)}),
        ("dp=2,tp=16", {"tp": (8, 2), "dp": (1, 2)}),
        ("pp=2,dp=4,tp=4", {"tp": (4, 1), "dp": (2, 2), "pp": (1, 2)}),
    ],
)
def test_axes_cross_levels_by_stride_and_size(
    axes: str, crosses: dict[str, tuple[int, ...]]
) -> None:
    mesh = replace(Mesh.of(axes), topology=Topology.load("dgx-h100", 32))
    assert {axis: mesh.crosses(axis) for axis in mesh.names} == crosses


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Axes and levels that need not nest: both multiply to one number, in their own order."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), min_size=1, max_size=5))

    def sizes() -> list[int]:
        order = draw(st.permutations(primes))
        cuts = draw(st.lists(st.integers(1, 3), min_size=len(order), max_size=len(order)))
        found = [1, 1, 1]
        for prime, cut in zip(order, cuts, strict=True):
            found[cut - 1] *= prime
        return found

    levels = [Level(f"level {i}", size, 1e9, 1e-6) for i, size in enumerate(sizes())]
    axes = tuple((name, size) for name, size in zip("abc", sizes(), strict=True))
    num = Mesh(axes).num_ranks
    return Mesh(axes, Topology("fleet", ((H100.device, num),), tuple(levels)))


@pytest.mark.exhaustive
@settings(deadline=None)
@given(meshes())
def test_crossing_is_that_of_the_group_that_crosses_most(mesh: Mesh) -> None:
    for axis in mesh.names:
        groups = {tuple(mesh.peers(rank, axis)) for rank in range(mesh.num_ranks)}
        units = [
            max(len({rank // unit for rank in group}) for group in groups)
            for unit in (1, *mesh.hardware.unit_sizes)
        ]
        wanted = [-(-below // above) for below, above in pairwise(units)]
        assert list(mesh.crosses(axis)) == wanted
