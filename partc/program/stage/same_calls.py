"""Before a call of all ranks, whether all of them make it: a step, a norm, a checkpoint."""

from __future__ import annotations

from collections import Counter

from partc.program.ranks.disagreement import refused_elsewhere
from partc.program.ranks.same_choice import SameChoice
from partc.program.stage.family_errors import CALL, REFUSED, calls_differ


class SameCalls:
    """Compares what ranks call; with ``asks=False`` nobody is asked."""

    def __init__(self, asks: bool) -> None:
        self.choice = SameChoice() if asks else None
        self._met = Counter[str]()  # calls beside steps

    def meet(self, call: str, most: int = 0) -> None:
        """RunError on all ranks if some of them run something else than this call, which is one of
        all ranks. ``most``: only so many times, of a call that every step makes; 0 always.
        """
        self._met[call] += 1
        if not most or self._met[call] <= most:
            self.check(call)

    def check(self, call: str) -> None:
        """The same, every time: RunError on all ranks if some run something else than this call."""
        texts = self.choice.differing(f"{CALL}{call}") if self.choice is not None else []
        if REFUSED in texts:
            raise refused_elsewhere([i for i, text in enumerate(texts) if text == REFUSED])
        if texts:
            raise calls_differ(texts)
