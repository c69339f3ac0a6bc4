"""The memory of a step without pipeline stages, before it is printed."""

from __future__ import annotations

from torch import fx

from partc.codegen.account.blocks import Shape
from partc.codegen.account.execution import Execution
from partc.codegen.account.memory import Memory
from partc.codegen.account.transfers import Transfers
from partc.codegen.account.walk import Walk
from partc.codegen.bodies.gathers_ahead import gather_ahead
from partc.codegen.calls.tidy import spelled
from partc.codegen.repeats.arranged import arranged
from partc.cost.storage import replay
from partc.graph import Graph, is_tensor


def step_memory(
    graph: Graph, *, prefetch: int = 1, messages: bool = False, backend: str = "gloo"
) -> Memory:
    """The live memory of a step's program; parameters, buffers and inputs are not counted."""
    graph = spelled(graph, fused=False)
    items, sides = arranged(graph, ())
    memory = Memory()
    transfers = Transfers(memory, backend == "gloo" and not messages, messages)
    walk = _walk(Shape(graph, gather_ahead(items), sides), prefetch)
    Execution.of(walk, memory, transfers, replay(graph).temporary_bytes).run()
    return memory


def _walk(shape: Shape, prefetch: int) -> Walk:
    outputs = shape.graph.outputs
    results = [*outputs.results.values()] + ([outputs.loss] if outputs.loss is not None else [])
    kept = {*results, *outputs.buffers.values()}
    made = {item for item in shape.items if isinstance(item, fx.Node)}
    lasting = {n for n in kept if is_tensor(n) and (n in made or n in results)}
    return Walk(shape, shape.items, kept, lasting, prefetch)
