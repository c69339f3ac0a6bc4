"""Turn a graph with shardings into the local graph of one rank.

Values get the size of this rank's shard. Where a call reads a value in another sharding than it was
made in, collectives are inserted: ``f32[8@dp,64] -> all_gather -> f32[8,64]``.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from partc.graph import (
    Graph,
    Origin,
    Outputs,
    Value,
    changed,
    collectives,
    fake_of,
    picked,
    results_of,
    set_fake,
    set_value,
    tensor_args,
    value,
)
from partc.graph.casts import is_cast, widens
from partc.graph.graph_edits import name_as_before, run_fake
from partc.graph.input_only import input_only
from partc.passes.shard.cast_weights import cast_weights
from partc.passes.shard.microbatches import (
    check_microbatches,
    for_all_microbatches,
    in_pieces,
    until_last,
)
from partc.passes.shard.price import Choices
from partc.passes.shard.propagate import pinned, placed
from partc.passes.shard.reshard import Step, reaches, reshard_steps, transition_cost
from partc.passes.shard.results import sharding_of_result
from partc.passes.shard.settle_modules import drop_unused, settle_modules
from partc.passes.shard.zeros import is_zero, zeros_in
from partc.plan import Plan
from partc.plan.batch import given
from partc.plan.mesh import MICROBATCH_AXIS
from partc.plan.sharding import R, Sharding, U
from partc.rules import Strategy, write_local_call
from partc.rules.local_batch_norm import VARIANT, keeps_first


def insert_collectives(graph: Graph, plan: Plan, choices: Choices) -> Graph:
    """Write the local graph: ``value`` of a node has the global shape, ``fake_of`` the local one.

    PlanError if a call needs all microbatches at once.
    """
    return _Partition(graph, plan, choices).build()


@dataclass
class _Partition:
    """Writes the local graph ``out``.

    ``copies`` has per node of the whole graph its local nodes by sharding, the produced one first.
    ``gathered`` has the all-gathered copies of a parameter, per phase (FSDP) or per step (ZeRO-1).
    ``casts`` are the casts of parameters, and views of these, that are made with those copies.
    """

    graph: Graph
    plan: Plan
    choices: Choices
    out: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, dict[Sharding, fx.Node]] = field(default_factory=dict)
    gathered: dict[tuple[Hashable, str], dict[Sharding, fx.Node]] = field(default_factory=dict)
    casts: dict[fx.Node, fx.Node] = field(default_factory=dict)
    input_only: set[fx.Node] = field(
        default_factory=set
    )  # what exists for all microbatches at once
    dealt: set[fx.Node] = field(default_factory=set)  # input-only values of a rank's own samples
    # their calls for all microbatches, with the strategies
    in_time: dict[fx.Node, tuple[fx.Node, dict[str, Strategy]]] = field(default_factory=dict)
    moved: set[fx.Node] = field(default_factory=set)  # what the plan wants to be moved once made
    # the name that a value's call has in the whole graph
    names: dict[fx.Node, str] = field(default_factory=dict)

    def build(self) -> Graph:
        """Write placeholders, calls and results; the graph without the calls that nothing reads."""
        mesh = self.graph.mesh
        pins = pinned(self.graph, self.plan)
        self.moved = {n for n, planned in pins.items() if any(x.then for x in planned.values())}
        self.input_only = input_only(self.graph) if MICROBATCH_AXIS in mesh.names else set()
        self.dealt = self._dealt()
        self.casts = cast_weights(self.graph, self.plan, self.choices, self.moved)
        for node in self.graph.fx.nodes:
            if node.op == "placeholder":
                self._place(node)
        for (
            node
        ) in self.graph.inputs.values():  # of the batch that it is given a rank keeps a piece
            ((own, batch),) = self.copies[node].items()
            piece = self._reshard(batch, placed(node, self.plan), value(node))
            self.copies[node] = {value(piece).sharding: piece, own: batch}
        for node in self.graph.calls():
            if node not in self.casts:
                self._call(node)
        outputs = self._finish(self.graph.outputs)
        self.out.output(outputs.as_dict())
        local = replace(self.graph, fx=self.out, mesh=mesh)
        drop_unused(self.out)
        name_as_before(self.out, self.names)
        check_microbatches(local)
        settle_modules(local)
        return local

    def _dealt(self) -> set[fx.Node]:
        """The input-only values of a rank's own piece of the batch."""
        inputs = self.graph.inputs.values()
        found = {n for n in inputs if n in self.input_only and self._given(n) != Sharding()}
        for node in self.graph.calls():
            if node in self.input_only and found.intersection(node.all_input_nodes):
                found.add(node)
        return found

    def _given(self, node: fx.Node) -> Sharding:
        """The layout in which a rank is given an input."""
        return given(value(node).name, self.plan, self.graph.mesh)

    def _place(self, node: fx.Node) -> None:
        """Write a placeholder: a parameter as this rank stores it, an input as it is given it."""
        known = value(node)
        cuts = self.plan.stored(known.name) if known.kind == "param" else {}
        stored = self._given(node) if known.kind == "input" else self.plan.sharding(cuts)
        new = self.out.create_node("placeholder", str(node.target), name=node.name)
        set_value(new, changed(known, sharding=stored))
        shape = stored.local_shape(known.shape, self.graph.mesh)
        assert shape is not None, f"{known.name} {known.shape} is not divided by {stored}"
        set_fake(new, fake_of(node).new_empty(shape))
        self.names[new] = node.name
        self.copies[node] = {stored: new}

    def _call(self, node: fx.Node) -> None:
        """Write one call on local operands, each resharded to the layout of the call's strategy."""
        known = value(node)
        if node in self.dealt and not self._in_turns(node):
            new = self._of_all_microbatches(node)
            self.copies[node] = {value(new).sharding: new}
            return
        new = self._localized(node, self.choices.get(node, {}))
        set_value(new, changed(known, name=known.name or node.name, origin=value(new).origin))
        self.copies[node] = {known.sharding: self._first_only(node, new)}

    def _localized(
        self, node: fx.Node, chosen: dict[str, Strategy], at: Value | None = None
    ) -> fx.Node:
        """Write one call with the strategies ``chosen`` by axis, its operands resharded; ``at``
        says where and when it runs, if not where the whole graph has it.
        """
        known = at or value(node)
        operands = tensor_args(node)
        local_of: list[fx.Node] = []
        for i, operand in enumerate(operands):
            layouts = {axis: s.ins[i] for axis, s in chosen.items()}
            if len(results_of(operand)) == 1 and not isinstance(fake_of(operand), (tuple, list)):
                want = Sharding.of(layouts, self.graph.mesh)
                local_of.append(self._get(operand, want, known))
            else:  # the tuple that a getitem reads
                local_of.append(next(iter(self._copies(operand, known).values())))
        new = write_local_call(self.out, node, local_of, chosen, self.graph.mesh)
        self.names[new] = node.name
        own = any(s.variant == VARIANT for s in chosen.values())
        origin = Origin.LOCAL_STATISTICS if own else known.origin
        set_value(new, changed(known, name=known.name or node.name, origin=origin))
        return new

    def _first_only(self, node: fx.Node, new: fx.Node) -> fx.Node:
        """With ``batch_norm="local"`` keep the running statistics of the axis's first rank only."""
        if node.target is operator.getitem:
            call, index = picked(node)
            for axis, strategy in self.choices.get(call, {}).items():
                if keeps_first(call, strategy, index):
                    unfinished = value(new).sharding
                    own = unfinished.with_(axis, R, self.graph.mesh)
                    set_value(new, changed(value(new), sharding=own))
                    kwargs = {"axis": axis, "num": self.graph.mesh.size(axis)}
                    step = Step(collectives.keep_first, kwargs, unfinished)
                    new = self._step(new, step, value(new), value(new))
        return new

    def _get(self, node: fx.Node, want: Sharding, reader: Value) -> fx.Node:
        """The local node of ``node`` in the sharding ``want``, resharded from the cheapest copy if
        there is none yet.
        """
        copies = self._copies(node, reader)
        if want not in copies and node in self.dealt:
            return self._get_dealt(node, want)
        if want not in copies and node in self.input_only:
            return self._get_given(node, want, reader)
        near = {have: copy for have, copy in copies.items() if reaches(value(copy), reader)}
        made = is_zero(node) and all(layout.kind not in "UM" for _, layout in want.layouts)
        if want not in near and made and all(self._cost(have, want) for have in near):
            copies[want] = zeros_in(self.out, node, want, reader, self.graph.mesh)
            self.names[copies[want]] = self.names.get(node, node.name)
        elif want not in near:
            source = min(near, key=lambda have: self._cost(have, want))
            once = node in self.moved or value(node).kind == "input"
            at = value(node) if once else reader
            copies[want] = self._reshard(near[source], want, at)
        return copies[want]

    def _get_given(self, node: fx.Node, want: Sharding, reader: Value) -> fx.Node:
        """A copy of an input-only value: computed for all microbatches at once, or sliced from a
        copy that is whole on every axis.
        """
        copies, sharding = self.copies[node], Sharding()
        if want.on(MICROBATCH_AXIS) == R and node.op != "placeholder":
            sharding = value(node).sharding.with_(MICROBATCH_AXIS, R, self.graph.mesh)
        if sharding not in copies:
            axes = dict(sharding.layouts) if sharding.layouts else {}
            chosen = {a: s for a, s in self.choices.get(node, {}).items() if a in axes}
            new = self._localized(node, chosen)
            set_value(new, changed(value(new), sharding=sharding))
            copies[sharding] = new
        if want not in copies:
            copies[want] = self._reshard(copies[sharding], want, reader)
        return copies[want]

    def _get_dealt(self, node: fx.Node, want: Sharding) -> fx.Node:
        """A copy of an input-only value of a rank's piece of the batch.

        No collective is over microbatches: a copy for one of them is made of one for this
        microbatch or for all, and one for all is computed for all.
        """
        copies, turns = self.copies[node], {R, want.on(MICROBATCH_AXIS)}
        if not any(have.on(MICROBATCH_AXIS) in turns for have in copies):
            new = self._of_all_microbatches(node)
            copies[value(new).sharding] = new
        if want not in copies:
            near = [have for have in copies if have.on(MICROBATCH_AXIS) in turns]
            source = min(near, key=lambda have: self._cost(have, want))
            copies[want] = self._reshard(copies[source], want, value(node))
        return copies[want]

    def _in_turns(self, node: fx.Node) -> bool:
        """Whether a call is made for each microbatch by itself."""
        call = picked(node)[0] if node.target is operator.getitem else node
        return MICROBATCH_AXIS in self.choices.get(call, {})

    def _of_all_microbatches(self, node: fx.Node) -> fx.Node:
        """Write a call for all microbatches of a rank's piece of the batch at once."""
        if node.target is operator.getitem:
            call, index = picked(node)
            if call not in self.in_time:
                self._of_all_microbatches(call)
            made, chosen = self.in_time[call]
            new = write_local_call(self.out, node, [made], {}, self.graph.mesh)
            self.names[new] = node.name
        else:
            index, chosen = (
                0,
                for_all_microbatches(node, self.choices.get(node, {}), self.graph.mesh),
            )
            new = self._localized(node, chosen)
            self.in_time[node] = new, chosen
        outs = {axis: strategy.outs[index] for axis, strategy in chosen.items()}
        known = replace(value(node), name=value(node).name or node.name)
        set_value(new, changed(known, sharding=Sharding.of(outs, self.graph.mesh)))
        return new

    def _copies(self, node: fx.Node, reader: Value) -> dict[Sharding, fx.Node]:
        """The copies that a reader may use.

        An all-gathered parameter, or a cast of it, exists for one phase (FSDP, ``gather = "use"``)
        or for the step.
        """
        param = self.casts.get(node, node)
        if value(param).kind != "param":
            return self.copies[node]
        (stored, shard), *_ = self.copies[param].items()
        lives = {self.plan.gather[a] for a, _ in stored.layouts if a in self.plan.gather}
        what = node if node not in self.casts or not is_cast(node) else (param, value(node).dtype)
        scope = (what, reader.phase if "use" in lives else "step")
        if scope not in self.gathered:
            used = placed(param, self.plan)
            if node is param:
                copies = {used: self._reshard(shard, used, reader)}
            elif is_cast(node) and not widens(node):
                copies = {used: self._reshard(shard, used, reader, value(node).dtype)}
            else:
                copies = {value(node).sharding: self._anew(node, reader)}
            self.gathered[scope] = copies
        return self.gathered[scope]

    def _anew(self, node: fx.Node, reader: Value) -> fx.Node:
        """Write a view or cast of a gathered weight in the phase and module of its reader."""
        at = replace(
            value(node), module=reader.module, source=reader.source,
            calls=reader.calls, phase=reader.phase, stage=reader.stage,
        )  # fmt: skip
        return self._localized(node, self.choices.get(node, {}), at)

    def _cost(self, have: Sharding, want: Sharding) -> float:
        costs = (
            transition_cost(have.on(a), want.on(a), self.graph.mesh.size(a))
            for a in self.graph.mesh.names
        )
        return sum(float("inf") if c is None else c for c in costs)

    def _reshard(
        self, node: fx.Node, want: Sharding, reader: Value, dtype: torch.dtype | None = None
    ) -> fx.Node:
        """Write the collectives to the sharding ``want``; the first one casts to ``dtype``."""
        made_by = value(node)
        steps = [*reshard_steps(made_by.sharding, want, self.graph.mesh)]
        if dtype is not None:
            made_by = replace(made_by, dtype=dtype)
            steps[0] = replace(steps[0], kwargs={**steps[0].kwargs, "dtype": dtype})
        for step in steps:
            node = self._step(node, step, made_by, reader)
        return node

    def _step(self, node: fx.Node, step: Step, made_by: Value, reader: Value) -> fx.Node:
        """Write one collective: a reduction in the module that made the value, a gather in the
        module that reads it.
        """
        reduces = step.target in (collectives.all_reduce, collectives.reduce_scatter)
        at = made_by if reduces and made_by.kind == "op" else reader
        new = self.out.call_function(step.target, (node,), dict(step.kwargs))
        self.names[new] = self.names.get(node, node.name)
        set_value(new, replace(
            made_by, kind="op", sharding=step.after, name=made_by.name,
            module=at.module, at="" if made_by.kind == "param" else at.at, source=at.source,
            phase=at.phase, stage=at.stage, forward=made_by.forward,
        ))  # fmt: skip
        set_fake(new, run_fake(step.target, (node,), step.kwargs))
        return new

    def _finish(self, outputs: Outputs) -> Outputs:
        """Reshard every result of the step: gradients as their parameters are stored, the loss and
        buffers replicated.
        """
        grads = {
            n: self._sum(g, self.plan.sharding(self.plan.stored(n)), self.plan.reduce)
            for n, g in outputs.grads.items()
        }
        return Outputs(
            loss=None if outputs.loss is None else self._sum(outputs.loss, Sharding(), "step"),
            grads=grads,
            buffers={n: self._final(b, Sharding()) for n, b in outputs.buffers.items()},
            results={n: self._collected(r) for n, r in outputs.results.items()},
        )

    def _sum(self, node: fx.Node, want: Sharding, when: str) -> fx.Node:
        """Accumulate ``node`` over microbatches and reshard it to ``want``.

        ``when`` says when ranks reduce: ``"step"`` after the last microbatch, or each microbatch.
        """
        mesh = self.graph.mesh
        if MICROBATCH_AXIS not in mesh.names:
            return self._final(node, want)
        have = value(node).sharding
        before = (until_last if when == "step" else in_pieces)(have, want, mesh)
        turn = self._get(node, before.with_(MICROBATCH_AXIS, U, mesh), value(node))
        whole = value(turn).sharding.with_(MICROBATCH_AXIS, R, mesh)
        kwargs = {"axis": MICROBATCH_AXIS, "num": mesh.size(MICROBATCH_AXIS)}
        step = Step(collectives.accumulate, kwargs, whole)
        return self._reshard(self._step(turn, step, value(turn), value(node)), want, value(node))

    def _collected(self, node: fx.Node) -> fx.Node:
        """A result of the step, with the microbatches' parts concatenated or added up."""
        layout = value(node).sharding.on(MICROBATCH_AXIS)
        want = sharding_of_result(node, self.graph, self.plan)
        if layout.kind == "U":
            return self._sum(node, want, "step")
        if layout.kind != "cut":
            return self._final(node, want)
        mesh = self.graph.mesh
        mine = sharding_of_result(node, self.graph, self.plan, in_turn=True)
        turn = self._get(node, mine, value(node))
        kwargs = {
            "axis": MICROBATCH_AXIS,
            "num": mesh.size(MICROBATCH_AXIS),
            "dim": layout.dim,
            "outer": layout.outer,
        }
        return self._step(turn, Step(collectives.collect, kwargs, want), value(turn), value(node))

    def _final(self, node: fx.Node, want: Sharding) -> fx.Node:
        return self._get(node, want, value(node))
