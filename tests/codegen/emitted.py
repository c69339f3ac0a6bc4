"""Run emitted programs in one process and compare them with the model they were made from."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from partc.codegen.files.emit import emit as print_role
from partc.codegen.files.role_file import helper_file
from partc.graph import Graph
from partc.lowering import partition, trace
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.sharding import take_piece
from partc.program import Program
from partc.program.helper_file import helpers_of
from partc.program.role import Role
from partc.verification.threads import ThreadMesh, run_ranks

Loss = Callable[..., Any]


class Emitted(str):
    """The text of a role's file, and that of the helpers beside it."""

    helpers: str = ""


def emit(graph: Graph, **options: Any) -> Emitted:
    """The text of a role's file, and of its helpers."""
    printed = print_role(graph, **options)
    text = Emitted(printed.text)
    text.helpers = helpers_of(helper_file([printed]))
    return text


def emitted_of(program: Program) -> Emitted:
    """The text of the first rank's file, and of its helpers."""
    text = Emitted(program.source())
    text.helpers = helpers_of(program.sources)
    return text


def traced(model: nn.Module, inputs: tuple[Tensor, ...], loss: Loss | None = None) -> Graph:
    """The canonical graph of a training step, for one device."""
    return trace(model, inputs, loss)


def planned(graph: Graph, mesh: str, preset: str) -> Graph:
    """The scheduled graph of one rank."""
    graph.mesh = Mesh.of(mesh)
    return partition(graph, Plan(preset=preset))[1]


def loaded(
    source: Emitted, model: nn.Module, constants: dict[str, Tensor], mesh: Any = None
) -> Any:
    """The step module of a program, this rank's pieces of the model's weights in it."""
    module = Role.load(source, "program.py", helpers=source.helpers).module
    step = module.Step(mesh)
    fill(
        module,
        step,
        {**dict(model.named_parameters()), **constants, **dict(model.named_buffers())},
        mesh,
    )
    return module, step


def fill(module: ModuleType, step: nn.Module, values: dict[str, Tensor], mesh: Any) -> None:
    """Copy each table entry's piece of the whole value into the step module."""
    held = step.state_dict()
    with torch.no_grad():
        for key, (name, *_, cuts) in {**module.SHARDS, **module.BUFFERS}.items():
            held[key].copy_(piece(values[name], cuts, mesh))


def piece(whole: Tensor, cuts: Any, mesh: Any) -> Tensor:
    """What the rank at a mesh stand-in's coordinates holds of a whole."""
    for axis, dim, outer in cuts:
        whole = take_piece(whole, dim, outer, mesh.layout.size(axis), mesh.get_local_rank(axis))
    return whole


def worst_gradient(
    module: ModuleType, step: nn.Module, model: nn.Module, mesh: Any = None
) -> float:
    """The largest error of any gradient, over the largest gradient of the model."""
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    scale = max(float(grad.abs().max()) for grad in expected.values())
    worst = 0.0
    for key, (name, *_, cuts) in module.SHARDS.items():
        grad = step.get_parameter(key).grad
        if name in expected:
            assert grad is not None, name
            worst = max(worst, float((grad - piece(expected[name], cuts, mesh)).abs().max()))
        else:
            assert grad is None, name
    return worst / scale


def check_single(
    model: nn.Module, inputs: tuple[Tensor, ...], loss: Loss | None, tolerance: float
) -> Emitted:
    """Compare loss and every gradient of the one-rank program with eager; the program's text."""
    graph = traced(model, inputs, loss)
    source = emit(graph, header="one rank")
    module, step = loaded(source, model, graph.constants)
    found = step.step(*inputs)
    expected = model(*inputs) if loss is None else loss(model, *inputs)
    expected.backward()
    expected = expected.detach()
    assert float((found - expected).abs()) <= tolerance * float(expected.abs())
    assert worst_gradient(module, step, model) <= tolerance
    return source


def check_ranks(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    loss: Loss | None,
    mesh: str,
    preset: str,
    tolerance: float,
) -> Emitted:
    """Compare loss and all pieces of all gradients on all ranks with eager; the text."""
    graph = planned(traced(model, inputs, loss), mesh, preset)
    source = emit(graph, header=f"{preset} on {mesh}", prefetch=2)
    expected = model(*inputs) if loss is None else loss(model, *inputs)
    expected.backward()
    expected = expected.detach()

    def run(rank: int, dist: Any) -> tuple[float, float]:
        here = ThreadMesh(graph.mesh, rank)
        module, step = loaded(source, model, graph.constants, here)
        module.dist = dist
        found = step.step(*inputs)
        return float((found - expected).abs()), worst_gradient(module, step, model, here)

    for loss_error, gradient_error in run_ranks(graph.mesh.num_ranks, run):
        assert loss_error <= tolerance * float(expected.abs())
        assert gradient_error <= tolerance
    return source
