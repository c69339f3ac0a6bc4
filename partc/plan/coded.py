"""Tables of a plan for what is sent in fewer bytes and rounded but once: ``[compress_weights]``.

In: such a table. Out: a ``Coded``; for a code the bytes it takes. A number of a code has one byte,
and each block of numbers a scale beside it, or it has 16 bits and none. Unlike a sum of gradients
(``wires.py``) nothing of it is kept: what all ranks compute with is what was sent, so that an error
is one of a step, and not of the next one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from partc.plan.entries import Entries, is_block
from partc.plan.wires import BYTES_OF_SCALE, WIRES

COMPRESS_WEIGHTS = "compress_weights"  # the name of the table


@dataclass(frozen=True)
class Code:
    """A format: the class that is printed for weights that are gathered in it.

    ``has_blocks``: whether blocks have scales; a number then has one byte, else two.
    """

    weights: str
    has_blocks: bool = True

    def num_bytes(self, sizes: Sequence[int], block: int) -> int:
        """What tensors of so many elements take, each in blocks of its own."""
        if not self.has_blocks:
            return 2 * sum(sizes)
        return sum(size + BYTES_OF_SCALE * -(-size // block) for size in sizes)


CODES: Mapping[str, Code] = {
    "bf16": Code("BFloat16Weights", has_blocks=False),
    "fp8": Code("Float8Weights"),
    "int8": Code("Int8Weights"),
}
CODED_WEIGHTS = frozenset(code.weights for code in CODES.values())
BASE = "CodedWeights"  # that those are made from


def coding_of(code: str) -> int:
    """How often numbers are read or written to encode them, and again to decode them: what a sum
    in the same numbers takes that encodes and decodes each of them once.
    """
    return WIRES[code].coding * 2 // 3


@dataclass(frozen=True)
class Coded:
    """How something is sent: in which code, and how many elements share a scale.

    ``exact``: patterns of weights that are not, as each rank computes with the shard that it
    stores, such as columns of an embedding; the compiler fills it in.
    """

    wire: str
    block: int = 256
    exact: tuple[str, ...] = ()

    @property
    def code(self) -> Code:
        return CODES[self.wire]

    def lines(self) -> dict[str, str]:
        """The entries of the table as TOML, by name."""
        block = {"block": str(self.block)} if self.code.has_blocks else {}
        exact = {"exact": json.dumps([*self.exact], ensure_ascii=False)} if self.exact else {}
        return {"wire": f'"{self.wire}"', **block, **exact}

    def sends(self, name: str) -> bool:
        """Whether a weight that is stored in shards is gathered in the code."""
        return pattern_of(name) not in self.exact


def pattern_of(name: str) -> str:
    """A name with ``*`` in place of the numbers of blocks."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _read(name: str, table: Mapping[str, Any], where: str) -> Coded:
    entries = Entries(
        name, Coded, {"wire": _is_code, "block": is_block, "exact": _are_names}, 'wire = "int8"',
        "it does not say in which numbers", {"wire": CODES},
    )  # fmt: skip
    made: Coded = entries.read(table, where)
    made = replace(made, exact=tuple(made.exact))
    if not made.code.has_blocks and "block" in table:
        why, do = "its numbers have no scales", "Leave block out."
        raise entries.wrong(where, f"{made.wire} reads no block", why, do)
    return made


def _is_code(given: Any) -> str:
    known = isinstance(given, str) and given in CODES
    return "" if known else f"wire is one of {', '.join(map(repr, CODES))}"


def _are_names(given: Any) -> str:
    listed = isinstance(given, list | tuple) and all(isinstance(each, str) for each in given)
    return "" if listed else "it is a list of names"


read_compress_weights = partial(_read, COMPRESS_WEIGHTS)
