"""In which numbers gradients may be summed over ranks: the formats, what they send, their limits.

In: the table ``[compress]`` of a plan. Out: a ``Compress``, which passes, costs and printed text
read. Start: ``WIRES``. Never: a graph, since a plan is read without one.

A sum in a narrow format takes two transfers. Each rank has ``n`` elements, seen as one piece for
each of the ``num`` ranks, each padded to whole blocks. Piece ``i`` of all ranks goes to rank ``i``,
which decodes and adds them in float32; its sum is encoded once more and goes to all ranks. All
ranks decode what was sent, the one that made it too, so that all have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from partc.errors import PlanError

COMPRESS = "compress"  # the word of ``allow``, and the name of the table
BYTES_OF_SCALE = 4  # float32, one for each block
LEAST_MB, BLOCK = 0.01, 256  # of a plan that does not say more
SMALLEST_BLOCK, LARGEST_BLOCK = 8, 65_536  # a block's scale stands at a multiple of 8 bytes


@dataclass(frozen=True)
class Wire:
    """A format: the class that is printed for its sums, the bytes of so many elements in blocks of
    a size, and whether it has blocks, whose elements share a scale.
    """

    helper: str
    bytes_of: Callable[[int, int], int]
    blocks: bool


def _of_two_bytes(num: int, block: int) -> int:
    return 2 * num


def _of_a_byte(num: int, block: int) -> int:
    return num + BYTES_OF_SCALE * (num // block)


WIRES: Mapping[str, Wire] = {
    "bf16": Wire("BFloat16Sum", _of_two_bytes, blocks=False),
    "fp16": Wire("Float16Sum", _of_two_bytes, blocks=False),
    "fp8": Wire("Float8Sum", _of_a_byte, blocks=True),
    "int8": Wire("Int8Sum", _of_a_byte, blocks=True),
}
HELPERS = frozenset(wire.helper for wire in WIRES.values())
BASES = ("NarrowSum", "BlockSum")  # printed classes that those of the formats are made from
MARK = "@"  # in the name of a residual, "layers.0.w_residual@dp"; no tensor of a model has it


@dataclass(frozen=True)
class Compress:
    """How gradients are summed over data ranks: the plan's table ``[compress]``.

    ``wire``: the format. ``least_mb``: transfers with fewer megabytes of gradients stay exact.
    ``block``: how many elements share a scale. ``error_feedback``: whether ranks keep what rounding
    has lost, and add it to what they send in the next step.
    """

    wire: str
    least_mb: float = LEAST_MB
    block: int = BLOCK
    error_feedback: bool = True

    def padded(self, size: int, num: int) -> int:
        """The number of elements that ``size`` become: ``num`` equal pieces of whole blocks."""
        unit = num * (self.block if WIRES[self.wire].blocks else 1)
        return -(-size // unit) * unit

    def lines(self) -> dict[str, str]:
        """The entries of the table as TOML, by name."""
        return {
            "wire": f'"{self.wire}"', "least_mb": repr(self.least_mb), "block": str(self.block),
            "error_feedback": str(self.error_feedback).lower(),
        }  # fmt: skip


def wire_bytes(wire: str, size: int, num: int, block: int) -> int:
    """The bytes of ``size`` elements on the wire, for ``num`` ranks; each of both transfers sends
    ``(num - 1) / num`` of them.
    """
    padded = Compress(wire, block=block).padded(size, num)
    return WIRES[wire].bytes_of(padded, block)


def read_compress(table: Mapping[str, Any], where: str) -> Compress:
    """The table of a plan.toml as a Compress; PlanError for an unknown or wrong entry."""
    known = {"wire": _is_wire, "least_mb": _is_size, "block": _is_block, "error_feedback": _is_flag}
    for name, given in table.items():
        if name not in known:
            raise _wrong(where, f"there is no entry {name!r}", f"entries are {', '.join(known)}")
        if why := known[name](given):
            raise _wrong(where, f"{name} = {given!r} means nothing", why)
    if "wire" not in table:
        raise _wrong(where, "it does not say in which numbers", _is_wire(None))
    return Compress(**table)


def _is_wire(given: Any) -> str:
    known = isinstance(given, str) and given in WIRES
    return "" if known else f"wire is one of {', '.join(map(repr, WIRES))}"


def _is_size(given: Any) -> str:
    number = isinstance(given, int | float) and not isinstance(given, bool)
    return "" if number and 0 <= given < 1e6 else "it is a number of megabytes"


def _is_block(given: Any) -> str:
    number = isinstance(given, int) and not isinstance(given, bool)
    fits = number and SMALLEST_BLOCK <= given <= LARGEST_BLOCK and given % SMALLEST_BLOCK == 0
    return "" if fits else f"it is a multiple of 8, from {SMALLEST_BLOCK} to {LARGEST_BLOCK:,}"


def _is_flag(given: Any) -> str:
    return "" if isinstance(given, bool) else "it is true or false"


def _wrong(where: str, what: str, why: str) -> PlanError:
    do = 'Write [compress], and below it wire = "int8"; docs/reference/plan.md has all entries.'
    return PlanError(where=f"{where}, compress", what=what, why=why, do=do)


def is_residual(name: str) -> bool:
    """Whether a buffer of a program is what rounding has left over, and none of the model's."""
    return MARK in name
