"""Which part of the batch is whose: the axes that deal out samples, and what one rank is given.

With ``batch = "global"`` a step is given the whole batch on every rank, with ``"local"`` the rank's
piece. A piece is cut along data axes alone: ranks that differ on another axis (tensor or context
parallelism, pipeline stages) are given the same piece, and cut it further themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from partc.plan import Cuts, Plan, fits
from partc.plan.mesh import ISLAND, MICROBATCH_AXIS, PP, TP, Mesh, layout_mesh
from partc.plan.sharding import Layout, R, Sharding

DATA_AXES = ("dp", "dp_replicate", "dp_shard", "fsdp")  # that presets know
# along these no rank has samples of its own, of the batch of its island
MODEL_AXES = (ISLAND, PP, TP, "cp", "ep", MICROBATCH_AXIS)
BATCH = "batch"  # in [inputs]: all data axes, and microbatches, whatever their names
BY_PLACE = (
    "with the rows of all ranks one behind the other, rows are taken by their place: "  # note
)
ONE_RANKS = "the loss divides by "  # note
OTHER_ROWS = "another dim than 0 is taken for the batch of "  # note
ROWS_MEET = "rows of different ranks meet in "  # note
MIXED_ROWS = "samples mix along dim 0 of "  # note
Dealt = tuple[tuple[str, int, int], ...]  # (axis, dim, outer) in the order they are applied


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which ranks may have samples of their own, in mesh order."""
    return tuple(axis for axis in mesh.names if axis not in MODEL_AXES)


def spread_batch(cuts: Cuts, mesh: Mesh) -> Cuts:
    """An entry of ``[inputs]`` with the axes of a mesh in place of ``batch``.

    Microbatches are cut as data axes are, where the entry does not say it.
    """
    cuts = dict(cuts)
    if BATCH in cuts and BATCH not in mesh.names:
        layout = cuts.pop(BATCH)
        known = {axis: layout for axis in mesh.names if axis in (*DATA_AXES, MICROBATCH_AXIS)}
        return {**known, **cuts}
    samples = layout_of(cuts)
    if MICROBATCH_AXIS in mesh.names and MICROBATCH_AXIS not in cuts and samples != R:
        cuts[MICROBATCH_AXIS] = samples
    return cuts


def layout_of(cuts: Cuts) -> Layout:
    """How an entry of ``[inputs]`` cuts the batch; R if it does not."""
    named = (layout for axis, layout in cuts.items() if axis not in MODEL_AXES)
    return next(named, R)


def without_axes(inputs: Mapping[str, Cuts]) -> dict[str, Cuts]:
    """Entries of ``[inputs]`` for any data axes: ``{ dp = 1 }`` becomes ``{ batch = 1 }``."""
    found: dict[str, Cuts] = {}
    for name, cuts in inputs.items():
        kept = {axis: layout for axis, layout in cuts.items() if axis in (TP, "cp", "ep")}
        samples = layout_of(cuts)
        found[name] = kept if samples == R else {BATCH: samples, **kept}
    return found


def is_pinned(name: str, plan: Plan) -> bool:
    """Whether a plan says how an input is cut."""
    return any(fits(pattern, name) for pattern in plan.inputs)


def given(name: str, plan: Plan, mesh: Mesh) -> Sharding:
    """The layout in which a rank is given an input; ``mesh`` has the axes of layouts."""
    if plan.batch == "global":
        return Sharding()
    inside = [axis for axis in mesh.names if axis not in data_axes(mesh)]
    return Sharding.of(plan.stored(name, plan.inputs), mesh).without(inside, mesh)


def sequence_dim(said: int, taken: Collection[int]) -> int:
    """The dim of an activation that sequence parallelism scatters, where the plan says ``said``.

    ``taken`` are the dims that other axes cut. Sequence first, as inside of
    ``nn.MultiheadAttention``, the dim that the plan says has the samples, which data axes cut: the
    sequence is then the first of the other dims. To cut the samples once more would move those of
    every rank, since the later axis has the outer pieces.

    >>> sequence_dim(1, {0}), sequence_dim(1, {1}), sequence_dim(0, {0})
    (1, 0, 1)
    """
    return int(said == 0) if said in taken else said


def dealt(plan: Plan, names: Iterable[str]) -> dict[str, Dealt]:
    """How a rank's piece of each input is cut from the global batch; none for a whole input."""
    assert plan.mesh is not None
    mesh, found = layout_mesh(plan.mesh, plan.microbatches), {}
    for name in names:
        layout = given(name, plan, mesh)
        cuts = ((a, each.dim, layout.local_outer(a, mesh)) for a, each in layout.cuts())
        found[name] = tuple(cuts)
    return {name: cuts for name, cuts in found.items() if cuts}
