"""Attention as generated programs carry it: the kernels of the device that they run on.

A step is traced on a CPU, whose fused attention no other device has. All kernels give a result and
the logarithm of each query's sum; dropout, which none of these does, stands outside. GPUs have
FlashAttention (Dao 2023, arXiv 2307.08691), or cuDNN's form of it, for 16 bits without mask,
memory-efficient attention (Rabe and Staats 2021, arXiv 2112.05682) for masks and 32 bits, and
nothing for 64 bits or heads whose sizes do not lie in their registers.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def flash_attention(q: Tensor, k: Tensor, v: Tensor, **how: float) -> tuple[Tensor, Tensor]:
    """Attention in 16 bits, and the logarithm of each query's sum."""
    aten = torch.ops.aten
    if has_cudnn_attention(q):
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, **how)[:2]
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention(q, k, v, **how)[:2]
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **how)


def flash_attention_backward(
    d_y: Tensor, q: Tensor, k: Tensor, v: Tensor, *y: Tensor, is_causal: bool, **how: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``q``, ``k`` and ``v``; ``y`` is what the forward gave."""
    given, aten = (d_y, q, k, v, *y), torch.ops.aten
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, 0, is_causal, **how)  # fmt: skip
    seed = q.new_empty(2, dtype=torch.uint64)  # unused, as nothing is dropped
    more = (None, None, q.shape[2], k.shape[2], 0, is_causal)
    if has_cudnn_attention(q):
        return aten._scaled_dot_product_cudnn_attention_backward(
            *given, seed, seed, None, *more, **how)  # fmt: skip
    return aten._scaled_dot_product_flash_attention_backward(*given, *more, seed, seed, **how)


def has_cudnn_attention(q: Tensor) -> bool:
    """Whether a GPU has cuDNN's attention, faster from Hopper on, for heads of up to 128."""
    if not q.is_cuda or q.shape[-1] > 128 or torch.version.cuda is None:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability(q.device)[0] in (9, 10)


def efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, **how: float
) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of each query's sum."""
    aten = torch.ops.aten
    if q.is_cuda:
        return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, **how)[:2]
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, **how)


def efficient_attention_backward(
    d_y: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logsumexp: Tensor, *,
    is_causal: bool, mask: Tensor | None = None, **how: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``q``, ``k`` and ``v``."""
    aten, logsumexp = torch.ops.aten, logsumexp.contiguous()
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_y, q, k, v, y, logsumexp, 0, is_causal, attn_mask=mask, **how)  # fmt: skip
    seed = q.new_empty((), dtype=torch.int64)  # unused, as nothing is dropped
    given = (d_y, q, k, v, mask, y, logsumexp, seed, seed, 0, [True, True, True, False], is_causal)
    return aten._scaled_dot_product_efficient_attention_backward(*given, **how)[:3]


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention, and the logarithm of each query's sum, where a GPU has no kernel for it."""
    if not q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)  # fmt: skip
    scores = attention_scores(q, k, is_causal, scale, mask)
    logsumexp = scores.logsumexp(-1, keepdim=True)
    return (scores - logsumexp).exp() @ v, logsumexp.squeeze(-1)


def plain_attention_backward(
    d_y: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logsumexp: Tensor,
    is_causal: bool = False, scale: float | None = None, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``q``, ``k`` and ``v``."""
    if not q.is_cuda:
        given = (d_y, q, k, v, y, logsumexp.contiguous(), 0.0, is_causal)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, attn_mask=mask, scale=scale)  # fmt: skip
    scores = attention_scores(q, k, is_causal, scale, mask)
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    d_scores = weights * (d_y @ v.mT - (d_y * y).sum(-1, keepdim=True))
    d_scores *= q.shape[-1] ** -0.5 if scale is None else scale
    return d_scores @ k, d_scores.mT @ q, weights.mT @ d_y


def attention_scores(
    q: Tensor, k: Tensor, is_causal: bool, scale: float | None, mask: Tensor | None
) -> Tensor:
    """What each query is to each key, before the softmax."""
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores if mask is None else scores + mask


def of_heads(mask: Tensor, q: Tensor) -> Tensor:
    """A mask for every head; on a GPU its rows begin at multiples of 16 values."""
    num = mask.shape[-1]
    padded = F.pad(mask, (0, -num % 16)).narrow(-1, 0, num) if q.is_cuda else mask
    return padded.expand(*q.shape[:3], num)
