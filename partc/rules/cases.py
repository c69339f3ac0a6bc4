"""Small calls that every rule is proved on: in goes the table, out come signatures by the rule's name.

Elementwise ops get theirs from their schema; all others stand here. Every dim has another size, and
all sizes divide by 2, 3 and 4 unless the point is that they do not.
"""

from __future__ import annotations

from typing import Any

import torch

from partc.rules.schema_cases import elementwise_cases, functional_overloads
from partc.rules.signature import Signature, Spec
from partc.rules.table import RULES, name_of

aten = torch.ops.aten
call = Signature.call


def f(*shape: int) -> Spec:
    """A float operand."""
    return Spec(shape)


def i(*shape: int, high: int = 0) -> Spec:
    """An integer operand with values below ``high``."""
    return Spec(shape, torch.int64, high)


def b(*shape: int) -> Spec:
    """A boolean operand."""
    return Spec(shape, torch.bool)


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
)
VIEW = (
    call(aten.view.default, f(12, 24, 36), [288, 36]),
    call(aten.view.default, f(12, 24, 36), [12, 24, 3, 12]),
    call(aten.view.default, f(12, 24, 36), [12, -1]),
    call(aten.reshape.default, f(288, 36), [12, 24, 36]),
    call(aten._unsafe_view.default, f(12, 24, 36), [12, 864]),
    call(aten._reshape_alias.default, f(12, 24), [288], [1]),
    call(aten._reshape_copy.default, f(12, 24), [288]),
    call(aten.view_copy.default, f(12, 24), [288]),
    call(aten.flatten.using_ints, f(12, 24, 36), 1, 2),
    call(aten.unflatten.int, f(12, 288), 1, [12, 24]),
    call(aten.unsqueeze.default, f(12, 24), 1),
    call(aten.unsqueeze_copy.default, f(12, 24), -1),
    call(aten.squeeze.dim, f(12, 1, 24), 1),
    call(aten.squeeze.dims, f(12, 1, 24, 1), [1, 3]),
    call(aten.squeeze_copy.dim, f(12, 1, 24), 1),
    call(aten.permute.default, f(12, 24, 36), [2, 0, -2]),
    call(aten.permute_copy.default, f(12, 24, 36), [1, 2, 0]),
    call(aten.transpose.int, f(12, 24, 36), 0, -1),
    call(aten.transpose_copy.int, f(12, 24, 36), 1, 2),
    call(aten.t.default, f(12, 24)),
    call(aten.t.default, f(12)),
    call(aten.t_copy.default, f(12, 24)),
    call(aten.expand.default, f(12, 1, 24), [12, 36, 24]),
    call(aten.expand.default, f(24), [12, -1]),
    call(aten.expand_copy.default, f(12, 1), [12, 36]),
    call(aten.repeat.default, f(12, 24), [2, 1, 3]),
    call(aten.view_as_real.default, Spec((12, 24), torch.complex64)),
    call(aten.view_as_complex.default, f(12, 24, 2)),
    call(aten.view.dtype, f(12, 24), torch.int32),
    call(aten.as_strided.default, f(12, 24), [6, 6], [24, 2]),
)
REDUCE = (
    call(aten.sum.default, f(12, 24)),
    call(aten.sum.dim_IntList, f(12, 24, 36), [0, -1]),
    call(aten.sum.dim_IntList, f(12, 24, 36), [1], True),
    call(aten.nansum.default, f(12, 24), [1]),
    call(aten.mean.default, f(12, 24)),
    call(aten.mean.dim, f(12, 24, 36), [1, 2], True),
    call(aten.amax.default, f(12, 24), [1], True),
    call(aten.amax.default, i(12, 24), [0]),
    call(aten.max.default, f(12, 24)),
    call(aten.max.dim, f(12, 24), 1),
    call(aten.min.default, f(12, 24)),
    call(aten.min.dim, f(12, 24), 1, True),
    call(aten.amin.default, f(12, 24), [1]),
    call(aten.aminmax.default, f(12, 24), dim=1),
    call(aten.median.dim, f(12, 24), 1),
    call(aten.mode.default, i(12, 24), 1),
    call(aten.argmax.default, f(12, 24), 1),
    call(aten.argmax.default, f(12, 24)),
    call(aten.argmin.default, f(12, 24), 0, True),
    call(aten.any.dim, b(12, 24), 1),
    call(aten.any.default, b(12, 24)),
    call(aten.all.dim, b(12, 24), 0),
    call(aten.prod.dim_int, f(12, 24), 1),
    call(aten.var.correction, f(12, 24), [1], correction=1),
    call(aten.std.correction, f(12, 24), [1], correction=0),
    call(aten.var_mean.correction, f(12, 24, 36), [1, 2], correction=0, keepdim=True),
    call(aten.std_mean.correction, f(12, 24), [0]),
    call(aten.logsumexp.default, f(12, 24), [1]),
    call(aten.norm.ScalarOpt_dim, f(12, 24), 2, [1]),
    call(aten.linalg_vector_norm.default, f(12, 24), 2, [1]),
    call(aten.count_nonzero.dim_IntList, i(12, 24), [1]),
)
ALONG = (
    call(aten._softmax.default, f(12, 24), -1, False),
    call(aten._safe_softmax.default, f(12, 24), 0),
    call(aten._log_softmax.default, f(12, 24, 36), 1, False),
    call(aten._softmax_backward_data.default, f(12, 24), f(12, 24), -1, torch.float32),
    call(aten._log_softmax_backward_data.default, f(12, 24), f(12, 24), 1, torch.float32),
    call(aten.cumsum.default, f(12, 24), 1),
    call(aten.cumsum.default, i(12, 24), 0),
    call(aten.logcumsumexp.default, f(12, 24), 1),
    call(aten.cumprod.default, f(12, 24), 1),
    call(aten.cummax.default, f(12, 24), 1),
    call(aten.cummin.default, f(12, 24), 0),
    call(aten.sort.default, f(12, 24), 1),
    call(aten.sort.stable, f(12, 24), stable=True, dim=0),
    call(aten.argsort.default, f(12, 24), 1),
    call(aten.topk.default, f(12, 24), 4, -1),
    call(aten.kthvalue.default, f(12, 24), 3, 1),
    call(aten.flip.default, f(12, 24, 36), [1]),
    call(aten.roll.default, f(12, 24, 36), [5], [1]),
    call(aten.roll.default, f(12, 24), [5]),
    call(aten.tril.default, f(12, 24, 24), 1),
    call(aten.triu.default, f(12, 24, 24)),
)
SLICE = (
    call(aten.slice.Tensor, f(12, 36), 1, 12, 24),
    call(aten.slice.Tensor, f(12, 36), 1, 0, 9223372036854775807),
    call(aten.slice.Tensor, f(12, 36), 1, 5, 16),
    call(aten.slice.Tensor, f(12, 24, 2), 1, 1, 9223372036854775807, 2),
    call(aten.slice_backward.default, f(12, 12), [12, 36], 1, 12, 24, 1),
    call(aten.slice_scatter.default, f(12, 36), f(12, 12), 1, 12, 24),
    call(aten.select.int, f(12, 24, 36), 1, 3),
    call(aten.select_copy.int, f(12, 24), 0, -1),
    call(aten.select_backward.default, f(12, 36), [12, 24, 36], 1, 3),
    call(aten.select_scatter.default, f(12, 24, 36), f(12, 36), 1, 3),
    call(aten.cat.default, [f(12, 24), f(12, 36)], 1),
    call(aten.cat.default, [f(12, 24), f(12, 24)], 0),
    call(aten.stack.default, [f(12, 24), f(12, 24)], 1),
    call(aten.split.Tensor, f(12, 36), 12, 1),
    call(aten.split_with_sizes.default, f(12, 72), [12, 24, 36], 1),
    call(aten.chunk.default, f(12, 36), 3, 1),
    call(aten.unbind.int, f(12, 3, 24), 1),
    call(aten.constant_pad_nd.default, f(12, 24, 36), [1, 2], 0.0),
    call(aten.constant_pad_nd.default, f(12, 24, 36), [1, 2], 1.5),
    call(aten.unfold.default, f(12, 24, 36), 1, 4, 2),
    call(aten.unfold_backward.default, f(12, 11, 36, 4), [12, 24, 36], 1, 4, 2),
    call(aten.diagonal.default, f(12, 24, 24), 0, 1, 2),
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
    call(
        aten._native_batch_norm_legit.no_stats, f(4, 12, 6, 5), f(12), f(12), True, 0.1, 1e-5
    ),
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
        aten._fused_rms_norm_backward.default,
        *(f(12, 24, 36), f(12, 24, 36), [36], f(12, 24, 1), f(36), [True, True]),
    ),
)
Q, K, V = f(4, 12, 6, 8), f(4, 12, 24, 8), f(4, 12, 24, 8)
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
EMBEDDING = (
    call(aten.embedding.default, f(24, 36), i(12, 2)),
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
    call(aten.nll_loss2d_forward.default, f(12, 24, 6, 8), i(12, 6, 8), None, 2, -100),
    call(
        aten.nll_loss2d_backward.default,
        *(f(), f(12, 24, 6, 8), i(12, 6, 8), None, 2, -100, f()),
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
    call(aten.max_pool2d_with_indices.default, f(4, 12, 8, 6), [2, 2], [2, 2]),
    call(
        aten.max_pool2d_with_indices_backward.default,
        *(f(4, 12, 4, 3), f(4, 12, 8, 6), [2, 2], [2, 2], [0, 0], [1, 1], False, i(4, 12, 4, 3)),
    ),
    call(aten.avg_pool2d.default, f(4, 12, 8, 6), [2, 2], [2, 2]),
    call(
        aten.avg_pool2d_backward.default,
        *(f(4, 12, 4, 3), f(4, 12, 8, 6), [2, 2], [2, 2], [0, 0], False, True, None),
    ),
    call(aten._adaptive_avg_pool2d.default, f(4, 12, 8, 6), [2, 3]),
    call(aten._adaptive_avg_pool2d_backward.default, f(4, 12, 2, 3), f(4, 12, 8, 6)),
    call(aten.upsample_nearest2d.default, f(4, 12, 8, 6), [16, 12]),
    call(aten.upsample_bilinear2d.default, f(4, 12, 8, 6), [16, 12], False),
)
INDEX = (
    call(aten.index.Tensor, f(12, 24, 36), [None, i(6)]),
    call(aten.index.Tensor, f(12, 24, 36), [i(6, 1), i(1, 8)]),
    call(aten.index.Tensor, f(12, 24, 36), [i(6), None, i(6)]),
    call(aten.index_put.default, f(12, 24, 36), [None, i(6)], f(12, 6, 36), True),
    call(aten.index_put.default, f(12, 24), [i(6)], f(6, 24)),
    call(aten.index_select.default, f(12, 24, 36), 1, i(6)),
    call(aten.index_add.default, f(12, 24), 1, i(6), f(12, 6)),
    call(aten.gather.default, f(12, 24), 1, i(12, 6)),
    call(aten.scatter.src, f(12, 24), 1, i(12, 6), f(12, 6)),
    call(aten.scatter.value, f(12, 24), 1, i(12, 6), 1.5),
    call(aten.scatter_add.default, f(12, 24), 1, i(12, 6), f(12, 6)),
    call(aten.scatter_reduce.two, f(12, 24), 1, i(12, 6), f(12, 6), "sum"),
)
BY_HAND = (
    *MATMUL, *VIEW, *REDUCE, *ALONG, *SLICE, *NORM, *ATTENTION, *EMBEDDING, *LOSS, *CONV, *INDEX,
)  # fmt: skip


def cases_by_rule() -> dict[str, list[Signature]]:
    """For every name in the table the calls it is proved on, in the table's order."""
    by_hand: dict[str, list[Signature]] = {}
    for case in BY_HAND:
        by_hand.setdefault(rule_name(case.target), []).append(case)
    return {name: by_hand.get(name) or _from_schema(name) for name in RULES}


def rule_name(target: Any) -> str:
    """The name under which the table holds an op: its own or, failing that, its packet's."""
    name = name_of(target)
    return name if name in RULES or "." not in name else name.rpartition(".")[0]


def _from_schema(name: str) -> list[Signature]:
    namespace, op, *overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    if packet is None:
        return []
    named = [getattr(packet, overload[0])] if overload else functional_overloads(packet)
    return [case for each in named for case in elementwise_cases(each)]
