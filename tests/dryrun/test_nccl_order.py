"""Printed pipelines never hang by NCCL's rules, and the group code that hung on NCCL hangs here."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from partc.codegen.helpers import links as printed_links
from partc.dryrun.alone import LoneMesh
from partc.dryrun.nccl_order import ALL_RULES, check_order, check_roles
from partc.dryrun.nccl_rules import Rules
from partc.dryrun.recording import (
    Communicator,
    Event,
    MakeGroup,
    Recorder,
    Start,
    Wait,
    group_name,
    record,
)
from partc.errors import CheckError
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.program.role import Role
from tests.pipelines import TRAINING, toy_program
from tests.texts import edited

STARTS = 100
LAYOUTS = {  # preset, and microbatches
    "pp=2": ("ddp", 4),
    "pp=3": ("ddp", 4),
    "pp=4": ("ddp", 4),
    "pp=2,dp=2,tp=2": ("fsdp+megatron", 2),
}


@cache
def program(mesh: str, schedule: str) -> Program:
    preset, microbatches = LAYOUTS[mesh]
    _, made = toy_program(schedule, microbatches, mesh, preset, tied=True)
    return made


def recorded(made: Program, steps: int = 1) -> dict[int, tuple[Event, ...]]:
    ranks = range(made.mesh.num_ranks)
    return {rank: record(made.role(rank), rank, steps=steps) for rank in ranks}


# programs -----------------------------------------------------------------------------------------
# Every schedule in a chain of four; what is odd, short or beside other axes with some of them.
ORDERS = [
    *(("pp=4", schedule) for schedule in TRAINING),
    ("pp=3", "1f1b"), ("pp=3", "interleaved-1f1b"), ("pp=3", "zb-v"), ("pp=2", "gpipe"),
    ("pp=2", "dualpipe-v"), ("pp=2,dp=2,tp=2", "1f1b"), ("pp=2,dp=2,tp=2", "looped-bfs"),
    ("pp=2,dp=2,tp=2", "zb-v"),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "schedule"), ORDERS)
def test_no_schedule_hangs(mesh: str, schedule: str) -> None:
    events = recorded(program(mesh, schedule))
    for seed in range(STARTS):
        check_order(events, ALL_RULES[seed % len(ALL_RULES)], random.Random(seed))


@pytest.mark.exhaustive
def test_later_steps_begin_without_meeting() -> None:
    made = program("pp=3", "zb-v")
    once, twice = recorded(made), recorded(made, steps=2)
    for rules in ALL_RULES:
        check_order(twice, rules)
    met = sum(isinstance(e, Start) and e.size == "float32[1]" for e in once[1])
    assert met == sum(isinstance(e, Start) and e.size == "float32[1]" for e in twice[1]) > 0


def spoilt(made: Program, old: str, new: str) -> dict[int, Role]:
    """The first rank of every stage, with something else in the text of pipeline rank 0."""
    ranks = {rank: made.mesh.first_rank(rank) for rank in range(made.mesh.pipeline_ranks)}
    roles = {rank: made.role(rank) for rank in ranks.values()}
    spoiled = edited(made, re.escape(old), new.replace("\\", r"\\"))
    return roles | {0: spoiled.role(0)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("self.links.meet(ids.device)", "pass", "the same transfers in one order"),
        ("i % 2 == odd", "i % 2 != odd", "for ever|makes a group"),
        ("self.x_out[stage].put(", "tuple(", "for ever|never comes"),
    ],
)
def test_one_pipeline_of_several_as_its_text_stands(old: str, new: str, message: str) -> None:
    made = program("pp=2,dp=2,tp=2", "1f1b")
    check_roles(spoilt(made, "Step = ", "Step = "))
    with pytest.raises(CheckError, match=message):
        check_roles(spoilt(made, old, new))


# Until links were made by all ranks and met before the first step, programs had these lines.
OLD = """
class Links(dict):
    def __init__(self, mesh, rank_of, to):
        (pipeline,) = mesh.mesh.reshape(1, -1).tolist()
        for what, stages in sorted(to.items()):
            for stage in stages:
                source = pipeline[rank_of[stage - 1 if what == "x" else stage + 1]]
                target = pipeline[rank_of[stage]]
                if dist.get_rank() in (source, target):
                    group = dist.new_group([source, target], use_local_synchronization=True)
                    self[what, stage] = (group, source, target)

    def meet(self, device):
        pass
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        ("pp=2", "gpipe"), ("pp=3", "1f1b"), ("pp=3", "zb-v"), ("pp=4", "interleaved-1f1b"),
        ("pp=4", "gpipe"), ("pp=4", "1f1b"),
    ],
)  # fmt: skip
def test_the_old_groups_hang(mesh: str, schedule: str) -> None:
    made = program(mesh, schedule)
    events = {}
    for rank in range(made.mesh.num_ranks):
        role = made.role(rank)
        exec(OLD, role.module.__dict__)
        events[rank] = record(role, rank)
    for rules in ALL_RULES:
        with pytest.raises(CheckError, match=r"for ever|never comes|makes a group"):
            check_order(events, rules)


# how many groups ----------------------------------------------------------------------------------
def made_links(mesh: str, rank_of: Any, to: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What every rank of a mesh asks while it makes its links and lets their ends meet."""
    layout = Mesh.of(mesh)
    events = {}
    for rank in range(layout.num_ranks):
        here = LoneMesh(layout, rank)
        dist = Recorder(here)
        monkeypatch.setattr(printed_links, "dist", dist)
        made: Any = printed_links.Links(here, rank_of, to)  # type: ignore[arg-type]
        for _ in range(2):
            made.meet("cpu")
        events[rank] = dist.events
    return events


def test_64_pipeline_ranks_make_one_group_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    events = made_links("pp=64", range(64), {"x": range(1, 64), "d": range(63)}, monkeypatch)
    groups = [[e.group for e in asked if isinstance(e, MakeGroup)] for asked in events.values()]
    assert len(groups[0]) == 2 * 63
    assert all(own == groups[0] for own in groups)
    assert max(Counter(rank for group in groups[0] for rank in group.ranks).values()) == 4
    meetings = [sum(isinstance(e, Start) for e in asked) for asked in events.values()]
    assert (min(meetings), max(meetings)) == (2, 4)  # once, however often a step begins
    for rules in ALL_RULES:
        check_order(events, rules)
    assert rounds(events) == 4


def rounds(events: dict[int, list[Event]]) -> int:
    """The longest chain of meetings that have to follow each other."""
    depth = dict.fromkeys(events, 0)
    begun = [[e for e in asked if isinstance(e, Start)] for asked in events.values()]
    order = [e.group for e in events[0] if isinstance(e, MakeGroup)]
    for group in order:
        if any(e.group == group for e in begun[group.ranks[0]]):
            both = 1 + max(depth[rank] for rank in group.ranks)
            depth |= dict.fromkeys(group.ranks, both)
    return max(depth.values())


def test_pipelines_side_by_side_make_each_others_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stages share a rank (the turn of a V) there is no link."""
    v = {"x": [1, 3], "d": [0, 2]}
    events = made_links("dp=2,pp=2,tp=2", [0, 1, 1, 0], v, monkeypatch)
    groups = [[e.group for e in asked if isinstance(e, MakeGroup)] for asked in events.values()]
    assert all(own == groups[0] for own in groups)
    pairs = Counter(group.ranks for group in groups[0])
    assert pairs == dict.fromkeys([(0, 2), (1, 3), (4, 6), (5, 7)], 4)


# the mode itself ----------------------------------------------------------------------------------
PAIR, SECOND = Communicator("a", (0, 1)), Communicator("b", (0, 1))
ALL, LAZY = Communicator("c", (0, 1, 2)), Rules()


def asks(text: str, **groups: Communicator) -> list[Event]:
    """``send a 1; receive a 1; wait 1`` as a rank's events; a collective has no peer."""
    known = {"a": PAIR, "b": SECOND, "c": ALL} | groups
    events: list[Event] = []
    for line, call in enumerate(text.split("; ")):
        name, *rest = call.split()
        place = f"hand.py:{line + 1}"
        if name == "wait":
            events.append(Wait(int(rest[0]), place))
        else:
            number = 1 + sum(isinstance(e, Start) for e in events)
            peer = int(rest[1]) if len(rest) > 1 else None
            events.append(Start(number, name, known[rest[0]], peer, "float32[4]", place))
    return events


def outcome(*ranks: str, rules: Rules = LAZY) -> str:
    """The message of the error that the ranks run into; "" if they come to their ends."""
    try:
        check_order({rank: asks(text) for rank, text in enumerate(ranks)}, rules)
    except CheckError as error:
        return str(error)
    return ""


def test_two_sends_that_meet_wait_for_each_other() -> None:
    first = "send a 1; receive a 1; wait 1; wait 2"
    assert not outcome(first, "receive a 0; send a 0; wait 1; wait 2")
    met = outcome(first, "send a 0; receive a 0; wait 1; wait 2")
    assert "ranks 0, 1: they wait for each other for ever" in met
    assert "rank 0 begins send to rank 1 at hand.py:1 and is held up there" in met


def test_the_first_use_of_a_group_holds_up_what_would_let_it_end() -> None:
    """Later uses in another order do not, as groups have queues of their own."""
    cross = ("all_reduce a; all_reduce b", "all_reduce b; all_reduce a")
    assert "for ever" in outcome(*cross)
    met = [f"all_reduce a; all_reduce b; {each}; wait 3; wait 4" for each in cross]
    assert not outcome(*met)


def test_an_early_receive_holds_up_a_shared_group() -> None:
    """Where pairs of ranks have no communicators of their own."""
    first = "send c 1; wait 1; receive c 2; wait 2; send c 1; wait 3"
    middle = "receive c 0; wait 1; receive c 0; send c 2; wait 3; wait 2"
    last = "receive c 1; wait 1; send c 0; wait 2"
    assert not outcome(first, middle, last)
    assert "stands behind" in outcome(first, middle, last, rules=Rules(bound=True))


def test_what_ranks_must_agree_on() -> None:
    other = asks("all_reduce a; wait 1")
    small: list[Event] = [
        Start(1, "all_reduce", PAIR, None, "float32[3]", "hand.py:7"),
        Wait(1, "hand.py:8"),
    ]
    with pytest.raises(CheckError, match=r"all_reduce of float32\[3\].*float32\[4\]"):
        check_order({0: other, 1: small})
    assert "runs all_reduce" in outcome("all_reduce a; wait 1", "broadcast a; wait 1")
    assert "rank 1, which ends without taking part" in outcome(
        "all_reduce a; all_reduce a; wait 1; wait 2", "all_reduce a; wait 1"
    )


def test_names_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(pg_names={}, group_count=0)
    monkeypatch.setattr(distributed_c10d, "_world", world)
    for ranks, held in (([0, 1], 0), ([2, 5], 3)):
        world.pg_names = dict.fromkeys(range(held))
        for local in (False, True):
            made = world.group_count
            torchs = distributed_c10d._process_group_name(ranks, use_hashed_name=local)
            assert group_name(ranks, local, made, held) == torchs
