"""Times of collectives: the formulas against counted steps, NCCL's model and measured ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from partc.cost.collective_cost import cheapest, collective_seconds, estimates
from partc.errors import UsageError
from partc.machines.collective_formulas import FORMULAS, Group
from partc.machines.topology import Level, Topology
from partc.machines.topology_text import shipped
from partc.plan.mesh import Mesh

KINDS = sorted(FORMULAS)
MIB = 2**20


def over(machine: str, devices: int, axes: str | None = None) -> Mesh:
    """A mesh over a shipped machine, by default one axis ``a`` over all of it."""
    topology = Topology.load(machine, devices)
    return replace(Mesh.of(axes or f"a={devices}"), topology=topology)


def nodes(num_nodes: int, per_node: int) -> Mesh:
    """Groups along ``a`` with so many members on each DGX H100."""
    return over("dgx-h100", 8 * num_nodes, f"a={num_nodes * per_node},b={8 // per_node}")


# the formulas -------------------------------------------------------------------------------------
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.floats(1e-7, 1e-3)), min_size=1, max_size=3))
def test_a_ring_pays_the_latency_of_every_border_it_crosses(
    described: list[tuple[int, float]],
) -> None:
    """Counted member by member: a step is over the innermost level that joins both of its ends."""
    levels = tuple(Level(f"{i}", size, 1e9, a) for i, (size, a) in enumerate(described))
    units = Topology("t", ((Topology.load("cpu").device, size_of(levels)),), levels).unit_sizes
    steps = [
        next(level for level, unit in zip(levels, units, strict=True) if a // unit == b // unit)
        for a, b in pairwise(range(size_of(levels)))
    ]
    group = Group.of(levels, tuple(level.size for level in levels))
    if group.hops:
        assert group.round_s == pytest.approx(sum(level.latency_s for level in steps))


def size_of(levels: tuple[Level, ...]) -> int:
    size = 1
    for level in levels:
        size *= level.size
    return size


@pytest.mark.parametrize("num", [2, 3, 8])
def test_one_level_gives_the_textbook_formulas(num: int) -> None:
    a, b, p = 1e-6, 1e-9, num
    group = Group.of((Level("only", 8, 1 / b, a),), (num,))
    textbook = {
        ("all_gather", "ring"): ((p - 1) * a, (p - 1) * b),
        ("reduce_scatter", "ring"): ((p - 1) * a, (p - 1) / p * b),
        ("all_reduce", "ring"): (2 * (p - 1) * a, 2 * (p - 1) / p * b),
        ("all_reduce", "doubling"): (2 * (p - 1).bit_length() * a, 2 * (p - 1) / p * b),
        ("all_reduce", "hierarchical"): (2 * (p - 1) * a, 2 * (p - 1) / p * b),
        ("all_to_all", "pairwise"): (a, (p - 1) / p * b),
        ("broadcast", "tree"): ((p - 1).bit_length() * a, (p - 1).bit_length() * b),
        ("send", "direct"): (a, b),
    }
    for (kind, name), line in textbook.items():
        assert FORMULAS[kind][name](group) == pytest.approx(line)
    assert FORMULAS["all_reduce"]["in_network"](group) is None


def test_groups_on_one_node_share_its_network_cards() -> None:
    """Alone on its node a member has one card, four in one group have four of them."""
    alone, four = (
        estimates("all_reduce", nodes(4, per_node), "a", ("ring",))[0].s_per_byte
        for per_node in (1, 4)
    )
    assert alone == pytest.approx(2 * 3 / 4 / 48e9)
    assert four == pytest.approx(2 * 15 / 16 / (4 * 48e9))


def test_a_hierarchical_collective_pays_less_latency_than_a_ring() -> None:
    mesh = nodes(16, 8)
    (ring, _), (levels, _) = (
        estimates("all_gather", mesh, "a", (name,)) for name in ("ring", "hierarchical")
    )
    assert levels.latency_s < ring.latency_s / 2
    assert levels.s_per_byte > ring.s_per_byte  # a level after the other, not all at once
    assert cheapest("all_gather", 1, mesh, "a").algorithm == "ring_small"
    both = ("ring", "hierarchical")
    assert cheapest("all_gather", 1, mesh, "a", both).algorithm == "hierarchical_small"


def test_what_crosses_nothing_takes_no_time() -> None:
    assert collective_seconds("all_reduce", 1e9, over("dgx-h100", 8, "a=1,b=8"), "a") == 0


def test_unknown_kinds_and_algorithms_are_refused() -> None:
    with pytest.raises(UsageError, match="Known are all_reduce"):
        estimates("allreduce", nodes(2, 8), "a")
    with pytest.raises(UsageError, match="Known are ring, tree"):
        estimates("all_reduce", nodes(2, 8), "a", ("rings",))
    assert cheapest("all_reduce", 1, nodes(1, 8), "a", ("in_network",)).algorithm == "in_network"
    with pytest.raises(UsageError, match="none of these can do it"):
        cheapest("all_reduce", 1, nodes(2, 8), "a", ("in_network",))


# monotone -----------------------------------------------------------------------------------------
MESHES = st.builds(
    over, st.sampled_from(shipped()), st.just(32), st.sampled_from(["a=32", "a=4,b=8", "b=8,a=4"])
)


@settings(deadline=None)
@given(MESHES, st.sampled_from(KINDS), st.floats(0, 1e12), st.floats(1, 1e3))
def test_more_bytes_never_take_less_time(
    mesh: Mesh, kind: str, num_bytes: float, factor: float
) -> None:
    less, more = (collective_seconds(kind, n, mesh, "a") for n in (num_bytes, num_bytes * factor))
    assert more >= less * (1 - 1e-12)


@settings(deadline=None)
@given(MESHES, st.sampled_from(KINDS), st.floats(0, 1e12), st.floats(1.01, 1e2), st.integers(0, 1))
def test_more_bandwidth_never_takes_more_time(
    mesh: Mesh, kind: str, num_bytes: float, factor: float, at: int
) -> None:
    levels = list(mesh.hardware.levels)
    at %= len(levels)
    levels[at] = replace(levels[at], bytes_per_s=levels[at].bytes_per_s * factor)
    faster = replace(mesh, topology=replace(mesh.hardware, levels=tuple(levels)))
    more, less = (collective_seconds(kind, num_bytes, one, "a") for one in (mesh, faster))
    assert less <= more * (1 + 1e-12)


@pytest.mark.exhaustive
@settings(deadline=None)
@given(
    st.sampled_from(shipped()),
    st.sampled_from(KINDS),
    st.floats(0, 1e12),
    st.sampled_from([1, 2, 8]),
)
def test_more_members_never_take_less_time(
    machine: str, kind: str, num_bytes: float, per_node: int
) -> None:
    """Within a node where a switch joins it, and over more and more nodes."""
    rest = f"b={8 // per_node}"
    spread = [over(machine, 8 * n, f"a={n * per_node},{rest}") for n in (1, 2, 3, 8, 16)]
    inside = [over(machine, 8, f"b={8 // n},a={n}") for n in (1, 2, 4, 8)]
    direct = spread[0].hardware.levels[0].direct  # each member brings links of its own
    for row in (spread,) if direct else (spread, inside):
        times = [collective_seconds(kind, num_bytes, mesh, "a") for mesh in row]
        assert all(less <= more * (1 + 1e-12) for less, more in pairwise(times))


# expressions --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_expressions_give_what_numbers_give(kind: str) -> None:
    batch = sympy.Symbol("B", positive=True)
    mesh = nodes(4, 8)
    formula = sympy.Min(*(one.seconds(4096 * batch) for one in estimates(kind, mesh, "a")))
    for size in (1, 64, 10**6):
        known = collective_seconds(kind, 4096 * size, mesh, "a")
        assert float(formula.subs(batch, size)) == pytest.approx(known)


# NCCL ---------------------------------------------------------------------------------------------
RING, TREE = ("all_gather", "ring"), ("all_reduce", "tree")
NCCL_MODEL = [  # nodes, members on each; latency in us and GB/s
    (RING, 2, 8, 70.0, 409.6), (RING, 2, 2, 29.2, 128.0), (RING, 8, 1, 106.4, 54.9),
    (RING, 16, 8, 599.2, 387.0), (RING, 32, 4, 768.8, 193.5),
    (("all_reduce", "ring"), 4, 8, 282.8, 198.2), (("all_reduce", "ring"), 32, 8, 2399.6, 192.8),
    (TREE, 8, 1, 92.4, 18.8), (TREE, 16, 8, 176.4, 122.4), (TREE, 4, 2, 72.4, 37.5),
]  # fmt: skip


@pytest.mark.parametrize(("way", "num_nodes", "per_node", "latency_us", "gb_per_s"), NCCL_MODEL)
def test_latency_and_bandwidth_are_those_of_nccl(
    way: tuple[str, str], num_nodes: int, per_node: int, latency_us: float, gb_per_s: float
) -> None:
    """What NCCL 2.27 reckons with on H100 (AutoParallel, nccl_cost_model.py, from its logs).

    Rings agree to 0.1 % in latency. Their bandwidth does where the network limits them; with eight
    members on a node NVLink does, at 4 % less than NCCL has for it. Trees agree to 5 % in latency
    (NCCL has 4 us, not 3.4, for their steps over NVLink); with eight members on a node their
    bandwidth is 18 % too high, since a limit per channel is not modelled.
    """
    mesh = nodes(num_nodes, per_node)
    estimate = estimates(way[0], mesh, "a", (way[1],))[0]
    ring = way[1] == "ring"
    assert estimate.latency_s * 1e6 == pytest.approx(latency_us, rel=0.001 if ring else 0.05)
    whole = mesh.size("a") if way[0] == "all_gather" else 1  # NCCL counts the result's bytes
    known = whole / estimate.s_per_byte / 1e9
    assert known == pytest.approx(gb_per_s, rel=0.04 if ring else 0.18)


# measured -----------------------------------------------------------------------------------------
def test_rings_take_what_they_were_measured_to_take() -> None:
    """all_reduce on 8 H100 by rings (AutoParallel, overlap_simulator/colls8_8.table), MB against
    ms. The error is at most 13 %, at 8 MB, where NCCL has a protocol (LL128) between the two that
    are modelled here; from 32 MB it is below 3 %.
    """
    table = {1: 0.028, 2: 0.041, 4: 0.0628, 8: 0.0849, 16: 0.1292, 32: 0.2179, 64: 0.3822,
             128: 0.7084, 256: 1.3609, 512: 2.6658, 1024: 5.2756, 2048: 10.4952}  # fmt: skip
    for size, measured_ms in table.items():
        ring = cheapest("all_reduce", size * MIB, nodes(1, 8), "a", ("ring",))
        known_ms = 1e3 * ring.seconds(size * MIB)
        assert known_ms == pytest.approx(measured_ms, rel=0.03 if size >= 32 else 0.13)


SWEEPS = [  # ml-engineering, network/README.md: MiB against all_reduced GB/s, error
    ("dgx-h200", 8, {8: 88.87, 16: 125.65, 64: 198.01, 256: 249.23, 16384: 275.58}, 0.03),
    ("dgx-a100", 8, {64: 98.02, 256: 110.9, 1024: 130.88, 16384: 134.22}, 0.2),
    ("dgx-b200", 32, {1024: 186.8, 4096: 194.8, 16384: 197.1}, 0.01),
    ("mi300x", 8, {4096: 178.8}, 0.01),
    ("mi300x", 2, {4096: 47.67}, 0.07),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "num", "table", "error"), SWEEPS)
def test_all_reduces_take_what_they_were_measured_to_take(
    machine: str, num: int, table: dict[int, float], error: float
) -> None:
    """By the algorithm that the cost model chooses.

    The largest row of 8 H200, A100 and MI300X is where the efficiency of their links comes from,
    and what the H200's switches take beside comes from its other rows. 2 % off on H200, which sum
    in their switches from 64 MiB; 19 % on A100, whose bandwidth comes more slowly with size; 1 %
    for 32 B200, four machines on another network (EFA) of the same bytes/s, whose latency does not
    compare, so rows are from 1 GiB; 6 % for two MI300X, which have one of seven links between them.
    """
    mesh = over(machine, max(num, 8), f"b={max(num, 8) // num},a={num}")
    for size, gb_per_s in table.items():
        measured_s = size * MIB / (gb_per_s * 1e9)
        known_s = collective_seconds("all_reduce", size * MIB, mesh, "a")
        assert known_s == pytest.approx(measured_s, rel=error)
