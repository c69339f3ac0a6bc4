"""A model may call its parameters and buffers as a program calls what is its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.program.stage.runtime import Stage
from partc.verification.verification import verify
from tests.mistakes.things import one_rank


class Named(nn.Module):
    """A layer whose gains and counts have the given names."""

    def __init__(self, gains: list[str], counts: list[str]) -> None:
        super().__init__()
        self.gains, self.counts = gains, counts
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        for name in gains:
            self.register_parameter(name, nn.Parameter(torch.rand(4) + 0.5))
        for name in counts:
            self.register_buffer(name, torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop(self.linear(x).tanh())
        for name in (*self.gains, *self.counts):
            y = y + getattr(self, name) * x
        return y


class Net(Named):
    """Such a layer around blocks of such layers."""

    def __init__(self, gains: list[str], counts: list[str]) -> None:
        super().__init__(gains, counts)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Named(gains, counts) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(super().forward(x))
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


BATCH = torch.randn(8, 4), torch.randn(8, 4)
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "shards, recomputed": ("dp=2", "fsdp", {"microbatches": 2, "recompute": "block"}),
    "tensor parallel": ("tp=2", "megatron", {}),
    "stages": ("pp=2", "ddp", {"microbatches": 2, "schedule": "zb-h1"}),
}


class Gained(nn.Module):
    """Parameters, buffers or modules of the given names."""

    def __init__(self, names: list[str], kind: str) -> None:
        super().__init__()
        self.names, self.linear = names, nn.Linear(4, 4)
        for name in names:
            if kind == "module":
                self._modules[name] = nn.Linear(4, 4)
            elif kind == "buffer":
                self._buffers[name] = torch.rand(4) + 0.5
            else:
                self._parameters[name] = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).tanh()
        for name in self.names:
            own = self._modules.get(name)
            if own is not None:
                y = y + own(x) / len(self.names)
            else:
                y = y + (self._parameters | self._buffers)[name] * x  # type: ignore[operator]
        return y


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
def test_names_of_a_stage_may_be_those_of_a_model(kind: str) -> None:
    torch.manual_seed(0)
    with one_rank():
        plain = partc.compile(Gained([], kind), "dp=1", BATCH, loss=loss_of, plan="ddp").module()
        taken = {*dir(nn.Module()), *vars(Gained([], kind))}
        names = sorted({*vars(plain), *dir(type(plain))} - taken)
        assert {"agreement", "_loaded", "step", "mesh"} <= {*names}
        model = Gained(names, kind)
        stage = partc.compile(model, "dp=1", BATCH, loss=loss_of, plan="ddp").module()
        Stage.load_full(stage, model)
        torch.testing.assert_close(Stage.step(stage, *BATCH), loss_of(model, *BATCH))
        assert [*Stage.full_state_dict(stage)] == [*model.state_dict()]


def own_names(program: partc.Program) -> Iterator[str]:
    """The methods of a program's classes, and the attributes that these have."""
    for text in program.sources.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                yield node.name
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "layer"):
                yield node.attr


@cache
def free_names(layout: str) -> list[str]:
    """The names of a layout's program that mean nothing in the model."""
    mesh, plan, options = LAYOUTS[layout]
    plain = partc.compile(Net([], []), mesh, BATCH, loss=loss_of, plan=plan, **options)
    return sorted(name for name in {*own_names(plain)} if not hasattr(Net([], []), name))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layout", "as_gains"),
    [
        ("shards, recomputed", True), ("shards, recomputed", False), ("tensor parallel", False),
        ("stages", True),
    ],
)  # fmt: skip
def test_names_of_a_program_may_be_those_of_a_model(layout: str, as_gains: bool) -> None:
    mesh, plan, options = LAYOUTS[layout]
    torch.manual_seed(0)
    free = free_names(layout)
    assert len(free) > 5
    model = Net(free, []) if as_gains else Net([], free)
    program = partc.compile(model, mesh, BATCH, loss=loss_of, plan=plan, **options)
    verify(program, model, BATCH, loss_of).check()


class ListCalled(nn.Module):
    """Equal blocks without parameters, in a list with the name of an input, of a value."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(4, 4), name
        blocks = (
            nn.Sequential(nn.LayerNorm(4, elementwise_affine=False), nn.GELU()) for _ in range(8)
        )
        setattr(self, name, nn.ModuleList(blocks))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        for block in getattr(self, self.name):
            y = block(y)
        return y


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", ["x", "target", "shift", "i"])
def test_a_list_of_blocks_may_be_called_as_what_microbatches_share(name: str) -> None:
    def loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        shift = torch.arange(4, device=x.device)
        result: Tensor = (model(x) - target + shift).square().mean()
        return result

    torch.manual_seed(0)
    model = ListCalled(name)
    program = partc.compile(model, "dp=2", BATCH, loss=loss, plan="ddp", microbatches=2)
    assert f"for layer in self.{name}" in program.source()
    verify(program, model, BATCH, loss).check()
