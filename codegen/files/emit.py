"""Prints the program of a step without pipeline stages, from the checked graph of one rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import fx

from partc.codegen.bodies.body import given_out_at
from partc.codegen.bodies.class_names import class_names, inner_names
from partc.codegen.bodies.classes import BlockClass
from partc.codegen.bodies.compiled import compiled
from partc.codegen.bodies.gathers_ahead import gather_ahead
from partc.codegen.bodies.last_sums import last_hidden
from partc.codegen.bodies.outline import outlined
from partc.codegen.bodies.printed_order import check_printed
from partc.codegen.bodies.step import StepBody
from partc.codegen.bodies.tables import (
    TABLES,
    declarations,
    input_meaning,
    input_rows,
    table,
)
from partc.codegen.calls.buffers_in_place import updates
from partc.codegen.calls.expressions import ADDS, Adds
from partc.codegen.calls.names import wishes
from partc.codegen.calls.path_names import short_names
from partc.codegen.calls.ranges import finished
from partc.codegen.calls.scope import Scope, attributes, lists
from partc.codegen.calls.statements import free_early, with_sections
from partc.codegen.calls.tidy import spelled
from partc.codegen.files.instances import instances
from partc.codegen.files.island import Head, Islands
from partc.codegen.files.role_file import role_file
from partc.codegen.files.shared_blocks import Unlike, check_same_calls, shared_blocks
from partc.codegen.files.spelling import (
    dtype_name,
    read,
    result_type,
)
from partc.codegen.files.stored_tables import share_tables, stored_tables
from partc.codegen.files.templates import MEANINGS, TEMPLATES
from partc.codegen.helpers.needed import Helpers
from partc.codegen.repeats.arranged import arranged
from partc.codegen.repeats.equal import made_in_step, printing
from partc.codegen.repeats.layers import FIRST, Layers
from partc.codegen.repeats.runs import Item, Loop, Run, runs_within, with_inner
from partc.codegen.repeats.slots import Interface, interfaces
from partc.codegen.repeats.totals import unread_zeros
from partc.codegen.text import Line, Printed, Text, block
from partc.graph import Graph, Kind, is_tensor, value
from partc.graph.draws import draws_of
from partc.graph.given_back import given_out, waits_for_script, written_before
from partc.graph.graph_edits import copied
from partc.graph.hooked import calls_hooks
from partc.graph.moves import is_keyed, wire_of
from partc.plan.mesh import Mesh
from partc.quoting import comment, identifier, literal

NO_AXES = Mesh(())


def emit(
    graph: Graph, *, header: str, mesh: Mesh | None = None, prefetch: int = 1,
    messages: bool = False, backend: str = "gloo", inductor: bool = False, ranges: bool = False,
    islands: Islands | None = None,
) -> Printed:  # fmt: skip
    """The text of a role's file: tables, helper functions, block classes and ``class <Model>Step``.

    ``mesh`` has the axes that the launcher makes, where the graph lacks those of one rank.

    Between two loops over blocks the program starts to gather the weights of the first ``prefetch``
    blocks of the next loop. ``backend`` carries tensors between ranks: ``gloo`` or ``nccl``. With
    ``messages`` ranks send each other what gloo would gather, or sum and scatter. With ``inductor``
    the calls between two transfers become functions for torch.compile. With ``ranges`` blocks and
    transfers stand in ranges of torch.profiler. With ``islands`` the step meets those of other
    islands. CheckError if the text does anything but compute with torch.
    """
    apart: set[tuple[str, ...]] = set()
    while True:
        try:
            return _emit(
                graph, apart, header=header, mesh=mesh or graph.mesh, prefetch=prefetch,
                messages=messages, backend=backend, inductor=inductor, ranges=ranges,
                islands=islands,
            )  # fmt: skip
        except Unlike as unlike:
            apart.update(unlike.layers)


def _emit(
    graph: Graph, apart: Collection[tuple[str, ...]], *, header: str, mesh: Mesh, prefetch: int,
    messages: bool, backend: str, inductor: bool, ranges: bool, islands: Islands | None,
) -> Printed:  # fmt: skip
    """As ``emit``; Unlike if runs, but for those ``apart``, share no class with their kin."""
    graph = spelled(graph, fused=inductor)
    items, sides = arranged(graph, apart)
    checked = copied(graph)
    helpers = Helpers(
        messages=messages, backend=backend, ranges=ranges, hooks=calls_hooks(graph),
        narrow=any(map(wire_of, graph.calls())),
    )  # fmt: skip
    [items] = outlined([(graph, items)], helpers)
    items = compiled(graph, items, helpers) if inductor else items
    items = gather_ahead(items)
    check_printed(checked, items)
    loops = [item for item in items if isinstance(item, Loop)]
    check_same_calls(dict.fromkeys(loop.run for loop in with_inner(loops)))
    with printing(graph):
        # Again: the calls of the loops, whose positions interfaces hold, have been replaced.
        sides = interfaces(graph, loops)
        return RoleText(
            graph, header, items, sides, helpers, mesh=mesh, prefetch=prefetch, islands=islands
        ).file()


@dataclass
class RoleText:
    """Prints one role's file; ``StageText`` prints one pipeline stage with the same methods."""

    step_locals: ClassVar[tuple[str, ...]] = ()  # variables that the templates use in `step`

    graph: Graph
    header: str
    items: list[Item]
    sides: dict[Loop, Interface]
    helpers: Helpers
    mesh: Mesh = NO_AXES  # of all ranks
    adds: Adds = ADDS
    prefetch: int = 1
    islands: Islands | None = None
    lent: frozenset[str] = frozenset()  # buffers that another stage of the same rank holds
    # the list whose layers are counted from the stage's first one, if several stages share a text
    layers: Layers | None = None
    label: str = ""  # of a pipeline stage
    classes: dict[Run, BlockClass] = field(default_factory=dict)
    attributes: dict[fx.Node, str] = field(
        default_factory=dict
    )  # "layers.0.w" of a parameter or buffer
    lent_by_blocks: dict[str, Any] = field(default_factory=dict)  # what the step reads of blocks

    def file(self) -> Printed:
        """The file, and the helpers that it needs of the file beside it."""
        self.make_classes()
        self.name_attributes()
        arguments = self.arguments_by_node()
        blocks = shared_blocks([self])
        first = [Line(f"self.rng = {self.helpers.use('Draws')}()")] if self.draws else []
        made = block([*first, *self.declarations(str)], 2)
        body = self._step(arguments)
        name = self.class_name
        result = result_type(
            self.graph.loss is not None, bool(self.graph.outputs.results),
            waits=waits_for_script(self.graph),
        )  # fmt: skip
        head = Head(name=name, arguments=list(arguments.values()), result=result)
        last = f"Step = {name}"
        if self.islands is not None and self.graph.loss is not None:
            for each in self.islands.calls:
                self.helpers.use(each)
            last = self.islands.text([self.graph], self.attributes, head, draws=self.draws)
        body = TEMPLATES.get_template("program.py.j2").render(
            distributed=self.is_distributed,
            mesh=literal(dict(self.mesh.axes)),
            dtypes=literal(self._dtypes()) if "empty" in self.helpers.used else "",
            tables=self._tables(),
            helpers=self.helpers.own_text(),
            blocks=blocks,
            draws=self.draws,
            own=self.helpers,
            axes=self.graph.mesh.names,
            declarations=made,
            method="step" if self.graph.loss is not None else "forward",
            body=body,
            last=last,
            **head,
        )
        return role_file(body, self.header, self.helpers, distributed=self.is_distributed)

    @property
    def class_name(self) -> str:
        """The name of the program's class."""
        return f"{identifier(self.graph.model) or 'Model'}Step"

    # classes and attributes ------------------------------------------------------------------
    @cached_property
    def draws(self) -> bool:
        """Whether the program draws random numbers."""
        return bool(draws_of(self.graph)) or any(map(is_keyed, self.sums()))

    def sums(self) -> Iterable[fx.Node]:
        return self.graph.calls()  # among which are all sums with fewer bytes

    @property
    def is_distributed(self) -> bool:
        """Whether classes are made for a rank of a mesh."""
        return bool(self.graph.mesh.names) or self.islands is not None

    def make_classes(self) -> None:
        """Make a BlockClass for every run of equal blocks."""
        every = dict.fromkeys(loop.run for loop in self.sides)
        within = {inner for run in every for inner in run.inner}
        runs = sorted((run for run in every if run not in within), key=lambda run: run.follows)
        names = class_names(runs, self.graph.classes, lists(self.graph.mesh), self.class_name)
        named = dict(zip(runs, names, strict=True))
        deep = [run for run in runs_within(every) if run in within]
        inner = inner_names(deep, self.graph.classes, [n for n, _ in names], self.class_name)
        named |= {run: (name, "") for run, name in zip(deep, inner, strict=True)}
        for run in runs:
            self._make_class(run, named, within)
        share_tables(self)

    def _make_class(
        self, run: Run, named: Mapping[Run, tuple[str, str]], within: Collection[Run]
    ) -> None:
        """The class of a run, behind those that it needs: of its kin's first run, of inner ones."""
        if run in self.classes:
            return
        lead = next((r for r in named if r.layers[0] == run.kin), None) if run.follows else None
        for needed in (*run.inner, *([lead] if lead is not None else [])):
            self._make_class(needed, named, within)
        sides = {lp.phase: s for lp, s in self.sides.items() if lp.run is run}
        name, attribute = named[run]
        self.classes[run] = BlockClass(
            self.graph, run, sides["F"], sides.get("B"), name, attribute, self.helpers,
            self.adds, sides.get("W"), self.is_distributed,
            lead=self.classes[lead] if lead is not None else None,
            inner=[self.classes[each] for each in run.inner], is_inner=run in within,
            **self.lent_by_blocks,
        )  # fmt: skip

    @property
    def own_classes(self) -> list[BlockClass]:
        """The classes of which the step itself has instances."""
        return [cls for cls in self.classes.values() if not cls.is_inner]

    def name_attributes(self) -> None:
        """Give each parameter and buffer an attribute: ``embed_weight``, ``layers.0.w_weight``."""
        in_blocks = {n: a for c in self.own_classes for n, a in c.attributes().items()}
        scope = attributes(self.graph.mesh, *(c.attribute for c in self.own_classes))
        short = short_names([name for name in self._stored() if name not in in_blocks])
        for name, node in self._stored().items():
            self.attributes[node] = in_blocks.get(name) or scope.fresh(short[name])

    def _stored(self) -> dict[str, fx.Node]:
        return {**self.graph.params, **self.graph.buffers}

    def standing(self, kind: Kind) -> dict[fx.Node, str]:
        """Parameters or buffers of the step module itself, and not of a block, by attribute."""
        nodes = [
            n for n in self.graph.placeholders(kind).values() if value(n).name not in self.lent
        ]
        return {n: self.attributes[n] for n in nodes if "." not in self.attributes[n]}

    def arguments_by_node(self) -> dict[fx.Node, str]:
        """The name of the argument of ``step`` for each input of the model."""
        scope = Scope([*self.helpers.names, *self.step_locals])
        return {node: scope.fresh(name) for name, node in self.graph.inputs.items()}

    # data ------------------------------------------------------------------------------------
    def _tables(self) -> list[str]:
        entries: dict[str, list[Line]] = {
            "ALIASES": [
                Line(f"{literal(a)}: {literal(b)}") for a, b in sorted(self.graph.aliases.items())
            ],
            "INPUTS": input_rows(self.graph),
        }
        tables, stored = stored_tables(self)
        entries |= stored
        said = {**MEANINGS, "INPUTS": input_meaning(self.graph)}
        trains = self.graph.loss is not None
        own = self.islands.tables() if self.islands and trains else []
        every = (table(name, said[name], entries[name]) for name in MEANINGS)
        return [*dict.fromkeys(tables), *every, *own]

    def shown(self, path: str) -> str:
        """A module's path as comments show it."""
        return path if self.layers is None else self.layers.shown(path)

    def span(self, run: Run) -> str:
        """The blocks of a run as comments show them: ``model.layers.0 .. 7``."""
        if run.is_called:
            return comment(f"{self.shown(run.module)}, called {len(run.layers)} times")
        first, last = (self.shown(run.layers[i]) for i in (0, -1))
        if run.is_single:
            return comment(first)
        return comment(f"{first} .. {last.rpartition('.')[2]}")

    def declarations(
        self, table_of: Callable[[str], str], kinds: Collection[Kind] = tuple(TABLES)
    ) -> list[Line]:
        """The statements that make blocks, and parameters and buffers of the given ``kinds``.

        ``table_of`` gives the expression that reads a table: ``STAGE1_SHARDS`` for ``SHARDS``.
        """
        lines = []
        for kind in kinds:
            constant = TABLES[kind]
            some = any(cls.stored(kind) for cls in self.own_classes)
            lines += declarations(
                self.graph, self.standing(kind), kind, table_of(constant), self.helpers, some
            )
        return lines + [instances(self, cls) for cls in self.own_classes]

    def site_literal(self, site: str) -> str:
        """A site as an expression in a method, with ``self.n`` where layers are relative."""
        return literal(site) if self.layers is None else self.layers.literal(site, f"self.{FIRST}")

    def _dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of all parameters and buffers by name."""
        nodes = self._stored().values()
        return {dtype_name(n): value(n).dtype for n in nodes}

    # step ------------------------------------------------------------------------------------
    def _step(self, arguments: dict[fx.Node, str]) -> str:
        """The body of ``step``: compute, wait for the last reductions, write buffers, return."""
        graph, outputs = self.graph, self.graph.outputs
        order = [item for item in self.items if isinstance(item, fx.Node)]
        seen = {node: Text(read(path)) for node, path in self.attributes.items()}
        seen |= {node: Text(name) for node, name in arguments.items()}
        seen |= dict.fromkeys(self.zeros, Text("0"))
        if outputs.loss is not None and waits_for_script(graph):
            seen[outputs.loss] = Text("0")  # the script computes the loss
        results = [*outputs.results.values()] + ([outputs.loss] if outputs.loss is not None else [])
        kept = {*results, *outputs.buffers.values()}
        scope = Scope([*arguments.values(), *self.helpers.names])
        device = f"{next(iter(arguments.values()), 'next(self.parameters())')}.device"
        body = StepBody(
            graph, order, wishes(graph, stored=self.attributes), scope, self.helpers, seen, kept,
            self.final_grads(), device, name_of=self.site_literal, items=self.items,
            classes=self.classes, prefetch=self.prefetch,
        )  # fmt: skip
        made = {*order, *results, *self._by_calls(), *written_before(graph)}
        lasting = {n for n in kept if is_tensor(n) and n in made}
        statements = free_early(
            body.statements(), body.text, lasting | set(self.attributes) | set(arguments)
        )
        lines = with_sections(statements, name_of=self.helpers.ranges and self.site_literal)
        if any(re.search(r"\breduced\b", line.code) for line in lines):
            lines = [Line(f"reduced = {self.helpers.use('Reduced')}()"), *lines]
            call = f"reduced.finish({', '.join(self._others())})"
            lines += finished(call, last_hidden(body), ranges=self.helpers.ranges)
        if self.draws:
            lines.insert(0, Line(f"self.rng.begin({device})"))
        at = given_out_at(lines) if waits_for_script(graph) else len(lines)
        lines[at:at] = self.buffer_updates(body)
        lines += [Line(self._result(body))] if self._gives_last else []
        return self.helpers.block(scope.settled([lines])[0], 2)

    @cached_property
    def zeros(self) -> set[fx.Node]:
        """Zeros that no line makes, as calls of a module add to them in a dict."""
        return unread_zeros([total for side in self.sides.values() for total in side.totals])

    def _by_calls(self) -> set[fx.Node]:
        """What the calls of modules leave behind the loops over them."""
        loops = [loop for loop in self.sides if loop.run.is_called]
        return {node for loop in loops for node in loop.groups[-1].nodes}

    def _others(self) -> list[str]:
        """The groups of ranks that see other sums with fewer bytes than this rank, as texts."""
        sums = {str(node.kwargs["axis"]) for node in self.graph.calls() if wire_of(node)}
        axes = [axis for axis, size in self.graph.mesh.axes if size > 1]
        return [f"self.{axis}" for axis in axes if sums and axis not in sums]

    def final_grads(self) -> dict[fx.Node, list[str]]:
        """For each gradient that no block adds to ``.grad`` itself its parameters, as texts."""
        stored: dict[fx.Node, list[str]] = {}
        loops = [loop for loop in self.sides if not loop.run.is_called]
        in_blocks = {n for loop in loops for g in loop.groups for n in g.nodes}
        params = self.graph.params
        for name, node in self.graph.grads.items():
            made_by = made_in_step(self.graph, node)
            path = self.attributes[params[name]]
            if made_by not in in_blocks or "." not in path:
                stored.setdefault(node, []).append(read(path))
        return stored

    def buffer_updates(self, body: StepBody) -> list[Line]:
        """The lines that copy new values of buffers over the old ones."""
        news = self.graph.outputs.buffers.items()
        seen = ((self.buffer_text(name), node) for name, node in news if node in body.seen)
        return updates(seen, body.text)

    def buffer_text(self, name: str) -> str:
        """The text that reads a buffer of the model: ``self.layers[0].running_mean``."""
        return read(self.attributes[self.graph.buffers[name]])

    @property
    def _gives_last(self) -> bool:
        """Whether ``step`` ends with a ``return``; what it has given out needs none."""
        given = given_out(self.graph) if waits_for_script(self.graph) else None
        return given is None or given.keys() != self.graph.outputs.results.keys()

    def _result(self, body: StepBody) -> str:
        """The ``return`` of the loss with its extras, or of a model's results in inference; where
        the script computes the loss, that of the gradients of inputs.
        """
        outputs, waits = self.graph.outputs, waits_for_script(self.graph)
        before = given_out(self.graph) if waits else {}
        named = (each for each in outputs.results.items() if each[0] not in before)
        items = (f"{literal(name)}: {body.text(node)}" for name, node in named)
        results = f"{{{', '.join(items)}}}"
        if outputs.loss is None or waits:
            return f"return {results}"
        loss = str(body.text(outputs.loss))
        return f"return {loss}, {results}" if outputs.results else f"return {loss}"
