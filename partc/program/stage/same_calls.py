"""Before a call of all ranks, whether all of them make it: a step, a norm, a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from partc.plan.mesh import PP
from partc.program.ranks.disagreement import refused_elsewhere
from partc.program.ranks.other_ranks import named_failures
from partc.program.ranks.same_choice import SameChoice
from partc.program.stage.family_errors import CALL, REFUSED, calls_differ
from partc.program.tensors.rank_tensors import RankTensors


class SameCalls:
    """Compares what ranks call; with ``asks=False`` nobody is asked.

    Beside a call, ranks with the same stages of the same island compare a number; ``unlike`` is
    called where theirs differ.
    """

    def __init__(self, asks: bool, of: RankTensors, unlike: Callable[[], None]) -> None:
        mesh, here = of.mesh, of.coords.get(PP, 0)
        kinds = mesh.pipeline_ranks * mesh.islands
        kind = of.here * mesh.pipeline_ranks + here
        self.choice = SameChoice(kind, kinds, unlike) if asks else None
        self._met = Counter[str]()  # calls beside steps

    def meet(self, call: str, most: int = 0) -> None:
        """RunError on all ranks if some of them run something else than this call, which is one of
        all ranks. ``most``: only so many times, of a call that every step makes; 0 always.
        """
        self._met[call] += 1
        if not most or self._met[call] <= most:
            self.check(call)

    def check(self, call: str, beside: int = 0) -> None:
        """The same, every time: RunError on all ranks if some run something else than this call.
        ``beside``: as of ``SameChoice``.
        """
        with named_failures(call):
            texts = self.choice.differing(f"{CALL}{call}", beside) if self.choice else []
        if REFUSED in texts:
            raise refused_elsewhere([i for i, text in enumerate(texts) if text == REFUSED])
        if texts:
            raise calls_differ(texts)
