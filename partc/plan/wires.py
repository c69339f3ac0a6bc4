"""How gradients may be summed over ranks with fewer bytes: the schemes, what they send and keep.

In: the shapes of gradients that leave together. Out: ``WIRES``, the table of schemes, which plans
(``compress.py``), passes, costs, checks and printed text read. Never: a graph.

A *rounded* sum takes two transfers. Each rank has ``n`` elements, seen as one piece for each of the
``num`` ranks, each padded to whole blocks. Piece ``i`` of all ranks goes to rank ``i``, which
decodes and adds them in float32; its sum is encoded once more and goes to all ranks. All ranks
decode what was sent, the one that made it too, so that all have the same bits.

Where gradients are scattered, so that rank ``i`` keeps the sum of piece ``i``, a rounded sum takes
the first of these transfers alone. A piece then has the pieces of all gradients side by side.

A *picked* sum takes one: of a few elements of each rank, which all ranks add in the same order. One
by threshold takes another before, as ranks have to know how many elements the others send.

Random numbers of a sum follow from seed, step, the name of its first parameter, and, where ranks
draw their own, the place among those that sum: never from the place on another axis.

A *low-rank* sum takes two all-reduces of thin matrices (PowerSGD, Vogels et al. 2019).

A *vote* (signSGD with majority vote, Bernstein et al. 2019) takes the two transfers of a rounded
sum, of one bit for each element: its sign on a rank, and then the sign that most ranks have. What
arrives is a direction, +1 or -1 for each element, and no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

BLOCK, SHARE, RANK = "block", "share", "rank"  # entries of [compress], of which a scheme has one
THRESHOLD = "threshold"  # a further entry, and the scheme that has it
BYTES_OF_SCALE = 4  # float32, one for each block
BYTES_OF_NUMBER = BYTES_OF_PLACE = BYTES_OF_COUNT = 4  # float32, and int32
BITS_OF_BYTE = 8
MARK = "@"  # in the name of a residual, "layers.0.w_residual@dp"; no tensor of a model has it
OWN, PIECE, ALIKE = "a row of each rank", "a piece on each rank", "the same on all ranks"
RESIDUAL, OF_SUM, COLUMNS = "residual", "residual_of_sum", "last_columns"  # words in names

Shapes = Sequence[Sequence[int]]  # of the gradients that one sum has
Sent = tuple[tuple[str, int], ...]  # the transfers of a sum: their kinds, the bytes a rank puts in


@dataclass(frozen=True)
class Kept:
    """A buffer for what a sum has not sent, or needs again: the shape of the buffers of all ranks
    that sum, together, and which of its parts is whose: a row, or all of it.
    """

    shape: tuple[int, int]
    whose: str = OWN

    def over(self, num: int) -> tuple[int, int]:
        """The shape where gradients are cut in ``num`` pieces, each of which is summed apart."""
        rows, columns = self.shape
        return (rows * num, columns) if self.whose == ALIKE else (rows, columns * num)


@dataclass(frozen=True)
class Wire:
    """A scheme: the class that is printed for its sums, and what these send and keep.

    ``sent`` and ``kept`` follow from the gradients' shapes, the number of ranks, and a size: that
    of a block, how many elements are sent, or how many columns thin matrices have. ``coding`` says
    how often gradients are read or written before the first transfer, and again behind the last,
    to encode, decode and keep what is not sent: as measured on an H200, of 64 million numbers,
    beside the time of a copy, which reads and writes them once.
    """

    helper: str
    entry: str  # of [compress], which decides on the size; "" for a scheme without one
    sent: Callable[[Shapes, int, int], Sent]
    kept: Callable[[Shapes, int, int], dict[str, Kept]]
    coding: int
    needs_rest: bool = False  # whether it means nothing without error feedback
    casts: bool = False  # whether it does nothing where all floats are of one dtype
    drawn: str = ""  # random numbers: ALIKE on all ranks that sum, or each rank's OWN
    takes_grads: bool = False  # whether the class is given the gradients, and not their number
    has_threshold: bool = False  # whether the class is given one; then the size is an expected one
    is_direction: bool = False  # whether +1 or -1 arrives: of no such sum is anything left over
    scatter: str = ""  # the class that is printed for sums of which ranks keep pieces; "": none
    scattered: Callable[[Shapes, int, int], Sent] | None = None  # what these send


def elements(shapes: Shapes) -> int:
    """How many numbers gradients of these shapes have."""
    return sum(map(prod, shapes))


# rounded sums -------------------------------------------------------------------------------------
def padded(shapes: Shapes, num: int, block: int) -> int:
    """The number of elements of a rounded sum: ``num`` equal pieces of whole blocks."""
    unit = num * block
    return -(-elements(shapes) // unit) * unit


def _rounded(helper: str, bits: int, coding: int, *, blocks: bool = True, **more: Any) -> Wire:
    def coded(size: int, block: int) -> int:
        return size * bits // 8 + (BYTES_OF_SCALE * (size // block) if blocks else 0)

    def sent(shapes: Shapes, num: int, block: int) -> Sent:
        whole = coded(padded(shapes, num, block), block)
        return ("all_to_all", whole), ("all_gather", whole // num)

    def scattered(shapes: Shapes, num: int, block: int) -> Sent:
        return (("all_to_all", coded(padded(shapes, num, block), block)),)

    def kept(shapes: Shapes, num: int, block: int) -> dict[str, Kept]:
        size = padded(shapes, num, block)
        return {RESIDUAL: Kept((num, size)), OF_SUM: Kept((num, size // num), PIECE)}

    entry = BLOCK if blocks else ""
    return Wire(
        helper, entry, sent, kept, coding, casts=not blocks, scattered=scattered, **more
    )  # fmt: skip


# picked sums --------------------------------------------------------------------------------------
def _sent_top(shapes: Shapes, num: int, k: int) -> Sent:
    return (("all_gather", (BYTES_OF_NUMBER + BYTES_OF_PLACE) * k),)


def _sent_by_threshold(shapes: Shapes, num: int, k: int) -> Sent:
    return ("all_gather", BYTES_OF_COUNT), *_sent_top(shapes, num, k)


def bytes_of_counts(counts: Sequence[int]) -> int:
    """The bytes that a rank sends for a sum by threshold in which ranks send so many numbers."""
    return (len(counts) - 1) * sum(size for _, size in _sent_by_threshold([], 0, max(counts)))


def _sent_at_random(shapes: Shapes, num: int, k: int) -> Sent:
    return (("all_reduce", BYTES_OF_NUMBER * k),)


def _kept_whole(shapes: Shapes, num: int, size: int) -> dict[str, Kept]:
    return {RESIDUAL: Kept((num, elements(shapes)))}


# low-rank sums ------------------------------------------------------------------------------------
def thick(shapes: Shapes, rank: int) -> list[tuple[int, int]]:
    """The gradients that are sent as products, as matrices: those of which that is not half."""
    matrices = [(shape[0], prod(shape[1:])) for shape in shapes if len(shape) > 1]
    return [(a, b) for a, b in matrices if 2 * rank * (a + b) < a * b]


def _sent_low_rank(shapes: Shapes, num: int, rank: int) -> Sent:
    matrices = thick(shapes, rank)
    others = elements(shapes) - elements(matrices)
    first, second = (rank * sum(m[i] for m in matrices) for i in (0, 1))
    of_number = BYTES_OF_NUMBER
    return ("all_reduce", of_number * (first + others)), ("all_reduce", of_number * second)


def _kept_low_rank(shapes: Shapes, num: int, rank: int) -> dict[str, Kept]:
    columns = (sum(b for _, b in thick(shapes, rank)), rank)
    return {**_kept_whole(shapes, num, rank), COLUMNS: Kept(columns, ALIKE)}


# votes --------------------------------------------------------------------------------------------
def _sent_votes(shapes: Shapes, num: int, size: int) -> Sent:
    bits = padded(shapes, num, BITS_OF_BYTE) // num
    piece = bits // BITS_OF_BYTE + 1  # the last byte says whether all numbers are finite
    return ("all_to_all", num * piece), ("all_gather", piece)


def _kept_nothing(shapes: Shapes, num: int, size: int) -> dict[str, Kept]:
    return {}


WIRES: Mapping[str, Wire] = {
    "bf16": _rounded("BFloat16Sum", 16, 15, blocks=False, scatter="BFloat16Scatter"),
    "fp16": _rounded("Float16Sum", 16, 15, blocks=False, scatter="Float16Scatter"),
    "fp8": _rounded("Float8Sum", 8, 28, scatter="Float8Scatter"),
    "int8": _rounded("Int8Sum", 8, 25, scatter="Int8Scatter"),
    "int8-stochastic": _rounded(
        "RandomInt8Sum", 8, 27, drawn=OWN, scatter="RandomInt8Scatter"
    ),
    "sign": _rounded("SignSum", 1, 43),
    "top-k": Wire("TopSum", SHARE, _sent_top, _kept_whole, 43),
    # no GPU has measured it: what its calls read and write, beside what those of top-k do
    THRESHOLD: Wire(
        "ThresholdSum", SHARE, _sent_by_threshold, _kept_whole, 12, has_threshold=True
    ),
    "random-k": Wire("RandomSum", SHARE, _sent_at_random, _kept_whole, 56, drawn=ALIKE),
    "power-sgd": Wire(
        "LowRankSum", RANK, _sent_low_rank, _kept_low_rank, 16, needs_rest=True, takes_grads=True
    ),
    # no GPU has measured it: what its calls read and write, beside what those of bf16 do
    "majority-sign": Wire("MajoritySum", "", _sent_votes, _kept_nothing, 10, is_direction=True),
}  # fmt: skip
SCATTERS = frozenset(wire.scatter for wire in WIRES.values() if wire.scatter)
HELPERS = frozenset(wire.helper for wire in WIRES.values()) | SCATTERS
BASES = ("NarrowSum", "RoundedSum", "BlockSum", "ScatteredSum")  # that those are made from


def is_residual(name: str) -> bool:
    """Whether a buffer of a program is what its sums have not sent, and none of the model's."""
    return MARK in name


def whose(name: str) -> str:
    """Which part of such a buffer is whose, by its name."""
    word = name.partition(MARK)[0]
    return PIECE if word.endswith(OF_SUM) else ALIKE if word.endswith(COLUMNS) else OWN
