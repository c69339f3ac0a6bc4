"""How to lay out a step along one mesh axis, or several at once, as a `Problem` of seconds.

A variable per call (its strategies), per parameter (its stored layout), and per value with several
readers a hub for each phase (``hubs.py``). Costs: the local call by the roofline model, and the
collectives between how a value is made and how it is wanted, at its local size. A gradient ends as
its parameter is stored. With axes that are decided already, all of this is what it costs given
these: cuts divide what they leave, and what one axis cuts makes the others' collectives smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import fx

from partc.graph import picked, value
from partc.passes.search.shardings.call_choices import CallChoices, CallWays
from partc.passes.search.shardings.decided import Decided, Life
from partc.passes.search.shardings.pins import Pins
from partc.passes.search.shardings.shared_copies import SharedCopies
from partc.passes.search.shardings.step_values import Reader, StepValues
from partc.passes.search.shardings.tables import Tables
from partc.passes.search.solver.problem import Assignment, Costs, Problem
from partc.plan.sharding import R, cut

_Source = tuple[int, tuple[int, ...]]  # a variable, and by its choices how a value is made
_At = tuple[int, SharedCopies]  # a variable, and by its choices what is at hand


@dataclass
class ShardingProblem:
    """``life`` says how long a gathered parameter lives (as in ``Plan.gather``); ``tie`` gives
    equal blocks of a list one choice for all. ``shrunk`` is the part of every value that is left
    where nothing is known of other axes but that they cannot cut more: costs are bounds then.
    """

    values: StepValues
    ways: CallWays
    pins: Pins
    axes: tuple[str, ...]
    decided: Decided
    life: Life = "use"
    tie: bool = True
    shrunk: float = 1.0

    def __post_init__(self) -> None:
        self.lies = self.ways.lies
        self.tables, self.cache, self.hubs = Tables(), self.ways.tables, self.ways.hubs
        self.chosen: dict[fx.Node, tuple[int, CallChoices]] = {}  # call -> its variable
        self.placed: dict[fx.Node, tuple[int, CallChoices]] = {}  # placeholder -> its variable
        for node in self.values.values():
            if node.op == "placeholder":
                self._place(node)
        for node in self.values.names:
            if node not in self.values.free:
                self._choose(node)
        for node in self.values.values():
            self._move(node)
        self._read_free()
        self.problem: Problem = self.tables.problem()

    def decode(self, assignment: Assignment) -> Decided:
        """The decisions of an assignment, those of the other axes among them."""
        choices = {node: dict(known) for node, known in self.decided.choices.items()}
        for node, (v, ways) in self.chosen.items():
            strategies = zip(self.axes, ways.strategies[assignment[v]], strict=True)
            choices.setdefault(node, {}).update(strategies)
        stored = {name: dict(known) for name, known in self.decided.stored.items()}
        for node, (v, ways) in self.placed.items():
            if value(node).kind == "param":
                sharding = self.lies.shardings[ways.outs[0][assignment[v]]]
                stored[value(node).name] = dict(sharding.layouts)
        return Decided(choices, stored)

    # variables ------------------------------------------------------------------------------------
    def _variable(self, node: fx.Node, ways: CallChoices) -> int:
        name = value(node).name if node.op == "placeholder" else self.values.names[node]
        key = (self.values.alike(node), id(ways)) if self.tie else node
        return self.tables.variable(key, name, ways.labels)

    def _choose(self, node: fx.Node) -> None:
        every = self.ways.of(node, self.axes, self.decided.choices)
        ways = self.pins.allowed(node, every, self.axes)
        v = self._variable(node, ways)
        self.chosen[node] = v, ways
        self.tables.cost(v, ways.seconds, self.values.graph.times(node))

    def _place(self, node: fx.Node) -> None:
        """A parameter is stored in some layout; buffers and cut inputs are where the plan says."""
        known = value(node)
        if known.kind != "param":
            ways = self.ways.placed(self.pins.input(known.name))
            self.placed[node] = self._variable(node, ways), ways
            return
        ways = self._stored_ways(node)
        self.placed[node] = self._variable(node, ways), ways

    def _stored_ways(self, node: fx.Node) -> CallChoices:
        """Whole, or cut along any dim, on each axis."""
        known = value(node)
        pinned = self.pins.stored(known.name)
        decided = self.decided.stored.get(known.name, {})
        others = {a: layout for a, layout in decided.items() if a not in self.axes}
        cuts = [cut(dim) for dim, size in enumerate(known.shape) if size > 1]
        options = [
            [pinned.get(axis, R)]
            if pinned is not None
            else [R, *cuts, *self.ways.outers(node, self.lies.mesh.size(axis))]
            for axis in self.axes
        ]
        return self.ways.stored(known.shape, self.axes, options, others)

    # transfers ------------------------------------------------------------------------------------
    def _move(self, node: fx.Node) -> None:
        """The ways from where a value is made to all that read it."""
        readers = self.values.readers[node]
        forward = [r for r in readers if not r.backward]
        backward = [r for r in readers if r.backward]
        source = self._source(node)
        if value(node).kind == "param" and self.life == "use":
            for group in (forward, backward):
                self._connect(node, source, group)
            return
        at = self._connect(node, source, forward or backward, shared=len(readers) > 1)
        if at is not None and forward and backward:
            self._connect_again(node, at, backward)

    def _source(self, node: fx.Node) -> _Source:
        if node in self.placed:
            v, ways = self.placed[node]
            return v, ways.outs[0]
        call, index = (node, 0) if node in self.chosen else picked(node)
        v, ways = self.chosen[call]
        return v, ways.outs[index]

    def _reader(self, reader: Reader) -> tuple[int | None, tuple[int, ...]]:
        """The variable of a reader (None: it has no choice) and what it wants by choice."""
        if reader.node is None:
            return None, (self.lies.whole,)
        if reader.node.op == "placeholder":
            return self._source(reader.node)
        v, ways = self.chosen[reader.node]
        return v, ways.ins[reader.operand]

    def _connect(
        self, node: fx.Node, source: _Source, group: Sequence[Reader], shared: bool = False
    ) -> _At | None:
        """Readers read what a source makes; several of them through a hub, which is returned."""
        (v, outs), lies = source, self.pins.transfers(node)
        num_bytes = self._num_bytes(node)
        if not (shared or len(group) > 1 or (group and self.pins.gathers(node))):
            for reader in group:
                w, wants = self._reader(reader)
                table = lies.table(num_bytes, outs, wants)
                self._pair(v, w, table, self.values.times(node, reader))
            return None
        h, hub = at = self._hub(node, group, outs)
        made = self._once(("made", outs, hub), lambda: hub.made_from(outs))
        filled = self._once(("fill", num_bytes, hub, id(lies)), lambda: hub.filled(num_bytes, lies))
        self.tables.pair(v, h, made)
        self.tables.cost(h, filled, self._times(node, group))
        self._read(node, at, group)
        return at

    def _connect_again(self, node: fx.Node, before: _At, group: Sequence[Reader]) -> None:
        """The backward reads what the forward has at hand, several readers through their own
        hub.
        """
        if len(group) > 1:
            lies, num_bytes, (u, old) = self.pins.transfers(node), self._num_bytes(node), before
            h, hub = at = self._hub(node, group, old.made)
            table = self._once(
                ("refill", num_bytes, old, hub, id(lies)),
                lambda: hub.refilled(num_bytes, old, lies),
            )
            self.tables.pair(u, h, table, self._times(node, group))
            before = at
        self._read(node, before, group)

    def _hub(self, node: fx.Node, group: Sequence[Reader], made: Sequence[int]) -> _At:
        """The variable of what is at hand for a group of readers."""
        wanted = tuple(dict.fromkeys(n for r in group for n in dict.fromkeys(self._reader(r)[1])))
        lies, num_bytes = self.pins.transfers(node), self._num_bytes(node)
        key = num_bytes, tuple(dict.fromkeys(made)), wanted, id(lies)
        if key not in self.hubs:
            self.hubs[key] = SharedCopies.of(num_bytes, key[1], wanted, lies)
        hub, phase = self.hubs[key], "backward" if group[0].backward else "forward"
        name = f"{self._name(node)} {phase}"
        known = (name, hub) if self.tie else (node, phase)
        return self.tables.variable(known, name, hub.labels(self.lies)), hub

    def _name(self, node: fx.Node) -> str:
        """What equal values of equal blocks have in common."""
        if node in self.placed or node in self.chosen:
            return self.values.alike(node)
        call, index = picked(node)
        return f"{self.values.alike(call)}[{index}]"

    def _read(self, node: fx.Node, at: _At, group: Sequence[Reader]) -> None:
        (h, hub), lies = at, self.pins.transfers(node)
        num_bytes = self._num_bytes(node)
        for reader in group:
            w, wants = self._reader(reader)
            key = "read", num_bytes, hub, wants, id(lies)
            if key not in self.cache:
                self.cache[key] = hub.read(num_bytes, wants, lies)
            self._pair(h, w, self.cache[key], self.values.times(node, reader))

    def _pair(self, v: int, w: int | None, table: Costs, times: int) -> None:
        if w is None:
            self.tables.cost(v, table[:, 0], times)
        else:
            self.tables.pair(v, w, table, times)

    def _times(self, node: fx.Node, group: Sequence[Reader]) -> int:
        return max(self.values.times(node, reader) for reader in group)

    def _read_free(self) -> None:
        """What follows from the inputs is whole everywhere: readers take their piece of it."""
        for node, readers in self.values.readers.items():
            for reader in readers if node in self.values.free else ():
                if reader.node in self.chosen:
                    w, wants = self._reader(reader)
                    assert w is not None
                    self.tables.cost(w, self.lies.table(0, (self.lies.whole,), wants)[0])

    def _num_bytes(self, node: fx.Node) -> float:
        return self.values.num_bytes(node) * self.shrunk

    def _once(self, key: Hashable, make: Callable[[], Costs]) -> Costs:
        """The table of a key: equal ones are one array, which the solver finds by identity."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]
