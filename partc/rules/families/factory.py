"""Rules of ops that make tensors: a rank makes its own piece, unless values depend on the place.

``zeros`` may be sharded; ``arange`` may not, since its values depend on their places.
"""

from __future__ import annotations

from partc.rules.call import Call
from partc.rules.notation import dims
from partc.rules.table import rule, whole_only


def filled(call: Call) -> str:
    """``-> abc``: every dim may be cut."""
    return "->" + "".join(dims(len(call.results[0] or ())))


def filled_like(call: Call) -> str:
    """``___ -> ab``: the operand lends its dtype and device only."""
    return "_" * call.rank() + filled(call)


def picked(call: Call) -> str:
    """One result of an op with several: it lies as the op left it.

    A getitem node has the layout of the result that it picks.
    """
    letters = "".join(dims(len(call.results[0] or ())))
    return f"{letters}->{letters}"


rule("aten.zeros aten.ones aten.full aten.empty.memory_format", filled, sizes="size")
rule("aten.rand aten.randn aten.randint aten.normal.float_float", filled, sizes="size")
rule(
    "aten.new_zeros aten.new_ones aten.new_full aten.new_empty", filled_like, unread=0, sizes="size"
)
rule("aten.scalar_tensor aten.arange aten.linspace aten.eye aten.randperm", whole_only)
rule("aten.tril_indices aten.triu_indices aten.empty_strided aten.logspace", whole_only)
rule("aten.new_empty_strided aten.hann_window aten.hamming_window", whole_only, unread=0)
rule("operator.getitem", picked, linear="0", moves=True)
