"""Rules of normalisations: dims that share a mean and a variance are not sharded."""

from __future__ import annotations

from functools import partial

from partc.rules.call import Call
from partc.rules.table import rule


def layer_norm(call: Call) -> str:
    """The last dims are whole, so are weight and bias; statistics keep these dims with size 1."""
    inner = "_" * len(call["normalized_shape"])
    data = "..." + inner
    num_weights = len(call.slots) - 1
    return f"{data}{f',{inner}' * num_weights}->{','.join([data] * len(call.results))}"


def layer_norm_backward(call: Call) -> str:
    """Gradients of weight and bias are sums over the leading dims."""
    inner = "_" * len(call["normalized_shape"])
    data = "..." + inner
    num_weights = len(call.results) - 1
    ins = [data] * (len(call.slots) - num_weights) + [inner] * num_weights
    return f"{','.join(ins)}->{','.join([data] + [inner] * num_weights)}"


def batch_norm(call: Call, training: bool = True) -> str:
    """By channel; by sample where no statistics are taken. Absent ones are empty tensors.

    In training a batch norm's statistics need all samples, so ``b`` is frozen (``!b``). In
    evaluation, statistics that the op does not compute are results of size 0.
    """
    training = call.arguments.get("training", call.arguments.get("train", training))
    shape = call.shape(0)
    batch = "!b" if training else "b"

    def term(tensor: tuple[int, ...] | None) -> str:
        if tensor is not None and len(tensor) == len(shape):
            return f"{batch}c" + "_" * (len(shape) - 2)
        return "c" if tensor is None or tensor == shape[1:2] else "_" * len(tensor) + "=b=c"

    sides = (",".join(map(term, side)) for side in (call.shapes, call.results))
    return "->".join(sides)


STATISTICS = ("mean", "rstd")

rule("aten.native_layer_norm aten._fused_rms_norm", layer_norm)
rule("aten.native_layer_norm_backward", layer_norm_backward, linear="0", contiguous=STATISTICS)
rule("aten._fused_rms_norm_backward", layer_norm_backward, linear="0", contiguous=STATISTICS)
rule("aten.native_batch_norm aten._native_batch_norm_legit", batch_norm)
rule("aten._native_batch_norm_legit_functional", batch_norm)
rule("aten._native_batch_norm_legit_no_training", partial(batch_norm, training=False))
rule("aten._batch_norm_with_update_functional aten.cudnn_batch_norm", batch_norm)
rule("aten.native_batch_norm_backward", batch_norm, linear="0")

GROUPS = {"N": "b", "C": "g", "group": "g"}
rule(
    "aten.native_group_norm",
    "b(g !c)!...,(g c),(g c)->b(g c)...,bg,bg",
    scales=GROUPS,
    contiguous=("input",),
)
rule(
    "aten.native_group_norm_backward",
    "b(g !c)!...,b(g c)...,bg,bg,(g c)->b(g c)...,(g c),(g c)",
    linear="0",
    scales=GROUPS,
    contiguous=("grad_out", "input", *STATISTICS),
)
