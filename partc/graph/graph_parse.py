"""Read the text form of a Graph (see ``graph_text``) back into a Graph on fake tensors."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from partc.errors import UsageError
from partc.graph import (
    Graph,
    Origin,
    Outputs,
    Phase,
    Value,
    set_fake,
    set_value,
    update,
)
from partc.graph.call_text import DTYPES, parsed_call, parsed_literal, parsed_name
from partc.graph.graph_edits import run_fake
from partc.graph.graph_text import SECTIONS
from partc.plan.mesh import Mesh
from partc.plan.sharding import DTYPE_NAMES, Layout, Sharding, cut

_TYPE = re.compile(r"(\w+)\[(.*)\]((?:\{[UM]:\w+\})*)\Z")
_PHASES: dict[str, Phase] = {word: phase for phase, word in SECTIONS.items()}
_OUTPUTS = ("grad", "buffer", "result", "sent")
_ORIGINS = {origin.value for origin in Origin} - {""}


def parse_graph(text: str) -> Graph:
    """The Graph that a text describes; fakes are made by running its ops. Lines that begin with
    ``#`` are comments.
    """
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            try:
                reader.read(line)
            except (
                ValueError,
                KeyError,
                AttributeError,
                SyntaxError,
                RuntimeError,
                TypeError,
            ) as error:
                raise UsageError(
                    where=f"graph text line {number}: {line.strip()}",
                    what="it cannot be read",
                    why=str(error).splitlines()[0] if str(error) else type(error).__name__,
                    do="Write it as str(graph) does.",
                ) from error
    return reader.finish()


class _Reader:
    """What has been read so far, and where in the text the next line stands."""

    def __init__(self) -> None:
        self.graph = Graph(fx.Graph())
        self.mode = FakeTensorMode()
        self.nodes: dict[str, fx.Node] = {}
        self.local = False
        self.section = Value()
        self.outputs: dict[str, dict[str, fx.Node]] = {kind: {} for kind in _OUTPUTS}
        self.loss: fx.Node | None = None
        self.in_outputs = False

    def read(self, line: str) -> None:
        """One line that is not blank."""
        first, _, rest = line.strip().partition(" ")
        if line.startswith("  "):
            self._output(line.strip()) if self.in_outputs else self._call(line.strip())
        elif first in ("graph", "local"):
            self._header(line)
        elif first in ("param", "buffer", "input", "received"):
            self._placeholder(first, rest)
        elif first in _PHASES:
            module = "" if rest == "(loss)" else rest
            self.section = Value(module=module, phase=_PHASES[first])
        elif first == "outputs":
            self.in_outputs = True
        else:
            raise ValueError(f"{first!r} starts no line")

    def finish(self) -> Graph:
        """The graph, with its output node."""
        outputs = Outputs(self.loss, *(self.outputs[kind] for kind in _OUTPUTS))
        self.graph.fx.output(outputs.as_dict())
        self.graph.fx.lint()
        return self.graph

    def _header(self, line: str) -> None:
        words, _, mesh = line.partition("  mesh ")
        *kind, self.graph.model = words.split(" ") if " " in words else [words, ""]
        self.local = kind[0] == "local"
        self.graph.mesh = Mesh.parse(mesh) if mesh else Mesh(())

    def _placeholder(self, kind: Any, rest: str) -> None:
        names, _, described = rest.partition(" : ")
        typed, _, constant = described.partition(" = ")
        name, *also = names.split(" = ")
        known = self._typed(typed, Value(kind, name=name))
        node = self.graph.fx.placeholder(name.replace(".", "_"))
        shape = (
            known.sharding.local_shape(known.shape, self.graph.mesh) if self.local else known.shape
        )
        if shape is None:
            raise ValueError("the mesh does not divide it")
        with self.mode:
            self._keep(name, node, known, torch.empty(shape, dtype=known.dtype))
        self.graph.aliases |= dict.fromkeys(also, name)
        if constant:
            self.graph.constants[name] = torch.tensor(parsed_literal(constant), dtype=known.dtype)

    def _call(self, line: str) -> None:
        body, _, note = line.partition("  # ")
        assignment, _, typed = body.rpartition(" : ")
        name, _, call = assignment.partition(" = ")
        target, args, kwargs = parsed_call(call.strip(), self.nodes)
        site = kwargs.pop("site", "")
        node = self.graph.fx.create_node("call_function", target, args, kwargs, name=name.strip())
        single = "[" in typed and not typed.strip().startswith("(")
        known = self._typed(typed.strip(), self.section) if single else self.section
        with self.mode:
            fake = run_fake(target, args, kwargs)
        self._keep(name.strip(), node, replace(known, site=site), fake)
        if note in _ORIGINS:
            update(node, origin=Origin(note))
        elif note:
            update(node, note=note)

    def _keep(self, name: str, node: fx.Node, known: Value, fake: Any) -> None:
        set_value(node, known)
        set_fake(node, fake)
        self.nodes[name] = node
        if isinstance(fake, Tensor):
            shape = known.shape if not self.local else fake.shape
            if (tuple(fake.shape), fake.dtype) != (tuple(shape), known.dtype):
                raise ValueError(f"it gives {DTYPE_NAMES[fake.dtype]}{list(fake.shape)}")

    def _output(self, line: str) -> None:
        what, _, name = line.partition(" = ")
        kind, _, key = what.partition(" ")
        if kind == "loss":
            self.loss = self.nodes[parsed_name(name)]
        else:
            self.outputs[kind][key] = self.nodes[parsed_name(name)]

    def _typed(self, text: str, known: Value) -> Value:
        """``f32[8,64@tp]{U:dp}`` as the shape, dtype and sharding of a value."""
        match = _TYPE.match(text)
        if match is None:
            raise ValueError(f"{text!r} is no type")
        layouts: dict[str, Layout] = {}
        dims = re.findall(r"\([^)]*\)|[^,]+", match[2])
        shape = tuple(_dim(d, dim, layouts) for d, dim in enumerate(dims))
        for kind, axis in re.findall(r"\{([UM]):(\w+)\}", match[3]):
            layouts[axis] = Layout(kind)
        sharding = Sharding.of(layouts, self.graph.mesh)
        return Value(
            known.kind,
            shape,
            DTYPES[match[1]],
            sharding,
            known.name,
            known.module,
            phase=known.phase,
        )


def _dim(position: int, text: str, layouts: dict[str, Layout]) -> int:
    """The size of ``64``, ``64@tp+dp``, ``64~dp`` or ``(3 1024@tp)``; its cuts go to
    ``layouts``.
    """
    outer, sizes = 1, []
    for part in text.strip("()").split(" "):
        size, *marked = re.split(r"([@~])", part)
        for mark, axes in zip(marked[::2], marked[1::2], strict=True):
            layouts |= {
                axis: cut(position, outer, permuted=mark == "~") for axis in axes.split("+")
            }
        sizes.append(int(size))
        outer = prod(sizes)
    return outer
