"""Formulas for collectives over a group on several levels of links: latency and seconds per byte.

``n`` is what one rank puts in: its piece for all_gather, the whole for the others. ``a`` is the
latency of a step, ``b`` the seconds per byte of a link. The formulas are those of Thakur,
Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), and
Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and
experience" (2007).

A group has ``members`` at each level (``Mesh.crosses``), each of which stands for the ``below``
devices in its unit; p in all. All groups of an axis run at once, and a level's bytes/s are one
device's share while all send: so groups on one node share its network cards, and a group with
several members on a node has several of them. What a ring brings into a node is spread over
``below`` cards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from partc.machines.topology import Level

Line = tuple[float, float]  # a latency in seconds, seconds per byte

SMALL_SHARE = 0.5  # of the bandwidth: every 4 bytes travel with a 4-byte flag (NCCL's LL protocol)
TREE_SHARE = 0.92 * 0.85  # of the bandwidth, in NCCL's own model of its trees (src/graph/tuning.cc)
EXCHANGES_AT_ONCE = 8  # messages that NCCL has under way at a time


@dataclass(frozen=True)
class Hop:
    """The members of one group at one level: ``members`` of them, each for ``below`` devices.

    Level 0 joins devices, the others join units.
    """

    number: int
    level: Level
    members: int
    below: int

    @property
    def latency_s(self) -> float:
        return self.level.latency_s

    @property
    def s_per_byte(self) -> float:
        """Of one device through this level, to all other members at once."""
        if self.level.direct:
            return self.pair_s_per_byte / (self.members - 1)
        return 1 / self.level.attained_bytes_per_s

    @property
    def pair_s_per_byte(self) -> float:
        """Of one device to one other member."""
        links = self.level.size - 1 if self.level.direct else 1
        return links / self.level.attained_bytes_per_s

    @property
    def doublings(self) -> int:
        """Steps until what one member has is with all, if those who have it double each time."""
        return (self.members - 1).bit_length()


@dataclass(frozen=True)
class Group:
    """Where the members of one group stand, innermost level first; levels that it does not cross
    are left out.
    """

    hops: tuple[Hop, ...]

    @classmethod
    def of(cls, levels: tuple[Level, ...], members: tuple[int, ...]) -> Group:
        below = accumulate(members, mul, initial=1)
        hops = map(Hop, range(len(levels)), levels, members, below)
        return cls(tuple(hop for hop in hops if hop.members > 1))

    def small(self) -> Group | None:
        """The same links with the protocol for small messages, None if one of them has none."""
        levels = [hop.level.small(SMALL_SHARE) for hop in self.hops]
        pairs = zip(self.hops, levels, strict=True)
        hops = tuple(replace(hop, level=level) for hop, level in pairs if level is not None)
        return Group(hops) if len(hops) == len(levels) else None

    @property
    def size(self) -> int:
        return self.hops[-1].members * self.hops[-1].below

    @property
    def ring_step_s_per_byte(self) -> float:
        """The slowest link of a ring whose channels leave a unit by all its members' cards."""
        return max(hop.s_per_byte / hop.below for hop in self.hops)

    @property
    def round_s(self) -> float:
        """The latencies of p - 1 steps of a ring, which enters each unit once."""
        steps = (
            self.size // hop.below - self.size // (hop.below * hop.members) for hop in self.hops
        )
        return sum(num * hop.latency_s for num, hop in zip(steps, self.hops, strict=True))


Formula = Callable[[Group], Line | None]  # None where an algorithm cannot do it


# rings --------------------------------------------------------------------------------------------
def ring_all_gather(group: Group) -> Line:
    """(p - 1) steps of n bytes: ``(p - 1) a + (p - 1) n b`` (Thakur; Chan's bucket)."""
    return group.round_s, (group.size - 1) * group.ring_step_s_per_byte


def ring_reduce_scatter(group: Group) -> Line:
    """(p - 1) steps of n / p bytes: ``(p - 1) a + (p - 1)/p n b`` (Thakur; Chan's bucket)."""
    return group.round_s, (group.size - 1) / group.size * group.ring_step_s_per_byte


def ring_all_reduce(group: Group) -> Line:
    """A reduce_scatter and an all_gather: ``2 (p - 1) a + 2 (p - 1)/p n b`` (Chan)."""
    return twice(ring_reduce_scatter(group))


def ring_broadcast(group: Group) -> Line:
    """A pipeline of small pieces through all: ``(p - 1) a + n b`` (Chan)."""
    return group.round_s, group.ring_step_s_per_byte


# trees --------------------------------------------------------------------------------------------
def tree_all_reduce(group: Group) -> Line:
    """Two trees over units, each for half of the bytes: ``2 log2(p) a + 2 n b`` (Sanders, Speck
    and Traff 2009). Devices of a node form a chain, as in NCCL's.
    """
    depths = (hop.doublings if hop.number else hop.members - 1 for hop in group.hops)
    depth_s = sum(depth * hop.latency_s for depth, hop in zip(depths, group.hops, strict=True))
    return 2 * depth_s, 2 * group.ring_step_s_per_byte / TREE_SHARE


def tree_broadcast(group: Group) -> Line:
    """A binomial tree, farthest first: ``log2(p) (a + n b)`` (Thakur; Chan)."""
    return (
        sum(hop.doublings * hop.latency_s for hop in group.hops),
        sum(hop.doublings * hop.s_per_byte for hop in group.hops),
    )


# doubling and hierarchical: level after level -----------------------------------------------------
def doubling_all_gather(group: Group) -> Line:
    """What a member has doubles each step, farthest first: ``log2(p) a + (p - 1) n b`` (recursive
    doubling, Thakur).
    """
    latency_s = sum(hop.doublings * hop.latency_s for hop in group.hops)
    return latency_s, _levels_after_another(group)


def doubling_reduce_scatter(group: Group) -> Line:
    """The same backwards: ``log2(p) a + (p - 1)/p n b`` (recursive halving, Thakur)."""
    return per_member(group, doubling_all_gather(group))


def doubling_all_reduce(group: Group) -> Line:
    """Halving, then doubling: ``2 log2(p) a + 2 (p - 1)/p n b`` (Rabenseifner, in Thakur)."""
    return twice(doubling_reduce_scatter(group))


def hierarchical_all_gather(group: Group) -> Line:
    """A ring per level, the farthest first, each device with its counterparts in other units:
    slow links carry each byte once per device, and their latency is paid m - 1 times, not p - 1.
    """
    latency_s = sum((hop.members - 1) * hop.latency_s for hop in group.hops)
    return latency_s, _levels_after_another(group)


def hierarchical_reduce_scatter(group: Group) -> Line:
    """The same backwards, the nearest first."""
    return per_member(group, hierarchical_all_gather(group))


def hierarchical_all_reduce(group: Group) -> Line:
    """reduce_scatter inside, all_reduce of the pieces outside, all_gather inside."""
    return twice(hierarchical_reduce_scatter(group))


def _levels_after_another(group: Group) -> float:
    """Bytes at level i per byte put in: what outer levels brought, for each other member."""
    return sum(
        group.size // (hop.below * hop.members) * (hop.members - 1) * hop.s_per_byte
        for hop in group.hops
    )


# in the network -----------------------------------------------------------------------------------
def in_network_all_reduce(group: Group) -> Line | None:
    """Switches sum and send the sum to all, n bytes up and n down at once: ``a + n b`` (Graham et
    al., SHARP, 2016; NCCL's NVLS). None unless one level with such switches joins the group.
    """
    if len(group.hops) > 1 or not group.hops[0].level.reduces_in_network:
        return None
    level = group.hops[0].level
    return level.in_network_s, 1 / (level.bytes_per_s * level.in_network)


# exchanges ----------------------------------------------------------------------------------------
def pairwise_all_to_all(group: Group) -> Line:
    """A message of n / p bytes to each other member: ``(p - 1) a + (p - 1)/p n b`` (Thakur),
    with eight messages under way at a time. What goes to other units leaves by the own card.
    """
    p = group.size
    peers = [hop.below * (hop.members - 1) for hop in group.hops]
    rounds = [max(1.0, num / EXCHANGES_AT_ONCE) for num in peers]
    latency_s = sum(num * hop.latency_s for num, hop in zip(rounds, group.hops, strict=True))
    return latency_s, max((p - hop.below) / p * hop.s_per_byte for hop in group.hops)


def direct_send(group: Group) -> Line:
    """To a neighbour along the axis, over the outermost level that it crosses: ``a + n b``."""
    return group.hops[-1].latency_s, max(hop.pair_s_per_byte for hop in group.hops)


def twice(line: Line) -> Line:
    return 2 * line[0], 2 * line[1]


def per_member(group: Group, line: Line) -> Line:
    """A line over the whole, from one over a member's piece."""
    return line[0], line[1] / group.size


FORMULAS: dict[str, dict[str, Formula]] = {
    "all_reduce": {
        "ring": ring_all_reduce,
        "tree": tree_all_reduce,
        "in_network": in_network_all_reduce,
        "doubling": doubling_all_reduce,
        "hierarchical": hierarchical_all_reduce,
    },
    "all_gather": {
        "ring": ring_all_gather,
        "doubling": doubling_all_gather,
        "hierarchical": hierarchical_all_gather,
    },
    "reduce_scatter": {
        "ring": ring_reduce_scatter,
        "pairwise": pairwise_all_to_all,  # pieces are exchanged, and summed on arrival
        "doubling": doubling_reduce_scatter,
        "hierarchical": hierarchical_reduce_scatter,
    },
    "all_to_all": {"pairwise": pairwise_all_to_all},
    "broadcast": {"ring": ring_broadcast, "tree": tree_broadcast},
    "send": {"direct": direct_send},
}
