"""Rules of ops that only rearrange or repeat elements: reshapes, permutations, expansions."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from partc.rules.call import Call, Shape
from partc.rules.notation import dims
from partc.rules.table import rule, whole_only

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJLMNOPQRSTUVWXYZ"


def reshape(call: Call) -> str:
    """Both shapes as products of common factors: ``[2,6,4] -> [12,4]`` is ``a b c -> (a b) c``."""
    return regroup(call.shape(0), call.results[0] or ())


def regroup(old: Shape, new: Shape) -> str:
    """The notation of a reshape from one shape to another: ``[12,4] -> [2,6,4]``.

    A border is the product of the sizes before a dim. Two neighbouring borders, of either shape,
    enclose a common factor if they divide all other borders or are divided by them. Where borders
    do not divide each other (``[4,6] -> [6,4]`` has 4 and 6), no shard of the one shape is a shard
    of the other.
    """
    borders = sorted({*_borders(old), *_borders(new)} - {0})
    clean = {b for b in borders if all(max(a, b) % min(a, b) == 0 for a in borders)}
    factors = {
        start: letter
        for (start, end), letter in zip(pairwise(borders), LETTERS, strict=False)
        if start in clean and end in clean
    }
    return f"{_grouped(old, factors)}->{_grouped(new, factors)}"


def _borders(shape: Shape) -> list[int]:
    """The products of the sizes before each dim, and of all sizes: ``[2,6,4] -> 1, 2, 12, 48``."""
    return [prod(shape[:i]) for i in range(len(shape) + 1)]


def _grouped(shape: Shape, factors: dict[int, str]) -> str:
    """The term of a shape: every dim as the common factors inside; ``_`` for a dim without."""
    terms = []
    for start, end in pairwise(_borders(shape)):
        inside = [letter for border, letter in factors.items() if start <= border < end]
        shared = start in factors and bool(inside)
        terms.append(f"({' '.join(inside)})" if shared else "_")
    return " ".join(terms)


def permute(call: Call) -> str:
    """``abc -> cab``."""
    letters = dims(call.rank())
    order = [d % call.rank() for d in call["dims"]]
    return f"{''.join(letters)}->{''.join(letters[d] for d in order)}"


def transpose(call: Call) -> str:
    """``abc -> acb``."""
    letters = dims(call.rank())
    order = list(letters)
    if letters:
        i, j = call.dim("dim0"), call.dim("dim1")
        order[i], order[j] = order[j], order[i]
    return f"{''.join(letters)}->{''.join(order)}"


def expand(call: Call) -> str:
    """``b -> a b``: a dim that is new or was of size 1 has a letter only on the right."""
    result = call.results[0] or ()
    letters = dims(len(result))
    old = letters[len(letters) - call.rank() :]
    return f"{''.join(old)}->{''.join(letters)}"


def repeat(call: Call) -> str:
    """``b -> !a (2 b)``: the copies of a dim stand behind each other."""
    result = call.results[0] or ()
    new = len(result) - call.rank()
    times = call["repeats"]
    letters = dims(len(result), frozen={i for i in range(len(result)) if i < new})
    right = [f"({times[i]} {x})" if times[i] > 1 else x for i, x in enumerate(letters)]
    return f"{''.join(letters[new:])}->{' '.join(letters[:new] + right[new:])}"


def repeat_interleave(call: Call) -> str:
    """``a b -> a (b 2)``: the copies of an entry stand side by side."""
    dim, letters = call["dim"], dims(call.rank())
    if dim is None:
        return f"{' '.join('_' for _ in letters)}->_"
    right = list(letters)
    right[dim % call.rank()] = f"({right[dim % call.rank()]} {call['repeats']})"
    return f"{' '.join(letters)}->{' '.join(right)}"


def mirror(call: Call) -> str:
    """``ab -> ba``."""
    letters = dims(call.rank())
    return f"{''.join(letters)}->{''.join(reversed(letters))}"


RESHAPES = (
    "view.default reshape _unsafe_view _reshape_alias _reshape_copy view_copy.default "
    "flatten unflatten unsqueeze squeeze unsqueeze_copy squeeze_copy"
)

for op in RESHAPES.split():
    rule(f"aten.{op}", reshape, linear="0", moves=True, reshapes=True)
rule("aten.permute aten.permute_copy", permute, linear="0", moves=True)
rule("aten.transpose.int aten.transpose_copy", transpose, linear="0", moves=True)
rule("aten.t aten.t_copy", mirror, linear="0", moves=True)
rule("aten.expand aten.expand_copy", expand, linear="0", moves=True, sizes="size")
rule("aten.repeat", repeat, linear="0", moves=True)
rule("aten.repeat_interleave.self_int", repeat_interleave, linear="0", moves=True)
rule("aten.view_as_real aten.view_as_real_copy", "...->..._", linear="0")
rule("aten.view_as_complex aten.view_as_complex_copy", "..._->...", linear="0", adjacent=("self",))
rule("aten.view.dtype aten.as_strided aten.as_strided_copy aten.as_strided_scatter", whole_only)
