"""Rules of elementwise ops that are linear in an operand, or that lack torch's pointwise tag.

Any other op with torch's ``pointwise`` tag has the rule of `table.elementwise`. A linear op may
read an unfinished sum and give one: ``f32[8]{U:tp} * 2 -> f32[8]{U:tp}``.
"""

from __future__ import annotations

from torch import fx

from partc.rules.call import Call
from partc.rules.table import pointwise, rule


def masked(call: Call) -> str:
    """Linear only for the value 0: another one would be filled in by every rank, and summed."""
    return "0" if _is_zero(call["value"]) else ""


def where(call: Call) -> str:
    """The linear slots of ``where``: both branches jointly, or one if the other is constant 0."""
    branches = [(slot, call[name]) for slot, name in ((1, "self"), (2, "other"))]
    tensors = [slot for slot, branch in branches if isinstance(branch, fx.Node)]
    constants = [branch for _, branch in branches if not isinstance(branch, fx.Node)]
    if not all(map(_is_zero, constants)):
        return ""
    return "+".join(str(slot) for slot in range(len(call.slots) - len(tensors), len(call.slots)))


def quotient(call: Call) -> str:
    """The linear slot of a division: the numerator, unless the result is rounded."""
    return "" if call.arguments.get("rounding_mode") else "0"


def power(call: Call) -> str:
    """The linear slot of a power: only exponent 1 is linear."""
    return "0" if call["exponent"] == 1 else ""


def sampled(call: Call) -> str:
    """``a_->a_``: each row of weights is drawn from by itself, and not in parts."""
    return "a_->a_" if call.rank() == 2 else "_->_"


def _is_zero(constant: object) -> bool:
    return isinstance(constant, int | float) and constant == 0


rule(
    "aten.neg aten.clone aten.positive aten.lift_fresh aten.alias aten.detach",
    pointwise,
    linear="0",
)
rule("aten.lift_fresh_copy aten.contiguous aten.conj_physical", pointwise, linear="0")
rule("aten._to_copy aten.to aten._conj", pointwise, linear="0")
rule("aten.copy", "...,...->...", linear="1")
rule("aten.add.Tensor aten.sub.Tensor aten.rsub.Tensor", pointwise, linear="0+1")
rule("aten.mul aten.multiply", pointwise, linear="0|1")
rule("aten.div aten.true_divide", pointwise, linear=quotient)
rule("aten.pow.Tensor_Scalar", pointwise, linear=power)
rule("aten.addcmul", pointwise, linear="0+1|0+2")
rule("aten.addcdiv", pointwise, linear="0+1")
rule("aten.lerp", pointwise, linear="0+1")
rule("aten.where.self", pointwise, linear="1+2")
rule("aten.where.ScalarSelf aten.where.ScalarOther", pointwise, linear=where)
rule("aten.masked_fill.Scalar", pointwise, linear=masked)
rule("aten.real aten.imag", pointwise, linear="0")

# backward formulas: linear in the gradient, which comes first
rule("aten.gelu_backward aten.silu_backward aten.mish_backward", pointwise, linear="0")
rule("aten.tanh_backward aten.sigmoid_backward aten.logit_backward", pointwise, linear="0")
rule(
    "aten.threshold_backward aten.hardtanh_backward aten.leaky_relu_backward", pointwise, linear="0"
)
rule("aten.elu_backward aten.softplus_backward aten.softshrink_backward", pointwise, linear="0")
rule("aten.hardswish_backward aten.hardsigmoid_backward", pointwise, linear="0")
rule("aten.hardshrink_backward aten.log_sigmoid_backward", pointwise, linear="0")
rule("aten.rrelu_with_noise_backward aten._prelu_kernel_backward", pointwise, linear="0")
rule("aten.native_dropout_backward", pointwise, linear="0")

# elementwise without torch's tag
rule("aten.hardswish aten.log_sigmoid_forward aten._prelu_kernel", pointwise)
rule("aten.fill aten.floor_divide aten.nan_to_num aten.isposinf aten.isneginf", pointwise)
rule("aten.bucketize.Tensor", "...,!b->...")
rule("aten.masked_fill.Tensor aten.isclose aten.polar aten.complex", pointwise)

# the user's hooks: what they do with a piece is the user's
rule("partc.hooked", pointwise)

# random elementwise ops: pieces draw their own numbers, copies equal ones
rule("partc.ops.dropout_mask aten.rand_like aten.randn_like aten.randint_like", pointwise, unread=0)
rule("aten.bernoulli.p aten.uniform aten.normal_functional aten.log_normal", pointwise, unread=0)
rule("aten.exponential aten.geometric aten.cauchy aten.random", pointwise, unread=0)
rule("aten.bernoulli aten.native_dropout aten._fused_dropout aten.rrelu_with_noise", pointwise)
rule("aten.normal.Tensor_float aten.normal.float_Tensor aten.normal.Tensor_Tensor", pointwise)
rule("aten.poisson aten.binomial aten._standard_gamma", pointwise)
rule("aten._sample_dirichlet", "...!k->...k")
rule("aten.multinomial", sampled)
rule("aten.zeros_like aten.ones_like aten.full_like aten.empty_like", pointwise, unread=0)
