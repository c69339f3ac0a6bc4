"""Attention of generated programs: on a CPU what was traced, on a GPU kernels of its own."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from partc.api import compile
from partc.codegen.helpers import attention
from partc.codegen.helpers.attention import (
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
    of_heads,
)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [0.35, 0.3])
def test_on_a_cpu_it_is_torch_s(is_causal: bool, scale: float) -> None:
    q, k, v = (torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
    d_y = torch.randn_like(y)
    wanted = torch.autograd.grad(y, (q, k, v), d_y)
    pairs = (
        (flash_attention, flash_attention_backward),
        (efficient_attention, efficient_attention_backward),
    )
    for forward, backward in pairs:
        with torch.no_grad():
            found, logsumexp = forward(q, k, v, is_causal=is_causal, scale=scale)
            statistics = logsumexp.contiguous()
            grads = backward(d_y, q, k, v, found, statistics, is_causal=is_causal, scale=scale)
        torch.testing.assert_close(found, y, rtol=0, atol=0)
        torch.testing.assert_close(grads, wanted, rtol=1e-12, atol=1e-12)


def test_a_mask_on_a_cpu_is_torch_s() -> None:
    q, k, v = (torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    mask = torch.randn(2, 1, 5, 5, dtype=torch.float64)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    wanted = torch.autograd.grad(y.sum(), (q, k, v))
    with torch.no_grad():
        found, logsumexp = efficient_attention(q, k, v, mask=of_heads(mask, q))
        grads = efficient_attention_backward(
            torch.ones_like(y),
            q,
            k,
            v,
            found,
            logsumexp.contiguous(),
            is_causal=False,
            mask=of_heads(mask, q),
        )
    torch.testing.assert_close(found, y, rtol=0, atol=0)
    torch.testing.assert_close(grads, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_what_no_kernel_computes(is_causal: bool, scale: float | None) -> None:
    """The lines that a GPU would run, on a CPU."""
    names: dict[str, Any] = {**vars(attention)}
    for name in ("plain_attention", "plain_attention_backward"):
        source = inspect.getsource(names[name])
        exec(source.replace("not q.is_cuda", "False"), names)
    q, k, v = (torch.randn(2, 3, 5, 7, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    mask = None if is_causal else torch.randn(2, 1, 5, 5, dtype=torch.float64)
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale)
    d_y = torch.randn_like(y)
    wanted = torch.autograd.grad(y, (q, k, v), d_y)
    with torch.no_grad():
        found, logsumexp = names["plain_attention"](q, k, v, is_causal, scale, mask)
        grads = names["plain_attention_backward"](
            d_y, q, k, v, found, logsumexp, is_causal, scale, mask
        )
    torch.testing.assert_close(found, y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cudnn", [False, True])
def test_on_a_gpu_calls_and_shapes_are_those_of_its_kernels(
    cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU's kernels take and give, by torch's shape functions: no GPU is needed."""
    monkeypatch.setattr(attention, "has_cudnn_attention", lambda q: cudnn)
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 4, 70, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
        y, logsumexp = flash_attention(q, k, v, is_causal=True)
        sums = q.shape[:3] + (1,) * cudnn
        assert (y.shape, logsumexp.shape, y.device.type) == (q.shape, sums, "cuda")
        grads = flash_attention_backward(y, q, k, v, y, logsumexp, is_causal=True)
        assert [g.shape for g in grads] == [q.shape] * 3

        q, k, v = (x.float() for x in (q, k, v))
        mask = of_heads(torch.empty(1, 1, 70, 70, device="cuda"), q)
        assert mask.shape == (2, 4, 70, 70)
        assert mask.stride(2) == 80  # rows begin at multiples of 16
        y, logsumexp = efficient_attention(q, k, v, mask=mask)
        assert (y.shape, logsumexp.shape[:2]) == (q.shape, q.shape[:2])
        grads = efficient_attention_backward(y, q, k, v, y, logsumexp, is_causal=False, mask=mask)
        assert [g.shape for g in grads] == [q.shape] * 3


class Attends(nn.Module):
    """Heads of one linear."""

    def __init__(self, heads: int, head: int) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(heads * head, 3 * heads * head)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        masked = mask if mask.dim() > 1 else None
        return F.scaled_dot_product_attention(q, k, v, masked, is_causal=masked is None).sum()


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    ("dtype", "head", "masked", "kernel"),
    [
        (torch.bfloat16, 16, False, "flash"),
        (torch.bfloat16, 16, True, "efficient"),
        (torch.bfloat16, 12, False, "plain"),  # 24 bytes
        (torch.float32, 12, False, "efficient"),
        (torch.float32, 6, False, "plain"),
        (torch.float64, 16, False, "plain"),
    ],
)
def test_which_kernel_a_program_asks_for(
    dtype: torch.dtype, head: int, masked: bool, kernel: str
) -> None:
    model = Attends(2, head).to(dtype)
    inputs = (
        torch.randn(2, 5, 2 * head, dtype=dtype),
        torch.zeros(5, 5, dtype=dtype) if masked else torch.zeros(1, dtype=dtype),
    )
    source = compile(model, {}, inputs, loss=lambda m, x, mask: m(x, mask), plan="ddp").source()
    assert f" = {kernel}_attention(" in source
    assert f" = {kernel}_attention_backward(" in source
    assert ("mask=" in source.partition("class ")[2]) == masked
