"""Small calls that every rule is proved on: in goes the table, out come signatures by the rule's name.

Elementwise ops get theirs from their schema; all others stand here. Every dim has another size, and
all sizes divide by 2, 3 and 4 unless the point is that they do not.
"""

from __future__ import annotations

import torch

from partc.rules.signature import Signature, Spec

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
