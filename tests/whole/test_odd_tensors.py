"""Tensors that are not dense: constants compute, parameters, buffers and inputs are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import RunError, TraceError
from partc.verification.verification import verify

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{words}:UserWarning")
    for words in ("Sparse", "nested tensors", "strided layout", "quantize")
]
NODES, WIDTH = 8, 6
CLASSES = torch.arange(NODES) % WIDTH
Take = Callable[[Tensor, Tensor], Tensor]


def edges(seed: int = 0) -> Tensor:
    """An adjacency matrix with weights; some edges stand in it twice."""
    drawn = torch.Generator().manual_seed(seed)
    ends = torch.randint(NODES, (2, 30), generator=drawn)
    weights = torch.rand(30, generator=drawn, dtype=torch.float64)
    return torch.sparse_coo_tensor(ends, weights, (NODES, NODES))


class Graphs(nn.Module):
    """Layers over a graph; ``take`` computes with what is held as ``a`` and the layers' results."""

    def __init__(self, take: Take, a: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.double()
        self.take, self.a = take, a

    def forward(self, x: Tensor, a: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(self.take(self.a if a is None else a, layer(x)))
        return x


def loss_of(model: nn.Module, *inputs: Tensor) -> Tensor:
    return F.cross_entropy(model(*inputs), CLASSES)


def batch(*more: Tensor) -> tuple[Tensor, ...]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(NODES, WIDTH, generator=drawn, dtype=torch.float64), *more


def agrees(model: nn.Module, mesh: str = "dp=2", plan: str = "ddp") -> str:
    """The text of the plan of a program that computes what the model computes."""
    program = partc.compile(model, mesh, batch(), loss=loss_of, plan=plan)
    verify(program, model, batch(), loss=loss_of).check()
    return str(program.plan)


# constants ---------------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "plan"),
    [("dp=2", "ddp"), ("dp=2", "fsdp"), ("tp=2", "megatron"), ("pp=2", "ddp"), ("dp=2", "auto")],
)
def test_a_sparse_matrix_that_is_a_constant_is_multiplied(mesh: str, plan: str) -> None:
    text = agrees(Graphs(torch.sparse.mm, edges()), mesh, plan)
    assert "whole on every rank: model.a, sparse, 720 B, read at test_odd_tensors.py" in text


def quantised() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(NODES, WIDTH), 0.5, 0, torch.qint8)


def nested(layout: torch.layout = torch.jagged) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def by_rows() -> Tensor:
    return edges().coalesce().to_sparse_csr()


def by_columns() -> Tensor:
    return edges().coalesce().to_sparse_csc()


CONSTANTS: dict[str, tuple[Take, Callable[[], Any]]] = {
    "csr": (torch.mm, by_rows),
    "csc, turned": (lambda a, x: a.t() @ x, by_columns),
    "on the right": (lambda a, x: (x.t() @ a.t()).t(), edges),
    "a vector": (lambda a, x: torch.mv(a, x[:, 0])[:, None] * x, edges),
    "its elements": (lambda a, x: x * a.coalesce().values().sum() + len(a), edges),
    "made dense": (lambda a, x: a.to_dense() @ x, edges),
    "in a list": (lambda a, x: torch.sparse.mm(a[0], x), lambda: [edges()]),
    "quantised": (lambda a, x: a.dequantize() * x, quantised),
    "nested": (lambda a, x: a.values().sum() * x, nested),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CONSTANTS)
def test_what_follows_from_constants_that_are_not_dense_is_right(case: str) -> None:
    take, make = CONSTANTS[case]
    agrees(Graphs(take, make()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["another one", "written to"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_step_sees_that_a_sparse_constant_has_changed(how: str, layout: torch.layout) -> None:
    model = Graphs(torch.mm, edges().coalesce().to_sparse(layout=layout))
    stage = partc.compile(model, "dp=1", batch(), loss=loss_of, plan="ddp").module()
    stage.step(*batch())
    if how == "another one":
        model.a = edges(1).to_sparse(layout=layout)
    else:
        model.a.values().mul_(2)
    with pytest.raises(RunError, match=r"model\.a is not what it was when compiled"):
        stage.step(*batch())


# refused -----------------------------------------------------------------------------------------
def held(a: Tensor) -> dict[str, nn.Module]:
    """Models that hold a tensor as a buffer and as a parameter."""
    buffer, param = Graphs(torch.mm), Graphs(torch.mm)
    del buffer.a, param.a
    buffer.register_buffer("a", a)
    param.a = nn.Parameter(a, requires_grad=False)
    return {"this buffer is": buffer, "this parameter is": param}


ODD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (edges, "self.a = a, a sparse matrix is a constant.*index_add"),
    "sparse by rows": (by_rows, "index_add"),
    "quantised": (quantised, "dequantize"),
    "nested": (nested, "to_padded_tensor"),
    "nested strided": (lambda: nested(torch.strided), "to_padded_tensor"),
    "mkldnn": (lambda: torch.ones(NODES, WIDTH).to_mkldnn(), "to_dense"),
}


@pytest.mark.parametrize("kind", ODD)
def test_parameters_buffers_and_inputs_that_are_not_dense_are_refused(kind: str) -> None:
    make, advice = ODD[kind]
    tensor, word = make(), kind.partition(" ")[0]
    for what, model in held(tensor).items():
        with pytest.raises(TraceError, match=f"a: {what} {word} .*{advice}"):
            partc.compile(model, "dp=2", batch(), loss=loss_of, plan="ddp")
    with pytest.raises(TraceError, match=f"it is a {word} tensor .* Pass x.(to_|deq)"):
        partc.compile(Graphs(torch.mm), "dp=2", batch(tensor), loss=loss_of, plan="ddp")


MADE: dict[str, tuple[Take, str]] = {
    "sparse": (lambda a, x: torch.sparse.mm((x @ x.t()).to_sparse(), x), "a sparse tensor"),
    "nested": (
        lambda a, x: torch.nested.as_nested_tensor([x[:3], x[3:]]).to_padded_tensor(0.0)[0, :1] * x,
        "a nested tensor",
    ),
    "mkldnn": (lambda a, x: x + x.float().to_mkldnn().to_dense(), "a tensor of mkldnn"),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_step_that_makes_what_is_not_dense_is_refused(kind: str) -> None:
    take, words = MADE[kind]
    with pytest.raises(TraceError, match=words):
        partc.compile(Graphs(take), "dp=2", batch(), loss=loss_of, plan="ddp")


OTHERS: dict[str, Take] = {
    "addmm": lambda a, x: torch.addmm(x, a, x),
    "mul": lambda a, x: (a * x[:, :1]).to_dense() @ x,
    "mul_": lambda a, x: a.mul_(2) @ x,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_a_step_does_with_a_sparse_constant_is_refused_by_name(name: str) -> None:
    model = Graphs(OTHERS[name], edges().coalesce())
    with pytest.raises(TraceError, match=f"test_odd_tensors.*{name.strip('_')} of a sparse tensor"):
        partc.compile(model, "dp=2", batch(), loss=loss_of, plan="ddp")
