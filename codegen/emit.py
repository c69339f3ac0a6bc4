"""A scheduled local graph in, the source of one rank's program out."""

from __future__ import annotations

from dataclasses import dataclass, field

import jinja2
from torch import fx, nn

from partc.codegen.body import Body, free_early, with_sections
from partc.codegen.helpers import Helpers
from partc.codegen.names import Scope, wishes
from partc.codegen.safety import check_source
from partc.codegen.tables import declaration, row, table
from partc.codegen.text import Line, Text, block
from partc.graph import Graph, is_tensor, typed, value
from partc.quoting import comment, docstring, identifier, literal

TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("partc.codegen"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # noqa: S701 - Python text; every value comes quoted
)
TABLES = {
    "SHARDS": "attribute here: (name in the model, whole shape, dtype, cuts as (axis, dim, outer))",
    "BUFFERS": "the same for buffers",
    "ALIASES": "second name of a tied parameter: the name it stands under",
    "INPUTS": "the global batch: (shape, dtype)",
}


def emit(graph: Graph, *, header: str) -> str:
    """The text of one role's file: data, helper functions and ``class <Model>Step``."""
    text = _Program(graph, header).text()
    check_source(text)
    return text


@dataclass
class _Program:
    graph: Graph
    header: str
    helpers: Helpers = field(default_factory=Helpers)
    attributes: dict[fx.Node, str] = field(default_factory=dict)

    def text(self) -> str:
        scope = Scope(dir(nn.Module))
        for name, node in [*self.graph.params.items(), *self.graph.buffers.items()]:
            self.attributes[node] = scope.fresh(name)
        arguments = self._arguments()
        body = self._step(arguments)
        return TEMPLATES.get_template("program.py.j2").render(
            header=[docstring(line, 120) for line in self.header.strip().splitlines()],
            distributed=bool(self.graph.mesh.names),
            mesh=literal(dict(self.graph.mesh.axes)),
            tables=self._tables(),
            helpers=self.helpers.text(),
            name=f"{identifier(self.graph.model) or 'Model'}Step",
            axes=[(axis, literal(axis)) for axis in self.graph.mesh.names],
            declarations=block(self._declarations(), 2),
            method="step" if self.graph.loss is not None else "forward",
            result="Tensor" if self.graph.loss is not None else "dict[str, Tensor]",
            arguments=list(arguments.values()),
            body=body,
        )

    def _arguments(self) -> dict[fx.Node, str]:
        scope = Scope()
        return {node: scope.fresh(name) for name, node in self.graph.inputs.items()}

    def _tables(self) -> list[str]:
        rows = {
            kind: [row(self.graph, n, self.attributes[n]) for n in self.graph.placeholders(kind).values()]
            for kind in ("param", "buffer")
        }
        inputs = [
            f"{literal(name)}: {literal((tuple(value(n).shape), str(value(n).dtype).removeprefix('torch.')))}"
            for name, n in self.graph.inputs.items()
        ]
        entries = {
            "SHARDS": [f"{literal(r.attribute)}: {r.value}" for r in rows["param"]],
            "BUFFERS": [f"{literal(r.attribute)}: {r.value}" for r in rows["buffer"]],
            "ALIASES": [f"{literal(a)}: {literal(b)}" for a, b in sorted(self.graph.aliases.items())],
            "INPUTS": inputs,
        }
        return [table(name, TABLES[name], entries[name]) for name in TABLES]

    def _declarations(self) -> list[Line]:
        lines = []
        for kind in ("param", "buffer"):
            for name, node in self.graph.placeholders(kind).items():  # type: ignore[arg-type]
                code = declaration(node, self.attributes[node], kind, name in self.graph.grads)
                lines.append(Line(code, comment(typed(node))))
        return lines

    def _step(self, arguments: dict[fx.Node, str]) -> str:
        graph, outputs = self.graph, self.graph.outputs
        seen = {node: Text(f"self.{name}") for node, name in self.attributes.items()}
        seen |= {node: Text(name) for node, name in arguments.items()}
        stored: dict[fx.Node, list[str]] = {}
        for name, node in outputs.grads.items():
            stored.setdefault(node, []).append(f"self.{self.attributes[graph.params[name]]}")
        results = list(outputs.results.values()) + ([outputs.loss] if outputs.loss is not None else [])
        kept = {*results, *outputs.buffers.values()}
        device = f"{next(iter(arguments.values()), 'self')}.device"
        body = Body(
            graph, list(graph.calls()), wishes(graph), Scope(arguments.values()), self.helpers,
            seen, kept, stored, device,
        )  # fmt: skip
        statements = free_early(body.statements(), body.text, {n for n in kept if is_tensor(n)} | set(seen_placeholders(graph)))
        lines = with_sections(statements)
        reduced = any("reduced.append" in line.code for line in lines)
        if reduced:
            lines = [Line("reduced = []"), *lines, Line(f"{self.helpers.use('finish')}(reduced)")]
        for name, node in outputs.buffers.items():
            lines.append(Line(f"self.{self.attributes[graph.buffers[name]]}.copy_({body.text(node)})"))
        lines.append(Line(self._result(body)))
        return block(lines, 2)

    def _result(self, body: Body) -> str:
        outputs = self.graph.outputs
        if outputs.loss is not None:
            return f"return {body.text(outputs.loss)}"
        items = (f"{literal(name)}: {body.text(node)}" for name, node in outputs.results.items())
        return f"return {{{', '.join(items)}}}"


def seen_placeholders(graph: Graph) -> list[fx.Node]:
    """Everything that comes from outside."""
    return [n for n in graph.fx.nodes if n.op == "placeholder"]
