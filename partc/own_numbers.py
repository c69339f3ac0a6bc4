"""Numbers and texts among a step's results, where ranks are given samples of their own.

``{"logits": logits, "rows": len(x)}`` is traced with the samples of all ranks, and each rank gets
its own rows of the logits. So the step is traced once more with one rank's samples: what is another
number there follows from the rows, and is this rank's beside results that are its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from partc.errors import PartcError, PlanError, TraceError
from partc.passes.runner import Table
from partc.program import Program
from partc.trace.record import Source
from partc.trace.returns import LOSS
from partc.trace.trees import OF_ROWS, Tree, told
from partc.traced import Traced
from partc.whole_batch import resized

OF_RANK = "numbers_of_rank"  # a loss's attribute: what it returns is logged, as each rank's own


def with_own_numbers(program: Program, step: Traced, rows: Table) -> Program:
    """The program whose results have the numbers of one rank's samples.

    PlanError where a result is neither all ranks' nor this rank's: a number of rows beside both its
    own rows and sums over all, and as many results as there are rows.
    """
    tree = program.returns
    if tree is None or not program.dealt or not _may_follow_rows(tree, program):
        return program
    try:
        source = _of_one_rank(step, program)
        one = Traced(step.model, source.given, step.loss, step.kind).state(rows, fold=True)
    except TraceError as error:
        raise _unknown(program, tree, error) from None
    return replace(
        program, returns=_Joined(program, step.loss).tree(tree, one.made["source"].returns.tree)
    )


def _may_follow_rows(tree: Tree, program: Program) -> bool:
    """Whether it is worth a trace: there are numbers beside a rank's rows, or a list of rows."""
    cuts = ((name, dim) for name, each in program.dealt.items() for _, dim, _ in each)
    rows = {program.inputs[name][0][dim] for name, dim in cuts}
    parts = [*tree.parts()]
    lists = any(p.kind in ("tuple", "list", "dict") and len(p.entries) in rows for p in parts)
    return lists or (bool(program.results) and any(map(_is_number, parts)))


def _is_number(tree: Tree) -> bool:
    return tree.kind == "value" and tree.plain is not None


def _of_one_rank(step: Traced, program: Program) -> Source:
    """What is traced, with the samples of one rank."""
    source = Source.of(step.model, step.inputs, step.loss, step.kind)
    given = source.given
    pieces = [_piece(x, name, program) for name, x in zip(given.names, given.tensors, strict=True)]
    return replace(source, given=given.with_tensors(pieces))


def _piece(x: Tensor, name: str, program: Program) -> Tensor:
    shape = [*x.shape]
    for axis, dim, _ in program.dealt.get(name, ()):
        shape[dim] //= program.mesh.size(axis)
    return resized(x, shape)


class _Joined:
    """What is returned of all ranks' samples, with the numbers that one rank's have."""

    def __init__(self, program: Program, loss: object) -> None:
        self.program, self.is_logged = program, getattr(loss, OF_RANK, False)
        names = [*program.returns.names()] if program.returns else []
        self.of_all = [n for n in names if n != LOSS and n not in program.results]

    def tree(self, whole: Tree, one: Tree | None, where: str = "") -> Tree:
        """PlanError where a number belongs to several results, or the structures differ."""
        if whole == one:
            return whole
        if one is None or (one.kind, one.name, one.of) != (whole.kind, whole.name, whole.of):
            raise other_structure(_place(self.program, where))
        if whole.kind == "value":
            return self._number(whole, one, where)
        found: Mapping[object, Tree] = dict(one.entries)
        if [*found] != [key for key, _ in whole.entries]:
            raise other_structure(_place(self.program, where))
        entries = tuple(
            (key, self.tree(each, found[key], f"{where}.{key}")) for key, each in whole.entries
        )
        return replace(whole, entries=entries)

    def _number(self, whole: Tree, one: Tree, where: str) -> Tree:
        own = [n for n in self.program.returns.names() if n in self.program.results]  # type: ignore[union-attr]
        if not own:
            return whole  # beside sums over all ranks' rows
        if self.is_logged or not self.of_all:
            return replace(one, of=OF_ROWS)
        raise PlanError(
            where=_place(self.program, where),
            what=f"it is {told(one.plain)} for one rank's samples, and {told(whole.plain)} for "
            "those of all ranks",
            why=f"{own[0]} has this rank's rows, and {self.of_all[0]} is of all ranks' together: "
            "the number could be meant for either",
            do="Return it as a tensor that is computed from the samples, "
            "torch.ones_like(y).sum() for all of them; or leave it out, and take the rows of this "
            f"rank in the script, len({own[0]}).",
        )


def other_structure(where: str) -> PlanError:
    """The error for a step that returns other entries for one rank's samples than for all."""
    return PlanError(
        where=where,
        what="it has other entries for one rank's samples than for those of all ranks",
        why="each rank would be given a result of every rank's samples, as of the list [*logits]",
        do="Return one tensor with all rows, and take it apart in the script.",
    )


def _place(program: Program, where: str) -> str:
    return f"{program.model}, what it returns{', ' if where else ''}{where.removeprefix('.')}"


def _unknown(program: Program, tree: Tree, error: PartcError) -> PlanError:
    found = next((told(p.plain) for p in tree.parts() if _is_number(p)), "a list")
    return PlanError(
        where=_place(program, ""),
        what=f"whether {found} follows from the number of samples is not known",
        why=f"the step does not run on one rank's samples alone: {str(error).splitlines()[0]}",
        do="Return tensors alone.",
    )
