"""Blocks that differ in sizes alone: one class prints all of them, wherever they stand.

In: the runs of equal blocks that lists have. Out: the runs, those of one kin marked so, and the
single blocks that are kin: modules of any path, such as the last block of each stage of a network
whose stages differ in width. Whether one text serves all of a kin is for who prints it to decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import fx

from partc.codegen.repeats.equal import Equal
from partc.codegen.repeats.numbers import Varied, varied
from partc.codegen.repeats.owners import blocks_of, layer_of, owners_of
from partc.codegen.repeats.runs import PHASES, Run
from partc.codegen.repeats.trim import Block
from partc.graph import Graph, Phase, collectives, is_tensor, value
from partc.graph.moves import gathers_param
from partc.graph.places import module_of

# Lines that a class has beyond those of a block's calls, and that each of its instances takes.
CLASS, INSTANCE = 15, 8


@dataclass(eq=False)
class Kin:
    """Runs and single blocks that differ in sizes alone; ``lead`` is the block that is printed."""

    lead: Block
    runs: list[tuple[Block, ...]]
    known: list[Run | None] = field(default_factory=list)  # of each the run that a list has

    @property
    def single(self) -> list[Block]:
        return [run[0] for run, known in zip(self.runs, self.known, strict=True) if known is None]

    @property
    def nodes(self) -> set[fx.Node]:
        """The calls of all its single blocks."""
        return {node for block in self.single for node in nodes_of(block)}

    @property
    def layers(self) -> list[str]:
        return [layer_of(block) for block in self.single]

    @property
    def is_worth_it(self) -> bool:
        """Whether single blocks have fewer lines as calls of a class than in line."""
        num = sum(is_tensor(node) for node in nodes_of(self.lead))
        in_line = self.known.count(None)
        printed = 1 if in_line == len(self.runs) else 0
        return (in_line - printed) * num > printed * CLASS + in_line * INSTANCE


def related(
    graph: Graph, runs: Sequence[Run], taken: Collection[fx.Node],
    alone: Collection[tuple[str, ...]],
) -> list[Run]:  # fmt: skip
    """The runs with those that are kin marked, and single blocks that are kin of others.

    ``taken`` has the calls of all runs. Runs in ``alone``, by their ``layers``, are no kin. Single
    blocks are looked for among the kin of runs first, then the outermost modules first.
    """
    finder = Finder(graph, Equal(graph, {}, sizes=True))
    for run in runs:
        if run.layers not in alone and not run.elsewhere and not run.is_called:
            finder.add(tuple(blocks_in(run)), run)
    looped = [module_of(layer) for run in runs for layer in run.layers]
    free = set(taken)
    for of_runs in (True, False):
        level = 1
        while paths := {path for node in graph.calls() if (path := prefix_of(node, level))}:
            found = [layer for kin in finder.kins if kin.is_worth_it for layer in kin.layers]
            inside = [*looped, *found]
            allowed = {p for p in paths if (p,) not in alone and not meets(p, inside)}
            within = partial(within_path, level=level, allowed=allowed)
            for block in blocks_of(graph, owners_of(graph, within, free, looped=False)):
                if is_small(block):
                    continue
                finder.add((block,), None, free, of_runs=of_runs)
            free |= {node for kin in finder.kins if kin.is_worth_it for node in kin.nodes}
            level += 1
    kins = [kin for kin in finder.kins if len(kin.runs) > 1]
    kins = [kin for kin in kins if kin.is_worth_it or None not in kin.known]
    marked = [run for kin in kins for run in _runs(kin)]
    done = {id(run) for kin in kins for run in kin.known if run is not None}
    return [*(run for run in runs if id(run) not in done), *marked]


@dataclass(eq=False)
class Finder:
    """Puts blocks among those that they are kin of; ``kins`` has all that were found so far."""

    graph: Graph
    equal: Equal
    kins: list[Kin] = field(default_factory=list)
    by_calls: dict[object, list[Kin]] = field(default_factory=dict)

    def add(
        self, run: tuple[Block, ...], known: Run | None, taken: Collection[fx.Node] = (), *,
        of_runs: bool = False,
    ) -> None:  # fmt: skip
        """Add a run, or a single block (``known`` is None), to its kin, or begin a new one.

        ``of_runs``: add it to the kin of a run, or not at all.
        """
        near = self.by_calls.setdefault(says_of(self.graph, run[0]), [])
        for kin in near:
            if not kin.is_worth_it and not kin.nodes.isdisjoint(taken):
                continue  # its calls have become part of other blocks
            if of_runs and kin.known[0] is None:
                continue
            if known is None and meets(layer_of(run[0]), [layer_of(r[0]) for r in kin.runs]):
                continue
            aligned = [self.equal.all_aligned(kin.lead, block) for block in run]
            blocks = tuple(block for block in aligned if block is not None)
            if len(blocks) == len(run):
                kin.runs.append(blocks)
                kin.known.append(known)
                return
        if not of_runs:
            near.append(Kin(run[0], [run], [known]))
            self.kins.append(near[-1])


def _runs(kin: Kin) -> Iterator[Run]:
    """The runs of a kin, with the numbers that differ among all of their blocks."""
    made = [_run(blocks, known) for blocks, known in zip(kin.runs, kin.known, strict=True)]
    layers = [layer for run in made for layer in run.layers]
    phases = [[group for run in made for group in run.of(phase)] for phase in PHASES]
    rows = varied(layers, phases, sizes=True)
    start = 0
    for run in made:
        end = start + len(run.layers)
        mine = tuple(Varied(row.name, row.values[start:end], row.word) for row in rows)
        yield replace(run, numbers=mine, kin=layers[0])
        start = end


def _run(blocks: Sequence[Block], known: Run | None) -> Run:
    forward, backward, weights = (
        tuple(group for block in blocks if (group := block[phase]) is not None) for phase in PHASES
    )
    layers = known.layers if known is not None else (layer_of(blocks[0]),)
    return Run(layers, forward, backward, weights)


def blocks_in(run: Run) -> Iterator[Block]:
    for i in range(len(run.forward)):
        yield {phase: run.of(phase)[i] if run.of(phase) else None for phase in PHASES}


def nodes_of(block: Block) -> list[fx.Node]:
    return [node for group in block.values() if group is not None for node in group.nodes]


def is_small(block: Block) -> bool:
    """Whether a function serves better: one module's own calls, without a transfer in between."""
    calls = block["F"].nodes if block["F"] is not None else ()
    waits = [node.all_input_nodes[0] for node in calls if node.target is collectives.wait]
    return len({value(node).module for node in calls}) < 2 and all(map(gathers_param, waits))


def says_of(graph: Graph, block: Block) -> object:
    """What blocks that are kin have in common: how often they call which op in which phase."""
    groups: list[tuple[Phase, object]] = [
        (phase, frozenset(Counter(str(node.target) for node in group.nodes).items()))
        for phase, group in block.items()
        if group is not None
    ]
    return graph.classes.get(layer_of(block)), tuple(groups)


def prefix_of(node: fx.Node, level: int) -> str:
    """The first ``level`` parts of a call's module path; "" if it has fewer."""
    parts = value(node).module.split(".")
    return ".".join(parts[:level]) if len(parts) >= level else ""


def within_path(node: fx.Node, level: int, allowed: Collection[str]) -> str:
    path = ".".join(value(node).module.split(".")[:level])
    return path if path in allowed and path.count(".") == level - 1 else ""


def meets(path: str, others: Collection[str]) -> bool:
    """Whether a module is one of some others, or inside of one, or around one."""
    return any(f"{path}.".startswith(f"{o}.") or f"{o}.".startswith(f"{path}.") for o in others)
