"""Proof cases of products, norms, attention, lookups, losses and convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from partc.graph.given_back import GIVEN_BACK
from partc.graph.ops import (
    by_columns,
    cross_entropy_grad,
    inverse_order,
    masked_embedding,
    masked_gather,
    solved,
    weight_grad,
    window,
)
from partc.rules.signature import Signature, Spec, f, i

aten = torch.ops.aten
call = Signature.call


def h(*shape: int) -> Spec:
    """A bfloat16 operand, for ops that take nothing wider."""
    return Spec(shape, torch.bfloat16)


INFO = Spec((12,), torch.int32, high=1)  # zeros: of a routine of torch.linalg that could

MATMUL = (
    call(aten.linear.default, f(12, 2, 24), f(36, 24)),
    call(aten.linear.default, f(12, 2, 24), f(36, 24), f(36)),
    call(aten.mm.default, f(12, 24), f(24, 36)),
    call(aten.bmm.default, f(12, 24, 36), f(12, 36, 48)),
    call(aten.mv.default, f(12, 24), f(24)),
    call(aten.dot.default, f(12), f(12)),
    call(aten.vdot.default, f(12), f(12)),
    call(aten.outer.default, f(12), f(24)),
    call(aten.ger.default, f(12), f(24)),
    call(aten.matmul.default, f(12, 2, 24), f(24, 36)),
    call(aten.matmul.default, f(12, 1, 2, 24), f(36, 24, 12)),
    call(aten.matmul.default, f(12, 24), f(24)),
    call(aten.matmul.default, f(24), f(12, 24, 36)),
    call(aten.matmul.default, f(24), f(24)),
    call(aten.addmm.default, f(36), f(12, 24), f(24, 36)),
    call(aten.addmm.default, f(12, 36), f(12, 24), f(24, 36), beta=0.5, alpha=1.5),
    call(aten.baddbmm.default, f(12, 24, 48), f(12, 24, 36), f(12, 36, 48)),
    call(aten.addmv.default, f(12), f(12, 24), f(24)),
    call(aten.addbmm.default, f(24, 48), f(12, 24, 36), f(12, 36, 48)),
    call(aten._grouped_mm.default, h(24, 96), h(3, 96, 192), Spec((3,), torch.int32)),
    call(aten._grouped_mm.default, h(3, 24, 96), h(3, 96, 192)),
    call(weight_grad, f(12, 2, 36), f(12, 2, 24)),
    call(weight_grad, f(12, 36), f(12, 24)),
    call(GIVEN_BACK, [f(12, 36), f(12, 24, 4)], []),
    call(GIVEN_BACK, [f(12, 24), f(6, 24), f()], []),
)

LINALG = (
    call(aten.linalg_cholesky_ex.default, f(12, 24, 4, 4)),
    call(aten.linalg_inv_ex.default, f(12, 4, 4)),
    call(aten.linalg_lu_factor_ex.default, f(12, 4, 4)),
    call(aten.linalg_qr.default, f(12, 6, 4)),
    call(aten._linalg_eigh.default, f(12, 4, 4), "L", True),
    call(aten._linalg_svd.default, f(12, 6, 4)),
    call(aten._linalg_det.default, f(12, 4, 4)),
    call(aten._linalg_slogdet.default, f(12, 4, 4)),
    call(by_columns, f(12, 4, 6)),
    call(solved, f(12, 4, 4), INFO, "inv"),
    call(solved, f(12, 4), INFO, "solve"),
    call(aten._linalg_solve_ex.default, f(12, 4, 4), f(12, 4, 6)),
    call(aten._linalg_solve_ex.default, f(12, 4, 4), f(12, 4)),
    call(aten.linalg_matrix_exp.default, f(12, 4, 4)),
    call(aten.linalg_solve_triangular.default, f(12, 4, 4), f(12, 4, 6), upper=True),
    call(aten.linalg_lu_solve.default, f(12, 4, 4), Spec((12, 4), torch.int32), f(12, 4, 6)),
    call(aten.linalg_cross.default, f(12, 24, 3), f(12, 24, 3)),
    call(aten.linalg_cross.default, f(12, 3, 24), f(12, 3, 24), dim=1),
    call(aten.diag_embed.default, f(12, 24)),
    call(aten.diag_embed.default, f(12, 24), 0, 0, 1),
)

NORM = (
    call(aten.native_layer_norm.default, f(12, 24, 36), [36], f(36), f(36), 1e-5),
    call(aten.native_layer_norm.default, f(12, 24), [24], None, None, 1e-5),
    call(
        aten.native_layer_norm_backward.default,
        *(f(12, 24, 36), f(12, 24, 36), [36], f(12, 24, 1), f(12, 24, 1), f(36), f(36)),
        [True, True, True],
    ),
    call(aten.native_group_norm.default, f(12, 24, 6), f(24), f(24), 12, 24, 6, 12, 1e-5),
    call(
        aten.native_group_norm_backward.default,
        *(f(12, 24, 6), f(12, 24, 6), f(12, 12), f(12, 12), f(24), 12, 24, 6, 12),
        [True, True, True],
    ),
    call(
        aten.native_batch_norm.default,
        *(f(4, 12, 6, 5), f(12), f(12), f(12), f(12), True, 0.1, 1e-5),
    ),
    call(aten._native_batch_norm_legit.no_stats, f(4, 12, 6, 5), f(12), f(12), True, 0.1, 1e-5),
    call(
        aten._native_batch_norm_legit_functional.default,
        *(f(4, 12, 6, 5), f(12), f(12), f(12), f(12), True, 0.1, 1e-5),
    ),
    call(
        aten.native_batch_norm_backward.default,
        *(f(4, 12, 6, 5), f(4, 12, 6, 5), f(12), f(12), f(12), f(12), f(12)),
        *(True, 1e-5, [True, True, True]),
    ),
    call(aten._fused_rms_norm.default, f(12, 24, 36), [36], f(36), 1e-5),
    call(
        aten._native_batch_norm_legit_no_training.default,
        *(f(4, 12, 6, 5), f(12), f(12), f(12), f(12), 0.1, 1e-5),
    ),
    call(
        aten._batch_norm_with_update_functional.default,
        *(f(4, 12, 6, 5), f(12), f(12), f(12), f(12), 0.1, 1e-5),
    ),
)

Q, K, V = f(4, 12, 6, 8), f(4, 12, 24, 8), f(4, 12, 24, 8)
EMBEDDING = (
    call(aten.embedding.default, f(24, 36), i(12, 2)),
    call(masked_embedding, f(24, 36), i(12, 2)),
    call(masked_gather, f(12, 24), 1, i(12, 6)),
    call(inverse_order, i(12)),
    call(window, i(12, 2), 1, 3),
    call(aten.embedding.default, f(24, 36), i(12, 2), 5),
    call(aten.embedding_dense_backward.default, f(12, 2, 36), i(12, 2), 24, -1, False),
    call(aten.embedding_dense_backward.default, f(12, 2, 36), i(12, 2), 24, 5, False),
    call(aten.one_hot.default, i(12, 2, high=24), 24),
)
LOSS = (
    call(aten.nll_loss_forward.default, f(12, 24), i(12), None, 2, -100),
    call(aten.nll_loss_forward.default, f(12, 24), i(12), None, 2, 3),
    call(aten.nll_loss_forward.default, f(12, 24), i(12), f(24), 2, -100),
    call(aten.nll_loss_forward.default, f(12, 24), i(12), None, 0, -100),
    call(aten.nll_loss_forward.default, f(12, 24), i(12), None, 1, -100),
    call(aten.nll_loss_backward.default, f(), f(12, 24), i(12), None, 2, -100, f()),
    call(aten.nll_loss_backward.default, f(), f(12, 24), i(12), None, 2, 3, f()),
    call(cross_entropy_grad, f(), f(12, 24), i(12), i(12), -100),
    call(cross_entropy_grad, f(), f(12, 24), i(12), i(12), 3),
    call(aten.nll_loss2d_forward.default, f(12, 24, 6, 8), i(12, 6, 8), None, 2, -100),
    call(
        aten.nll_loss2d_backward.default,
        *(f(), f(12, 24, 6, 8), i(12, 6, 8), None, 2, -100, f()),
    ),
    call(aten._ctc_loss.Tensor, f(24, 12, 6), i(12, 4, high=6), i(12), i(12), 0, False),
    call(
        aten._ctc_loss_backward.Tensor,
        *(f(12), f(24, 12, 6), i(12, 4, high=6), i(12), i(12), f(12), f(12, 24, 9), 0, True),
    ),
    call(aten.mse_loss.default, f(12, 24), f(12, 24), 2),
    call(aten.mse_loss.default, f(12, 24), f(12, 24), 1),
    call(aten.mse_loss_backward.default, f(), f(12, 24), f(12, 24), 2),
    call(aten.mse_loss_backward.default, f(), f(12, 24), f(12, 24), 1),
)
CONV = (
    call(
        aten.convolution.default,
        *(f(4, 12, 8, 6), f(24, 12, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
    call(
        aten.convolution.default,
        *(f(4, 12, 8, 6), f(24, 12, 3, 3), f(24), [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
    ),
    call(
        aten.convolution.default,
        *(f(4, 12, 8, 6), f(24, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 12),
    ),
    call(
        aten.convolution.default,
        *(f(4, 12, 8), f(12, 24, 3), None, [2], [1], [1], True, [1], 1),
    ),
    call(
        aten.convolution_backward.default,
        *(f(4, 24, 8, 6), f(4, 12, 8, 6), f(24, 12, 3, 3), [24]),
        *([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]),
    ),
    call(
        aten.convolution_backward.default,
        *(f(4, 24, 8, 6), f(4, 12, 8, 6), f(24, 1, 3, 3), None),
        *([1, 1], [1, 1], [1, 1], False, [0, 0], 12, [True, True, False]),
    ),
)


def _pooling(dims: int) -> Iterator[Signature]:
    """Pooling and resizing over one, two or three space dims, forward and backward."""
    small, large = f(4, 12, *[2, 3, 4][:dims]), f(4, 12, *[4, 6, 8][:dims])
    picked = i(4, 12, *[2, 3, 4][:dims], high=prod([4, 6, 8][:dims]))
    twos, zeros, ones = [2] * dims, [0] * dims, [1] * dims
    sizes, wide = list(small.shape[2:]), [4, 12, *large.shape[2:]]
    averaged = (twos, twos, zeros, False, True, None)
    maxed = (twos, twos, zeros, ones, False)
    kind = {1: "linear", 2: "bilinear", 3: "trilinear"}[dims]
    operands: dict[str, tuple[Any, ...]] = {
        f"avg_pool{dims}d": (large, twos, twos),
        f"adaptive_avg_pool{dims}d": (large, sizes),
        f"_adaptive_avg_pool{dims}d": (large, sizes),
        f"avg_pool{dims}d_backward": (small, large, *averaged),
        f"_adaptive_avg_pool{dims}d_backward": (small, large),
        f"max_pool{dims}d_with_indices": (large, twos, twos),
        f"max_pool{dims}d_with_indices_backward": (small, large, *maxed, picked),
        f"adaptive_max_pool{dims}d": (large, sizes),
        f"adaptive_max_pool{dims}d_backward": (small, large, picked),
        f"upsample_nearest{dims}d": (small, wide[2:]),
        f"upsample_nearest{dims}d_backward": (large, wide[2:], [4, 12, *sizes]),
        f"upsample_{kind}{dims}d": (small, wide[2:], False),
        f"upsample_{kind}{dims}d_backward": (large, wide[2:], [4, 12, *sizes], False),
        f"_upsample_{kind}{dims}d_aa": (small, wide[2:], False),
        f"_upsample_{kind}{dims}d_aa_backward": (large, wide[2:], [4, 12, *sizes], False),
    }
    for name, arguments in operands.items():
        if hasattr(aten, name):
            yield call(getattr(aten, name).default, *arguments)


POOLING = (
    *(case for dims in (1, 2, 3) for case in _pooling(dims)),
    call(aten.upsample_bicubic2d.default, f(4, 12, 2, 3), [4, 6], False),
    call(aten.upsample_bicubic2d_backward.default, f(4, 12, 4, 6), [4, 6], [4, 12, 2, 3], False),
    call(aten._upsample_bicubic2d_aa.default, f(4, 12, 2, 3), [4, 6], False),
    call(
        aten._upsample_bicubic2d_aa_backward.default, f(4, 12, 4, 6), [4, 6], [4, 12, 2, 3], False
    ),
    call(aten.grid_sampler_2d.default, f(4, 12, 8, 6), f(4, 3, 5, 2), 0, 0, False),
    call(
        aten.grid_sampler_2d_backward.default,
        f(4, 12, 3, 5),
        f(4, 12, 8, 6),
        f(4, 3, 5, 2),
        0,
        0,
        False,
        [True, True],
    ),
    call(aten.grid_sampler_3d.default, f(4, 12, 8, 6, 7), f(4, 3, 5, 2, 3), 0, 0, False),
    call(
        aten.grid_sampler_3d_backward.default,
        f(4, 12, 3, 5, 2),
        f(4, 12, 8, 6, 7),
        f(4, 3, 5, 2, 3),
        0,
        0,
        False,
        [True, True],
    ),
    call(aten.pixel_shuffle.default, f(4, 12, 6, 8), 2),
    call(aten.pixel_unshuffle.default, f(4, 12, 6, 8), 2),
    call(aten.im2col.default, f(4, 12, 8, 6), [2, 2], [1, 1], [0, 0], [2, 2]),
    call(aten.col2im.default, f(4, 48, 12), [8, 6], [2, 2], [1, 1], [0, 0], [2, 2]),
)
ATTENTION = (
    call(aten._scaled_dot_product_flash_attention_for_cpu.default, Q, K, V),
    call(
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        *(Q, K, V, 0.0, False),
        attn_mask=f(4, 12, 6, 24),
    ),
    call(aten._scaled_dot_product_flash_attention_for_cpu.default, K, K, V, 0.0, True),
    call(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        *(Q, Q, K, V, Q, f(4, 12, 6), 0.0, False),
    ),
    call(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        *(K, K, K, V, K, f(4, 12, 24), 0.0, True),
        attn_mask=f(4, 1, 24, 24),
    ),
    call(aten._scaled_dot_product_attention_math.default, Q, K, V),
    call(aten.scaled_dot_product_attention.default, Q, K, V, f(4, 1, 6, 24)),
    call(aten.scaled_dot_product_attention.default, K, K, V, None, 0.0, True),
)
