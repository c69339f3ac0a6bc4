"""The step of the global batch where the example inputs are one rank's piece of it.

In: a plan with ``batch = "local"``, and example inputs with one rank's samples. Out: a ``Traced``
of all data ranks' samples, and the plan with what was found of the batch's dims. Dim 0 is tried
first; where the model does not run so, one rank's step tells which dims are the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from partc.errors import PartcError, PlanError
from partc.graph import Graph
from partc.passes.runner import Table
from partc.passes.shard.apply_preset import check_has_dim
from partc.passes.shard.find_batch import Found, batch_of, entries, notes_on
from partc.passes.shard.other_rows import (
    check_rows,
    for_batch_first,
    notes_on_mixed_rows,
    notes_on_other_rows,
)
from partc.plan import Cuts, Plan
from partc.plan.batch import BATCH, is_pinned, layout_of, spread_batch
from partc.plan.mesh import Mesh
from partc.plan.sharding import R, cut, dtype_name
from partc.trace.fixed_rows import fixed_rows
from partc.trace.record import Source
from partc.traced import Traced


def step_of(
    model: nn.Module | Traced, inputs: Any, loss: Callable[..., Any] | None, mesh: Mesh, plan: Plan,
    rows: Table,
) -> tuple[Traced, Plan]:  # fmt: skip
    """The step that ``compile`` compiles, and its plan.

    Raises:
        PlanError: the mesh is open, so that nobody knows how many pieces there are; or two dims may
            be the batch.
        TraceError: as of ``Traced``; also if the model does not run on all ranks' samples together.
    """
    if plan.batch == "global" or inputs is None or isinstance(model, Traced):
        return Traced.of(model, inputs, loss), plan
    return _Pieces.of(model, inputs, loss, mesh, plan, rows).step()


def first_step(
    model: nn.Module, inputs: Any, loss: Callable[..., Any] | None, mesh: Mesh, plan: Plan,
    rows: Table,
) -> Traced:  # fmt: skip
    """The step that ``step_of`` traces first: that of all ranks' samples along dim 0."""
    if plan.batch == "global" or inputs is None:
        return Traced.of(model, inputs, loss)
    return _Pieces.of(model, inputs, loss, mesh, plan, rows).first()


@dataclass(frozen=True)
class _Pieces:
    """A step whose inputs are one rank's."""

    model: nn.Module
    inputs: Any
    loss: Callable[..., Any] | None
    mesh: Mesh
    plan: Plan
    rows: Table

    @classmethod
    def of(
        cls, model: nn.Module, inputs: Any, loss: Callable[..., Any] | None, mesh: Mesh,
        plan: Plan, rows: Table,
    ) -> _Pieces:  # fmt: skip
        """PlanError if the mesh is open: nobody knows how many pieces there are."""
        if mesh.is_open and plan.mesh is None:
            raise axes_open(mesh)
        return cls(model, inputs, loss, mesh.settled(plan.mesh), plan, rows)

    def first(self) -> Traced:
        """The step with the batch along dim 0, or where the plan says."""
        return self._of(self._usual_cuts())

    def step(self) -> tuple[Traced, Plan]:
        """The step of all ranks' samples, and the plan with an entry for every input."""
        usual = self._usual_cuts()
        step = self._of(usual)
        try:
            graph = self._graph(step)
        except PartcError as error:
            for_all = self._with_one_for_all(usual)
            if for_all is not None:
                return self._of(for_all), self._planned(for_all, ())
            found = self._found(self._graph(self._of({})), usual)
            if found is None:
                raise self._not_along(usual, error) from error
        else:
            found = self._found(graph, usual)
            if found is None:
                return step, self._planned(usual, notes_on_mixed_rows(graph, usual, self.plan))
        step = self._of(found)
        try:
            graph = self._graph(step)
        except PartcError as error:  # as of a mask with as many rows as there are samples
            raise self._not_along(found, error) from error
        # Again on the right shapes: [0, 35] of flat targets has the number of steps in it.
        cuts = self._found(graph, usual) or found
        check_rows(graph, cuts, self.plan)
        notes = [*notes_on(cuts), *notes_on_other_rows(graph, cuts, self.plan)]
        notes += notes_on_mixed_rows(graph, cuts, self.plan)
        return step, self._planned(cuts, notes)

    def _not_along(self, cuts: Mapping[str, Cuts], error: PartcError) -> PlanError:
        """The refusal of inputs that were joined along these dims, to all ranks' samples."""
        if (fixed := fixed_rows(self.source.given, self._frozen())) is not None:
            return fixed.refusal(error)
        whole = [n for n, each in cuts.items() if is_pinned(n, self.plan) and not each]
        dims = {n: x.dim for n, each in cuts.items() for x in each.values() if x != R}
        joined = [f"{name} along dim {dim}" for name, dim in dims.items()]
        joined += [f"{name} whole, by the plan" for name in whole]
        given = zip(self.source.given.names, self.source.given.tensors, strict=True)
        shapes = {name: x.shape for name, x in given}
        others = {n: layout_of(x) for n, x in cuts.items() if not is_pinned(n, self.plan)}
        found = ((n, x.dim) for n, x in others.items() if x.dim)  # R has none
        do = next((f"{for_batch_first(*each)} " for each in found), "")
        do += self._of_buffers(cuts, shapes) + _advice(cuts, shapes)
        if self._runs_without_pins():
            names = ", ".join(f'"{name}"' for name in self.plan.inputs)
            do = f"Take {names} out of the plan's [inputs]: without it the model runs on them."
        return PlanError(
            where="inputs",
            what="the model runs on one rank's samples, but not on those of all ranks "
            f"({', '.join(joined)})",
            why=str(error).partition("\n")[0],
            do=do,
        )

    def _of_buffers(self, cuts: Mapping[str, Cuts], given: Mapping[str, Sequence[int]]) -> str:
        """What to change where a buffer, as a hidden state, has one rank's rows."""
        for name, each in cuts.items():
            dims = {x.dim for x in each.values() if x != R}
            rows = given[name][min(dims)] if dims else 1
            spread = spread_batch(each, self.mesh).items()
            num = prod(self.mesh.size(axis) for axis, x in spread if x != R)
            for buffer, value in self.model.named_buffers():
                if rows > 1 and rows in value.shape:
                    return (
                        f"The buffer {buffer} {dtype_name(value.dtype)}{list(value.shape)} has one "
                        f"rank's rows: where each is of a sample, give it those of all ranks, "
                        f"{rows * num} in place of {rows}, the same on every rank. "
                    )
        return ""

    def _frozen(self) -> tuple[str, ...]:
        """Sentences on the tensors that one rank's step reads from outside; none where it fails."""
        try:
            return tuple(self._graph(self._of({})).frozen)
        except PartcError:
            return ()

    def _runs_without_pins(self) -> bool:
        """Whether what the plan says of inputs stands in the way."""
        if not self.plan.inputs:
            return False
        try:
            replace(self, plan=self.plan.changed(inputs={})).step()
        except PartcError:
            return False
        return True

    def _with_one_for_all(self, usual: Mapping[str, Cuts]) -> dict[str, Cuts] | None:
        """The entries where what has one row, as a mask ``bool[1,5,5]``, is for all samples; None
        where the model does not run so, or dim 0 is not the batch then.
        """
        given = self.source.given
        sizes = {n: x.shape[0] for n, x in zip(given.names, given.tensors, strict=True) if x.dim()}
        ones = [n for n, num in sizes.items() if num == 1 and not is_pinned(n, self.plan)]
        if not ones or len(ones) == len(sizes):
            return None
        cuts = {**usual, **{name: {} for name in ones}}
        try:
            graph = self._graph(self._of(cuts))
        except PartcError:
            return None
        return cuts if self._found(graph, cuts) is None else None

    @cached_property
    def source(self) -> Source:
        """The model with one rank's inputs, by name."""
        return Source.of(self.model, self.inputs, self.loss)

    def _found(self, graph: Graph, usual: Mapping[str, Cuts]) -> dict[str, Cuts] | None:
        """The entries of all inputs by what a graph shows; None if those are the usual ones."""
        pins = {n: layout_of(each) for n, each in usual.items() if is_pinned(n, self.plan)}
        found = batch_of(graph, pins)
        if found is None:
            return None
        found.check(self.plan)
        new = {n: x for n, x in found.batch.items() if n not in pins and not self._is_row(n, found)}
        return {**usual, **entries(new)} if new else None

    def _is_row(self, name: str, found: Found) -> bool:
        """Whether an input that could be whole is taken for one rank's samples all the same: it has
        as many rows as inputs that are cut, as one side of a contrastive loss has.
        """
        given = self.source.given
        sizes = {n: tuple(x.shape) for n, x in zip(given.names, given.tensors, strict=True)}
        rows = {sizes[n][x.dim] // x.outer for n, x in found.batch.items() if x != R}
        return found.batch[name] == R and bool(sizes[name]) and sizes[name][0] in rows

    def _planned(self, cuts: Mapping[str, Cuts], notes: Sequence[str]) -> Plan:
        own = {name: each for name, each in cuts.items() if not is_pinned(name, self.plan)}
        inputs = {**self.plan.inputs, **own}
        return self.plan.changed(inputs=inputs, notes=(*self.plan.notes, *notes))

    def _usual_cuts(self) -> dict[str, Cuts]:
        given = self.source.given
        shapes = zip(given.names, (x.shape for x in given.tensors), strict=True)
        return {name: self._usual(name, shape) for name, shape in shapes}

    def _usual(self, name: str, shape: Sequence[int]) -> Cuts:
        """The entry of the plan, or dim 0."""
        if is_pinned(name, self.plan):
            return self.plan.stored(name, self.plan.inputs)
        return {BATCH: cut(0)} if shape else {}

    def _graph(self, step: Traced) -> Graph:
        """The graph of a step; it is recorded as ``compile`` will ask for it."""
        return step.state(self.rows, fold=not self.plan.names_blocks).graph

    def _of(self, cuts: Mapping[str, Cuts]) -> Traced:
        """The step with inputs of all ranks that these cuts tell apart."""
        given = self.source.given
        whole = [
            _times(name, x, cuts.get(name, {}), self.mesh)
            for name, x in zip(given.names, given.tensors, strict=True)
        ]
        return Traced(self.model, given.with_tensors(whole), self.loss)


def _times(name: str, x: Tensor, cuts: Cuts, mesh: Mesh) -> Tensor:
    """A tensor without data for all ranks' pieces together, its dims in the same memory order."""
    shape = [*x.shape]
    for layout in cuts.values():
        check_has_dim(name, f"{dtype_name(x.dtype)}{shape}", x.dim(), layout)
    for axis, layout in spread_batch(cuts, mesh).items():
        if layout != R and axis in mesh.names:
            shape[layout.dim] *= mesh.size(axis)
    return resized(x, shape)


def resized(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor without data of another shape, its dims in the memory order of ``x``."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    made = torch.empty([shape[dim] for dim in order], dtype=x.dtype, device="meta")
    return made.permute([order.index(dim) for dim in range(x.dim())])


def axes_open(mesh: Mesh) -> PlanError:
    """The refusal of one rank's piece on a mesh whose axes are to be chosen."""
    return PlanError(
        where=f"mesh {mesh}",
        what='its axes are open, and the inputs are one rank\'s piece (batch="local")',
        why="how large the global batch is follows from the number of data ranks, which the search "
        "would choose",
        do='Give the mesh axes ("dp=8"), or all ranks the whole batch (batch="global").',
    )


def _advice(cuts: Mapping[str, Cuts], given: Mapping[str, Sequence[int]]) -> str:
    """What to change where inputs of these shapes do not join along these dims."""
    dims = {n: x.dim for n, each in cuts.items() for x in each.values() if x != R}
    rows = {given[name][dim] for name, dim in dims.items()}
    of_one, say = "", "Say"
    if len(rows) == 1 and rows != {1}:
        of_one = f"If the model or its loss has {min(rows)}, one rank's rows, as a number, take it "
        of_one, say = of_one + f"from a tensor, len({next(iter(dims))}). ", "Else say"
    wide = [name for name, dim in dims.items() if dim == 0 and len(given[name]) > 1]
    first = [*wide, *([] if wide else dims), "x"][len(wide) - 1 if wide else 0]
    which = f'; and which dim is the batch: "{first}" = {{ batch = 1 }}' if wide else ""
    return (
        f"{of_one}{say} in the plan what is no batch (a mask, a table) and given to every rank "
        + f'alike: [inputs] "{first}" = {{}}{which}. '
        + "Or give examples of several samples." * (1 in rows)
    ).strip()
