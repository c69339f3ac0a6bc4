"""Prints the class of one pipeline stage, with a method for each phase of a step.

- ``begin(inputs)`` computes what all microbatches share, and gathers weights that stay whole;
- ``forward(i, ...)`` and ``backward(i, ...)`` compute one microbatch;
- ``weights(i)`` computes the weight gradients that a split backward leaves for later;
- ``finish()`` sums over ranks what all microbatches have added up, and returns the loss.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from torch import fx

from partc.codegen.bodies.block_arguments import LEFT
from partc.codegen.bodies.classes import BlockClass
from partc.codegen.bodies.compiled import compiled
from partc.codegen.bodies.gathers_ahead import gather_ahead
from partc.codegen.bodies.printed_order import check_printed
from partc.codegen.bodies.step import StepBody
from partc.codegen.bodies.tables import TABLES
from partc.codegen.calls.buffers_in_place import updates, written_late
from partc.codegen.calls.expressions import ADDS, PARTIALS
from partc.codegen.calls.names import wishes
from partc.codegen.calls.ranges import finished
from partc.codegen.calls.scope import Scope, attributes
from partc.codegen.calls.statements import free_early, with_sections
from partc.codegen.calls.tidy import spelled
from partc.codegen.files.alike_stages import declared, given
from partc.codegen.files.early_ends import early_sums
from partc.codegen.files.emit import RoleText
from partc.codegen.files.narrow_ends import NarrowEnds, lent
from partc.codegen.files.spelling import read, variable_of
from partc.codegen.files.stage_ends import Finish
from partc.codegen.files.stage_flow import StageFlow, has_phase
from partc.codegen.files.stage_methods import METHODS, Method
from partc.codegen.files.take_ends import Ends, take_ends
from partc.codegen.helpers.needed import Helpers
from partc.codegen.repeats.arranged import arranged
from partc.codegen.repeats.equal import printing
from partc.codegen.repeats.layers import FIRST, Layers, count_from_first
from partc.codegen.repeats.runs import Item, Loop, Run
from partc.codegen.repeats.slots import interfaces
from partc.codegen.text import WIDTH, Line, Text, block
from partc.graph import Graph, Phase, fake_of, innermost_block, is_tensor, typed, value
from partc.graph.graph_edits import copied
from partc.passes.overlap.bucket_collectives import BYTES_PER_MB
from partc.quoting import comment, literal


@dataclass
class Prepared:
    """A stage's graph on its way to a text: without the calls that end the step, in ``items``."""

    graph: Graph
    ends: Ends
    items: list[Item]
    checked: Graph  # a copy, whose calls no function replaces

    @classmethod
    def of(cls, graph: Graph, layers: Layers | None, *, inductor: bool) -> Prepared:
        """``layers``: those that are counted from the stage's first one."""
        graph = spelled(graph, fused=inductor)
        if layers is not None:
            graph = count_from_first(graph, layers)
        ends = take_ends(graph)
        return cls(graph, ends, arranged(graph)[0], copied(graph))


def stage_text(
    stage: Prepared, label: str, title: str, helpers: Helpers, bucket_mb: float, *,
    lent: frozenset[str] = frozenset(), shared: frozenset[str] = frozenset(),
    layers: Layers | None = None, first: str = "", inductor: bool = False,
) -> StageText:  # fmt: skip
    """A stage made ready for printing as ``class Stage<label>``.

    With ``layers`` the layers are counted from the stage's first one, whose number is the
    expression ``first``, so that several ranks or stages share the text. ``lent`` are buffers that
    another stage of the rank holds, ``shared`` those that several stages have. Up to ``bucket_mb``
    megabytes of gradients share a bucket when the step ends. With ``inductor`` the calls between
    transfers become functions for torch.compile.
    """
    graph, items = stage.graph, stage.items
    items = compiled(graph, items, helpers, by_phase=True) if inductor else items
    items = gather_ahead(items)
    check_printed(stage.checked, items)
    with printing(graph):
        sides = interfaces(graph, [item for item in items if isinstance(item, Loop)])
        return StageText(
            graph, "", items, sides, helpers, lent=lent, layers=layers, label=label, title=title,
            first=first, ends=stage.ends, bucket_bytes=round(bucket_mb * BYTES_PER_MB),
            shared=shared,
        )  # fmt: skip


@dataclass
class StageText(RoleText):
    """Prints one stage.

    Its methods share ``seen`` and ``scope``, so that a value has the same name in all of them.
    """

    step_locals: ClassVar[tuple[str, ...]] = ("i", "j", "stage", "loss", "results", "found")

    title: str = ""
    first: str = ""  # the number of its first layer, as an expression
    bucket_bytes: int = 0
    shared: frozenset[str] = frozenset()  # buffers that several stages have
    ends: Ends = field(default_factory=lambda: Ends({}, None))
    seen: dict[fx.Node, Text] = field(default_factory=dict)
    scope: Scope = field(default_factory=Scope)
    flow: StageFlow = field(init=False)
    class_of: StageText = field(init=False)  # the stage for which this one's class is printed
    lends: bool = False  # whether other stages of the same class read this one's buffers

    def __post_init__(self) -> None:
        self.class_of = self
        self.flow = StageFlow(self.graph, self.items, self.sides)
        self.adds = PARTIALS if self.ends.reduces else ADDS
        self.lent_by_blocks = lent(self.ends.narrow)
        self.make_classes()
        self.name_attributes()
        self.scope = Scope([*self.helpers.names, "i"])
        self.own = attributes(self.graph.mesh, *(c.attribute for c in self.own_classes))
        self.own.taken |= {path.partition(".")[0] for path in self.attributes.values()}
        self.seen = {node: Text(read(path)) for node, path in self.attributes.items()}
        self.seen |= dict.fromkeys(self.zeros, Text("0"))
        self.wishes = wishes(self.graph)

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def name(self) -> str:
        return f"Stage{self.class_of.label}"

    @property
    def attribute(self) -> str:
        """The stage's attribute in a rank's ``Step``: ``stage1``, ``stage_a``."""
        return f"stage_{self.label.lower()}" if self.label.isalpha() else f"stage{self.label}"

    def table(self, constant: str) -> str:
        """The name of the stage's table of its own parameters or buffers: ``STAGE1_SHARDS``."""
        return f"STAGE{self.class_of.label}_{constant}"

    def values(self) -> dict[str, Any]:
        """The values with which the template of a stage's class is filled."""
        return {
            "name": self.name,
            "doc": self._doc(),
            "functions": self.functions,
            "arguments": "".join(f", {name}: {kind}" for name, kind in given(self).items()),
            "declarations": block(declared(self), 2),
        }

    @cached_property
    def functions(self) -> list[dict[str, str]]:
        """The methods of the stage's class; cached, since printing them notes names and helpers."""
        methods = {phase: self._method(phase) for phase in METHODS if self.has(phase)}
        methods["S"].lines[:0] = self._opening()  # last: it depends on what the others leave
        self.scope.taken |= self.own.taken  # attributes are called as what they hold
        settled = self.scope.settled(
            [[Line(", ".join(m.arguments)), *m.lines] for m in methods.values()]
        )
        functions = [
            replace(method, arguments=arguments.code.split(", "), lines=lines).function(
                self.helpers
            )
            for method, (arguments, *lines) in zip(methods.values(), settled, strict=True)
        ]
        functions += [self._finish().reduce()] if self.ends.leaving else []
        return [*functions, *([self._finish().function()] if self.finishes else [])]

    def varies(self, constant: str) -> bool:
        """Whether a table depends on the number of the first layer, as it names layers."""
        kind = next(kind for kind, name in TABLES.items() if name == constant)
        layers = self.layers
        return layers is not None and any(map(layers.has, self.graph.placeholders(kind)))

    def read_table(self, constant: str) -> str:
        """The expression that reads one of the stage's tables: ``STAGE1_SHARDS[n]``."""
        return self.table(constant) + (f"[{FIRST}]" if self.varies(constant) else "")

    def has(self, phase: Phase) -> bool:
        return has_phase(self.graph, phase)

    @property
    def finishes(self) -> bool:
        """Whether the stage has a ``finish``: sums, held weights, buffers, a loss or results."""
        outputs = self.graph.outputs
        made = outputs.loss is not None or bool(outputs.results)
        return self.ends.reduces or bool(self._steady()) or bool(self.late) or made

    def _finish(self) -> Finish:
        steady = [cls.attribute for cls in self._steady()]
        late = ((self.buffer_text(name), node) for name, node in self.late.items())
        return Finish(
            self.graph, self.ends, self.attributes, steady, self.helpers, self.bucket_bytes,
            updates(late, lambda node: Text(self.scope.named(str(self.seen[node])))),
            [*NarrowEnds.of(self).lines()],
        )  # fmt: skip

    def sums(self) -> list[fx.Node]:
        return [*self.graph.calls(), *(end.node for end in self.ends.narrow)]

    def _steady(self) -> list[BlockClass]:
        """The block classes whose weights are gathered once for all microbatches."""
        return [cls for cls in self.classes.values() if cls.is_steady]

    def _doc(self) -> str:
        """The docstring of the stage's class: which modules of the model it computes.

        Of modules inside of each other the outer one, unless blocks of it are named.
        """
        found: dict[str, None] = {}
        for item in self.items:
            if isinstance(item, Loop):
                found.setdefault(self.span(item.run))
            elif value(item).phase == "F" and value(item).module:
                found.setdefault(comment(self.shown(innermost_block(item) or value(item).module)))
        blocks = [name for name in found if " " in name]
        found = {m: None for m in found if not any(b.startswith(f"{m}.") for b in blocks)}
        named = [m for m in found if not any(m.startswith(f"{other}.") for other in found)]
        text = f"{self.title}: {', '.join(named)}."
        return "\n    ".join(textwrap.wrap(text, WIDTH - len('    """'), break_on_hyphens=False))

    # functions -------------------------------------------------------------------------------
    def _method(self, phase: Phase) -> Method:
        """One method: unpack values of earlier phases, compute, put away values for later ones."""
        items = self.flow.of(phase)
        arguments = self._arguments_of(phase)
        order = [item for item in items if isinstance(item, fx.Node)]
        kept = self.flow.kept(phase)
        unpacked = self._unpacked(phase)
        device = f"{self._tensor_of(phase)}.device"
        body = StepBody(
            self.graph, order, self.wishes, self.scope, self.helpers, self.seen, kept,
            self.final_grads(), device, items=items, classes=self.classes, adds=self.adds,
            sums=self._sums(phase), name_of=self.site_literal, late=self.late,
        )  # fmt: skip
        self.scope.taken |= {*self.arguments.values()}
        statements = body.statements()
        lasting = {n for n in kept if is_tensor(n)} | set(self.attributes) | set(self.arguments)
        lasting |= {n for n in self.seen if n not in body.place}
        lines = with_sections(
            free_early(statements, body.text, lasting),
            self.shown,
            name_of=self.helpers.ranges and self.site_literal,
        )
        lines = self._with_reductions(lines)
        lines += self._updates(phase, body)
        lines = [*unpacked, *lines, *self._closing(phase, body, kept)]
        return Method(phase, arguments, lines)

    def _sums(self, phase: Phase) -> dict[Run, tuple[list[Line], list[Line]]]:
        """The lines that start early reductions, in the phase that makes weight gradients."""
        loops = [item for item in self.flow.of(phase) if isinstance(item, Loop)]
        if self.ends.leaving is None or phase != ("W" if self.has("W") else "B"):
            return {}
        params = self.graph.params
        first = [self.attributes[params[name]] for name in self.ends.leaving.first]
        classes = [self.classes[loop.run] for loop in loops]
        return early_sums(self.ends.leaving, first, classes, params)

    def _updates(self, phase: Phase, body: StepBody) -> list[Line]:
        """The lines that write new values of buffers which this method computes."""
        made = {*self.flow.made(phase)}
        news = self.graph.outputs.buffers.items()
        mine = [(name, node) for name, node in news if node in made and name not in self.late]
        return updates(((self.buffer_text(name), node) for name, node in mine), body.text)

    @cached_property
    def late(self) -> dict[str, fx.Node]:
        """The new values of buffers that ``finish`` writes, by the buffer's name."""
        return written_late(self.graph, self.shared)

    def _tensor_of(self, phase: Phase) -> str:
        """The text of any tensor that a method can read, for its ``.device``."""
        arguments, own = list(self.arguments.values()), map(read, self.attributes.values())
        if phase == "S":
            return next(iter([*arguments, *own]), "self")
        received = [str(self.seen[node]) for node in self.flow.received(phase)]
        return next(iter([*own, *received, *(f"self.{name}" for name in arguments)]))

    def _arguments_of(self, phase: Phase) -> list[str]:
        """The arguments of a method with their types; names them as a side effect."""
        if phase == "S":
            self.arguments = self.arguments_by_node()
            self.seen |= {node: Text(name) for node, name in self.arguments.items()}
            return [f"{name}: Tensor" for name in self.arguments.values()]
        received = self.flow.received(phase)
        main = max(received, key=lambda n: fake_of(n).numel(), default=None)
        for node in received:
            wish = ("x" if phase == "F" else "d_y") if node is main else self.wishes.get(node, "x")
            self.seen[node] = Text(self.scope.value(node, self.wishes, wish, first=True))
        return ["i: int", *(f"{self.seen[n]}: Tensor" for n in received)]

    def _opening(self) -> list[Line]:
        """The lines of ``begin`` that make the dicts and lists of values between methods.

        Called after all methods are printed: only then is known which values pass between them.
        """
        lines = []
        for phase in METHODS:
            places = [
                f"self.{place}"
                for (before, then), place in LEFT.items()
                if then == phase and self._handed(before, then)
            ]
            if places:
                lines.append(Line(f"{', '.join(places)} = {', '.join(['{}'] * len(places))}"))
        lines += [Line("self.losses = []")] if self.graph.loss is not None else []
        lists = ", ".join(f"{literal(name)}: []" for name in self.graph.outputs.results)
        lines += [Line(f"self.results = {{{lists}}}")] if lists else []
        if self.graph.early:
            last = self.graph.early.last
            lines.append(Line(f"self.reduced, self.last = {self.helpers.use('Reduced')}(), {last}"))
        return lines

    def _unpacked(self, phase: Phase) -> list[Line]:
        """The lines that take what earlier phases saved: ``x, y = self.saved.pop(i)``."""
        lines = []
        for (before, then), place in LEFT.items():
            names = self._handed(before, then) if then == phase else []
            if names:
                listed = f"({names[0]},)" if len(names) == 1 else ", ".join(names)
                lines.append(Line(f"{listed} = self.{place}.pop(i)"))
        return lines

    def _handed(self, before: Phase, then: Phase) -> list[str]:
        """The names of the values that one phase saves for a later one."""
        wanted = self.flow.read(then)
        names: dict[str, None] = {}
        for node in self.flow.made(before):
            if node in wanted and node in self.seen:
                names.setdefault(variable_of(self.seen[node].code))
        word = LEFT[before, then]
        for cls in self.classes.values():
            if any(word in cls.left_by(s) for s in cls.sides if s.loop.phase == before):
                names.setdefault(f"{cls.attribute}_{word}")
        return list(names)

    def _closing(self, phase: Phase, body: StepBody, kept: set[fx.Node]) -> list[Line]:
        """The last lines of a method: save what later methods read, return what is sent.

        ``self.saved[i] = (x, layers_saved)``, then ``return (y,)`` for the next stage.
        """
        lines: list[Line] = []
        if phase == "S":
            for cls in self._steady():
                lines.append(Line(f"for layer in self.{cls.attribute}:"))
                lines.append(Line("layer.gather()", "weights for the whole step", indent=1))
                lines.append(Line(f"for layer in self.{cls.attribute}:"))
                taken = cls.taken("layer.whole", cls.forward)
                lines.append(Line(f"layer.whole = {taken}", indent=1))
            for node in self.graph.fx.nodes:
                if node in kept and node not in self.zeros:
                    text = body.text(node).code
                    attribute = self.own.fresh(variable_of(text))
                    lines.append(Line(f"self.{attribute} = {text}", comment(typed(node))))
                    self.seen[node] = Text(f"self.{attribute}")
            return lines
        lines += self._set_aside(phase, body)
        for (before, then), place in LEFT.items():
            names = self._handed(before, then) if before == phase else []
            if names:
                comma = "," if len(names) == 1 else ""
                lines.append(Line(f"self.{place}[i] = ({', '.join(names)}{comma})"))
        if phase == "F" and self.graph.loss is not None:
            lines.append(Line(f"self.losses.append({body.text(self.graph.loss)})"))
        for name, node in self.graph.outputs.results.items() if phase == "F" else ():
            lines.append(Line(f"self.results[{literal(name)}].append({body.text(node)})"))
        if phase in "FB":
            sent = self.flow.sent(phase)
            texts = [body.text(n).code for n in sent]
            types = comment(", ".join(typed(n) for n in sent))
            lines.append(
                Line(f"return ({', '.join(texts)}{',' if len(texts) == 1 else ''})", types)
            )
        return lines

    def _set_aside(self, phase: Phase, body: StepBody) -> list[Line]:
        """The lines that keep new values of buffers, which a method makes, for ``finish``."""
        made, names = {*self.flow.made(phase)}, dict[str, str]()
        for node in self.late.values():
            if node in made:
                base = variable_of(body.text(node).code)
                kept = f"self.{names.setdefault(base, self.own.fresh(base))}"
                self.seen[node] = Text(body.text(node).code.replace(base, kept, 1))
        return [Line(f"self.{name} = {base}") for base, name in names.items()]

    def _with_reductions(self, lines: list[Line]) -> list[Line]:
        """The lines; where they use ``reduced``, it is made before them and finished behind."""
        if not any(re.search(r"\breduced\b", line.code) for line in lines):
            return lines
        for helper in self.adds.helpers:
            self.helpers.use(helper)
        finish = finished("reduced.finish()", ranges=self.helpers.ranges)
        return [Line(f"reduced = {self.adds.reduced}"), *lines, *finish]
