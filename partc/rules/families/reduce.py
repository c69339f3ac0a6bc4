"""Rules of ops along some dims: reductions, softmax, scans, sorting.

A sum or a maximum may be sharded along a reduced dim and is then unfinished; a softmax may not.
"""

from __future__ import annotations

from collections.abc import Collection

from partc.rules.call import Call
from partc.rules.notation import dims
from partc.rules.table import Written, rule


def reduction(call: Call, frozen: bool = False) -> str:
    """``abc -> a_c`` or ``abc -> ac``: the reduced dims have no letter on the right."""
    reduced = call.dim_list("dim") if "dim" in call.arguments else list(range(call.rank()))
    left = dims(call.rank(), reduced if frozen else ())
    keep = bool(call.arguments.get("keepdim"))
    right = ["_" if i in reduced else x for i, x in enumerate(left) if keep or i not in reduced]
    return f"{''.join(left)}->{','.join([''.join(right)] * len(call.results))}"


def frozen_reduction(call: Call) -> str:
    """As ``reduction``, the reduced dims whole: what they give on pieces does not add up.

    For example a variance or an argmax of the whole is no sum of those of the pieces.
    """
    return reduction(call, frozen=True)


def along(call: Call, reduced: Collection[int]) -> str:
    """The notation of an op whose tensors all have the same dims; ``reduced`` are not sharded."""
    text = "".join("_" if i in reduced else x for i, x in enumerate(dims(call.rank())))
    ins = ",".join(text if shape else "" for shape in call.shapes)
    return f"{ins}->{','.join([text] * len(call.results))}"


def along_dim(call: Call) -> str:
    """Elementwise but for the dim that the argument ``dim`` names."""
    return along(call, {call.dim("dim")} if call.rank() else ())


def along_dims(call: Call) -> str:
    """Elementwise but for the dims that ``dims`` names (all of them if it names none)."""
    return along(call, call.dim_list("dims"))


def fourier(call: Call) -> str:
    """Elementwise but for the dims that are transformed."""
    return along(call, call.dim_list("dim"))


def along_last(num: int) -> Written:
    """The notation of ops that are elementwise but for the last ``num`` dims, which stay whole."""
    return lambda call: along(call, range(call.rank() - num, call.rank()))


rule("aten.sum aten.nansum", reduction, linear="0")
rule("aten._fft_r2c aten._fft_c2c aten._fft_c2r", fourier, linear="0")
rule("aten.mean", reduction, linear="0", reduce="mean")
rule("aten.amax", reduction, reduce="max")
rule("aten.max.default", reduction, reduce="max")
rule(
    "aten.max.dim aten.min aten.amin aten.aminmax aten.kthvalue aten.median.dim aten.mode",
    frozen_reduction,
)
rule("aten.argmax aten.argmin aten.any aten.all aten.prod", frozen_reduction)
rule("aten.var aten.std aten.var_mean aten.std_mean", frozen_reduction)
rule("aten.logsumexp aten.norm aten.linalg_vector_norm aten.count_nonzero", frozen_reduction)

rule("aten._softmax aten._safe_softmax aten._log_softmax", along_dim)
rule("aten._softmax_backward_data aten._log_softmax_backward_data", along_dim, linear="0")
rule("aten.cumsum", along_dim, linear="0")
rule("aten.logcumsumexp aten.cumprod aten.cummax aten.cummin", along_dim)
rule("aten.sort aten.argsort aten.topk", along_dim)
rule("aten.flip aten.roll", along_dims, linear="0", moves=True)
rule("aten.tril aten.triu", along_last(2), linear="0")
