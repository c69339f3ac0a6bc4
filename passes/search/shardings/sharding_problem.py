"""The choice of all shardings of a step on one or more mesh axes, as a `Problem` in seconds.

There is a variable per call (its strategy), per parameter (its stored layout), and, for a value
with several readers, one per phase for its shared copies (``shared_copies.py``). Costs are the
local calls by the roofline model, and the collectives from the sharding that a value is made in to
those that its readers want. A gradient ends in the layout of its stored parameter. Axes that are
decided already count: a new axis must divide the shards that they leave, and moves fewer bytes.
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

_Source = tuple[int, tuple[int, ...]]  # a variable; per choice the sharding that a value is made in
_At = tuple[int, SharedCopies]  # a variable; per choice the copies of a value that exist


@dataclass
class ShardingProblem:
    """Builds the problem for ``axes``, given what is ``decided`` on other axes.

    ``life`` is the lifetime of an all-gathered parameter (as in ``Plan.gather``). With ``tie``
    equal blocks share one choice. ``shrunk`` is the smallest share of every value that other, still
    undecided axes may leave on a rank; costs are then lower bounds.
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
        self.transfers = self.ways.transfers
        self.tables, self.cache, self.shared = Tables(), self.ways.tables, self.ways.shared
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
        """The decisions of an assignment, together with those on the other axes."""
        choices = {node: dict(known) for node, known in self.decided.choices.items()}
        for node, (v, ways) in self.chosen.items():
            strategies = zip(self.axes, ways.strategies[assignment[v]], strict=True)
            choices.setdefault(node, {}).update(strategies)
        stored = {name: dict(known) for name, known in self.decided.stored.items()}
        for node, (v, ways) in self.placed.items():
            if value(node).kind == "param":
                sharding = self.transfers.shardings[ways.outs[0][assignment[v]]]
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
        """Add the variable of a placeholder: a parameter's stored layout is chosen, buffers and
        sharded inputs have the one choice that the plan gives.
        """
        known = value(node)
        if known.kind != "param":
            ways = self.ways.placed(self.pins.input(known.name))
            self.placed[node] = self._variable(node, ways), ways
            return
        ways = self._stored_ways(node)
        self.placed[node] = self._variable(node, ways), ways

    def _stored_ways(self, node: fx.Node) -> CallChoices:
        """The layouts in which a parameter may be stored: whole, or sharded on any dim, per axis.

        A pinned parameter has only the plan's layout.
        """
        known = value(node)
        pinned = self.pins.stored(known.name)
        decided = self.decided.stored.get(known.name, {})
        others = {a: layout for a, layout in decided.items() if a not in self.axes}
        cuts = [cut(dim) for dim, size in enumerate(known.shape) if size > 1]
        options = [
            [pinned.get(axis, R)]
            if pinned is not None
            else [R, *cuts, *self.ways.outers(node, self.transfers.mesh.size(axis))]
            for axis in self.axes
        ]
        return self.ways.stored(known.shape, self.axes, options, others)

    # transfers ------------------------------------------------------------------------------------
    def _move(self, node: fx.Node) -> None:
        """Add the costs of a value's transfers to all its readers.

        With ``life`` "use" forward and backward each gather a parameter anew.
        """
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
        """The variable of a reader (None: no choice), and per choice the sharding it wants."""
        if reader.node is None:
            return None, (self.transfers.whole,)
        if reader.node.op == "placeholder":
            return self._source(reader.node)
        v, ways = self.chosen[reader.node]
        return v, ways.ins[reader.operand]

    def _connect(
        self, node: fx.Node, source: _Source, group: Sequence[Reader], shared: bool = False
    ) -> _At | None:
        """Add the transfers from a value's source to a group of readers.

        Several readers read shared copies, whose variable is returned.
        """
        (v, outs), transfers = source, self.pins.transfers(node)
        num_bytes = self._num_bytes(node)
        if not (shared or len(group) > 1 or (group and self.pins.gathers(node))):
            for reader in group:
                w, wants = self._reader(reader)
                table = transfers.table(num_bytes, outs, wants)
                self._pair(v, w, table, self.values.times(node, reader))
            return None
        h, copies = at = self._shared_copies(node, group, outs)
        made = self._once(("made", outs, copies), lambda: copies.made_from(outs))
        filled = self._once(
            ("fill", num_bytes, copies, id(transfers)), lambda: copies.filled(num_bytes, transfers)
        )
        self.tables.pair(v, h, made)
        self.tables.cost(h, filled, self._times(node, group))
        self._read(node, at, group)
        return at

    def _connect_again(self, node: fx.Node, before: _At, group: Sequence[Reader]) -> None:
        """Add the transfers from the forward's copies to the backward's readers; several readers
        have shared copies of their own.
        """
        if len(group) > 1:
            transfers, num_bytes = self.pins.transfers(node), self._num_bytes(node)
            u, old = before
            h, copies = at = self._shared_copies(node, group, old.made)
            table = self._once(
                ("refill", num_bytes, old, copies, id(transfers)),
                lambda: copies.refilled(num_bytes, old, transfers),
            )
            self.tables.pair(u, h, table, self._times(node, group))
            before = at
        self._read(node, before, group)

    def _shared_copies(self, node: fx.Node, group: Sequence[Reader], made: Sequence[int]) -> _At:
        """The variable of the shared copies for a group of readers."""
        wanted = tuple(dict.fromkeys(n for r in group for n in dict.fromkeys(self._reader(r)[1])))
        transfers, num_bytes = self.pins.transfers(node), self._num_bytes(node)
        key = num_bytes, tuple(dict.fromkeys(made)), wanted, id(transfers)
        if key not in self.shared:
            self.shared[key] = SharedCopies.of(num_bytes, key[1], wanted, transfers)
        copies, phase = self.shared[key], "backward" if group[0].backward else "forward"
        name = f"{self._name(node)} {phase}"
        known = (name, copies) if self.tie else (node, phase)
        return self.tables.variable(known, name, copies.labels(self.transfers)), copies

    def _name(self, node: fx.Node) -> str:
        """The name that a value shares with the equal values of equal blocks."""
        if node in self.placed or node in self.chosen:
            return self.values.alike(node)
        call, index = picked(node)
        return f"{self.values.alike(call)}[{index}]"

    def _read(self, node: fx.Node, at: _At, group: Sequence[Reader]) -> None:
        (h, copies), transfers = at, self.pins.transfers(node)
        num_bytes = self._num_bytes(node)
        for reader in group:
            w, wants = self._reader(reader)
            key = "read", num_bytes, copies, wants, id(transfers)
            if key not in self.cache:
                self.cache[key] = copies.read(num_bytes, wants, transfers)
            self._pair(h, w, self.cache[key], self.values.times(node, reader))

    def _pair(self, v: int, w: int | None, table: Costs, times: int) -> None:
        if w is None:
            self.tables.cost(v, table[:, 0], times)
        else:
            self.tables.pair(v, w, table, times)

    def _times(self, node: fx.Node, group: Sequence[Reader]) -> int:
        return max(self.values.times(node, reader) for reader in group)

    def _read_free(self) -> None:
        """Add the cost of reading input-only values: 0 for a slice of the whole, inf if a reader
        wants a sharding that slicing cannot give.
        """
        for node, readers in self.values.readers.items():
            for reader in readers if node in self.values.free else ():
                if reader.node in self.chosen:
                    w, wants = self._reader(reader)
                    assert w is not None
                    self.tables.cost(w, self.transfers.table(0, (self.transfers.whole,), wants)[0])

    def _num_bytes(self, node: fx.Node) -> float:
        return self.values.num_bytes(node) * self.shrunk

    def _once(self, key: Hashable, make: Callable[[], Costs]) -> Costs:
        """The table of a key, made once: the solver recognises equal tables by their identity."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]
