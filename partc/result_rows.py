"""Along which dim a result has ranks' rows, where the model mixes the rows of all.

Where no sample is moved, a result's sharding follows from the inputs' and tells which rows are
whose. A sum over all rows up to each (``x.cumsum(0)``), or a recurrent layer that runs over them,
needs all of them on every rank, and what comes behind it may be computed whole, or in pieces of
features. So the step is traced once more with one rank's rows: the dim that is so many times
shorter then is the rows'. A result without one is of all rows together, and every rank has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import fx

from partc.errors import PartcError, PlanError
from partc.graph import Graph, value
from partc.graph.given_back import given_out, waits_for_script
from partc.own_numbers import other_structure
from partc.passes.runner import Table
from partc.passes.shard.find_batch import moved_results
from partc.plan import Plan
from partc.plan.batch import BATCH, data_axes, is_pinned, layout_of, spread_batch
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, R, cut, dtype_name
from partc.trace.record import Source
from partc.traced import Traced
from partc.whole_batch import resized


def rows_of_results(
    step: Traced, graph: Graph, plan: Plan, mesh: Mesh, rows: Table
) -> dict[str, Layout]:
    """The layout, along each axis of ranks' own rows, of the results of which nothing else tells.

    PlanError where samples were moved on the way to a result, and no dim or several may have its
    rows.
    """
    results = given_out(graph)
    if plan.batch != "local" or not results:
        return {}
    dealt = _Dealt.of(graph, plan, mesh)
    if dealt.ranks < 2:
        return {}
    moved = moved_results(graph, dealt.layouts)
    if not (asked := {name: node for name, node in results.items() if name in moved}):
        return {}
    alone, why = _shapes_alone(step, dealt, rows)
    return {
        name: dealt.rows(asked[name], alone.get(name), name, why, waits_for_script(graph))
        for name in asked
    }


def _shapes_alone(
    step: Traced, dealt: _Dealt, rows: Table
) -> tuple[Mapping[str, tuple[int, ...]], str]:
    """The shapes of results of one rank's rows; none, and why, where the step does not run so."""
    source = Source.of(step.model, step.inputs, step.loss, step.kind)
    given = source.given
    pairs = zip(given.names, given.tensors, strict=True)
    pieces = [resized(x, dealt.piece(name, x.shape)) for name, x in pairs]
    try:
        one = Traced(step.model, given.with_tensors(pieces), step.loss, step.kind)
        found = one.state(rows, fold=True).graph.outputs.results
    except PartcError as error:
        said = str(error).partition("\n")[0]
        return {}, f"the step does not run on one rank's rows alone: {said}"
    return {name: value(node).shape for name, node in found.items()}, ""


@dataclass(frozen=True)
class _Dealt:
    """How the rows of inputs are dealt out. ``layouts``: of each input. ``shares``: in how many
    pieces. ``num_rows``: how many rows one rank may have.
    """

    layouts: dict[str, Layout]
    shares: Mapping[str, int]
    num_rows: frozenset[int]

    @classmethod
    def of(cls, graph: Graph, plan: Plan, mesh: Mesh) -> _Dealt:
        shapes = {name: value(node).shape for name, node in graph.inputs.items()}
        cuts = {
            name: plan.stored(name, plan.inputs) if is_pinned(name, plan)
            else {BATCH: cut(0)} if shape else {}
            for name, shape in shapes.items()
        }  # fmt: skip
        layouts = {name: layout_of(each) for name, each in cuts.items()}
        axes = data_axes(mesh)
        shares = {
            name: prod(mesh.size(a) for a, x in spread_batch(each, mesh).items()
                       if a in axes and x.kind == "cut")
            for name, each in cuts.items()
        }  # fmt: skip
        rows = {
            shapes[name][x.dim] // x.outer // shares[name]
            for name, x in layouts.items() if x.kind == "cut"
        }  # fmt: skip
        return cls(layouts, shares, frozenset(rows))

    @property
    def ranks(self) -> int:
        return max(self.shares.values(), default=1)

    def piece(self, name: str, shape: Sequence[int]) -> list[int]:
        """The shape of one rank's piece of an input."""
        piece = [*shape]
        if (layout := self.layouts.get(name, R)) != R:
            piece[layout.dim] //= self.shares[name]
        return piece

    def rows(
        self, node: fx.Node, alone: Sequence[int] | None, name: str, why: str, waits: bool
    ) -> Layout:
        """Where a result has its rows, given its shape for one rank's; R without any."""
        shape = value(node).shape
        if alone is None and not why:
            raise other_structure(f"the result {name} ({value(node).source})")
        if alone is None or len(alone) != len(shape):
            raise _unknown(node, name, why or _other_dims(alone or (), shape), waits)
        longer = [dim for dim, (n, one) in enumerate(zip(shape, alone, strict=True)) if n != one]
        if not longer:
            return R
        if len(longer) == 1:
            [dim] = longer
            if alone[dim] in self.num_rows and shape[dim] == alone[dim] * self.ranks:
                return cut(dim)
        raise _unknown(node, name, _other_sizes(alone, shape, longer), waits)


def _other_dims(alone: Sequence[int], shape: Sequence[int]) -> str:
    return f"of one rank's rows it is {[*alone]}, and {[*shape]} of those of all"


def _other_sizes(alone: Sequence[int], shape: Sequence[int], dims: Sequence[int]) -> str:
    named = " and ".join(f"dim {dim}" for dim in dims)
    many = "both follow from them" if len(dims) > 1 else "is no dim of whole rows"
    return f"{_other_dims(alone, shape)}: {named} {many}"


def _unknown(node: fx.Node, name: str, why: str, waits: bool) -> PlanError:
    known = value(node)
    return PlanError(
        where=f"the result {name} ({known.source})",
        what=f"which dim of {dtype_name(known.dtype)}{[*known.shape]} has a rank's own rows is not "
        "known, as rows of different ranks meet in what it is computed from",
        why=why,
        do=" ".join(_advice(waits)),
    )


def _advice(waits: bool) -> Iterator[str]:
    yield 'Let every rank have the results of all rows: batch="global".'
    if waits:
        yield "Or give the loss to partc, loss=loss_of of def loss_of(model, x, y), which sees all."
    else:
        yield "Or leave it out of what is returned."
    yield "If rows are not to meet, as in nn.GRU without it, write batch_first=True."
