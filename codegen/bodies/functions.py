"""The text of a function made of a few calls (a ``Unit``): signature, body, names of results."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from partc.codegen.bodies.body import Body
from partc.codegen.bodies.units import RESULTS, Unit, is_movable, moves
from partc.codegen.calls.moved_names import known_as
from partc.codegen.calls.path_names import is_within
from partc.codegen.calls.scope import Scope
from partc.codegen.calls.statements import Statement, free_early, with_sections
from partc.codegen.calls.wishes import Wishes
from partc.codegen.helpers.needed import Helpers, Outlined
from partc.codegen.text import NONE, Line, Text, block, wrap
from partc.graph import Graph, fake_of, first_operand, is_backward, is_call, picked, typed, value
from partc.plan.sharding import DTYPE_NAMES
from partc.quoting import comment, docstring, identifier


def given_names(
    graph: Graph, unit: Unit, known: dict[tuple[str, fx.Node], str]
) -> dict[fx.Node, str]:
    """Names of a function's arguments.

    The main argument is ``x``, in a backward ``d_y``; one that was cast on entry is ``x_float32``.
    A parameter has its own name. ``known`` has the names that values have in the forward of the
    same module, by module path and node: the backward uses them again.
    """
    names: dict[fx.Node, str] = {}
    stored_in = f"{unit.home.path}."
    inner = [value(n).name.removeprefix(stored_in) for n in map(_stored, unit.inputs) if n]
    short = Counter(".".join(own.split(".")[-2:]) for own in inner)
    main = "d_y" if unit.is_backward else "x"
    for node in unit.inputs:
        stored = _stored(node)
        if stored is not None:
            own = value(stored).name.removeprefix(f"{unit.home.path}.")
            last = ".".join(own.split(".")[-2:])
            names[node] = identifier(last if short[last] == 1 else own)
        elif unit.is_backward and (unit.home.path, node) in known:
            names[node] = known[unit.home.path, node]
        elif main not in names.values() and (is_backward(node)) == unit.is_backward:
            names[node] = main
        elif dtype := _cast_on_entry(node, unit.home.path):
            names[node] = f"x_{dtype}"
    first = {known_as(n): name for n, name in names.items() if _stored(n) is None}
    return {n: first[known_as(n)] for n in graph.calls() if known_as(n) in first} | names


def _cast_on_entry(node: fx.Node, path: str) -> str:
    """The dtype of a value that is a cast, by the module at ``path``, of what comes from outside.

    "" for any other value.
    """
    if not is_call(node, torch.ops.aten._to_copy.default):
        return ""
    given = first_operand(node)
    outside = given.op != "call_function" or value(given).module != path
    return (
        DTYPE_NAMES.get(fake_of(node).dtype, "") if outside and value(node).module == path else ""
    )


def _stored(node: fx.Node) -> fx.Node | None:
    """The parameter or buffer that a value is, as stored or gathered; None for other values."""
    index = 0
    while node.op == "call_function" and (moves(node) or node.target is operator.getitem):
        index = picked(node)[1] if node.target is operator.getitem else index
        operands = node.all_input_nodes
        node = operands[index] if len(operands) > 1 else operands[0]
    return node if node.op == "placeholder" and value(node).kind in ("param", "buffer") else None


@dataclass
class Written:
    """The text of one unit as a function body, with the names of its values."""

    arguments: list[str]
    lines: list[Line]
    names: dict[fx.Node, Text]
    results: tuple[str, ...]

    @classmethod
    def of(
        cls, graph: Graph, unit: Unit, wishes: Wishes, helpers: Helpers, *,
        fused: bool = False, frees: bool = False,
    ) -> Written:  # fmt: skip
        """Write the calls of a unit; ``wishes`` has the wanted names of its inputs and nodes.

        ``fused``: the text is for torch.compile, so module paths stand in it as comments and no
        value is written over another. ``frees``: a ``del`` drops what is no longer read.
        """
        scope = Scope()
        seen = {node: Text(scope.value(node, wishes, first=True)) for node in unit.inputs}
        arguments = [str(text) for text in seen.values()]
        body = Body(
            graph, unit.nodes, wishes, scope, helpers, seen, set(unit.outputs),
            device=f"{arguments[0]}.device", one_turn=True, fused=fused,
        )  # fmt: skip
        last = unit.nodes[-1]
        bound = last in body.accumulated or last.target is operator.getitem
        ends = last in unit.outputs and not bound  # `return expression` needs no name
        order = unit.nodes[:-1] if ends else unit.nodes
        statements = [s for node in order for s in body.one(node)]
        if ends:
            statements += body.parts(last)
            body.seen[last] = body.expression(last)
        level = NONE if len(unit.outputs) == 1 else NONE + 1
        result = ", ".join(body.text(n).at(level) for n in unit.outputs)
        result = f"({result})" if len(unit.outputs) > RESULTS else result  # may be broken then
        line = Line(f"return {result}", comment(typed(last)) if ends else "")
        reads = [n for n in unit.outputs if n is not last or not ends]
        reads += body.read_by(last) if ends else []
        statements.append(Statement([line], reads, section=body.section(last)))
        if frees:
            statements = free_early(statements, body.text, {*unit.inputs, *reads})
        if fused:
            lines = with_sections(statements)
        else:
            lines = [line for s in statements for line in s.lines]
        [[signature, *lines]] = scope.settled([[Line(", ".join(arguments)), *lines]])
        names = {n: Text(scope.named(str(text))) for n, text in body.seen.items()}
        results = tuple(wishes.get(n) if n is last else str(names[n]) for n in unit.outputs)
        return cls(signature.code.split(", "), lines, names, results)

    @property
    def code(self) -> list[str]:
        """Arguments and lines without their comments: units of equal code share a function."""
        return [*self.arguments, *(line.code for line in self.lines)]

    def function(self, name: str, unit: Unit, alike: Sequence[Sequence[Line]]) -> Outlined:
        """The function for several units; a comment in which the units differ is left out.

        ``alike`` has the lines of every unit.
        """
        lines = [
            same[0] if len(set(same)) == 1 else replace(same[0], remark="")
            for same in zip(*alike, strict=True)
        ]
        way = "Backward" if unit.is_backward else "Forward"
        again = ", anew for its backward" if unit.repeats else ""
        says = f"{way} of `{docstring(unit.home.name)}`{again}."
        return Outlined(name, self.text(name, says, lines), self.results)

    def text(self, name: str, says: str, lines: Sequence[Line]) -> str:
        """Signature, docstring and body of a function."""
        num = len(self.results)
        several = ", ".join(["Tensor"] * num) if num <= RESULTS else "Tensor, ..."
        result = "Tensor" if num == 1 else f"tuple[{several}]"
        typed = ", ".join(f"{argument}: Tensor" for argument in self.arguments)
        head = wrap(f"def {name}({typed}) -> {result}:", 0)
        return "\n".join([*head, f'    """{says}"""', block(lines, 1)])


def function_name(unit: Unit, result: str) -> str:
    """The wanted name of a unit's function: ``rms_norm``, ``rms_norm_backward``, ``rms_norm_anew``.

    ``anew`` recomputes forward values in the backward. A function of less than half of a module's
    calls is also called after its result: ``attention_k_embed``.
    """
    what = "_backward" if unit.is_backward else "_anew" if unit.repeats else ""
    path, own = unit.home.path, {*unit.nodes}
    of_module = [n for n in unit.place.nodes if is_within(value(n).module, path)]
    alike = [n for n in of_module if is_backward(n) == is_backward(unit.nodes[0]) and is_movable(n)]
    if not what and not unit.home.line and 2 * len(own) < len(alike):
        what = f"_{result}"
    return snake(unit.home.name) + what


def snake(name: str) -> str:
    """
    >>> snake("LlamaRMSNorm")
    'llama_rms_norm'
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return identifier(words.lower())
