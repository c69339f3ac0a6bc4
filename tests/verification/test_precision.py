"""Programs and models in float64: what torch computes in narrower types alone too."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

from partc.api import compile
from partc.verification.precision import Raised, grouped_products, raised_text
from partc.verification.verification import verify
from tests.zoo import MODELS

ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)  # one of three groups is empty


@pytest.mark.parametrize(
    ("a", "b"),
    [((8, 16), (3, 16, 32)), ((16, 8), (8, 32)), ((3, 16, 24), (24, 8)), ((3, 8, 16), (3, 16, 32))],
)
def test_grouped_products_are_torch_s(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, y = torch.randn(a), torch.randn(b)
    offs = None if len(a) == len(b) == 3 else ENDS
    wanted = torch._grouped_mm(x, y, offs)
    torch.testing.assert_close(grouped_products(x, y, offs), wanted, rtol=1e-5, atol=1e-5)
    with Raised():
        found = torch._grouped_mm(x, y, offs)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "masked"), [("flash", False), ("efficient", False), ("efficient", True)]
)
def test_a_gpu_s_attention_is_the_cpu_s_in_float64(kernel: str, masked: bool) -> None:
    aten, forward = torch.ops.aten, f"_scaled_dot_product_{kernel}_attention"
    q, k, v, d_y = torch.randn(4, 2, 3, 8, 16, dtype=torch.float64).unbind()
    mask = torch.randn(2, 3, 8, 8, dtype=torch.float64) if masked else None
    mine = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, not masked, attn_mask=mask
    )
    wanted = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_y, q, k, v, *mine, 0.0, not masked, attn_mask=mask
    )
    seed = q.new_empty((), dtype=torch.int64)
    between: list[object] = [mask, True] if kernel == "efficient" else []
    with Raised():
        found = getattr(aten, forward)(q, k, v, *between, is_causal=not masked)[:2]
        last = [[True, True, True, masked], not masked] if kernel == "efficient" else [not masked]
        first = [mask] if kernel == "efficient" else []
        middle = [seed, seed, 0.0] if kernel == "efficient" else [None, None, 8, 8, 0.0]
        after = [] if kernel == "efficient" else [seed, seed]
        grads = getattr(aten, f"{forward}_backward")(
            d_y, q, k, v, *first, *found, *middle, *last, *after
        )[:3]
    for ours, theirs in zip((*found, *grads), (*mine, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_least_number_of_a_raised_tensor_fits() -> None:
    with Raised():
        x = torch.zeros(2, dtype=torch.float32) + 1
        least = torch.full((), torch.finfo(x.dtype).min)
    assert least.item() == torch.finfo(torch.float64).min


def test_a_raised_text_has_them() -> None:
    text = raised_text("y = torch.ops.aten._grouped_mm(a, b, ends)\n")
    assert text.startswith("y = grouped_products(a, b, ends)\n")
    assert text.endswith(inspect.getsource(grouped_products))


class Turned(nn.Module):
    """Turns pairs of features by complex numbers that it holds."""

    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 8)
        self.register_buffer("turns", torch.polar(torch.ones(5, 4), torch.rand(5, 4)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.w(x).reshape(4, 5, 4, 2)) * self.turns
        return torch.view_as_real(pairs).square()[..., 0].sum()


def test_complex_buffers_stay_complex() -> None:
    model, x = Turned(), torch.randn(4, 5, 8)
    program = compile(model, "dp=2", (x,), plan="fsdp")
    verify(program, model, (x,)).check()


@pytest.mark.exhaustive
def test_mixtures_of_experts_are_verified() -> None:
    case = MODELS["mixtral"]()
    program = compile(case.model, "dp=2", case.inputs, loss=case.loss, plan="fsdp")
    verify(program, case.model, case.inputs, loss=case.loss).check()
