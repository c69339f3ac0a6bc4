"""The controller of a stage: it measures steps, switches between variants, and keeps a log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from partc.amounts import time_text
from partc.control.decide import Rules, Standing, after, expected, is_due, switched
from partc.control.left_over import keeps, sending_all
from partc.control.meter import Meter
from partc.control.prices import Prices
from partc.control.told import (
    check_alike,
    check_is_stage,
    check_stage,
    checked_log,
    checked_standing,
    known_variant,
    not_replayed,
    rules_of,
)
from partc.control.variants import FIRST, variants_of
from partc.plan import Plan
from partc.program.model.habits import LOG
from partc.program.ranks.same_choice import SameChoice
from partc.program.role import Role
from partc.program.stage.run_state import unwatched
from partc.program.stage.runtime import Stage
from partc.program.wanted import Wanted
from partc.wrong_calls import as_path, known_arguments

Row = Mapping[str, Any]


class Controller:
    """Chooses which variant of a stage's step runs next, from what steps take.

    Behind each step ranks agree on what it took, by one sum of a few numbers over their hosts. The
    cost model then says what each variant would take on links and devices that are so fast, and the
    variant that is faster by ``gain`` for ``steps`` steps runs next. All ranks make one, and call
    ``stage.step`` as without it.

    Attributes:
        variant: the name of the variant that runs next.
        log: a row for each switch: behind which step, from which variant to which, what was
            measured, what was expected of each variant.
    """

    @known_arguments
    def __init__(
        self, stage: Stage, *, start: str | None = None, order: Sequence[str] | None = None,
        gain: float = 0.1, steps: int = 3, stay: int = 20, seconds: float = 0.0,
        replay: Iterable[Row] | None = None, log: str | Path | None = None,
    ) -> None:  # fmt: skip
        """Take over the choice; all ranks call this together.

        Args:
            stage: of a program with variants (``partc.with_variants``).
            start: the variant that runs first; None for the first of ``order``.
            order: the variants, the preferred one first; None for those that send gradients as they
                are, then those that compress them.
            gain: by which part another variant has to be faster.
            steps: in so many steps, one behind the other.
            stay: so many steps lie between two switches.
            seconds: a budget: of the variants that take no longer the preferred one runs.
            replay: the ``log`` of an earlier run: its switches are made again, and nothing is
                measured.
            log: a file to which each row is added, as a line of JSON, by rank 0.

        Raises:
            UsageError: the stage has no variants, or an argument is wrong.
            RunError: ranks were given different arguments.

        Example::

            controller = partc.Controller(stage)
            for batch in data:
                loss = stage.step(*batch)
        """
        check_is_stage(stage)
        family = stage._own
        self._programs = variants_of(family.first.program)
        check_stage(self._programs)
        self._rules = rules_of(self._programs, order, gain, steps, stay, seconds)
        self._replayed = None if replay is None else checked_log(replay, self._programs)
        first = self._rules.order[0] if start is None else start
        self._standing = Standing(known_variant(self._programs, first, "start"))
        self._ranks = SameChoice()
        check_alike(self._ranks, (self._rules, self._standing, self._replayed))
        axes = {group.group_name: axis for axis, group in stage.groups.items()}
        self._meter = Meter(axes, stage.device.type, self._ranks)
        self._prices = Prices(self._programs)
        self._kept = {name: keeps(p.role(dist.get_rank())) for name, p in self._programs.items()}
        self._leaving = False  # whether the next step is the last of its variant, and sends all
        self._path = None if log is None or dist.get_rank() else as_path(log, "Controller(log=...)")
        self.log: list[Row] = []
        self._state = family.state
        self._state.watch = self._around
        self._take_up()

    @property
    def variant(self) -> str:
        return self._standing.variant

    def state_dict(self) -> dict[str, Any]:
        """How things stand, as plain data, for a checkpoint."""
        return {**self._standing.as_json(), "leaving": self._leaving}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken; all ranks call this together.

        UsageError if it is no state of a controller of these variants.
        """
        self._standing = checked_standing(state, self._programs)
        self._leaving = bool(state.get("leaving"))
        check_alike(self._ranks, (self._standing, self._leaving))
        self._take_up()

    def close(self) -> None:
        """Let the variant that runs now run on; all ranks call this together."""
        self._state.watch = unwatched

    # inside ----------------------------------------------------------------------------------
    def _take_up(self) -> None:
        """Let the variant run that stands next."""
        self._state.variant = "" if self.variant == FIRST else self.variant

    @contextmanager
    def _around(self, role: Role, wanted: Wanted) -> Iterator[None]:
        """Around a run: measure a step of the variant, and decide on the next one."""
        runs = wanted.variant or FIRST
        if wanted != self._programs[runs].wanted or runs != self.variant:
            yield  # an evaluation, or a batch of another shape
        elif self._leaving:
            yield from self._last_step(role)
        elif self._replayed is not None:
            yield
            self._replay()
        else:
            with self._meter.step():
                yield
            self._decide()

    def _last_step(self, role: Role) -> Iterator[None]:
        """Around the last step of a variant, in which all that it has kept is sent."""
        how = Plan.parse(self._programs[self.variant].plan).compress
        assert how is not None
        with sending_all(role, how) as sent:
            yield
        (unfit,) = self._ranks.largest([float(not sent.finite)])
        if unfit:  # such a step is skipped; the next one sends what is kept
            return
        for buffer in sent.kept:
            buffer.zero_()
        self._switch()

    def _decide(self) -> None:
        """Behind a measured step: whether another variant runs next."""
        seen = self._meter.seen()
        pace = self._prices.pace(self.variant, seen)
        predicted = self._prices.seconds(pace)
        self._standing = after(self._rules, self._standing, seen.step_s, predicted)
        if not is_due(self._rules, self._standing):
            return
        now = expected(self._standing, predicted)
        to = self._standing.wish
        self._note({
            "step": self._taken, "from": self.variant, "to": to, "seen": seen.as_json(),
            "expected_s": now, "why": _why(self.variant, to, now, self._rules),
        })  # fmt: skip
        self._begin_switch()

    def _replay(self) -> None:
        """Behind a step: whether the log switches here."""
        assert self._replayed is not None
        row = self._replayed.get(self._taken)
        if row is None:
            return
        if row[0] != self.variant:
            raise not_replayed(self._taken, self.variant, row)
        self._standing = replace(self._standing, wish=row[1])
        self._note({"step": self._taken, "from": row[0], "to": row[1], "why": "replayed"})
        self._begin_switch()

    @property
    def _taken(self) -> int:
        """How many steps of the stage have been taken, with the one that ends."""
        return self._state.seed[1] + 1

    def _begin_switch(self) -> None:
        """Switch behind this step, or behind one more, which sends what this variant has kept."""
        unread = self._kept[self.variant] - self._kept[self._standing.wish]
        self._leaving = bool(unread)
        if not unread:
            self._switch()

    def _switch(self) -> None:
        self._standing, self._leaving = switched(self._standing), False
        self._take_up()

    def _note(self, row: Row) -> None:
        """Keep a switch, tell of it on the first rank, and write it to the file."""
        self.log.append(row)
        if dist.get_rank() == 0:
            LOG.warning("partc: from %(from)s to %(to)s behind step %(step)d: %(why)s", row)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _why(now: str, to: str, seconds: Mapping[str, float], rules: Rules) -> str:
    """Why a switch was made, in a sentence."""
    took, takes = (time_text(seconds[name]) for name in (now, to))
    if seconds[to] < seconds[now]:
        return f"a step takes {took}, and is expected to take {takes}"
    within = f"is within {time_text(rules.seconds)}" if rules.seconds else "takes no longer"
    return f"{to} is preferred, and {within}: {takes} is expected, and a step takes {took}"
