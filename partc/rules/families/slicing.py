"""Rules of ops that take parts of a dim or join parts: slice, select, split, cat, pad.

A dim whose parts are multiples of a unit N is written ``(3 N)``. Sharding ``N`` shards every part
in the same way, such as the three parts of a fused q, k, v weight: ``split: a (3 N) -> a (1 N),
a (2 N)``.
"""

from __future__ import annotations

from math import gcd

from partc.rules.call import Call
from partc.rules.notation import dims
from partc.rules.table import rule

SCALED = {
    "start": "N",
    "end": "NP",
}  # a slice's bounds scale with the unit N of its parts, or with the length P of a stepped slice


def term(letters: list[str], dim: int, factor: str) -> str:
    """The term of a tensor with these letters, with another factor in one dim."""
    return " ".join([*letters[:dim], factor, *letters[dim + 1 :]])


def parts(size: int, unit: int) -> str:
    """A dim of ``size`` entries as units of ``N``: ``12, 4 -> (3 N)``; ``_`` for unit 1."""
    return "_" if unit <= 1 else f"({size // unit} N)"


def part(call: Call, whole: int, taken: int) -> tuple[str, str]:
    """The factors of a slice's dim in the operand and in the result.

    ``whole`` and ``taken`` are the dim's sizes in both; they are ``_`` if no shard is possible.
    """
    step = int(call["step"])
    if taken == whole:
        return "N", "N"
    if step > 1:
        fits = whole == step * taken and int(call["start"] or 0) < step
        return (f"(P {step})", "P") if fits else ("_", "_")
    unit = gcd(first(call, whole, taken), taken, whole)
    return parts(whole, unit), parts(taken, unit)


def first(call: Call, whole: int, taken: int) -> int:
    """The place in the whole where a slice begins; the call's bounds may be a local call's."""
    start, end = int(call["start"] or 0), call["end"]
    if start == 0:
        return 0
    if start < 0 or end is None or end >= whole:
        return whole - taken if end is None or end >= whole else start % whole
    return start * taken // (end - start) if end > start else start


def cut_out(call: Call) -> str:
    """``x[:, start:end]``: ``a (3 N) -> a (1 N)``."""
    dim, letters = call.dim(), dims(call.rank())
    before, after = part(call, call.shape(0)[dim], (call.results[0] or ())[dim])
    return f"{term(letters, dim, before)}->{term(letters, dim, after)}"


def put_back(call: Call) -> str:
    """The backward of a slice, zeros around the gradient: ``a (1 N) -> a (3 N)``."""
    dim, letters = call.dim(), dims(call.rank())
    before, after = part(call, (call.results[0] or ())[dim], call.shape(0)[dim])
    return f"{term(letters, dim, after)}->{term(letters, dim, before)}"


def overwrite(call: Call) -> str:
    """``x[:, start:end] = y``."""
    dim, letters = call.dim(), dims(call.rank())
    before, after = part(call, call.shape(0)[dim], call.shape(1)[dim])
    whole = term(letters, dim, before)
    return f"{whole},{term(letters, dim, after)}->{whole}"


def select(call: Call) -> str:
    """``a _ c -> a c``."""
    dim, letters = call.dim(), dims(call.rank())
    return f"{term(letters, dim, '_')}->{term(letters, dim, '')}"


def unselect(call: Call) -> str:
    """The backward of select: ``a c -> a _ c``."""
    rank = call.rank() + 1
    letters, dim = dims(rank), call["dim"] % rank
    return f"{term(letters, dim, '')}->{term(letters, dim, '_')}"


def overwrite_one(call: Call) -> str:
    """``x[:, index] = y``."""
    dim, letters = call.dim(), dims(call.rank())
    whole = term(letters, dim, "_")
    return f"{whole},{term(letters, dim, '')}->{whole}"


def split(call: Call) -> str:
    """``a (3 N) -> a (1 N), a (2 N)``: the unit is what all sizes are multiples of."""
    dim, letters = call.dim(), dims(call.rank())
    pairs = zip(call.results, _asked_for(call), strict=True)
    sizes = [size if shape is None else shape[dim] for shape, size in pairs]
    unit = gcd(*sizes)
    results = ",".join(term(letters, dim, parts(size, unit)) for size in sizes)
    return f"{term(letters, dim, parts(sum(sizes), unit))}->{results}"


def _asked_for(call: Call) -> list[int]:
    """The sizes of all parts by the call's arguments, also of parts that no node reads."""
    if "split_sizes" in call.arguments:
        return list(call["split_sizes"])
    whole = call.shape(0)[call.dim()]
    chunks = call.arguments.get("chunks")
    size = -(-whole // chunks) if chunks else call["split_size"]
    return [min(size, whole - start) for start in range(0, whole, size)]


def cat(call: Call) -> str:
    """``a (1 N), a (2 N) -> a (3 N)``; an empty list of old days has one dim and no letters.

    torch.cat accepts an operand of shape [0] beside operands of any number of dims and ignores it;
    older code starts its lists with such a tensor.
    """
    result = call.results[0] or ()
    letters, dim = dims(len(result)), call["dim"] % len(result)
    joined = [shape or () for shape in call.shapes]
    fits = [len(shape) == len(result) for shape in joined]
    unit = gcd(*(shape[dim] for shape, fit in zip(joined, fits, strict=True) if fit))
    ins = (
        term(letters, dim, parts(shape[dim], unit)) if fit else "_"
        for shape, fit in zip(joined, fits, strict=True)
    )
    return f"{','.join(ins)}->{term(letters, dim, parts(result[dim], unit))}"


def stack(call: Call) -> str:
    """``ab, ab -> a_b``."""
    rank = call.rank() + 1
    letters, dim = dims(rank), call["dim"] % rank
    ins = ",".join([term(letters, dim, "")] * len(call.slots))
    return f"{ins}->{term(letters, dim, '_')}"


def unbind(call: Call) -> str:
    """``a_b -> ab, ab``."""
    dim, letters = call.dim(), dims(call.rank())
    return f"{term(letters, dim, '_')}->{','.join([term(letters, dim, '')] * len(call.results))}"


def pad(call: Call) -> str:
    """Dims that are padded stay whole; ``pad`` counts from the last dim, two numbers each."""
    amounts = list(call["pad" if "pad" in call.arguments else "padding"])
    padded = {call.rank() - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    text = "".join("_" if i in padded else x for i, x in enumerate(dims(call.rank())))
    return f"{','.join([text] * len(call.slots))}->{text}"


def pad_is_linear(call: Call) -> str:
    """Linear only for padding with 0: another value would be padded by every rank, and summed."""
    return "0" if call["value"] == 0 else ""


def unfold(call: Call) -> str:
    """Windows along a dim: ``a _ c -> a _ c _``."""
    dim = call.dim("dimension")
    text = term(dims(call.rank()), dim, "_")
    return f"{text}->{text} _"


def fold_back(call: Call) -> str:
    """The backward of unfold: ``a _ c _ -> a _ c``."""
    rank = call.rank() - 1
    text = term(dims(rank), call["dim"] % rank, "_")
    return f"{text} _->{text}"


def diagonal(call: Call) -> str:
    """``_ b _ -> b _``: the two dims leave, their diagonal comes last."""
    letters = dims(call.rank())
    gone = {call.dim("dim1"), call.dim("dim2")}
    rest = [x for i, x in enumerate(letters) if i not in gone]
    return f"{''.join('_' if i in gone else x for i, x in enumerate(letters))}->{''.join(rest)}_"


def undiagonal(call: Call) -> str:
    """The backward of diagonal: ``b _ -> _ b _``."""
    rank = call.rank() + 1
    letters, gone = dims(rank), {call["dim1"] % rank, call["dim2"] % rank}
    rest = "".join(x for i, x in enumerate(letters) if i not in gone)
    return f"{rest}_->{''.join('_' if i in gone else x for i, x in enumerate(letters))}"


def glu(call: Call) -> str:
    """One half gates the other: ``(2 N) -> N``."""
    dim, letters = call.dim(), dims(call.rank())
    return f"{term(letters, dim, '(2 N)')}->{term(letters, dim, 'N')}"


def glu_backward(call: Call) -> str:
    """``N, (2 N) -> (2 N)``."""
    dim, letters = call.dim(), dims(call.rank())
    both = term(letters, dim, "(2 N)")
    return f"{term(letters, dim, 'N')},{both}->{both}"


rule("aten.glu", glu)
rule("aten.glu_backward", glu_backward, linear="0")
rule("aten.slice aten.slice_copy", cut_out, linear="0", moves=True, scales=SCALED)
rule("aten.slice_backward", put_back, linear="0", sizes="input_sizes", scales=SCALED)
rule("aten.slice_scatter", overwrite, linear="0+1", moves=True, scales=SCALED)
rule("aten.select.int aten.select_copy", select, linear="0", moves=True)
rule("aten.select_backward", unselect, linear="0", sizes="input_sizes")
rule("aten.select_scatter", overwrite_one, linear="0+1", moves=True)
rule(
    "aten.split.Tensor aten.unsafe_split", split, linear="0", moves=True, scales={"split_size": "N"}
)
rule(
    "aten.split_with_sizes aten.unsafe_split_with_sizes aten.split_with_sizes_copy",
    split,
    linear="0",
    moves=True,
    scales={"split_sizes": "N"},
)
rule("aten.split_copy", split, linear="0", moves=True, scales={"split_size": "N"})
rule("aten.chunk aten.unsafe_chunk", split, linear="0", moves=True)
rule("aten.cat", cat, linear="all", moves=True)
rule("aten.stack", stack, linear="all", moves=True)
rule("aten.unbind", unbind, linear="0", moves=True)
rule("aten.constant_pad_nd", pad, linear=pad_is_linear)
for num_dims in (1, 2, 3):
    for op in (f"reflection_pad{num_dims}d", f"replication_pad{num_dims}d"):
        rule(f"aten.{op} aten.{op}_backward", pad, linear="0")
rule("aten.unfold aten.unfold_copy", unfold, linear="0", moves=True)
rule("aten.unfold_backward", fold_back, linear="0", sizes="input_sizes")
rule("aten.diagonal aten.diagonal_copy", diagonal, linear="0", moves=True)
rule("aten.diagonal_backward", undiagonal, linear="0", sizes="input_sizes")
