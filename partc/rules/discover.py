"""Discovery: find the strategies of an op without a rule by running the op on pieces.

The call is shrunk to small shapes, run whole and on the pieces of 2 and of 3 ranks, and every
combination of layouts is kept whose joined results equal the whole results.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from math import prod

from torch import Tensor, fx

from partc.errors import RuleError
from partc.graph import results_of, tensor_args, value
from partc.plan.sharding import Layout, M, R, U, cut
from partc.rules.call import whole_call
from partc.rules.experiment import (
    Refused,
    Results,
    cut_shares,
    is_random,
    joined_error,
    local_results,
    take_apart,
    tolerance,
    whole_run,
)
from partc.rules.isolate import answers_of
from partc.rules.signature import Signature
from partc.rules.strategy import Strategy, has_rule, strategies
from partc.rules.table import whole_only

ROUNDS = ((2, 1), (3, 2))  # (ranks, seed); two rounds, since a layout may hold by chance in one
UNIT = 6  # sizes are multiples of it, so that 2 and 3 ranks divide them
SMALL_ELEMENTS = 1 << 16  # an operand up to this is tried as it is where it cannot be shrunk
MOST_CANDIDATES = 2000
SECONDS = 10.0  # silence after which an attempt counts as hanging


def strategies_for(
    node: fx.Node,
    num: int,
    seen: Collection[tuple[int, Layout]] = (),
    *,
    strict: bool = False,
    warnings: list[str] | None = None,
) -> list[Strategy]:
    """The strategies of a call on ``num`` ranks: from the table of rules, else by discovery.

    An empty list means that the call can only be replicated. Then a warning is appended to
    ``warnings`` once per op; with ``strict`` it is raised as a RuleError.
    """
    if has_rule(node.target):
        return strategies(node, num, seen)
    found = discover(node, num)
    if found:
        return found
    told = _replication(node)
    if strict:
        raise told
    if warnings is not None and str(told) not in warnings:
        warnings.append(str(told))
    return []


def _replication(node: fx.Node) -> RuleError:
    """The error for a call without a strategy: the bytes that each rank reads and writes."""
    op, known = Signature.of(node).op, value(node)
    where = " ".join(filter(None, [known.module, f"({known.source})" if known.source else ""]))
    operands = [prod(value(arg).shape) * value(arg).dtype.itemsize for arg in tensor_args(node)]
    results = [r.numel() * r.element_size() for r in results_of(node) if r is not None]
    return RuleError(
        where=where or str(node),
        what=f"{op} has no sharding rule and runs whole on every rank",
        why="no cut was found by experiment; each rank reads "
        f"{sum(operands)} and writes {sum(results)} bytes",
        do=f'Add a rule, such as rule("{op}", "{whole_only(whole_call(node))}"), with a letter in '
        "place of `_` for each dim that may be cut.",
    )


def discover(node: fx.Node, num: int) -> list[Strategy]:
    """Every strategy of a call that holds on small random tensors and divides the call's sizes."""
    small = shrunk(node)
    if small is None:
        return []
    shapes = [tuple(value(arg).shape) for arg in tensor_args(node)]
    results = [None if r is None else tuple(r.shape) for r in results_of(node)]
    return [
        strategy
        for strategy in discovered(small)
        if _fits(strategy.ins, shapes, num) and _fits(strategy.outs, results, num)
    ]


def _fits(layouts: Sequence[Layout], shapes: Sequence[tuple[int, ...] | None], num: int) -> bool:
    pairs = zip(layouts, shapes, strict=True)
    return all(s is None or lay.kind != "cut" or s[lay.dim] % num == 0 for lay, s in pairs)


def shrunk(node: fx.Node) -> Signature | None:
    """The call with small operands, where equal sizes stay equal; None if no small call works.

    An integer argument may be a size or not. So the integers are first left alone, and then shrunk
    with the sizes, until the small call's results have the expected sizes.
    """
    whole = Signature.of(node)
    sizes = sorted({size for spec in whole.operands for size in spec.shape if size > 1})
    small = {size: UNIT * (2 + i) for i, size in enumerate(sizes)} | {0: 0, 1: 1}
    operands = tuple(
        replace(spec, shape=tuple(small[size] for size in spec.shape)) for spec in whole.operands
    )
    left_alone = replace(whole, operands=operands)
    along = replace(left_alone.with_arguments(lambda leaf: _small_literal(leaf, small)))
    for candidate in (left_alone, along):
        if _same_pattern(node, candidate, small):
            return candidate
    is_small = all(prod(spec.shape) <= SMALL_ELEMENTS for spec in whole.operands)
    return whole if is_small else None


def _small_literal(leaf: object, small: dict[int, int]) -> object:
    is_size = isinstance(leaf, int) and not isinstance(leaf, bool) and leaf > 1
    return small.get(leaf, leaf) if is_size else leaf  # type: ignore[call-overload]


def _same_pattern(node: fx.Node, candidate: Signature, small: dict[int, int]) -> bool:
    """Whether the small call runs and its results' sizes are the shrunk sizes of the whole's."""
    try:
        fakes = results_of(candidate.node())
    except RuleError:
        return False
    for fake, real in zip(fakes, results_of(node), strict=True):
        if real is None:  # it is absent, or nobody reads it
            continue
        if fake is None or fake.dim() != real.dim():
            return False
        if any(small.get(r, f) != f for r, f in zip(real.shape, fake.shape, strict=True)):
            return False
    return True


@cache
def discovered(signature: Signature) -> tuple[Strategy, ...]:
    """The strategies of a small call; runs in forked children, as kernels may crash on pieces."""
    candidates = list(itertools.islice(_candidates(signature), MOST_CANDIDATES))
    if getattr(getattr(signature.target, "_schema", None), "is_mutable", False):
        return ()  # an op that changes its operands would spoil the operands of later runs
    experiment = _Experiment(signature)
    alive = answers_of(lambda _: experiment.examine(), 1, SECONDS)
    if alive != ["sound"]:
        return ()
    answers = answers_of(lambda i: experiment.outs_text(candidates[i]), len(candidates), SECONDS)
    found = (
        Strategy(ins, outs)
        for ins, answer in zip(candidates, answers, strict=True)
        if answer is not None and (outs := _read_outs(answer)) is not None
    )
    # Replicated results mean that every rank computes all of them: nothing is gained.
    return tuple(s for s in found if any(layout != R for layout in s.outs))


def _candidates(signature: Signature) -> Iterator[tuple[Layout, ...]]:
    """The operand layouts to try: dims of equal size sharded together, operands as U or as M."""
    shapes = [spec.shape for spec in signature.operands]
    for size in sorted({s for shape in shapes for s in shape if s % UNIT == 0 and s}):
        dims = [[R, *(cut(d) for d, s in enumerate(shape) if s == size)] for shape in shapes]
        yield from (ins for ins in itertools.product(*dims) if any(lay != R for lay in ins))
    floating = [i for i, spec in enumerate(signature.operands) if spec.dtype.is_floating_point]
    for count in range(1, len(floating) + 1):
        for group in itertools.combinations(floating, count):
            yield tuple(U if i in group else R for i in range(len(shapes)))
    for one in floating:
        yield tuple(M if i == one else R for i in range(len(shapes)))


class _Experiment:
    """The runs of one small call, whole and on the ranks of every round; used in a forked child."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature

    @cached_property
    def wholes(self) -> list[tuple[Signature, list[Tensor], Results]]:
        """Per round: the call, its operands and its whole results.

        The last round has other random literals, so that no strategy rests on a literal's value.
        """
        first, second = (seed for _, seed in ROUNDS)
        given = _runnable(self.signature, first)
        redrawn = given.with_random_literals(second)
        try:
            last = (redrawn, *whole_run(redrawn, second))
        except Refused:  # not every literal may be redrawn
            last = (given, *whole_run(given, second))
        return [(given, *whole_run(given, first)), last]

    def examine(self) -> str:
        """``sound`` if the call runs whole and gives the same results twice; else ``refused`` (it
        fails) or ``random``."""
        try:
            random = any(is_random(*whole) for whole in self.wholes)
        except Refused:
            return "refused"
        return "random" if random else "sound"

    def outs_text(self, ins: tuple[Layout, ...]) -> str:
        """The results' layouts as JSON; ``null`` if some result has no layout that holds."""
        try:
            return json.dumps([[lay.kind, lay.dim] for lay in self.outs(ins)])
        except Refused:
            return "null"

    def outs(self, ins: tuple[Layout, ...]) -> list[Layout]:
        """Per result, the first layout that holds in every round."""
        common: list[list[Layout]] | None = None
        for (num, seed), whole in zip(ROUNDS, self.wholes, strict=True):
            holding = _holding(*whole, ins, num, seed)
            pairs = zip(common or holding, holding, strict=True)
            common = [[lay for lay in before if lay in now] for before, now in pairs]
        if not common or not all(common):
            raise Refused("some result has no layout")
        return [layouts[0] for layouts in common]


def _runnable(signature: Signature, seed: int) -> Signature:
    """The call with float64 tensors if the op has such a kernel, else the call as it is."""
    try:
        whole_run(signature.in_float64(), seed)
    except Refused:
        return signature
    return signature.in_float64()


def _holding(
    signature: Signature,
    operands: Sequence[Tensor],
    whole: Results,
    ins: Sequence[Layout],
    num: int,
    seed: int,
) -> list[list[Layout]]:
    """Per result, every layout in which the joined results of the ranks equal the whole result."""
    shares = cut_shares(operands, ins, num, uneven=False)
    pieces = take_apart(operands, ins, shares, seed)
    results = local_results(lambda rank, xs: signature.run(xs), pieces, num)
    if any(len(local) != len(whole) for local in results):
        raise Refused("the number of results differs")
    allowed = tolerance(whole)
    return [
        [lay for lay in _possible(joined) if joined_error(parts, lay, joined) <= allowed]
        for parts, joined in zip(zip(*results, strict=True), whole, strict=True)
    ]


def _possible(result: Tensor | None) -> list[Layout]:
    """The layouts that a result may have.

    A floating result of zeros alone is no evidence for any layout: a loss whose gradient is 0 for
    the drawn operands also has gradient 0 on pieces, whatever it divides by. An integer result may
    be all zeros (error codes of a factorisation).
    """
    if result is None:
        return [R]
    cuts = [cut(dim) for dim in range(result.dim())]
    if not result.dtype.is_floating_point:
        return [R, *cuts]
    if not result.any():
        raise Refused("a result is zero everywhere")
    return [R, *cuts, U, M]


def _read_outs(answer: str) -> tuple[Layout, ...] | None:
    outs = json.loads(answer)
    return None if outs is None else tuple(Layout(kind, dim) for kind, dim in outs)
