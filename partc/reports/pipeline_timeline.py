"""The time line of a predicted pipeline: two rows for each pipeline rank, actions and messages.

Actions and messages are those of the simulated schedule. Their lines, and the memory between them,
come from the programs: one rank is run for each file, on tensors without data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from partc.cost.roofline import COMPUTE as COMPUTING
from partc.cost.roofline import Box
from partc.dryrun.program_trace import CALL, START, TURN, TURNED, Done, ProgramTrace, program_trace
from partc.plan.mesh import PP, Mesh
from partc.program import Program
from partc.reports.action_calls import (
    MOST_BARS,
    Inside,
    Turn,
    insides,
    replace_times,
    turns_of,
)
from partc.reports.linked import NO_LINE, Bar, Point
from partc.reports.saved_step import SavedStep, saved_step
from partc.reports.timeline import RANKS, TRANSFERS, Stream, Timeline, held_lines
from partc.schedules.actions import Action
from partc.schedules.programs import COMPUTE, FINISHED, RECEIVE, RECEIVED, SEND, SENT
from partc.schedules.programs import START as STARTS
from partc.schedules.queues import operation

METHOD_OF = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
WORDS = {SEND: "send", RECEIVE: "receive", STARTS: "collective"}
OPTIMIZER = "optimizer"
SHARED = "shared by microbatches"
LEAST = 1e-6  # of a step: what is shorter is rounding
_MESSAGES = ((SEND, "send"), (RECEIVE, "receive"))


@dataclass(frozen=True)
class _Rank:
    """A pipeline rank: what is simulated of it, its file, and what a rank with that file does."""

    number: int
    program: Program
    saved: SavedStep
    file: str
    trace: ProgramTrace

    @property
    def turns(self) -> dict[Turn, int]:
        """The line that calls each method of a stage for each microbatch."""
        return {_turn(each): each.line for each in self.trace.done if each.kind == TURN}

    def turn_of(self, action: Action) -> Turn:
        stages = self.saved.step.schedule.stages_of(self.number)
        return [*stages].index(action.stage), METHOD_OF[action.kind], action.microbatch

    def actions(self) -> Iterator[tuple[Action, float, float]]:
        """The rank's actions, each with when it begins and ends."""
        step, before = self.saved.step, 0.0
        ran = zip(step.programs[self.number].events, step.simulated.ends[self.number], strict=True)
        for (code, number), end in ran:
            if code == COMPUTE:
                yield step.wiring.action(number), before, end
            before = end


def pipeline_timeline(program: Program) -> Timeline:
    """The time line of a pipeline's predicted step, with the memory of the fullest rank."""
    saved = saved_step(program)
    peaks = [rank.peak_bytes for rank in saved.cost.ranks]
    fullest = max(range(len(peaks)), key=peaks.__getitem__)
    ranks = [*_ranks(program, saved, fullest)]
    most, cost = ranks[fullest], saved.cost.ranks[fullest]
    role = program.role(program.mesh.first_rank(fullest))
    within = _insides(most)
    called, until = _called(most, within)
    shared = _shared_s(saved)
    streams = (
        stream
        for rank in ranks
        for stream in (*_streams(rank), *(_inside(rank, called) if rank is most else ()))
    )
    return Timeline(
        file=most.file,
        streams=tuple(_behind(each, shared) for each in streams),
        curve=tuple(point._replace(at_s=point.at_s + shared) for point in _curve(most)),
        kept_bytes=cost.peak_bytes - cost.live,
        holders=tuple(held_lines(most.trace, role, program.sources[most.file])),
        orders_agree=all(map(_messages_pair, ranks)) and _calls_pair(within),
        moved={axis: _moved(most.trace, axis) for axis in program.mesh.names},
        memory_of=f"pipeline rank {fullest}",
        calls_until_s=until if until is None else until + shared,
    )


def _shared_s(saved: SavedStep) -> float:
    """Seconds of what all microbatches share, with which a step begins: no schedule has them."""
    step = saved.cost.prediction
    closes = sum(phase.seconds for phase in step.phases if phase.name == OPTIMIZER)
    seconds = step.seconds - closes - saved.step.simulated.makespan
    return seconds if seconds > LEAST * step.seconds else 0.0


def _behind(stream: Stream, shared: float) -> Stream:
    """A row behind what all microbatches share, which is a bar of a rank's own row."""
    if not shared:
        return stream
    bars = tuple(
        bar._replace(box=replace_times(bar.box, bar.box.begin_s + shared, bar.box.seconds))
        for bar in stream.bars
    )
    first = (Bar(Box(RANKS, SHARED, SHARED, 0.0, shared), NO_LINE, 0.0),)
    return replace(stream, bars=(*first, *bars) if stream.kind == RANKS else bars)


def _insides(rank: _Rank) -> dict[int, dict[str, Inside]]:
    """For each stage of a rank what its actions do, by their kind."""
    program, turns = rank.program, turns_of(rank.trace)
    mesh = Mesh(program.mesh.axes, program.basis.topology()).at_place(rank.number)
    stages = rank.saved.step.schedule.stages_of(rank.number)
    return {
        stage: insides(
            program.basis.tapes[stage], mesh, turns.get(place, {}), rank.trace, METHOD_OF
        )
        for place, stage in enumerate(stages)
    }


def _called(
    rank: _Rank, within: Mapping[int, Mapping[str, Inside]]
) -> tuple[list[Bar], float | None]:
    """The calls of a rank's first actions, and where they end if those of all are too many."""
    bars: list[Bar] = []
    for action, begin, end in rank.actions():
        if found := within[action.stage].get(action.kind):
            if len(bars) + len(found.step.bars) > MOST_BARS:
                return bars, begin
            bars += found.at(begin, end)
    return bars, None


def _inside(rank: _Rank, bars: Sequence[Bar]) -> Iterator[Stream]:
    """The calls of a rank's actions, and a row of transfers for each axis that has any."""
    names = dict.fromkeys(bar.box.stream for bar in bars)
    for name in sorted(names, key=lambda stream: (stream != COMPUTING, stream)):
        own = tuple(bar for bar in bars if bar.box.stream == name)
        if name == COMPUTING:
            yield Stream(f"calls of {rank.number}", COMPUTING, rank.file, own)
        else:
            yield Stream(f"over {name}", TRANSFERS, rank.file, own, name)


def _messages_pair(rank: _Rank) -> bool:
    """Whether as many messages are simulated as the program sends and receives."""
    lines, events = _message_lines(rank), rank.saved.step.programs[rank.number].events
    codes = [code for code, _ in events]
    return all((word, 0) in lines for code, word in _MESSAGES if code in codes)


def _calls_pair(within: Mapping[int, Mapping[str, Inside]]) -> bool:
    """Whether the transfers inside of all actions are in the order of the program's lines."""
    return all(each.step.orders_agree for stage in within.values() for each in stage.values())


def _ranks(program: Program, saved: SavedStep, fullest: int) -> Iterator[_Rank]:
    """All pipeline ranks; of those with one file the fullest, or the first, is run."""
    numbers = range(len(saved.cost.ranks))
    files = [program.role_of(program.mesh.first_rank(number)) for number in numbers]
    runs = {file: number for number, file in reversed([*enumerate(files)])}
    runs[files[fullest]] = fullest
    library = program.basis.topology().library
    traces = {}
    for file, number in runs.items():
        rank = program.mesh.first_rank(number)
        traces[file] = program_trace(program.role(rank), rank, library)
    for number, file in enumerate(files):
        yield _Rank(number, program, saved, file, traces[file])


def _streams(rank: _Rank) -> Iterator[Stream]:
    """What a rank computes, with the collectives that close its step, and its messages."""
    moved = [*_transfers(rank)]
    closing = [bar for bar in moved if bar.box.stream == RANKS]
    yield Stream(f"rank {rank.number}", RANKS, rank.file, (*_actions(rank), *closing))
    if messages := tuple(bar for bar in moved if bar.box.stream == PP):
        yield Stream("messages", TRANSFERS, rank.file, messages, PP)


def _actions(rank: _Rank) -> Iterator[Bar]:
    lines = rank.turns
    for action, begin, end in rank.actions():
        box = Box(RANKS, action.kind, str(action), begin, end - begin)
        yield Bar(box, lines.get(rank.turn_of(action), NO_LINE), 0.0)
    phases = rank.saved.cost.prediction.phases
    closes = sum(phase.seconds for phase in phases if phase.name == OPTIMIZER)
    if closes:
        makespan = rank.saved.step.simulated.makespan
        yield Bar(Box(RANKS, OPTIMIZER, OPTIMIZER, makespan, closes), NO_LINE, 0.0)


def _transfers(rank: _Rank) -> Iterator[Bar]:
    """What the rank sends and receives, and the collectives that close its step."""
    step, queues = rank.saved.step, rank.saved.step.simulated.queues
    waits, lines = _waits(rank), _message_lines(rank)
    counts = dict.fromkeys(WORDS.values(), 0)
    for code, number in step.programs[rank.number].events:
        if code not in WORDS:
            continue
        word, done = WORDS[code], operation(code, number)
        begin, end = queues.begin[done], queues.end[done]
        what = step.wiring.collectives[number].name if code == STARTS else step.wiring.made(number)
        line = lines.get((word, counts[word]), NO_LINE)
        counts[word] += 1
        if end > begin:
            box = Box(PP, f"{word} {what}", "", begin, end - begin)
            closes = Box(RANKS, word, str(what), begin, end - begin)
            yield Bar(closes if code == STARTS else box, line, waits.get(done, 0.0))


def _waits(rank: _Rank) -> dict[int, float]:
    """Seconds that the rank waits while a transfer of its own runs, by the transfer's operation."""
    step, before = rank.saved.step, 0.0
    queues = step.simulated.queues
    found: dict[int, float] = {}
    ran = zip(step.programs[rank.number].events, step.simulated.ends[rank.number], strict=True)
    for (code, number), end in ran:
        if code in (RECEIVED, SENT, FINISHED) and end > before:
            awaited = operation(code, number)
            found[awaited] = end - max(before, queues.begin[awaited])
        before = end
    return found


def _message_lines(rank: _Rank) -> Mapping[tuple[str, int], int]:
    """The line of the n-th send and receive; none where another number of them is simulated.

    Before its first step a rank greets each neighbour by a message, which is no part of it.
    """
    found: dict[tuple[str, int], int] = {}
    events = rank.saved.step.programs[rank.number].events
    for code, word in _MESSAGES:
        started = [each for each in rank.trace.done if each.kind == START and each.name == word]
        # stages have groups of their own; those of the whole axis are then for sums of tied weights
        own = [each for each in started if each.axis not in rank.trace.sizes]
        mine = own or [each for each in started if each.axis == PP]
        num = sum(event[0] == code for event in events)
        if 0 < num <= len(mine) and _are_greetings(mine[:-num], mine[-num:]):
            found |= {(word, i): each.line for i, each in enumerate(mine[-num:])}
    return found


def _are_greetings(first: list[Done], rest: list[Done]) -> bool:
    """Whether the messages before those of a step all come from one line, which sends no other."""
    lines = {each.line for each in first}
    return len(lines) <= 1 and lines.isdisjoint(each.line for each in rest)


def _moved(trace: ProgramTrace, axis: str) -> list[int]:
    if axis != PP:
        return [each.num_bytes for each in trace.starts(axis)]
    names = ("send", "receive")
    moved = (each for each in trace.done if each.kind == START and each.name in names)
    return [each.num_bytes for each in moved if each.axis not in trace.sizes or each.axis == PP]


def _curve(rank: _Rank) -> Iterator[Point]:
    """A rank's live bytes: within an action the calls stand at equal distances."""
    spans = {rank.turn_of(action): (begin, end) for action, begin, end in rank.actions()}
    held: list[int] = []
    now = 0.0
    for each in rank.trace.done:
        if each.kind == CALL:
            held.append(each.live_bytes)
        elif each.kind in (TURN, TURNED) and (span := spans.get(_turn(each))):
            begin, end = span if each.kind == TURNED else (now, span[0])
            yield from _spread(held, begin, end)
            now, held = end, []
    yield from _spread(held, now, rank.saved.step.simulated.makespan)


def _turn(each: Done) -> Turn:
    return int(each.axis), each.name, each.number


def _spread(held: list[int], begin: float, end: float) -> Iterator[Point]:
    for i, num_bytes in enumerate(held, start=1):
        yield Point(begin + (end - begin) * i / len(held), num_bytes)
