"""Rules of ops that pick or place elements by index, such as ``x[i]``, gather and scatter.

A dim that indices point into is not sharded, since an index may point to another rank's piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partc.graph.ops import masked_gather
from partc.rules.call import Call
from partc.rules.families.slicing import term
from partc.rules.notation import dims
from partc.rules.table import Windowed, rule, whole_only

BROADCAST = "ABCDEFGH"  # letters of the dims that index tensors share


def _index_terms(call: Call, num: int) -> tuple[list[str], list[str], list[str]]:
    """The letters of ``x[i, :, j]`` with ``num`` index slots: of x, of each index, of the result.

    As in numpy, the dims of adjacent indices take the place of the indexed dims; the dims of
    indices with a gap between them come first.
    """
    letters = dims(call.rank())
    shapes = call.shapes[1 : 1 + num]
    used = [i for i, shape in enumerate(shapes) if shape is not None]
    rank = max((len(shapes[i] or ()) for i in used), default=0)
    shared = list(BROADCAST[:rank])
    indices = ["".join(shared[rank - len(s) :]) if s is not None else "" for s in shapes]
    rest = [x for i, x in enumerate(letters) if i not in used]
    adjacent = used == list(range(used[0], used[-1] + 1)) if used else True
    at = used[0] if used and adjacent else 0
    operand = ["_" if i in used else x for i, x in enumerate(letters)]
    return operand, indices, [*rest[:at], *shared, *rest[at:]]


def _is_masked(call: Call) -> bool:
    """Whether a mask is among the indices: how much it picks depends on data."""
    return torch.bool in call.dtypes[1:] or torch.uint8 in call.dtypes[1:]


def pick(call: Call) -> str:
    """``x[i, :, j]``."""
    if _is_masked(call):
        return whole_only(call)
    operand, indices, result = _index_terms(call, len(call.slots) - 1)
    return f"{','.join([''.join(operand), *indices])}->{''.join(result)}"


def place(call: Call) -> str:
    """``x[i, :, j] = values`` or, if indices may be cut, ``+= values``.

    Ranks with some of the indices each add their part, so ``+=`` gives an unfinished sum. A plain
    assignment has no such sum, so its indices are not sharded.
    """
    if _is_masked(call):
        return whole_only(call)
    operand, indices, values = _index_terms(call, len(call.slots) - 2)
    mark = "" if call["accumulate"] else "!"
    indices = ["".join(mark + x for x in text) for text in indices]
    target = "".join(operand)
    return f"{','.join([target, *indices, ''.join(values)])}->{target}"


def place_is_linear(call: Call) -> str:
    """The linear slots of ``index_put``: the tensor and the values jointly.

    The values alone may not be an unfinished sum, since the tensor under them would then be counted
    once per rank.
    """
    return f"0+{len(call.slots) - 1}"


def index_select(call: Call) -> str:
    """``a _ c, I -> a I c``."""
    dim, letters = call.dim(), dims(call.rank())
    return f"{term(letters, dim, '_')},I->{term(letters, dim, 'I')}"


def index_add(call: Call) -> str:
    """``a _ c, I, a I c -> a _ c``."""
    dim, letters = call.dim(), dims(call.rank())
    whole = term(letters, dim, "_")
    return f"{whole},I,{term(letters, dim, 'I')}->{whole}"


def index_copy(call: Call) -> str:
    """As ``index_add``, but later places overwrite earlier ones.

    So the indices are not sharded: the last one to write a place may be on any rank.
    """
    return index_add(call).replace("I", "!I")


def _aligned(call: Call, slots: Sequence[int]) -> list[str]:
    """Letters for the dims in which all these tensors have equal sizes; ``_`` for other dims."""
    shapes = [call.shape(i) for i in slots]
    return [
        letter if len({shape[i] for shape in shapes}) == 1 else "_"
        for i, letter in enumerate(dims(len(shapes[0])))
    ]


def gather(call: Call) -> str:
    """``a V, a I@V -> a I``: along ``dim`` the elements may lie on other ranks.

    If ``V`` is sharded, a rank gives zeros for elements of other ranks: an unfinished sum.
    """
    if not call.rank() or not call.rank(1):
        return whole_only(call)
    dim, letters = call.dim(), _aligned(call, (0, 1))
    picked = term(letters, dim, "I")
    return f"{term(letters, dim, 'V')},{picked} @V->{picked}"


def scatter(call: Call, letter: str = "_") -> str:
    """``a _, a _, a _ -> a _``; ``src`` may be absent.

    ``letter`` is the letter of the scattered elements along ``dim`` (``_``: not sharded).
    """
    if not call.rank() or not call.rank(1):
        return whole_only(call)
    filled = [i for i, shape in enumerate(call.shapes) if shape is not None]
    dim, letters = call.dim(), _aligned(call, filled)
    placed = [term(letters, dim, letter)] * (len(call.slots) - 1)
    target = term(letters, dim, "_")
    return f"{','.join([target, *placed])}->{target}"


def scatter_add(call: Call) -> str:
    """``a _, a I, a I -> a _``, if source and index have the same ``I``."""
    dim = call.dim() if call.rank() else 0
    agrees = bool(call.rank(1)) and call.shape(1)[dim] == call.shape(2)[dim]
    return scatter(call, "I" if agrees else "_")


def scatter_is_linear(call: Call) -> str:
    """Linear only for the constant 0: another one would be written by every rank, and summed."""
    return "0" if call["value"] == 0 else ""


def histogram(call: Call) -> str:
    """Counts add up; without given bounds they depend on all data."""
    mark = "!" if call["min"] == call["max"] else ""
    return f"{mark}...->_"


rule("aten.index.Tensor aten._unsafe_index.Tensor", pick, linear="0", moves=True)
rule("aten.index_put aten._unsafe_index_put", place, linear=place_is_linear, added=0)
rule("aten.index_select", index_select, linear="0", moves=True)
rule("aten.index_add", index_add, linear="0+2", added=0)
rule("aten.index_copy", index_copy, linear="0+2")
rule("aten.gather", gather, linear="0", moves=True, windowed=Windowed(masked_gather))
rule("partc.ops.masked_gather", gather, linear="0", windowed=Windowed())
rule("aten.take", "!...,...->...", linear="0", moves=True)
rule("aten.scatter.src", scatter, linear="0+2", moves=True)
rule("aten.scatter.value", scatter, linear=scatter_is_linear)
rule("aten.scatter_add", scatter_add, linear="0+2", added=0)
rule("aten.scatter_reduce.two aten.scatter.reduce aten.scatter.value_reduce", scatter)
rule("aten.searchsorted.Tensor aten.masked_scatter aten.bincount aten.nonzero", whole_only)
rule("aten.histc", histogram)
rule("aten.one_hot", "...->..._")
rule("partc.ops.inverse_order", whole_only)
