"""Actions of a pipeline rank, such as ``0F2``, and schedules, which are orders of actions.

An action is written as in torch.distributed.pipelining: stage, kind, microbatch, so ``0F2`` is the
forward of stage 0 for microbatch 2. Kind ``F`` is a stage's forward and ``B`` its whole backward.
A split backward is ``I`` (the gradient of the stage's input, which the previous stage waits for)
and later ``W`` (the gradients of the stage's weights, which no other stage waits for).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from partc.errors import PlanError

Kind = Literal["F", "B", "I", "W"]
_WRITTEN = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")


class Action(NamedTuple):
    """One stage's forward or backward of one microbatch; ``str`` gives ``0F2``."""

    stage: int
    kind: Kind
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action such as ``0F2``; PlanError if the text is none."""
        found = _WRITTEN.fullmatch(str(text).strip())
        if not found:
            raise PlanError(
                where=f"schedule, action {text!r}",
                what="this is not an action",
                why="an action is a stage, a kind and a microbatch",
                do="Write for example 0F2: stage 0, forward, microbatch 2. Kinds are F, B (whole "
                "backward), I (input gradient) and W (weight gradients), in capitals.",
            )
        stage, kind, microbatch = found.groups()
        return cls(int(stage), kind, int(microbatch))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The order of actions of every pipeline rank, ``orders[rank]``.

    ``rank_of[stage]`` is the pipeline rank that runs a stage. ``str`` gives one line per rank, such
    as ``0F0 0F1 0B0 0B1``.
    """

    name: str
    orders: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]
    microbatches: int

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of the schedule's actions; ``I`` and ``W`` are among them if backwards are
        split into input and weight gradients."""
        return frozenset(action.kind for order in self.orders for action in order)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs, in the order of the model."""
        return tuple(s for s, r in enumerate(self.rank_of) if r == rank)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, order)) for order in self.orders)

    def _repr_html_(self) -> str:
        """The schedule as a picture, where every forward takes as long as half a backward."""
        from partc.schedules.picture import schedule_html

        return schedule_html(self)


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of every stage if stages are dealt out in turns: stage ``s`` on ``s % ranks``.

    >>> looped(2, 2)
    (0, 1, 0, 1)
    """
    return tuple(s % ranks for s in range(ranks * chunks))


def v_shaped(ranks: int) -> tuple[int, ...]:
    """The rank of every stage if stages go through the ranks and back: two stages per rank.

    >>> v_shaped(2)
    (0, 1, 1, 0)
    """
    return (*range(ranks), *reversed(range(ranks)))


def check_schedule(schedule: Schedule) -> None:
    """PlanError unless every rank runs the actions of its own stages, each exactly once.

    An order may pass and still deadlock; `timing.timeline` and `simulate.simulate` find that.
    """
    seen: set[Action] = set()
    for rank, order in enumerate(schedule.orders):
        for action in order:
            _check_action(schedule, rank, action, seen)
            seen.add(action)
    _check_complete(schedule, seen)


def _check_action(schedule: Schedule, rank: int, action: Action, seen: set[Action]) -> None:
    if action.stage >= schedule.stages or action.microbatch >= schedule.microbatches:
        raise _refused(
            schedule, rank, action, "there is no such stage or microbatch",
            f"there are {schedule.stages} stages and {schedule.microbatches} microbatches",
        )  # fmt: skip
    owner = schedule.rank_of[action.stage]
    if owner != rank:
        raise _refused(
            schedule, rank, action, "the stage belongs to another rank",
            f"stage {action.stage} runs on pipeline rank {owner}",
        )  # fmt: skip
    if action in seen:
        raise _refused(schedule, rank, action, "the action stands twice", "each runs once a step")


def _check_complete(schedule: Schedule, seen: set[Action]) -> None:
    forward_only = schedule.kinds <= {"F"}
    for stage, rank in enumerate(schedule.rank_of):
        for microbatch in range(schedule.microbatches):
            kinds = {k for k in "FBIW" if Action(stage, k, microbatch) in seen}  # type: ignore[arg-type]
            if kinds not in ({"F"} if forward_only else {"F", "B"}, {"F", "I", "W"}):
                raise _refused(
                    schedule, rank, None,
                    f"stage {stage} runs {', '.join(sorted(kinds)) or 'nothing'} for microbatch "
                    f"{microbatch}",
                    f"it must run F and B, or F, I and W, as {stage}F{microbatch} and "
                    f"{stage}B{microbatch}{_counted(schedule, microbatch)}",
                )  # fmt: skip


def _counted(schedule: Schedule, microbatch: int) -> str:
    """What to say where no stage runs the first microbatch, as of those who count from 1."""
    each = {action.microbatch for order in schedule.orders for action in order}
    is_from_1 = microbatch == 0 and 0 not in each and schedule.microbatches - 1 in each
    return "; microbatches and stages are counted from 0" * is_from_1


def _refused(
    schedule: Schedule, rank: int, action: Action | None, what: str, why: str
) -> PlanError:
    at = "" if action is None else f", action {action}"
    return PlanError(
        where=f"schedule {schedule.name}, pipeline rank {rank}{at}",
        what=what,
        why=why,
        do="Correct the schedule, or name one that partc makes, for example schedule='1f1b'.",
    )
