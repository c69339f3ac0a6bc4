"""Functions made of what several places of a program compute alike."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partc.codegen.safety import check_source
from tests.codegen.emitted import check_ranks, check_single, emit, planned, traced


class ScaleNorm(nn.Module):
    """Divides by the root of the mean square."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6) + 0.5)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        size = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(size + self.eps))


def turned(a: Tensor, b: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """The same for two values, a line each."""
    left = (a * angle.cos()).cumsum(-1) + (a.flip(-1) * angle.sin()).softmax(-1)
    right = (b * angle.cos()).cumsum(-1) + (b.flip(-1) * angle.sin()).softmax(-1)
    return left, right


class Network(nn.Module):
    """Four norms, the last of which may be another; ``turned`` is called once."""

    def __init__(self, last_eps: float = 1e-5) -> None:
        super().__init__()
        self.norms = nn.ModuleList(ScaleNorm(eps) for eps in (1e-5, 1e-5, 1e-5, last_eps))
        self.linears = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth, left, right = self.linears
        y = self.norms[0](first(x))
        y = self.norms[1](second(y).relu())
        y = self.norms[2](third(y).exp())
        y = self.norms[3](fourth(y).sin())
        a, b = turned(left(y), right(y), y)
        return F.mse_loss(a + b, x)


def network(last_eps: float = 1e-5) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Network(last_eps).double(), (torch.randn(4, 8, 6, dtype=torch.float64),)


def functions(source: str) -> dict[str, int]:
    """The functions made of a model's code, and how often each is called."""
    names = re.findall(r'(?m)^def (\w+)\([^"]*"""(?:Forward|Backward) of', source)
    return {name: len(re.findall(rf"(?<!def )\b{name}\(", source)) for name in names}


def test_modules_of_one_class_are_one_function() -> None:
    source = check_single(*network(), None, 1e-12)
    assert functions(source)["scale_norm"] == 4
    assert functions(source)["scale_norm_backward"] == 4


def test_lines_of_one_function_are_one_function() -> None:
    source = check_single(*network(), None, 1e-12)
    assert functions(source)["turned"] == 2


@pytest.mark.exhaustive
def test_a_function_that_saves_no_lines_is_not_made() -> None:
    model, inputs = network()
    norms = [ScaleNorm(1e-5).double() for _ in range(2)]
    model.norms = nn.ModuleList([*norms, nn.Identity(), nn.Identity()])
    source = check_single(model, inputs, None, 1e-12)
    assert "scale_norm" not in functions(source)


def test_what_reads_differently_stays_apart() -> None:
    source = check_single(*network(last_eps=1e-3), None, 1e-12)
    assert functions(source)["scale_norm"] == 3
    assert "0.001" in source


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "preset"),
    [("dp=2", "fsdp"), ("tp=2", "megatron"), ("dp=2,tp=2", "ddp+megatron-sp")],
)
def test_ranks_equal_eager(mesh: str, preset: str) -> None:
    source = check_ranks(*network(), None, mesh, preset, 1e-12)
    assert functions(source)["scale_norm"] >= 2


@pytest.mark.exhaustive
def test_no_function_holds_a_collective() -> None:
    model, inputs = network()
    source = emit(planned(traced(model, inputs), "dp=2,tp=2", "fsdp+megatron"), header="")
    for text in re.split(r"\n\n\n", source):
        if re.search(r'"""(Forward|Backward) of', text):
            assert "dist." not in text
            assert "self." not in text


@pytest.mark.exhaustive
def test_values_are_not_called_as_functions_are() -> None:
    def scale_norm(x: Tensor) -> Tensor:
        y = x.exp()
        return y / y.sum()

    class Clashing(Network):
        def forward(self, x: Tensor) -> Tensor:
            turned = scale_norm(x)
            for linear, norm in zip(self.linears, self.norms, strict=False):
                scale_norm_1 = linear(turned)
                turned = scale_norm(norm(scale_norm_1))
            return super().forward(turned)

    torch.manual_seed(0)
    x = torch.randn(4, 8, 6, dtype=torch.float64)
    source = check_single(Clashing().double(), (x,), None, 1e-12)
    assert functions(source)["scale_norm"] > 2


def test_hostile_class_names_stay_names() -> None:
    class Hostile(ScaleNorm):
        pass

    Hostile.__name__ = Hostile.__qualname__ = 'N"""\nimport os'
    model, inputs = network()
    model.norms = nn.ModuleList(Hostile(1e-5).double() for _ in range(4))
    source = check_single(model, inputs, None, 1e-12)
    check_source(source)
    assert functions(source)["n_import_os"] == 4
