"""A second opinion: what DTensor allows on one mesh dim is in our table, or here is why not.

DTensor's rules are private to torch and are read in this test only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from partc.graph import results_of
from partc.plan.sharding import Layout, M, R, U, cut
from partc.rules import Strategy, strategies
from partc.rules.signature import Signature
from tests.rule_cases.cases import cases_by_rule

THEIRS = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
# What DTensor has beyond our table, by op.
MAXIMA = "an unfinished maximum passes our moves only; no plan gains by carrying it further"
TRANSFORMED = "false: what a transform gives for the largest of two is not the larger one's"
LACKING: dict[str, tuple[set[str], str]] = {
    "aten.constant_pad_nd.default": ({"M -> M"}, MAXIMA),
    "aten.positive.default": ({"M -> M"}, MAXIMA),
    "aten.nan_to_num.default": ({"M -> M"}, MAXIMA),
    "aten._to_copy.default": ({"M -> M"}, MAXIMA),
    "aten._fft_r2c.default": ({"M -> M"}, TRANSFORMED),
    "aten._fft_c2c.default": ({"M -> M"}, TRANSFORMED),
    "aten._fft_c2r.default": ({"M -> M"}, TRANSFORMED),
    "aten.linalg_solve_triangular.default": (
        {"R, cut 0 -> cut 0"},
        "false where the first operand has as many matrices as the whole of the second",
    ),
    "aten._linalg_solve_ex.default": (
        {"R, U -> U, R, R, R"},
        "of its results one alone is a sum over right-hand sides, which no word of a rule says",
    ),
    "aten.add.Tensor": ({"M, R -> M"}, MAXIMA),
    "aten.sub.Tensor": ({"M, R -> M"}, MAXIMA),
    "aten.to.dtype": (
        {"M -> M", "U -> U"},
        MAXIMA
        + "; this cast is to integers, which cuts off the fractions of each part, not of the sum",
    ),
    "aten.bucketize.Tensor": (
        {"M, R -> M", "R, cut 0 -> U"},
        MAXIMA + "; boundaries are few, so cutting them gains nothing",
    ),
    "aten._native_batch_norm_legit_no_training.default": (
        {"cut 1, cut 0, cut 0, cut 0, cut 0 -> cut 1, cut 0, cut 0"},
        "the last two results are empty here, and empty results are replicated",
    ),
}

# What it has more since torch 2.15, by op or by call.
SHAPE_ALONE = "its operand gives dtype and device alone, and is whole on one device too"
UNREAD = "the total weight is not read for the gradient of a sum"
SUMS = {"R, R, R, U -> R", "R, cut 0, cut 0, U -> cut 0"}
LATER: dict[str, tuple[set[str], str]] = {
    **{
        f"aten.{name}.default": ({"M -> M"}, MAXIMA)
        for name in (
            "slice_backward", "select_backward", "clone", "alias", "detach", "contiguous", "amax",
            "max",
        )
    },
    **{
        f"aten.new_{name}.default": ({"cut 0 -> R"}, SHAPE_ALONE)
        for name in ("zeros", "ones", "full", "empty", "empty_strided")
    },
    "aten.empty_like.default": ({"M -> M", "U -> U"}, "its result has no values"),
    "aten.nll_loss_forward.default(f32[12,24], i64[12], None, 0, -100)": (
        {"cut 0, cut 0 -> cut 0, R"},
        "the total weight of losses that nobody adds up is not read",
    ),
    "aten.nll_loss_backward.default": (SUMS, UNREAD),
    "aten.nll_loss2d_backward.default": (
        SUMS | {"R, cut 3, cut 2, U -> cut 3", "R, cut 2, cut 1, U -> cut 2"},
        UNREAD,
    ),
    "aten.view.dtype": (
        {"M -> M", "U -> U", "cut 0 -> cut 0", "cut 1 -> cut 1"},
        "false: the bits of parts do not add up; nothing that is trained needs the cuts",
    ),
}  # fmt: skip


def lacking(case: Signature) -> set[str]:
    """What DTensor is known to have beyond our table for a call."""
    tables = [LACKING, LATER] if torch.__version__ >= "2.15" else [LACKING]
    found = [table[key][0] for table in tables for key in (case.op, str(case)) if key in table]
    return set().union(*found)


def cases() -> list[Signature]:
    """The calls of our proofs for which DTensor has a rule for one mesh dim."""
    return [c for group in cases_by_rule().values() for c in group if c.target in THEIRS]


def layout(placement: Any, rank: int) -> Layout | None:
    """Our word for a placement, None where there is none (averages, products, minima)."""
    if isinstance(placement, Replicate):
        return R
    if type(placement) is Partial:
        return {"sum": U, "max": M}.get(placement.reduce_op)
    if isinstance(placement, Shard) or not isinstance(placement, Placement):
        return cut(placement.dim % max(rank, 1))
    return None


def allowed_by_dtensor(case: Signature) -> Iterator[Strategy]:
    """DTensor's placements for a call that our layouts can express."""
    metas = [TensorMeta(torch.Size(s.shape), _strides(s.shape), s.dtype) for s in case.operands]
    args, kwargs = case.filled((case.args, dict(case.kwargs)), metas)
    args = tuple([*each] if type(each) is tuple else each for each in args)  # as dispatched
    shapes = [None if r is None else tuple(r.shape) for r in results_of(case.node())]
    shapes += [spec.shape for spec in case.operands]
    assert isinstance(case.target, torch._ops.OpOverload)
    for placements in THEIRS[case.target].func(case.target, args, kwargs):
        layouts = [
            R if placement is None or shape is None else layout(placement, len(shape))
            for placement, shape in zip(placements, shapes, strict=True)
        ]
        found = [lay for lay in layouts if lay is not None]
        if len(found) == len(layouts) and all(map(_divides, found, shapes)):
            num_outs = len(shapes) - len(case.operands)
            yield Strategy(tuple(found[num_outs:]), tuple(found[:num_outs]))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _divides(lay: Layout, shape: tuple[int, ...] | None) -> bool:
    return lay.kind != "cut" or shape is None or shape[lay.dim] % 2 == 0


@pytest.mark.parametrize("case", cases(), ids=str)
def test_dtensor_knows_no_cut_that_we_lack(case: Signature) -> None:
    ours = {(s.ins, s.outs) for s in strategies(case.node(), 2)}
    theirs = {(s.ins, s.outs) for s in allowed_by_dtensor(case)}
    missing = {pair for pair in theirs - ours if any(lay != R for lay in (*pair[0], *pair[1]))}
    assert {str(Strategy(*pair)) for pair in missing} == lacking(case)


def test_the_comparison_is_about_something() -> None:
    counts = [len(list(allowed_by_dtensor(case))) for case in cases()]
    assert len(counts) > 100
    assert sum(counts) > 300
