"""The collectives that turn one sharding of a value into another.

``f32[8,64]{U:tp} -> f32[8@tp,64]`` is one reduce-scatter, ``f32[8@tp,64] -> f32[8,64@tp]`` one
all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from partc.graph import ANYWHERE, Value, collectives
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, R, Sharding

# Bytes that cross the network, in units of the whole value's bytes, for axes of many ranks: a ring
# all-gather or reduce-scatter over n ranks moves (n - 1) / n of them, an all-reduce twice that.
_COST = {("U", "R"): 2.0, ("M", "R"): 2.0, ("U", "cut"): 1.0, ("cut", "R"): 1.0, ("R", "cut"): 0.0}


@dataclass(frozen=True)
class Step:
    """One call of ``partc.graph.collectives`` and the sharding after it."""

    target: Callable[..., Tensor]
    kwargs: dict[str, Any]
    after: Sharding


def transition_cost(have: Layout, want: Layout, num: int) -> float | None:
    """Network bytes per byte of the value, to reshard one axis; None if that is impossible."""
    if have == want:
        return 0.0
    if have.permuted or want.permuted:
        return None  # no other rank knows where these rows belong
    if have.kind == want.kind == "cut":
        return 1.0 / num
    if want.kind == "U" and have.kind == "R":
        return 0.0
    return _COST.get((have.kind, want.kind))


def reshard_steps(have: Sharding, want: Sharding, mesh: Mesh) -> Iterator[Step]:
    """The collectives from ``have`` to ``want``, in order.

    Partial sums are finished first: by reduce-scatter where the new shard ends up innermost on its
    dim, else by all-reduce. Then shards that ``want`` does not have are all-gathered, the innermost
    axis first, and new ones are sliced off locally, the outermost axis first.
    """
    own = _slices(have, want, mesh)
    if own:
        yield from own
        return
    # Sums first: a reduce-scatter leaves fewer bytes for the steps behind it.
    for axis in _unfinished(have, want, mesh):
        step = _finish(have, want, axis, mesh)
        yield step
        have = step.after
    swap = _swap(have, want, mesh)  # one all-to-all moves 1/n of what an all-gather would
    if swap is not None:
        yield swap
        have = swap.after
    for axis in _leaving(have, want):
        layout = have.on(axis)
        after = have.with_(axis, R, mesh)
        yield _step(collectives.all_gather, axis, layout, have.local_outer(axis, mesh), after, mesh)
        have = after
    for axis, layout in want.cuts():
        if have.on(axis) != layout:
            have = have.with_(axis, layout, mesh)
            yield _step(
                collectives.keep_piece, axis, layout, have.local_outer(axis, mesh), have, mesh
            )
    for axis in mesh.names:
        if want.on(axis).kind == "U" and have.on(axis) == R:
            have = have.with_(axis, want.on(axis), mesh)
            yield Step(collectives.keep_first, {"axis": axis, "num": mesh.size(axis)}, have)
    assert have == want, f"no way from {have} to {want}"


def _slices(have: Sharding, want: Sharding, mesh: Mesh) -> list[Step]:
    """The slices that make ``want``, where rows of one dim lie so that nothing has to move.

    ``f32[(2 4@dp)] -> f32[8@mb+dp]``: rank ``dp`` has its rows of both microbatches, and keeps
    those of one.
    """
    new = [axis for axis, _ in want.cuts() if have.on(axis) == R]
    if have.layouts == tuple(x for x in want.layouts if x[0] not in new):
        return []  # slices of whole dims, one by one
    if want.without(new, mesh) != have:
        return []
    steps = []
    for number, axis in enumerate(new, start=1):
        layout, after = want.on(axis), want.without(new[number:], mesh)
        outer = after.local_outer(axis, mesh)
        steps.append(_step(collectives.keep_piece, axis, layout, outer, after, mesh))
    return steps


def _step(
    target: Callable[..., Tensor],
    axis: str,
    layout: Layout,
    outer: int,
    after: Sharding,
    mesh: Mesh,
) -> Step:
    kwargs = {"axis": axis, "num": mesh.size(axis), "dim": layout.dim, "outer": outer}
    return Step(target, kwargs, after)


def _unfinished(have: Sharding, want: Sharding, mesh: Mesh) -> list[str]:
    """Axes with a partial sum to finish; first those that end sharded, outermost axis first."""
    order = [axis for axis, _ in want.cuts()]
    axes = [*order, *(axis for axis in mesh.names if axis not in order)]
    return [a for a in axes if have.on(a).kind in "UM" and have.on(a) != want.on(a)]


def _finish(have: Sharding, want: Sharding, axis: str, mesh: Mesh) -> Step:
    """Finish the partial sum on ``axis``: by reduce-scatter if the resulting shard is innermost on
    its dim, else by all-reduce.
    """
    layout = want.on(axis)
    scattered = have.with_(axis, layout, mesh)
    cuts = _on_dim(scattered, layout.dim)
    settled = cuts == _on_dim(want, layout.dim)[: len(cuts)]
    if (
        layout.kind == "cut"
        and have.on(axis).kind == "U"
        and settled
        and is_innermost(scattered, axis)
    ):
        outer = scattered.local_outer(axis, mesh)
        return _step(collectives.reduce_scatter, axis, layout, outer, scattered, mesh)
    op = "max" if have.on(axis).kind == "M" else "sum"
    kwargs = {"axis": axis, "num": mesh.size(axis), "op": op}
    return Step(collectives.all_reduce, kwargs, have.with_(axis, R, mesh))


def is_innermost(sharding: Sharding, axis: str) -> bool:
    """Whether ``axis`` is the innermost axis that shards its dim.

    Only then can its shards be scattered or gathered without moving those of another axis.
    """
    return _on_dim(sharding, sharding.on(axis).dim)[-1][0] == axis


def _on_dim(sharding: Sharding, dim: int) -> list[tuple[str, Layout]]:
    return [pair for pair in sharding.cuts() if pair[1].dim == dim]


def _swap(have: Sharding, want: Sharding, mesh: Mesh) -> Step | None:
    """One all-to-all, if the only change is that one axis shards another dim, innermost on both."""
    moved = [a for a in mesh.names if have.on(a) != want.on(a)]
    if len(moved) != 1 or have.on(moved[0]).kind != "cut" or want.on(moved[0]).kind != "cut":
        return None
    axis = moved[0]
    old, new = have.on(axis), want.on(axis)
    if old.dim == new.dim or not is_innermost(have, axis) or not is_innermost(want, axis):
        return None
    kwargs = {
        "axis": axis, "num": mesh.size(axis), "dim": old.dim, "to_dim": new.dim,
        "outer": have.local_outer(axis, mesh), "to_outer": want.local_outer(axis, mesh),
    }  # fmt: skip
    return Step(collectives.all_to_all, kwargs, want)


def _leaving(have: Sharding, want: Sharding) -> list[str]:
    """Axes to all-gather, innermost first: on each dim all axes from the first on in which ``have``
    and ``want`` differ.
    """
    leaving = []
    for dim in sorted({layout.dim for _, layout in have.cuts()}):
        old, new = _on_dim(have, dim), _on_dim(want, dim)
        shared = 0
        while shared < min(len(old), len(new)) and old[shared] == new[shared]:
            shared += 1
        leaving += [axis for axis, _ in reversed(old[shared:])]
    return leaving


def reaches(made: Value, reader: Value) -> bool:
    """Whether a pipeline stage may read what another one has made.

    Values of the forward are sent to later stages, gradients to earlier ones.
    """
    if ANYWHERE in (made.stage, reader.stage):
        return True
    first, last = (made, reader) if made.phase != "B" else (reader, made)
    return first.stage <= last.stage
