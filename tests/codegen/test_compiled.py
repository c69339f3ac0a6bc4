"""Programs whose computing is left to torch.compile: once per block, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import partc
from partc.codegen.safety import check_source
from partc.errors import CheckError, PlanError, RunError
from partc.program import Program
from partc.verification.verification import verify
from partc.wrappers.results import returned_loss
from tests.codegen.emitted import emitted_of, loaded
from tests.codegen.mlps import toy
from tests.patience import patience
from tests.zoo import MODELS

LAYOUTS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "one": ({}, "ddp", {}),
    "ddp": ("dp=2", "ddp", {}),
    "fsdp": ("dp=2", "fsdp", {}),
    "megatron-sp": ("tp=2", "megatron-sp", {}),
    "1f1b": ("pp=2", "ddp", {"microbatches": 2, "schedule": "1f1b"}),
    "zb-v": ("pp=2", "ddp", {"microbatches": 2, "schedule": "zb-v"}),
}  # fmt: skip
BLOCKS = 4


def compiled(name: str, compiler: str | None = "inductor") -> Program:
    mesh, plan, options = LAYOUTS[name]
    model, inputs = toy(BLOCKS)
    return partc.compile(model, mesh, inputs, plan=plan, compile=compiler, **options)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that torch.compile is given; it takes them as they are, and breaks none."""
    found: list[fx.GraphModule] = []
    real: Callable[..., Any] = torch.compile

    def backend(graph: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f: real(f, backend=backend, fullgraph=True))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_function_is_compiled_once_for_all_blocks(
    name: str, graphs: list[fx.GraphModule]
) -> None:
    """Without a break where a transfer stands, nor again for another block, step or microbatch."""
    program = compiled(name)
    model, inputs = toy(BLOCKS)
    verify(program, model, inputs).check(1e-12)
    ranks = range(program.mesh.num_ranks)
    assert len(graphs) == sum(program.source(r).count("\n@torch.compile\n") for r in ranks) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "layout"), [("gpt2", "one"), ("bert", "fsdp")])
def test_views_and_results_stay_where_their_readers_find_them(
    name: str, layout: str, graphs: list[fx.GraphModule]
) -> None:
    """gpt2's queries, keys and values are views of one memory; of a norm's gradients in bert some
    are read behind a transfer.
    """
    case, (mesh, plan, options) = MODELS[name](), LAYOUTS[layout]
    program = partc.compile(
        case.model, mesh, case.inputs, loss=case.loss, plan=plan, compile="inductor", **options
    )
    verify(program, case.model, case.inputs, case.loss).check(1e-12)
    assert graphs


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama", "t5", "mixtral", "deepseek_v3"])
def test_functions_of_functions_and_views_of_weights_stand_where_the_graph_has_them(
    name: str,
) -> None:
    """A result of a norm's function is given on by that of a block; experts' products read views of
    weights, which stand behind what is compiled before them.
    """
    case = MODELS[name]()
    partc.compile(case.model, "dp=1", case.inputs, loss=case.loss, plan="ddp", compile="inductor")


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_inductor_computes_the_same_on_real_ranks() -> None:
    model, inputs = toy(BLOCKS)
    verify(compiled("fsdp"), model, inputs, processes=True, timeout=patience()).check(1e-12)


def test_golden(golden: Callable[..., None]) -> None:
    golden(compiled("fsdp").source(), ".py")


def test_a_step_waits_for_the_script_between_functions(graphs: list[fx.GraphModule]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh())
    batch, loss = (torch.randn(8, 4),), returned_loss(model, [])
    program = partc.compile(model, "dp=1", batch, loss=loss, plan="ddp", compile="inductor")
    functions, step = program.source().split("class ")
    assert "_forward(" in functions
    assert "_backward(" in functions
    assert "yield" not in functions
    assert "= yield {" in step
    verify(program, model, batch, loss=loss).check(1e-6)
    assert graphs


@pytest.mark.exhaustive
def test_the_plan_replays() -> None:
    program = compiled("ddp")
    model, inputs = toy(BLOCKS)
    again = partc.compile(model, "dp=2", inputs, plan=program.plan)
    assert again.sources == program.sources
    assert "@torch.compile" not in compiled("ddp", "none").source()


class Drops(nn.Module):
    """Masks between what is compiled, and one that waits for no value."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.up(x)).exp(), 0.5)
        noise = nn.functional.dropout(torch.ones_like(x), 0.5)
        return (nn.functional.dropout(self.down(hidden).exp(), 0.5) * noise.exp()).sum()


def test_masks_are_drawn_in_the_same_order(graphs: list[fx.GraphModule]) -> None:
    torch.manual_seed(0)
    model, inputs = Drops(), (torch.randn(8, 4),)
    losses = []
    for compiler in ("none", "inductor"):
        program = partc.compile(model, {}, inputs, plan="ddp", compile=compiler)
        _, step = loaded(emitted_of(program), model, dict(program.constants))
        step.seed(3)
        losses.append(step.step(*inputs))
    assert graphs
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


# what is refused ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        '@torch.compile(backend="mine")\ndef f(x):\n    return x\n',
        "class A:\n    @torch.compile\n    def f(self):\n        return 1\n",
        "def f(x):\n    return torch.compile(x)\n",
        "@torch.jit.compile\ndef f(x):\n    return x\n",
    ],
)
def test_nothing_else_may_be_called_compile(text: str) -> None:
    with pytest.raises(CheckError):
        check_source(f"import torch\n{text}")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = compiled("one")
    model, inputs = toy(BLOCKS)
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    with pytest.raises(RunError, match="there is no C\\+\\+ compiler"):
        verify(program, model, inputs)


def test_other_compilers_are_refused() -> None:
    with pytest.raises(PlanError, match="compile = 'fast' means nothing"):
        compiled("one", "fast")
