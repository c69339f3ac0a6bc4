"""The table ``[compress]`` of a plan: how gradients are summed over data ranks with fewer bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import ceil
from typing import Any

from partc.plan.entries import Entries, is_block, is_number, is_whole, of_flag, of_steps
from partc.plan.wires import BLOCK, RANK, SHARE, THRESHOLD, WIRES

COMPRESS = "compress"  # the word of ``allow``, and the name of the table
MOST_RANK = 4096


@dataclass(frozen=True)
class Compress:
    """How gradients are summed over data ranks: the plan's table ``[compress]``.

    ``wire``: the scheme. ``least_mb``: transfers with fewer megabytes of gradients stay exact.
    ``error_feedback``: whether ranks keep what they have not sent, and add it to what they send in
    the next step; never of directions, which are no sums. ``block``: how many elements share a
    scale. ``share``: of all elements those that are sent; of a sum by ``threshold``, the least
    magnitude that is sent, those that are expected. ``rank``: the number of columns of thin
    matrices. ``start_step``: so many steps are exact first.
    """

    wire: str
    least_mb: float = 0.01
    block: int = 256
    share: float = 0.01
    threshold: float = 0.001
    rank: int = 4
    error_feedback: bool = True
    start_step: int = 0

    @property
    def keeps_rest(self) -> bool:
        """Whether ranks keep what they have not sent."""
        return self.error_feedback and not self.is_direction

    @property
    def is_direction(self) -> bool:
        """Whether gradients arrive as +1 and -1."""
        return WIRES[self.wire].is_direction

    def size(self, num_elements: int) -> int:
        """What a scheme's own entry means for so many elements: of a block, of those sent, ..."""
        entry = WIRES[self.wire].entry
        if entry == SHARE:
            return max(1, ceil(self.share * num_elements))
        return int(getattr(self, entry)) if entry else 1

    def lines(self) -> dict[str, str]:
        """The entries of the table as TOML, by name; of those that few schemes have, its own."""
        every = {
            "wire": f'"{self.wire}"', "least_mb": repr(self.least_mb), "block": str(self.block),
            "share": repr(self.share), "threshold": repr(self.threshold), "rank": str(self.rank),
            "error_feedback": str(self.error_feedback).lower(), "start_step": str(self.start_step),
        }  # fmt: skip
        own = {*entries_of(self.wire)} - ({"start_step"} if not self.start_step else set())
        return {name: text for name, text in every.items() if name in own}


def entries_of(wire: str) -> tuple[str, ...]:
    """The entries that the table has for a scheme, in order."""
    others = {BLOCK, SHARE, RANK, THRESHOLD} - {WIRES[wire].entry}
    others -= {THRESHOLD} if WIRES[wire].has_threshold else set()
    others |= {"error_feedback"} if WIRES[wire].is_direction else set()
    return tuple(each.name for each in fields(Compress) if each.name not in others)


def read_compress(table: Mapping[str, Any], where: str) -> Compress:
    """The table of a plan.toml as a Compress; PlanError for an unknown or wrong entry."""
    made: Compress = _ENTRIES.read(table, where)
    own = entries_of(made.wire)
    for name in _ENTRIES.flaws:
        if name not in own and name in table:
            has = ", ".join(own)
            why, do = f"its entries are {has}", f"Leave {name} out."
            raise _ENTRIES.wrong(where, f"{made.wire} reads no {name}", why, do)
    if WIRES[made.wire].needs_rest and not made.error_feedback:
        why = "what it does not send in one step it has to send in another"
        do = "Write error_feedback = true, or leave the entry out."
        what = f"{made.wire} does not work without error_feedback"
        raise _ENTRIES.wrong(where, what, why, do)
    return made


def _is_wire(given: Any) -> str:
    known = isinstance(given, str) and given in WIRES
    return "" if known else f"wire is one of {', '.join(map(repr, WIRES))}"


def _is_size(given: Any) -> str:
    return "" if is_number(given) and 0 <= given < 1e6 else "it is a number of megabytes, from 0"


def _is_share(given: Any) -> str:
    return "" if is_number(given) and 0 < given <= 1 else "it is a number above 0, and at most 1"


def _is_threshold(given: Any) -> str:
    return "" if is_number(given) and 0 < given < 1e6 else "it is a number above 0"


def _is_rank(given: Any) -> str:
    return "" if is_whole(given) and 1 <= given <= MOST_RANK else f"it is from 1 to {MOST_RANK:,}"


_SHARE = "Write share = 0.01, the part of the numbers that are sent."
_OTHER_WORDS = {
    **dict.fromkeys(
        ("k", "topk", "top_k", "ratio", "compress_ratio", "density", "fraction", "percent"), _SHARE
    ),
    "sparsity": "Write share = 0.01, the part that is sent: 1 - sparsity.",
    **dict.fromkeys(("scheme", "dtype", "type", "method", "kind"), 'Write wire = "int8".'),
    **dict.fromkeys(
        ("matrix_approximation_rank", "r"), "Write rank = 4, that of the products that are sent."
    ),
    "start_powersgd_iter": "Write start_step = 1000, from which step on sums are compressed.",
    "use_error_feedback": "Write error_feedback = true.",
}
_ENTRIES = Entries(
    COMPRESS, Compress,
    {
        "wire": _is_wire, "least_mb": _is_size, "block": is_block, "share": _is_share,
        "threshold": _is_threshold, "rank": _is_rank, "error_feedback": of_flag,
        "start_step": of_steps,
    },
    'wire = "int8"', "it does not say in which numbers", {"wire": WIRES}, _OTHER_WORDS,
)  # fmt: skip
