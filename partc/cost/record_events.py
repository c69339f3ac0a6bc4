"""Write a scheduled graph's calls and transfers down as StepEvents, which need no tensors.

``record_step`` does so for a whole step of one stage, ``record_phases`` for a pipeline stage.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile
from typing import TypeVar

from torch import fx

from partc.cost.bytes import packed_bytes, put_in_bytes, transfers, unpacked_bytes
from partc.cost.gather_order import ahead, whole_bytes
from partc.cost.roofline import call_of, dtype_of
from partc.cost.sites import Site, Sites
from partc.cost.step_events import (
    CALL,
    LAST,
    PHASES,
    START,
    WAIT,
    Call,
    Event,
    Move,
    Place,
    Run,
    StepEvents,
)
from partc.cost.storage import Replay
from partc.graph import (
    Graph,
    collectives,
    fake_of,
    first_operand,
    is_backward,
    is_tensor,
    ops,
    tensor_args,
    value,
)
from partc.graph.blocks import outermost_block
from partc.graph.given_back import is_given_back
from partc.graph.moves import gathers_param, kind_of, wire_of

T = TypeVar("T")


@dataclass(frozen=True)
class _Calls:
    """Consecutive calls of one block (or phase), and how many equal blocks they stand for."""

    label: str
    calls: list[fx.Node]
    times: int


def record_step(graph: Graph, ran: Replay, prefetch: int = 1) -> StepEvents:
    """The events of a whole step without pipeline stages; each run is labelled by its block."""
    found = _by_method(node for node in graph.calls() if not _finishes(node))
    runs = [_Calls(block, mine, graph.times(mine[0])) for block, mine in found]
    recorder = _Recorder(ran, lambda node: "B" if is_backward(node) else "F")
    return replace(recorder.step(runs), prefetch=prefetch)


Method = tuple[str, list[fx.Node]]  # a block and calls of it; "" for calls outside of blocks


def _by_method(calls: Iterable[fx.Node]) -> list[Method]:
    """The calls in the order of a program's lines, with their blocks.

    A program has all calls of a block's backward in one method, also those that the graph has
    behind the last block, such as the sum of a norm's gradients over tensor ranks. So these follow
    the other calls of their block here too.
    """
    runs: list[Method] = []
    backwards: dict[str, list[fx.Node]] = {}
    for block, run in groupby(calls, key=outermost_block):
        mine = list(run)
        if block in backwards and all(map(is_backward, mine)):
            backwards[block] += mine
            continue
        runs.append((block, mine))
        if block and is_backward(mine[-1]):
            backwards[block] = mine
    return [*_gathered_ahead(_behind_loops(runs))]


def _gathered_ahead(runs: list[Method]) -> Iterator[Method]:
    """The runs with gathers outside of blocks where a program starts them.

    What stands behind the wait for a script's loss is a run by itself: nothing that it gathers
    starts before.
    """
    most = max(whole_bytes(calls) for _, calls in runs) if runs else 0
    for block, calls in runs:
        if block:
            yield block, calls
            continue
        here = [*ahead(calls, most)]
        behind = next((i for i, node in enumerate(here) if is_given_back(node)), 0)
        yield from (("", part) for part in (here[:behind], here[behind:]) if part)


def _behind_loops(runs: list[Method]) -> list[Method]:
    """The runs with what stands between two backwards of a loop behind the loop.

    A program runs the backwards of equal blocks in one loop. A call between two of them that no
    block reads, such as the sum of the last norm's gradients, is a line behind the loop.
    """
    ends = {_loop(run): at for at, run in enumerate(runs) if _loop(run)}
    placed: list[tuple[float, Method]] = []
    inside = ""  # of which loop the last backward was
    for at, run in enumerate(runs):
        inside = _loop(run) or (inside if is_backward(run[1][0]) else "")
        last = ends.get(inside, at)
        waits = not run[0] and at < last and not _are_read(run[1], runs[at + 1 : last + 1])
        placed.append((last + 0.5 if waits else at, run))
    return [run for _, run in sorted(placed, key=lambda each: each[0])]


def _loop(run: Method) -> str:
    """The list of blocks of a block's backward; "" for other runs."""
    block, calls = run
    return block.rpartition(".")[0] if block and is_backward(calls[-1]) else ""


def _are_read(calls: list[fx.Node], later: Iterable[Method]) -> bool:
    """Whether a block of the loop reads a result of the calls."""
    readers = {user for node in calls for user in node.users}
    return any(node in readers for block, run in later if block for node in run)


def record_phases(graph: Graph, ran: Replay) -> StepEvents:
    """The events of one pipeline stage, phase by phase; each run is labelled by its block.

    A program has a method for each phase, and loops over blocks in it.
    """
    grads = set(graph.grads.values())
    added = {node for node in graph.calls() if _is_added(node, grads)}
    closing = _closing(graph, added)
    behind = {node for nodes in closing.values() for node in nodes}
    runs = []
    for phase in PHASES:
        calls = [n for n in graph.calls() if value(n).phase == phase and n not in behind]
        runs += [_Calls(block, mine, graph.times(mine[0])) for block, mine in _by_method(calls)]
    return _Recorder(
        ran, lambda node: value(node).phase, added=added, joined=_joined(graph),
        closing=closing,
    ).step(runs)  # fmt: skip


def _closing(graph: Graph, added: Set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """By transfer what waits for its gradients, where a microbatch adds these to those before it.

    Nothing else of the phase reads them, so the program waits for them a block later.
    """
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.calls():
        for wait in node.users if _is_start(node) and is_backward(node) else ():
            picks = [user for user in wait.users if user.target is operator.getitem]
            if wait.target is collectives.wait and all(pick in added for pick in picks or [wait]):
                found[node] = [wait, *sorted(picks)]
    return found


def _joined(graph: Graph) -> dict[fx.Node, Move | None]:
    """The transfer of each gradient reduction of phase E, as if each kind were one bucket.

    The first reduction of a kind, axis and dtype gets the bytes of all, the others get None.
    Programs reduce in large buckets, whose few additional starts make no difference in time. A sum
    with fewer bytes, and what the graph has joined, stays as it is.
    """
    found: dict[fx.Node, Move | None] = {}
    alike: dict[object, list[fx.Node]] = {}
    for node in graph.calls():
        alone = node.target in (collectives.all_reduce, collectives.reduce_scatter)
        if value(node).phase == "E" and alone and not wire_of(node):
            key = (kind_of(node), node.kwargs["axis"], dtype_of(first_operand(node)))
            alike.setdefault(key, []).append(node)
    for nodes in alike.values():
        found |= dict.fromkeys(nodes)
        first = next((n for n in nodes if graph.times(n) == 1), nodes[0])
        size = sum(graph.times(n) * put_in_bytes(n) for n in nodes)
        after = sum(graph.times(n) * unpacked_bytes(n) for n in nodes)
        several = len(nodes) > 1
        packed = 2 * size if several else packed_bytes(first)
        found[first] = _move_of(first)._replace(
            put_in_bytes=size, packed_bytes=packed, unpacked_bytes=after
        )
    return found


def _is_added(node: fx.Node, grads: Set[fx.Node]) -> bool:
    """Whether a program adds a value to the sum over earlier microbatches.

    That is so for a gradient, and for a rank's part of one that phase E reduces over ranks.
    """
    if value(node).phase not in ("B", "W") or not is_tensor(node):
        return False
    ends = any(user.op != "output" and value(user).phase == "E" for user in node.users)
    return ends or node in grads


def _reading(product: Call) -> Call:
    """A weight-gradient product that accumulates: the kernel reads the old sum when it writes."""
    size = product.written_bytes
    return product._replace(num_bytes=product.num_bytes + size, written_bytes=2 * size)


@dataclass
class _Recorder:
    """Gives equal calls, transfers and runs one number each, and builds the StepEvents of them.

    A run lists the gathers that start before it apart from its other events, and a transfer that
    finishes gradients is recorded without its wait.
    """

    ran: Replay
    phase: Callable[[fx.Node], str]
    calls: dict[Call, int] = field(default_factory=dict)
    moves: dict[Move, int] = field(default_factory=dict)
    runs: dict[Run, int] = field(default_factory=dict)
    marks: dict[fx.Node, str] = field(default_factory=dict)
    added: Set[fx.Node] = frozenset()  # to sums over microbatches
    joined: Mapping[fx.Node, Move | None] = field(default_factory=dict)
    closing: Mapping[fx.Node, list[fx.Node]] = field(default_factory=dict)  # by transfer

    def step(self, runs: list[_Calls]) -> StepEvents:
        self._mark(runs)
        order, rows = [], []
        for each in runs:
            run, row = self._run(each)
            order.append(Place(each.label, _number(self.runs, run), each.times))
            rows.append(row)
        return StepEvents(
            tuple(self.calls), tuple(self.moves), tuple(self.runs), tuple(order),
            sites=Sites.gathered(rows),
        )  # fmt: skip

    def _mark(self, runs: list[_Calls]) -> None:
        """Name every transfer, so that a wait finds its start.

        A transfer that starts and ends in one run is named by its place in the run (``3``), others
        by run and place (``5:3``). Equal runs thus have equal events and are stored once.
        """
        at = {node: number for number, run in enumerate(runs) for node in self._all_of(run)}
        for number, run in enumerate(runs):
            for place, node in enumerate(filter(_is_start, run.calls)):
                waits = [user for user in node.users if user.target is collectives.wait]
                stays = all(at.get(wait, number) == number for wait in waits)
                self.marks[node] = f"{place}" if stays else f"{number}:{place}"

    def _all_of(self, each: _Calls) -> list[fx.Node]:
        """The calls of a run, then those that wait for its gradients."""
        return [*each.calls, *(n for start in each.calls for n in self.closing.get(start, ()))]

    def _run(self, each: _Calls) -> tuple[Run, list[Site]]:
        """The run of some calls, and the site of each event: gathers first, closing last."""
        gathers = _first_gathers(each)
        rest = [n for n in each.calls if n not in gathers]
        parts = [[*self._events(n)] for n in (gathers, rest, self._all_of(each)[len(each.calls) :])]
        first, then, last = (tuple(event for event, _ in part) for part in parts)
        run = Run(first, then, bool(rest) and is_backward(rest[-1]), last)
        return run, [site for part in parts for _, site in part]

    def _events(self, nodes: Iterable[fx.Node]) -> Iterator[tuple[Event, Site]]:
        """The events of some calls, each with the place in the model that the call comes from."""
        for node in nodes:
            site = Site(value(node).module, value(node).source)
            yield from ((event, site) for event in self._events_of(node))

    def _events_of(self, node: fx.Node) -> Iterator[Event]:
        phase = self.phase(node)
        if _is_start(node):
            code = LAST if _ends_step(node) else START
            if moved := self._move(node):
                yield Event(phase, code, _number(self.moves, moved), self.marks[node])
        elif node.target is collectives.wait:
            started = first_operand(node)
            if started in self.marks and (moved := self._move(started)):
                yield Event(phase, WAIT, _number(self.moves, moved), self.marks[started])
        elif node.target is collectives.accumulate:
            return  # each microbatch has its additions
        elif call := call_of(node, self.ran):
            joins = node in self.added and node.target is ops.weight_grad
            call = _reading(call) if joins else call
            yield Event(phase, CALL, _number(self.calls, call))
        if node in self.added and node.target is not ops.weight_grad:
            adds = Call("add_grad", "matmul", dtype_of(node), 0, 3 * fake_of(node).nbytes)
            yield Event(phase, CALL, _number(self.calls, adds))

    def _move(self, node: fx.Node) -> Move | None:
        """The transfer that a call starts; None where another call's transfer counts its bytes."""
        return self.joined[node] if node in self.joined else _move_of(node)


def _first_gathers(each: _Calls) -> list[fx.Node]:
    """The gathers that start before a run: a block's, and those with which other calls begin."""
    if not each.label:
        return [*takewhile(gathers_param, each.calls)]
    gathers = filter(gathers_param, each.calls)  # a block's method starts those of one weight first
    return sorted(gathers, key=lambda n: len(tensor_args(n)) > 1)


def _number(table: dict[T, int], entry: T) -> int:
    return table.setdefault(entry, len(table))


def _is_start(node: fx.Node) -> bool:
    return node.target in collectives.COLLECTIVES


def _move_of(node: fx.Node) -> Move:
    kinds, sizes = zip(*transfers(node), strict=True)
    size = sizes[0] if len(kinds) == 1 else put_in_bytes(node)
    return Move(
        "+".join(kinds), str(node.kwargs["axis"]), size, packed_bytes(node), unpacked_bytes(node)
    )


def _finishes(node: fx.Node) -> bool:
    """Whether a call waits for finished gradients, or picks one of them.

    ``step_walk`` decides itself when such transfers are waited for.
    """
    if node.target is operator.getitem:
        return _finishes(node.all_input_nodes[0])
    return node.target is collectives.wait and _ends_step(first_operand(node))


def _ends_step(node: fx.Node) -> bool:
    """Whether a collective finishes gradients, which nothing reads before the step's end."""
    if node.target not in collectives.COLLECTIVES or not is_backward(node):
        return False
    waits = [user for user in node.users if user.target is collectives.wait]
    picks = [u for w in waits for u in w.users if u.target is operator.getitem]
    return bool(waits) and all(u.op == "output" for n in picks or waits for u in n.users)
