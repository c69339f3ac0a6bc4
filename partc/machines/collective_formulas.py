"""Formulas for the time of a collective over a group: a latency plus seconds per byte.

A group's ranks may be joined by several levels of links, for example NVLink inside a node and
InfiniBand between nodes. In the formulas, ``n`` is the number of bytes that one rank puts in: its
piece for all_gather, the whole tensor for the others. ``p`` is the number of ranks, ``a`` the
latency of a step, ``b`` the seconds per byte of a link. The formulas are from Thakur,
Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), and
Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and
experience" (2007).

At each level of links a group has ``members`` (see ``Mesh.crosses``); each member stands for the
group's ``below`` ranks inside one unit, such as a node. All groups of a mesh axis run their
collective at the same time, and a level's bytes/s are one device's share while all devices send.
So several groups on one node share the node's network cards, and a group with several ranks on a
node has several cards. A ring's traffic into a node is spread over ``below`` cards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from partc.machines.topology import Level

Line = tuple[float, float]  # the time of n bytes is latency_s + n * s_per_byte: these two

SMALL_SHARE = 0.5  # of the bandwidth: every 4 bytes travel with a 4-byte flag (NCCL's LL protocol)
TREE_SHARE = 0.92 * 0.85  # of the bandwidth, in NCCL's own model of its trees (src/graph/tuning.cc)
EXCHANGES_AT_ONCE = 8  # messages that NCCL has under way at a time


@dataclass(frozen=True)
class Hop:
    """One group at one level of links: ``members`` units, with ``below`` ranks of the group each.

    Level 0 joins single devices; every higher level joins units of the level below.
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
        """Seconds per byte that one device sends to all other members at once."""
        if self.level.direct:
            return self.pair_s_per_byte / (self.members - 1)
        return 1 / self.level.attained_bytes_per_s

    @property
    def pair_s_per_byte(self) -> float:
        """Seconds per byte that one device sends to one other member."""
        links = self.level.size - 1 if self.level.direct else 1
        return links / self.level.attained_bytes_per_s

    @property
    def doublings(self) -> int:
        """The steps of recursive doubling over the members: log2, rounded up."""
        return (self.members - 1).bit_length()


@dataclass(frozen=True)
class Group:
    """The levels of links that one group crosses, innermost level first."""

    hops: tuple[Hop, ...]

    @classmethod
    def of(cls, levels: tuple[Level, ...], members: tuple[int, ...]) -> Group:
        below = accumulate(members, mul, initial=1)
        hops = map(Hop, range(len(levels)), levels, members, below)
        return cls(tuple(hop for hop in hops if hop.members > 1))

    def small(self) -> Group | None:
        """The group with each link's protocol for small messages (NCCL's LL).

        None if some link has no protocol for small messages.
        """
        levels = [hop.level.small(SMALL_SHARE) for hop in self.hops]
        pairs = zip(self.hops, levels, strict=True)
        hops = tuple(replace(hop, level=level) for hop, level in pairs if level is not None)
        return Group(hops) if len(hops) == len(levels) else None

    @property
    def size(self) -> int:
        return self.hops[-1].members * self.hops[-1].below

    @property
    def ring_step_s_per_byte(self) -> float:
        """Seconds per byte of a ring step, given by the slowest level.

        The ring's channels leave a unit through the cards of all ``below`` ranks in the unit.
        """
        return max(hop.s_per_byte / hop.below for hop in self.hops)

    @property
    def round_s(self) -> float:
        """The latencies of the p - 1 steps of a ring that enters each unit once, in seconds."""
        steps = (
            self.size // hop.below - self.size // (hop.below * hop.members) for hop in self.hops
        )
        return sum(num * hop.latency_s for num, hop in zip(steps, self.hops, strict=True))


Formula = Callable[[Group], Line | None]  # None if the algorithm is impossible on the group


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
    """Small pieces that pass through all ranks one after the other: ``(p - 1) a + n b`` (Chan)."""
    return group.round_s, group.ring_step_s_per_byte


# trees --------------------------------------------------------------------------------------------
def tree_all_reduce(group: Group) -> Line:
    """Two trees over units, each for half of the bytes: ``2 log2(p) a + 2 n b``.

    The double tree is from Sanders, Speck and Traff 2009. The devices of a node form a chain, as in
    NCCL's trees.
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
    """Recursive doubling (Thakur): ``log2(p) a + (p - 1) n b``.

    In each step pairs of ranks exchange all pieces that they have; the farthest pairs go first,
    while the messages are small.
    """
    latency_s = sum(hop.doublings * hop.latency_s for hop in group.hops)
    return latency_s, _levels_after_another(group)


def doubling_reduce_scatter(group: Group) -> Line:
    """Recursive halving (Thakur): ``log2(p) a + (p - 1)/p n b``, doubling's steps backwards."""
    return per_member(group, doubling_all_gather(group))


def doubling_all_reduce(group: Group) -> Line:
    """Halving, then doubling: ``2 log2(p) a + 2 (p - 1)/p n b`` (Rabenseifner, in Thakur)."""
    return twice(doubling_reduce_scatter(group))


def hierarchical_all_gather(group: Group) -> Line:
    """A ring per level, the outermost first, between each rank and its counterparts in other units.

    So the slow outer links carry each byte once per device, and the latency of a level with ``m``
    members is paid m - 1 times, not p - 1 times.
    """
    latency_s = sum((hop.members - 1) * hop.latency_s for hop in group.hops)
    return latency_s, _levels_after_another(group)


def hierarchical_reduce_scatter(group: Group) -> Line:
    """The steps of the hierarchical all_gather backwards: the innermost level first."""
    return per_member(group, hierarchical_all_gather(group))


def hierarchical_all_reduce(group: Group) -> Line:
    """Hierarchical all-reduce: reduce_scatter inside a unit, all_reduce of the pieces across units,
    all_gather inside."""
    return twice(hierarchical_reduce_scatter(group))


def _levels_after_another(group: Group) -> float:
    """Seconds per byte put in, if the levels run one after the other, the outermost first.

    A level gives each other member all that the outer levels have brought.
    """
    return sum(
        group.size // (hop.below * hop.members) * (hop.members - 1) * hop.s_per_byte
        for hop in group.hops
    )


# in the network -----------------------------------------------------------------------------------
def in_network_all_reduce(group: Group) -> Line | None:
    """Switches sum and send the sum to all ranks: ``a + n b``, up and down at the same time.

    See Graham et al., SHARP, 2016, and NCCL's NVLS. None unless the group crosses a single level,
    whose switches can sum.
    """
    if len(group.hops) > 1 or not group.hops[0].level.reduces_in_network:
        return None
    level = group.hops[0].level
    return level.in_network_s, 1 / (level.bytes_per_s * level.in_network)


# exchanges ----------------------------------------------------------------------------------------
def pairwise_all_to_all(group: Group) -> Line:
    """A message of n / p bytes to each other rank: ``(p - 1) a + (p - 1)/p n b`` (Thakur).

    Up to eight messages are under way at a time, so their latencies overlap. Messages to other
    units leave through the rank's own network card.
    """
    p = group.size
    peers = [hop.below * (hop.members - 1) for hop in group.hops]
    rounds = [max(1.0, num / EXCHANGES_AT_ONCE) for num in peers]
    latency_s = sum(num * hop.latency_s for num, hop in zip(rounds, group.hops, strict=True))
    return latency_s, max((p - hop.below) / p * hop.s_per_byte for hop in group.hops)


def direct_send(group: Group) -> Line:
    """A send to a neighbour along the axis: ``a + n b``, with the outermost level's latency."""
    return group.hops[-1].latency_s, max(hop.pair_s_per_byte for hop in group.hops)


def twice(line: Line) -> Line:
    return 2 * line[0], 2 * line[1]


def per_member(group: Group, line: Line) -> Line:
    """Change a line's ``n`` from the bytes of one rank's piece to the bytes of the whole."""
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
