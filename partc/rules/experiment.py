"""The experiment behind proofs and discovery: shard operands, run the pieces, join, compare.

The measure is the relative error of the joined results against the whole call's results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

import torch
from torch import Tensor

from partc.plan.sharding import DTYPE_NAMES, Layout, R, join_pieces
from partc.rules.draw import DOMAINS, draw
from partc.rules.signature import Signature

TOLERANCE = {  # relative to the largest value; double wherever the op allows it
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}
# Added to the seed for random parts of a sum: parts drawn with the operand's own seed would equal
# the operand, and leave zeros as the last part.
PARTS = 1000
DRAWS = 2000  # the same for what the whole call draws
Results = list[Tensor | None]
LocalRun = Callable[[int, Sequence[Tensor]], Results]  # rank, its pieces -> its results


class Refused(Exception):
    """The experiment is impossible; the message says why."""


def piece_sizes(size: int, num: int, uneven: bool) -> list[int]:
    """The sizes of ``num`` pieces of ``size`` entries: ``12, 3 -> 4 4 4``; uneven, ``5 4 3``.

    Refused if ``num`` does not divide ``size``, or if the pieces are too small to be uneven.
    """
    base, rest = divmod(size, num)
    if not uneven:
        if rest or not base:
            raise Refused(f"{num} does not divide {size}")
        return [base] * num
    if base < 2:
        raise Refused(f"{size} is too small for {num} unequal pieces")
    return [base + 1 + rest, *[base] * (num - 2), base - 1]


def cut_shares(
    tensors: Sequence[Tensor | None], layouts: Sequence[Layout], num: int, uneven: bool
) -> list[int]:
    """Each rank's share of all sharded dims, in units of the greatest common divisor of sizes."""
    sizes = [
        whole.shape[layout.dim] // layout.outer
        for whole, layout in zip(tensors, layouts, strict=True)
        if whole is not None and layout.kind == "cut" and layout.dim < whole.dim()
    ]
    return piece_sizes(gcd(*sizes), num, uneven) if sizes else [1] * num


def cut_whole(whole: Tensor, layout: Layout, shares: Sequence[int]) -> list[Tensor]:
    """The pieces of a tensor by a shard layout, with sizes in the proportions of ``shares``."""
    if layout.dim >= whole.dim() or whole.shape[layout.dim] % (layout.outer * sum(shares)):
        raise Refused(f"{layout} does not fit {list(whole.shape)}")
    parts = whole.unflatten(layout.dim, (layout.outer, -1))
    scale = parts.shape[layout.dim + 1] // sum(shares)
    pieces = parts.split([share * scale for share in shares], layout.dim + 1)
    joined = [piece.flatten(layout.dim, layout.dim + 1) for piece in pieces]
    if len(set(shares)) == 1:
        return joined
    # The strides of an even piece are those that a rank's real piece has; `LocalCall` was written
    # for them. No rank has uneven pieces, so their strides mean nothing.
    return [piece.contiguous() for piece in joined]


def take_apart(
    operands: Sequence[Tensor], layouts: Sequence[Layout], shares: Sequence[int], seed: int
) -> list[list[Tensor]]:
    """Per operand, the tensor of every rank: a piece, a copy, or a random part of a sum or max."""
    generator = torch.Generator().manual_seed(seed + PARTS)
    pairs = zip(operands, layouts, strict=True)
    return [_take_one_apart(whole, layout, shares, generator) for whole, layout in pairs]


def _take_one_apart(
    whole: Tensor, layout: Layout, shares: Sequence[int], generator: torch.Generator
) -> list[Tensor]:
    num = len(shares)
    if layout.kind == "cut":
        return cut_whole(whole, layout, shares)
    if layout.kind == "R":
        return [whole] * num
    if layout.kind == "U":
        if whole.dtype == torch.bool:
            raise Refused("truth values are not summed")
        parts = [_noise(whole, generator) for _ in range(num - 1)]
        return [*parts, whole - torch.stack(parts).sum(0)]
    owner = torch.randint(0, num, whole.shape, generator=generator)
    below = [_noise(whole, generator).abs() for _ in range(num)]
    return [torch.where(owner == rank, whole, whole - below[rank]) for rank in range(num)]


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)
    return torch.randint(0, 4, like.shape, generator=generator).to(like.dtype)


def whole_run(signature: Signature, seed: int) -> tuple[list[Tensor], Results]:
    """Random operands and the whole call's results on them.

    The operands come from the first of ``DOMAINS`` in which the results are finite numbers. Refused
    if there is none.
    """
    refusal = "none of its results is a finite number"
    for domain in DOMAINS:
        generator = torch.Generator().manual_seed(seed)
        operands = draw(signature, domain, generator)
        try:
            results = signature.run(operands)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            refusal = f"the whole call fails: {first_line(error)}"
            continue
        if all(_finite(result) for result in results):
            return operands, results
    raise Refused(refusal)


def _finite(result: Tensor | None) -> bool:
    """Whether a result can be compared: no NaN, and not only infinities.

    Some infinities are right: masks, and the maximum of an empty set.
    """
    if result is None or not result.numel() or not result.dtype.is_floating_point:
        return True
    return not result.isnan().any() and bool(result.isfinite().any())


def is_random(signature: Signature, operands: Sequence[Tensor], results: Results) -> bool:
    """Whether the call gives other results on the same operands: it draws random numbers."""
    again = signature.run(operands)
    return any(joined_error([b], R, a) != 0 for a, b in zip(results, again, strict=True))


def moments_error(pieces: Sequence[Tensor | None], layout: Layout, whole: Tensor | None) -> float:
    """The gap of the first two moments of joined and whole random results, in six standard errors.

    Infinite if shapes differ, if ranks drew equal numbers for pieces of a sharded result, or if
    ranks drew different numbers for a replicated result.
    """
    if whole is None or any(piece is None for piece in pieces):
        return joined_error(pieces, layout, whole)
    present = [piece for piece in pieces if piece is not None]
    alike = all(relative_error(piece, present[0]) == 0 for piece in present[1:])
    if alike != (layout.kind == "R"):
        return float("inf")
    joined = join_pieces(present, layout, layout.outer)
    if joined.shape != whole.shape or joined.dtype != whole.dtype:
        return float("inf")
    return max(_moment_gap(joined.double() ** power, whole.double() ** power) for power in (1, 2))


def _moment_gap(a: Tensor, b: Tensor) -> float:
    spread = ((a.var() + b.var()) / a.numel()).sqrt()
    gap = (a.mean() - b.mean()).abs()
    return float(gap / (6 * spread)) if spread else float(gap > 0) * float("inf")


def shape_error(pieces: Sequence[Tensor | None], layout: Layout, whole: Tensor | None) -> float:
    """0 if the joined pieces have the whole's shape and dtype, else infinite."""
    if whole is None or any(piece is None for piece in pieces):
        return joined_error(pieces, layout, whole)
    zeros = [torch.zeros_like(piece) for piece in pieces if piece is not None]
    return joined_error(zeros, layout, torch.zeros_like(whole))


def local_results(
    run: LocalRun, operands: Sequence[Sequence[Tensor]], num: int, seed: int | None = None
) -> list[Results]:
    """Run the call on every rank's pieces; ``operands`` has a list of ``num`` pieces per operand.

    With a seed, every rank draws the same random numbers, as ranks do for a replicated value.
    Refused if the call fails on some rank's pieces.
    """
    results = []
    for rank in range(num):
        try:
            if seed is not None:
                torch.default_generator.manual_seed(seed)
            results.append(run(rank, [pieces[rank] for pieces in operands]))
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            raise Refused(f"the call on pieces fails: {first_line(error)}") from None
    return results


def joined_error(pieces: Sequence[Tensor | None], layout: Layout, whole: Tensor | None) -> float:
    """The largest error of the pieces joined by a layout, relative to the whole's largest value."""
    if whole is None or any(piece is None for piece in pieces):
        return 0.0 if whole is None and all(piece is None for piece in pieces) else float("inf")
    present = [piece for piece in pieces if piece is not None]
    if layout.kind == "R":
        return max(relative_error(piece, whole) for piece in present)
    try:
        return relative_error(join_pieces(present, layout, layout.outer), whole)
    except (RuntimeError, IndexError):
        return float("inf")


def relative_error(got: Tensor, want: Tensor) -> float:
    """The largest error of a tensor, relative to the largest value wanted.

    Infinite if shape, dtype, an integer value or the place of an infinity differs.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if not want.numel():
        return 0.0
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        return 0.0 if torch.equal(got, want) else float("inf")
    finite = want.isfinite()
    if not torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()):
        return float("inf")
    got, want = got[finite], want[finite]
    if not want.numel():
        return 0.0
    error, scale = float((got - want).abs().max()), float(want.abs().max())
    # NaN is returned as it is: it is not equal to itself, and no tolerance accepts it.
    return error if error != error or not scale else error / scale


def unlike(
    results: Sequence[Results], outs: Sequence[Layout], wanted: Sequence[Tensor | None]
) -> str:
    """Which result of the pieces has another shape or dtype than the whole's, in words; "" if none
    has.
    """
    for at, (whole, layout) in enumerate(zip(wanted, outs, strict=True)):
        pieces = [local[at] for local in results if at < len(local)]
        if whole is None or len(pieces) != len(results) or any(each is None for each in pieces):
            continue
        known = [each for each in pieces if each is not None]
        try:
            got = _told(join_pieces(known, layout, layout.outer))
        except (RuntimeError, IndexError) as error:
            got = f"none ({first_line(error)})"
        if got != _told(whole):
            which = f"result {at}" if len(wanted) > 1 else "the result"
            of = f"the ranks' {_told(known[0])}"
            return f"{which} is {_told(whole)}, and {layout} makes {got} of {of}"
    return ""


def _told(tensor: Tensor) -> str:
    dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
    return f"{dtype}[{','.join(map(str, tensor.shape))}]"


def tolerance(results: Sequence[Tensor | None]) -> float:
    """The allowed relative error: that of the coarsest floating dtype among the results."""
    floating = [r.dtype for r in results if r is not None and r.dtype in TOLERANCE]
    return max((TOLERANCE[dtype] for dtype in floating), default=0.0)


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
