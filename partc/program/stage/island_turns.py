"""What is due between steps where islands train apart: to meet, to wait for what is under way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partc.program.stage.members import Member
from partc.program.stage.run_state import RunState


class IslandTurns:
    """What is due with other islands before a step of one of several programs."""

    def __init__(self, first: Member, members: Mapping[Any, Member], state: RunState) -> None:
        self.first, self.members, self.state = first, members, state

    def begin(self, member: Member, *, trains: bool) -> None:
        """Do what is due before a step of a program, or let it go on where another has sent; before
        a program without gradients, bring the servers' parameters to all islands.
        """
        if not trains:
            self.pull()
        if member.sends:
            self.drain(other_than=member)
        if member.meets:
            self._meet(member)
        if member.is_late:
            member.run.met = self.state.met

    def end(self, member: Member) -> None:
        """Note behind how many steps a program's islands have met."""
        if member.is_late:
            self.state.met = member.run.met

    def meet(self) -> None:
        """Do what is due behind the last step, unless that has happened.

        All ranks call this together. A step of the program does it by itself; here first, as the
        next step may be one of another program.
        """
        if self.first.meets:
            self._meet(self.first)
        self.settle()

    def settle(self) -> None:
        """Let tensors be what they are behind all that is due; all ranks call this together."""
        self.drain()
        self.pull()

    def pull(self) -> None:
        """Bring the parameters that servers own to all islands; all ranks call this together."""
        if self.first.pulls:
            self.first.run.pull()

    def _meet(self, member: Member) -> None:
        run, (seed, step) = member.run, self.state.seed
        run.seed(seed, step)
        run.met = self.state.met
        run.meet()
        self.state.met = run.met

    def drain(self, other_than: Member | None = None) -> None:
        """Wait for what islands share and is under way, so that it stands in buffers."""
        for member in self.members.values():
            if member.sends and member is not other_than:
                member.run.drain()
