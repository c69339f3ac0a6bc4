"""Where another dim than 0 was found for the batch of ranks' own rows, though dim 0 may be meant.

``nn.GRU(6, 8)`` without ``batch_first=True`` mixes what is along dim 0, so that dim 1 is found for
the batch of its input ``f32[4,5,6]``. A model that is sequence first returns its samples along that
dim too. Where one takes the mean along it, or the last of it, and returns as many rows as dim 0
has, the script means dim 0: ranks would be given results of each other's rows.

Where dim 0 is taken for the batch though samples mix along it, as ``out[:, -1]`` of such a model
costs as much along dim 1, that tells too: nobody computes along a dim of which all places but some
are then dropped, unless it is the samples'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partc.errors import PlanError
from partc.graph import Graph, value
from partc.graph.given_back import given_out, waits_for_script
from partc.passes.shard.find_batch import PlacesRead, places_read, results_along
from partc.plan import Cuts, Plan
from partc.plan.batch import MIXED_ROWS, OTHER_ROWS, is_pinned, layout_of
from partc.plan.sharding import Layout, R, cut


def check_rows(graph: Graph, cuts: Mapping[str, Cuts], plan: Plan) -> None:
    """PlanError where a script is given results that have as many rows as dim 0 of an input, and
    are computed from all of what was taken for its samples.
    """
    if not (others := _others(cuts, plan)) or not waits_for_script(graph):
        return
    rows = {value(graph.inputs[name]).shape[0]: name for name in others}
    along = results_along(graph, {name: layout_of(each) for name, each in cuts.items()})
    for result, node in given_out(graph).items():
        shape = value(node).shape
        name = rows.get(next(iter(shape), -1))
        if name is None or result not in along:
            continue
        samples = value(graph.inputs[name]).shape[others[name]] // layout_of(cuts[name]).outer
        if not _has_samples(along[result], shape, samples):
            raise _refused(name, others[name], result, shape[0])


def notes_on_other_rows(graph: Graph, cuts: Mapping[str, Cuts], plan: Plan) -> list[str]:
    """A note on each input that has as many rows as dim 0 of another one, and goes to every rank
    whole, as labels of samples would that the model has mixed.
    """
    shapes = {name: value(node).shape for name, node in graph.inputs.items()}
    whole = [n for n, x in cuts.items() if layout_of(x) == R and not is_pinned(n, plan)]
    return [
        f"{OTHER_ROWS}{name}, as samples mix along dim 0, and {other} of as many rows is taken "
        f"for the same on every rank. {for_batch_first(name, dim)}"
        for name, dim in _others(cuts, plan).items()
        for other in whole
        if shapes[other][:1] == shapes[name][:1]
    ]


def notes_on_mixed_rows(graph: Graph, cuts: Mapping[str, Cuts], plan: Plan) -> list[str]:
    """A note where samples mix along dim 0, and results are of some places of another dim alone;
    PlanError where the script computes its loss of these.
    """
    layouts = {name: layout_of(each) for name, each in cuts.items()}
    pins = {n: x for n, x in layouts.items() if is_pinned(n, plan) or x != cut(0)}
    found = places_read(graph, pins)
    if found is None:
        return []
    if waits_for_script(graph):
        raise _mixed(found)
    return [
        f"{MIXED_ROWS}{found.name} ({found.mixed_at}), those of all ranks, and of dim {found.dim} "
        f"some places alone are read ({found.read_at}). {_do_of_mixed(found.name)}"
    ]


def _others(cuts: Mapping[str, Cuts], plan: Plan) -> dict[str, int]:
    """The inputs whose batch was found along another dim than 0, each with that dim."""
    found = {n: layout_of(each) for n, each in cuts.items() if not is_pinned(n, plan)}
    return {name: layout.dim for name, layout in found.items() if layout.dim}


def _has_samples(layout: Layout, shape: Sequence[int], samples: int) -> bool:
    """Whether a cut is one of all samples; what was gathered may be cut along other rows again."""
    return layout.kind == "cut" and shape[layout.dim] // layout.outer == samples


def for_batch_first(name: str, dim: int) -> str:
    """What to do about an input whose batch was found along a dim, where dim 0 may be meant."""
    return (
        "If dim 0 is the batch, let the model take it so, as nn.GRU and nn.MultiheadAttention do "
        f'with batch_first=True. If dim {dim} is meant, pin it in the plan: [inputs] "{name}" = '
        f"{{ batch = {dim} }}."
    )


def _do_of_mixed(name: str) -> str:
    return (
        "If the model takes the sequence first, let it take the batch first, as nn.GRU and "
        "nn.MultiheadAttention do with batch_first=True. If samples are to mix, pin it in the "
        f'plan: [inputs] "{name}" = {{ batch = 0 }}.'
    )


def _mixed(found: PlacesRead) -> PlanError:
    return PlanError(
        where=f"input {found.name}",
        what=f"its samples mix along dim 0 ({found.mixed_at}), and of dim {found.dim}, along which "
        f"nothing mixes, some places alone are read ({found.read_at})",
        why="each rank's results would be computed from the rows of all ranks, and most of each "
        "row from nothing",
        do=_do_of_mixed(found.name),
    )


def _refused(name: str, dim: int, result: str, rows: int) -> PlanError:
    return PlanError(
        where=f"input {name}",
        what=f"dim {dim} is taken for the batch, as samples mix along dim 0; yet the result "
        f"{result} has {rows} rows, as dim 0",
        why=f"it is computed from all of dim {dim}: ranks would get results of each other's rows",
        do=for_batch_first(name, dim),
    )
