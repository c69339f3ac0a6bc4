"""Prove a strategy by running it: the call on pieces must give the results of the whole call.

The word proof means an experiment on random operands here, not a derivation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite

import torch
from torch import Tensor, fx

from partc.errors import RuleError, UsageError
from partc.plan.sharding import DTYPE_NAMES, Layout
from partc.rules.experiment import (
    DRAWS,
    Refused,
    Results,
    cut_shares,
    is_random,
    joined_error,
    local_results,
    moments_error,
    shape_error,
    take_apart,
    tolerance,
    unlike,
    whole_run,
)
from partc.rules.pieces import LocalCall
from partc.rules.signature import Signature
from partc.rules.strategy import Strategy, strategies
from partc.wrong_calls import quoted

SEEDS = (1, 2)
Claims = Callable[[fx.Node, int], Sequence[Strategy]]


@dataclass(frozen=True)
class Trial:
    """One run of a call on pieces: what was varied, and the error of the joined results.

    ``error`` and ``tolerance`` are in the unit of the ``method``.
    """

    literals: str  # "given" or "random"
    pieces: str  # "even" or "uneven"
    dtype: str
    method: str  # "values", "moments" (random draws) or "shapes" (uninitialised memory)
    error: float
    tolerance: float
    failure: str = ""

    @property
    def holds(self) -> bool:
        return not self.failure and self.error <= self.tolerance

    def __bool__(self) -> bool:
        return self.holds


@dataclass(frozen=True)
class Proof:
    """All trials of one strategy of one call on ``num`` ranks."""

    signature: Signature
    strategy: Strategy
    num: int
    trials: tuple[Trial, ...]

    @property
    def holds(self) -> bool:
        """Whether at least one trial was made and none failed."""
        return bool(self.trials) and all(trial.holds for trial in self.trials)

    def __bool__(self) -> bool:
        return self.holds

    @property
    def error(self) -> float:
        return max((trial.error for trial in self.trials), default=float("inf"))

    def __str__(self) -> str:
        head = f"{self.signature} on {self.num} ranks: {self.strategy}"
        bad = next((trial for trial in self.trials if not trial.holds), None)
        if bad is None:
            return f"{head} holds in {len(self.trials)} trials"
        why = bad.failure or f"off by {bad.error:.1e}, allowed is {bad.tolerance:.0e}"
        return f"{head} FAILS with {bad.literals} literals and {bad.pieces} pieces: {why}"


@dataclass(frozen=True)
class Whole:
    """One run of a call on whole operands, in float64 if the op has such a kernel."""

    signature: Signature
    operands: tuple[Tensor, ...]
    results: tuple[Tensor | None, ...]
    method: str

    @property
    def dtype(self) -> str:
        names = {DTYPE_NAMES[r.dtype] for r in self.results if r is not None}
        return ", ".join(sorted(names))


def prove(
    call: fx.Node | Signature,
    strategy: Strategy,
    num: int,
    claims: Claims = strategies,
    seeds: Sequence[int] = SEEDS,
) -> Proof:
    """Run the call on whole operands and on the pieces of a strategy, and compare the results.

    The call runs with its own literals and with random ones. Pieces are even; where the call on
    pieces has the same literals as the whole call, uneven pieces are tried as well. Random literals
    are tried only if ``claims`` gives the strategy for the changed call too, since some rules need
    a certain literal, such as ``masked_fill`` with 0.
    """
    signature = call if isinstance(call, Signature) else Signature.of(call)
    if not isinstance(strategy, Strategy) or len(strategy.ins) != len(signature.operands):
        raise UsageError(
            where=f"prove({signature})", what=f"{quoted(strategy)} is no strategy for it",
            why=f"a strategy has a layout for each of the {len(signature.operands)} operands",
            do="Write Strategy((cut(0), ...), (cut(0),)), operands first, or take one of "
            "partc.rules.strategies(call.node(), num).",
        )  # fmt: skip
    trials: list[Trial] = []
    for seed in seeds:
        trials += _trials(signature, strategy, num, seed, "given")
        redrawn = signature.with_random_literals(seed)
        if redrawn != signature and strategy in _claimed(redrawn, num, claims):
            trials += _trials(redrawn, strategy, num, seed, "random")
    return Proof(signature, strategy, num, tuple(trials))


@lru_cache(maxsize=32)
def _claimed(signature: Signature, num: int, claims: Claims) -> Sequence[Strategy]:
    try:
        return claims(signature.node(), num)
    except (RuleError, RuntimeError, ValueError, IndexError):  # the op does not take these literals
        return ()


@lru_cache(maxsize=32)  # the strategies of a call are proved in turn and share its whole run
def _whole(signature: Signature, seed: int) -> Whole:
    """The whole run of a call, and the method to compare its results (see `Trial`)."""
    for exact in (signature.in_float64(), signature):
        with torch.random.fork_rng(devices=[]), suppress(Refused):
            torch.default_generator.manual_seed(seed + DRAWS)
            operands, results = whole_run(exact, seed)
            method = "moments" if is_random(exact, operands, results) else "values"
            method = "shapes" if "empty" in exact.op else method  # uninitialised memory
            return Whole(exact, tuple(operands), tuple(results), method)
    whole_run(signature, seed)  # tells why it is refused
    raise AssertionError


def _trials(
    signature: Signature, strategy: Strategy, num: int, seed: int, literals: str
) -> Iterator[Trial]:
    """The trial with even pieces and, if the call on pieces is unchanged, one with uneven pieces.

    A rule promises even pieces alone, so an op that refuses uneven pieces disproves nothing.
    """
    try:
        whole = _whole(signature, seed)
        local = LocalCall.of(whole.signature, strategy, num)
    except Refused as refused:
        yield Trial(literals, "even", "", "values", float("inf"), 0.0, str(refused))
        return
    try:
        yield _trial(whole, strategy, local, num, seed, (literals, "even"))
    except Refused as refused:
        yield Trial(literals, "even", "", whole.method, float("inf"), 0.0, str(refused))
    if local.unchanged and any(layout.kind == "cut" for layout in strategy.ins):
        with suppress(Refused):
            yield _trial(whole, strategy, local, num, seed, (literals, "uneven"))


def _trial(
    whole: Whole, strategy: Strategy, local: LocalCall, num: int, seed: int, varied: tuple[str, str]
) -> Trial:
    """Shard the operands, run the pieces, join the results and compare."""
    tensors = [*whole.operands, *whole.results]
    alike = all(layout.kind != "cut" for layout in strategy.outs)
    shares = cut_shares(tensors, [*strategy.ins, *strategy.outs], num, varied[1] == "uneven")
    pieces = take_apart(whole.operands, strategy.ins, shares, seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed + num)
        results = local_results(local.run, pieces, num, seed if alike else None)
    error, allowed = _compare(results, strategy.outs, whole)
    failure = "" if isfinite(error) else unlike(results, strategy.outs, whole.results)
    return Trial(*varied, whole.dtype, whole.method, error, allowed, failure)


def _compare(
    results: Sequence[Results], outs: Sequence[Layout], whole: Whole
) -> tuple[float, float]:
    """The largest error of all results, and the allowed error."""
    measures = {"values": joined_error, "moments": moments_error, "shapes": shape_error}
    if any(len(local) != len(whole.results) for local in results):
        return float("inf"), 0.0
    by_result = zip(zip(*results, strict=True), outs, whole.results, strict=True)
    errors = [measures[whole.method](*pieces_of_one) for pieces_of_one in by_result]
    allowed = {"values": tolerance(whole.results), "moments": 1.0, "shapes": 0.0}
    return max(errors, default=0.0), allowed[whole.method]
