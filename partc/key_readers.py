"""What of a compiled step a plan's keys speak of: its weights in shards, transfers, blocks, draws.

``idle_keys.py`` asks, for every key that a plan says, whether there is anything that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from partc.cost.step_events import Move, StepEvents
from partc.graph import Graph, collectives, value
from partc.graph.draws import draws_of
from partc.graph.moves import carried, kind_of
from partc.passes.overlap.bucket_collectives import (
    Groups,
    copied_bytes,
    groups_of,
    largest_forms,
    leading,
    ways_out,
    worth_copying,
)
from partc.passes.overlap.hierarchical_all_reduce import axes_of, pairs
from partc.passes.overlap.take_turns import awaited_in_blocks, in_turns
from partc.passes.recompute.recompute_attention import has_attention
from partc.passes.recompute.recompute_regions import has_blocks
from partc.passes.runner import State, run
from partc.passes.shard.local_batch_norm import has_batch_norm
from partc.passes.stages.choose_stages import is_pipeline
from partc.plan import Plan
from partc.plan.batch import sequence_dim

TELLS = "tells"  # of what passes made: whether somebody will ask what reads a key
LOCAL = "local"  # and the state of the graph of one rank, nothing joined in it


def keep_local(state: State) -> None:
    """Keep the graph of one rank as it is, before its transfers are joined and moved."""
    if state.made[TELLS]:
        state.made[LOCAL] = state.copied()


@dataclass(frozen=True)
class Compiled:
    """A step that is compiled: the plan that was asked for, and the state that was printed."""

    asked: Plan
    state: State

    @property
    def plan(self) -> Plan:
        return self.state.plan

    @cached_property
    def local(self) -> State:
        """The state of the graph of one rank, in which every transfer is still on its own."""
        found: State = self.state.made[LOCAL]
        return found

    # the plan -------------------------------------------------------------------------------------
    @property
    def pipelined(self) -> bool:
        return is_pipeline(self.plan, self.state.mesh)

    @property
    def trains(self) -> bool:
        return self.local.graph.loss is not None

    @property
    def pieces(self) -> int:
        """In how many pieces the batch is computed, on ranks and one after the other."""
        num = self.plan.microbatches
        for axis in self.plan.batch_axes:
            num *= self.state.mesh.size(axis)
        return num

    def stores_cut(self, *axes: str) -> bool:
        """Whether a weight is stored in shards over one of these axes."""
        sizes = self.state.mesh.size
        wide = {axis for axis in axes if sizes(axis) > 1}
        return any(wide & {*cuts} for cuts in self.plan.params.values())

    # the graph of one rank ------------------------------------------------------------------------
    @cached_property
    def draws(self) -> bool:
        return bool(draws_of(self.local.graph))

    @cached_property
    def batch_norms(self) -> bool:
        return has_batch_norm(self.local.graph)

    @cached_property
    def blocks(self) -> bool:
        return has_blocks(self.local.graph)

    @property
    def has_axes(self) -> bool:
        """Whether the mesh has an axis along which tensors may be cut, or one rank alone."""
        mesh = self.state.mesh
        return mesh.num_ranks == 1 or bool(mesh.cutting_axes().axes)

    @cached_property
    def attention(self) -> bool:
        return has_attention(self.local.graph)

    def scattered(self, axis: str, dim: int) -> bool:
        """Whether an activation, of three dims or more, is reduce-scattered over an axis along a
        dim, or along the one that stands for it where other axes cut the dim; or summed and then
        cut so.
        """
        graph = self.local.graph
        gradients = ways_out(graph)
        return any(
            (node.target is collectives.reduce_scatter or _keeps_a_piece_of_a_sum(node))
            and node.kwargs["axis"] == axis
            and node.kwargs["dim"] in (dim, sequence_dim(dim, _cut_by_others(node, axis)))
            and node not in gradients
            and len(value(node).shape) > 2
            for node in graph.calls()
        )

    # its transfers, before they are joined --------------------------------------------------------
    @cached_property
    def single(self) -> list[Graph]:
        """The graphs of all stages, their gradients summed over one axis after the other."""
        return self._stages(self.plan.changed(hierarchical={}))

    @cached_property
    def apart(self) -> list[Graph]:
        """The graphs of all stages as their transfers are joined, or not."""
        return self._stages(self.plan)

    def _stages(self, plan: Plan) -> list[Graph]:
        copy = self.local.copied()
        copy.plan = plan
        if not self.pipelined:
            run(copy, "share_gathers", "hierarchical_all_reduce")
            return [run(copy, "take_turns").graph]
        kinds = self.state.made["staged"].step.schedule.kinds
        copy.made |= {"split_backward": "W" in kinds, "phased": True}
        return run(copy, "take_turns", "hierarchical_per_stage").stages

    @cached_property
    def summed_over_both(self) -> set[frozenset[str]]:
        """The pairs of axes over which a gradient is summed."""
        return {frozenset(axes_of(x)) for graph in self.single for x in pairs(graph).values()}

    @cached_property
    def awaited(self) -> bool:
        """Whether a block waits for sums of activations."""
        return any(awaited_in_blocks(graph) for graph in self.single)

    @cached_property
    def copied(self) -> set[tuple[str, str]]:
        """Axes and kinds of the transfers that a bucket would copy something of."""
        nodes = map(leading, (n for groups in self._groups for nodes in groups for n in nodes))
        return {(_axis(node), kind_of(node)) for node in nodes if copied_bytes(node)}

    @cached_property
    def in_parts(self) -> set[str]:
        """The axes over which several gradients of a block are summed together."""
        return {
            axis
            for graph in self.apart
            for axis in largest_forms(
                graph, worth_copying(groups_of(graph, self.plan)[1], self.plan)
            )
        }

    @cached_property
    def joined(self) -> bool:
        """Whether there are transfers that a bucket may join."""
        in_graph = any(len(nodes) > 1 for groups in self._groups for nodes in groups)
        return in_graph or any(
            value(node).phase == "E" for graph in self.apart for node in ways_out(graph)
        )

    @cached_property
    def _groups(self) -> list[Groups]:
        return [groups for graph in self.apart for groups in groups_of(graph, self.plan)]

    # what was printed -----------------------------------------------------------------------------
    @cached_property
    def turned(self) -> list[Graph]:
        """The graphs with blocks that are computed in pieces."""
        return [graph for graph in self.state.stages or [self.state.graph] if in_turns(graph)]

    def crosses_in_turns(self, axis: str) -> bool:
        """Whether something crosses an axis in a step whose blocks are computed in pieces."""
        return any(axis == each for graph in self.turned for each in _axes(graph))

    @property
    def _tapes(self) -> list[StepEvents]:
        return [*self.state.made["tapes"].values()]

    @cached_property
    def moves(self) -> list[Move]:
        return [move for tape in self._tapes for move in tape.moves]

    @cached_property
    def gathers_ahead(self) -> bool:
        """Whether a loop over blocks gathers their weights."""
        return any(run.gathers for tape in self._tapes for run in tape.runs)


def _cut_by_others(node: fx.Node, axis: str) -> set[int]:
    """The dims of a value that other axes cut."""
    return {layout.dim for other, layout in value(node).sharding.cuts() if other != axis}


def _keeps_a_piece_of_a_sum(node: fx.Node) -> bool:
    """Whether a rank keeps its piece, along an axis, of what was summed over that axis before."""
    if node.target is not collectives.keep_piece:
        return False
    before: fx.Node | None = node.all_input_nodes[0]
    while before is not None and before.target is not collectives.all_reduce:
        before = carried(before)
    return before is not None and _axis(before) == _axis(node)


def _axis(node: fx.Node) -> str:
    return str(node.kwargs["axis"])


def _axes(graph: Graph) -> Iterator[str]:
    for node in graph.calls():
        if node.target in collectives.COLLECTIVES:
            yield _axis(node)
