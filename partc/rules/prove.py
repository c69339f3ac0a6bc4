"""Proof of a rule by running it: in goes a call and a strategy, out comes whether pieces give the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from partc.rules.experiment import (
    Refused,
    Results,
    TooSmall,
    cut_shares,
    is_random,
    joined_error,
    local_results,
    moments_error,
    shape_error,
    take_apart,
    tolerance,
    whole_run,
)
from partc.rules.pieces import LocalCall
from partc.rules.signature import Signature
from partc.rules.strategy import Strategy, strategies
from partc.sharding import DTYPE_NAMES, Layout

SEEDS = (1, 2)
Claims = Callable[[fx.Node, int], Sequence[Strategy]]


@dataclass(frozen=True)
class Trial:
    """One execution: what was varied, and how far the joined results are off (0 is exact)."""

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


@dataclass(frozen=True)
class Proof:
    """Every trial of one strategy of one call on ``num`` ranks."""

    signature: Signature
    strategy: Strategy
    num: int
    trials: tuple[Trial, ...]

    @property
    def holds(self) -> bool:
        """Whether at least one trial was made and none failed."""
        return bool(self.trials) and all(trial.holds for trial in self.trials)

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


def prove(
    call: fx.Node | Signature, strategy: Strategy, num: int, claims: Claims = strategies
) -> Proof:
    """Run the call on whole operands and on every rank's pieces, with given and with random literals.

    Pieces are even, and uneven where the call on pieces is written as the call on the whole. The
    literals are redrawn only where ``claims`` lists the strategy for the redrawn call as well: some rules
    rest on a literal, such as ``masked_fill`` with 0.
    """
    signature = call if isinstance(call, Signature) else Signature.of(call)
    trials: list[Trial] = []
    for seed in SEEDS:
        for literals, variant in _variants(signature, strategy, num, seed, claims):
            exact = _in_double(variant, seed)
            trials += _trials(exact, strategy, num, seed, literals)
    return Proof(signature, strategy, num, tuple(trials))


def _variants(
    signature: Signature, strategy: Strategy, num: int, seed: int, claims: Claims
) -> Iterator[tuple[str, Signature]]:
    """The call as given and, where it differs and the claim is the same, with random literals."""
    yield "given", signature
    redrawn = signature.with_random_literals(seed)
    if redrawn != signature and strategy in _claimed(redrawn, num, claims):
        yield "random", redrawn


def _claimed(signature: Signature, num: int, claims: Claims) -> Sequence[Strategy]:
    try:
        return claims(signature.node(), num)
    except (RuntimeError, ValueError, IndexError):  # the op does not take these literals
        return ()


def _in_double(signature: Signature, seed: int) -> Signature:
    """The call in double, or as it is where the op does not exist in double."""
    exact = signature.in_float64()
    try:
        whole_run(exact, seed)
    except Refused:
        return signature
    return exact


def _trials(
    signature: Signature, strategy: Strategy, num: int, seed: int, literals: str
) -> Iterator[Trial]:
    """The even trial and, where the pieces' call is the whole's call and large enough, the uneven one."""
    try:
        local = LocalCall.of(signature, strategy, num)
    except Refused as refused:
        yield Trial(literals, "even", "", "values", float("inf"), 0.0, str(refused))
        return
    yield _trial(signature, strategy, local, num, seed, (literals, "even"))
    if local.unchanged and any(layout.kind == "cut" for layout in strategy.ins):
        with suppress(TooSmall):
            yield _trial(signature, strategy, local, num, seed, (literals, "uneven"))


def _trial(
    signature: Signature,
    strategy: Strategy,
    local: LocalCall,
    num: int,
    seed: int,
    varied: tuple[str, str],
) -> Trial:
    """Run the whole, cut, run the pieces, join and compare; TooSmall where no unequal cut exists."""
    method, dtype = "values", ""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            operands, whole = whole_run(signature, seed)
            dtype = ", ".join(sorted({DTYPE_NAMES[r.dtype] for r in whole if r is not None}))
            method = _method(signature, operands, whole)
            layouts = [*strategy.ins, *strategy.outs]
            shares = cut_shares([*operands, *whole], layouts, num, varied[1] == "uneven")
            pieces = take_apart(operands, strategy.ins, shares, seed)
            alike = all(layout.kind != "cut" for layout in strategy.outs)
            results = local_results(local.run, pieces, num, seed if alike else None)
        error, allowed = _compare(results, strategy.outs, whole, method)
    except TooSmall:
        raise
    except Refused as refused:
        return Trial(*varied, dtype, method, float("inf"), 0.0, str(refused))
    return Trial(*varied, dtype, method, error, allowed)


def _method(signature: Signature, operands: Sequence[Tensor], whole: Results) -> str:
    """How results can be compared: by value, by the moments of random draws, or only by shape."""
    if "empty" in signature.op:
        return "shapes"
    return "moments" if is_random(signature, operands, whole) else "values"


def _compare(
    results: Sequence[Results], outs: Sequence[Layout], whole: Results, method: str
) -> tuple[float, float]:
    """The largest error of all results, and what is allowed."""
    measure = {"values": joined_error, "moments": moments_error, "shapes": shape_error}[method]
    if any(len(local) != len(whole) for local in results):
        return float("inf"), 0.0
    by_result = zip(zip(*results, strict=True), outs, whole, strict=True)
    errors = [measure(pieces, layout, joined) for pieces, layout, joined in by_result]
    allowed = {"values": tolerance(whole), "moments": 1.0, "shapes": 0.0}[method]
    return max(errors, default=0.0), allowed
