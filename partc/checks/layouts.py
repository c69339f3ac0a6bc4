"""Check call by call that the layouts noted on a local graph follow from the operands' layouts.

The shardings of parameters, buffers and inputs are taken as given. On each mesh axis, an op must be
replicated throughout or match a strategy of the op's rule. A collective must change the layout on
its own axis as its kind says: an all-reduce over tp ``{U:tp}`` -> replicated.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence

from torch import fx
from torch._subclasses import FakeTensorMode

from partc.checks.calls import result_nodes, wrong
from partc.checks.draws import check_draw
from partc.checks.pieces import check_piece, is_piecewise
from partc.checks.rows import check_order, check_rows, rows_made
from partc.checks.whole_twin import whole_twin
from partc.errors import CheckError
from partc.graph import (
    Graph,
    Origin,
    collectives,
    fake_of,
    is_tensor,
    layout_on,
    literals,
    ops,
    results_of,
    tensor_args,
    typed,
    value,
)
from partc.graph.draws import draws_numbers
from partc.graph.given_back import is_given_back
from partc.graph.moves import Move, moves
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, M, R, Sharding, U, cut
from partc.rules import strategies_for
from partc.rules.local_batch_norm import fits_locally
from partc.rules.rows import SORTS, alike, has_rows, rows_known
from partc.rules.table import name_of

MOVES = (*collectives.COLLECTIVES, *collectives.LOCAL)


def check_layouts(graph: Graph) -> None:
    """Raise CheckError at the first call whose noted layout does not follow from its operands."""
    sound: set[Hashable] = set()  # of calls that passed: equal ones need no second check
    sorted_by: dict[int, Hashable] = {}
    drawn: dict[str, fx.Node] = {}
    with FakeTensorMode():  # the twins of calls on whole tensors are fakes
        for node in graph.calls():
            if node.target in SORTS and value(node).rows is not None:
                check_order(node, sorted_by)
            if draws_numbers(node):
                check_draw(node, drawn)
            if node.target is collectives.wait:
                _check_wait(node)
            elif node.target in MOVES:
                _check_moves(node, graph.mesh)
            elif node.target is ops.window:
                _check_window(node, graph.mesh)
            elif is_piecewise(node):
                check_piece(node)
            elif is_given_back(node):
                _check_given_back(node)
            elif node.target not in (operator.getitem, collectives.axis_index):
                circumstances = _circumstances(node)
                if circumstances not in sound:
                    _check_call(node, graph.mesh)
                    sound.add(circumstances)


def _check_given_back(node: fx.Node) -> None:
    """Check that results are finished, and that each gradient lies as its result."""
    results = result_nodes(node)
    for given, back in zip(tensor_args(node)[: len(results)], results, strict=True):
        lies = value(given).sharding
        if any(layout.kind not in ("cut", "R") for _, layout in lies.layouts):
            raise wrong(node, f"{typed(given)} is not finished", "Reduce it before.")
        if back is not None and typed(back) != typed(given):
            raise wrong(node, "a gradient lies as its result", f"Make it {typed(given)}.")


def _circumstances(node: fx.Node) -> Hashable:
    """Everything that decides the check of a call, so that equal calls are checked once."""
    operands = tuple(_known(n) for n in tensor_args(node))
    outs = tuple(None if n is None else _known(n) for n in result_nodes(node))
    results = tuple(
        None if fake is None else (tuple(fake.shape), fake.dtype) for fake in results_of(node)
    )
    windows = tuple(windows_of(node).items())
    is_local = value(node).origin is Origin.LOCAL_STATISTICS
    rows = alike([*rows_known(node), *rows_made(result_nodes(node))]) if has_rows(node) else ()
    return node.target, literals(node), operands, outs, results, windows, is_local, rows


def _known(node: fx.Node) -> Hashable:
    """A value's whole shape, dtype and sharding, and its shape and dtype on this rank."""
    known, fake = value(node), fake_of(node)
    here = (tuple(fake.shape), fake.dtype) if is_tensor(node) else repr(fake)
    return known.shape, known.dtype, known.sharding, here


def _check_wait(node: fx.Node) -> None:
    (operand,) = tensor_args(node)
    if typed(operand) != typed(node):
        raise wrong(node, "a wait changes nothing", "Give its result the type of its operand.")


def _check_moves(node: fx.Node, mesh: Mesh) -> None:
    """Check a collective's axis, and the change of layout of every tensor that it moves."""
    axis, num = str(node.kwargs["axis"]), node.kwargs["num"]
    if axis not in mesh.names or mesh.size(axis) != num:
        raise wrong(node, f"mesh {mesh} has no axis {axis} of {num} ranks", "Take its own axis.")
    for move in moves(node):
        if move.result is not None:
            _check_move(node, move, move.result, mesh)
            _check_dtype(node, move, move.result)


def _is_of_every_piece(have: Sharding, want: Sharding, axis: str, mesh: Mesh) -> bool:
    """Whether ``have`` is a rank's part of every piece that ``axis`` makes, ``want`` that of one.

    So it is with a rank's rows of all microbatches and of one.
    """
    return want.with_(axis, R, mesh) != have == want.without([axis], mesh)


def _check_dtype(node: fx.Node, move: Move, result: fx.Node) -> None:
    """Check that a collective changes no dtype, except a gather that says to which."""
    if value(result).dtype != move.kwargs.get("dtype", value(move.operand).dtype):
        raise wrong(node, "it casts only where it names a dtype", "Correct the result's dtype.")


def _check_move(node: fx.Node, move: Move, result: fx.Node, mesh: Mesh) -> None:
    """Check that a tensor's layout changes on the collective's axis only, as its kind says."""
    axis = move.kwargs["axis"]
    have, want = value(move.operand).sharding, value(result).sharding
    before, after = _meaning(move, have, want, mesh)
    on = have.on(axis)
    if on != before:
        why = f"on {axis} its operand {move.operand.name} lies as {on}, and it needs {before}"
        raise wrong(node, why, "Use the collective that fits, once, over the right axis and dim.")
    if move.target is collectives.keep_piece and _is_of_every_piece(have, want, axis, mesh):
        outer = move.kwargs.get("outer", 1)
        if want.on(axis) == after and want.local_outer(axis, mesh) == outer:
            return
    if move.target is collectives.collect and _is_of_every_piece(want, have, axis, mesh):
        return
    if want != have.with_(axis, after, mesh) or value(move.operand).shape != value(result).shape:
        why = f"it makes {axis} {after} and leaves the other axes alone"
        raise wrong(node, why, "Correct its note, axis or dim.")
    for side in (have, want):
        if side.on(axis).kind == "cut" and not _innermost(side, axis):
            why = f"another axis cuts inside {axis}'s pieces, so they are not neighbours"
            raise wrong(node, why, "Move the inner cut first.")


def _meaning(move: Move, have: Sharding, want: Sharding, mesh: Mesh) -> tuple[Layout, Layout]:
    """The layouts on a collective's axis before and after: all-reduce ``U -> replicated``."""
    named = move.kwargs
    axis = named["axis"]
    if move.target is collectives.all_reduce:
        return (M if named.get("op") == "max" else U), R
    if move.target is collectives.accumulate:
        return U, R
    if move.target is collectives.keep_first:
        return R, U
    if move.target in (collectives.all_gather, collectives.collect):
        return _cut(have, axis, named["dim"], named.get("outer", 1), mesh), R
    if move.target is collectives.all_to_all:
        before = _cut(have, axis, named["dim"], named.get("outer", 1), mesh)
        return before, _cut(want, axis, named["to_dim"], named.get("to_outer", 1), mesh)
    after = _cut(want, axis, named["dim"], named.get("outer", 1), mesh)
    return (U if move.target is collectives.reduce_scatter else R), after


def _cut(sharding: Sharding, axis: str, dim: int, local_outer: int, mesh: Mesh) -> Layout:
    """The layout of the whole tensor that a collective's local ``dim`` and ``outer`` mean."""
    layout = sharding.on(axis)
    if layout.kind != "cut" or sharding.local_outer(axis, mesh) != local_outer:
        return cut(dim, local_outer)
    return cut(dim, layout.outer)


def _innermost(sharding: Sharding, axis: str) -> bool:
    dim = sharding.on(axis).dim
    return [a for a, layout in sharding.cuts() if layout.dim == dim][-1] == axis


def _check_call(node: fx.Node, mesh: Mesh) -> None:
    """Check that on each axis a call is replicated, or sharded by a strategy of its rule."""
    outs, windows = result_nodes(node), windows_of(node)
    if any(rows_made(outs)):
        check_rows(node, outs)
    for axis in mesh.names:
        ins = [layout_on(n, axis) for n in tensor_args(node)]
        noted = [None if n is None else layout_on(n, axis) for n in outs]
        # replicated operands give a replicated result, so no rule is asked
        if axis not in windows and all(layout in (None, R) for layout in [*ins, *noted]):
            continue
        seen = {(i, x) for i, x in enumerate([*ins, *noted]) if x is not None and x.kind == "cut"}
        fitting = [
            s
            for s in strategies_for(whole_twin(node, outs), mesh.size(axis), seen)
            if _fits(s.ins, ins) and _fits(s.outs, noted)
        ]
        # no strategy of a rule: statistics of a piece differ from those of the whole batch
        if value(node).origin is Origin.LOCAL_STATISTICS and fits_locally(node, ins, noted):
            continue
        if not any(s.variant == ("window" if axis in windows else "") for s in fitting):
            raise _unruled(node, axis, ins, noted, bool(fitting), axis in windows)
        if axis in windows:
            operands = [*zip(tensor_args(node), ins, strict=True)]
            _check_rows(node, axis, windows[axis], operands)


def _unruled(
    node: fx.Node, axis: str, ins: Sequence[Layout], outs: Sequence[Layout | None],
    fits: bool, windowed: bool,
) -> CheckError:  # fmt: skip
    """The error for a call whose layouts on an axis match no strategy of its rule."""
    text = ", ".join(map(str, ins))
    made = ", ".join("-" if x is None else str(x) for x in outs)
    if fits or windowed:
        counts = (
            "counts its indices from this rank's rows" if windowed else "has indices of the whole"
        )
        why = f"on {axis} it {counts}, and that is not how ({text}) is cut"
        return wrong(node, why, "Put a window on its indices exactly where the rows are cut.")
    why = f"on {axis} no rule of {name_of(node.target)} takes ({text}) to ({made})"
    return wrong(node, why, "Finish sums before ops that are not linear in them; reshard operands.")


# windows: indices counted from this rank's first row ---------------------------------------------
def windows_of(node: fx.Node) -> dict[str, int]:
    """The axes on which a call reads a window, with the rows per rank of each.

    A window is an index tensor with this rank's first row subtracted, for a table sharded by rows.
    """
    found: dict[str, int] = {}
    for operand in tensor_args(node):
        while operand.target is ops.window:
            index = operand.args[1]
            assert isinstance(index, fx.Node)
            found[str(index.kwargs["axis"])] = int(str(operand.args[2]))
            operand = tensor_args(operand)[0]
    return found


def _check_window(node: fx.Node, mesh: Mesh) -> None:
    """Check a window: its layout is that of its indices, and windows divide rows axis by axis."""
    operand, index = tensor_args(node)
    if index.target is not collectives.axis_index or index.kwargs["num"] != mesh.size(
        str(index.kwargs["axis"])
    ):
        raise wrong(node, f"{index.name} is no rank's place on an axis", "Take axis_index.")
    if typed(operand) != typed(node):
        raise wrong(node, "a window lies as its indices do", "Give it the type of its operand.")
    rows = int(str(node.args[2]))
    if operand.target is ops.window and operand.args[2] != rows * int(str(index.kwargs["num"])):
        why = f"{rows} rows on each rank are not the {operand.args[2]} of the window before"
        raise wrong(node, why, "Divide the rows by one axis after the other.")


def _check_rows(
    node: fx.Node, axis: str, rows: int, operands: Sequence[tuple[fx.Node, Layout]]
) -> None:
    """Check that a window has as many rows as this rank's shard of the table."""
    cuts = [(n, layout.dim) for n, layout in operands if layout.kind == "cut"]
    results = [(n, layout_on(n, axis).dim) for n in [node] if layout_on(n, axis).kind == "cut"]
    held_rows = {fake_of(n).shape[dim] for n, dim in [*cuts, *results]}
    # windows over several axes divide the rows one after the other: the last has the fewest
    last = min(windows_of(node).values())
    if held_rows != {last} or rows % last:
        why = f"the window has {last} rows, and this rank holds {sorted(held_rows)}"
        raise wrong(node, why, "Give the window the rows of this rank's piece.")


def _fits(rule: Sequence[Layout], noted: Sequence[Layout | None]) -> bool:
    pairs = zip(rule, noted, strict=True)
    return all(mine is None or mine == layout for layout, mine in pairs)
