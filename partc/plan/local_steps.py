"""The table ``[local_steps]`` of a plan: how often islands that train apart meet, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from partc.plan.entries import Entries, is_block, is_number, is_whole, of_steps

LOCAL_STEPS = "local_steps"  # the word of ``allow``, and the name of the table
MEAN, NESTEROV = "mean", "nesterov"
OUTER = (MEAN, NESTEROV)
WORDS = ("outer", "outer_momentum")  # in the names of what an outer optimizer keeps of a parameter
SUM = "outer_sum"  # the same of the sum of all ways, which is on its way while islands go on
ALL, RING, PAIRS = "all", "ring", "pairs"
PARTNERS = (ALL, RING, PAIRS)
OUTER_WIRES = ("int8", "fp8")  # schemes that round, with a scale for each block
MARK = "@island"  # behind these names: ``w_outer@island``; no tensor of a model has it


@dataclass(frozen=True)
class LocalSteps:
    """How islands meet: the plan's table ``[local_steps]``.

    Every ``period`` steps the parameters of all islands become their mean (local SGD, Stich 2019).
    With ``outer = "nesterov"`` the way from where they last met to that mean counts as a gradient,
    with which an outer optimizer goes on from there: SGD with Nesterov momentum (DiLoCo, Douillard
    et al. 2023). ``start_step``: in so many first steps islands share their gradients instead
    (post-local SGD, Lin et al. 2020). ``fragments``: so many parts of the model meet in turn, each
    every ``period`` steps (streaming DiLoCo, Douillard et al. 2025). ``wire``: the numbers in which
    the outer gradients are sent, a scheme of ``wires.py`` with blocks of ``block`` elements; "" for
    their own. ``partners``: with whom an island makes a mean (gossip, D-PSGD, Lian et al. 2017):
    ``"all"``; in a ``"ring"`` with the islands beside it, by Metropolis weights (Xiao and Boyd
    2004), which are equal there; in ``"pairs"`` with one, drawn anew for each meeting. ``overlap``:
    for so many steps islands go on while the outer gradient of a part is summed; what they keep of
    these steps in its parameters is the share ``mix`` (streaming DiLoCo).
    """

    period: int
    outer: str = MEAN
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    start_step: int = 0
    wire: str = ""
    block: int = 256
    partners: str = ALL
    overlap: int = 0
    mix: float = 0.0

    @property
    def keeps(self) -> tuple[str, ...]:
        """What islands keep of each parameter from one meeting to the next, by word."""
        under_way = (SUM,) if self.overlap else ()
        return (*WORDS, *under_way) if self.outer == NESTEROV else ()

    def lines(self) -> dict[str, str]:
        """The entries of the table as TOML, by name: those that say something."""
        every = {each.name: getattr(self, each.name) for each in fields(self)}
        said = {"period", "outer"} | ({"outer_lr", "outer_momentum"} if self.keeps else set())
        usual = ("fragments", "start_step", "partners", "overlap", "mix")
        said |= {name for name in usual if every[name] != _USUAL[name]}
        said |= {"wire", "block"} if self.wire else set()
        return {
            name: f'"{given}"' if isinstance(given, str) else repr(given)
            for name, given in every.items() if name in said
        }  # fmt: skip


def kept(name: str, word: str) -> str:
    """The name of the buffer for what islands keep of a parameter."""
    return f"{name}_{word}{MARK}"


def begins_as(name: str) -> str:
    """The parameter from which islands go on at first, of a buffer with where they last met; of
    others "".
    """
    end = kept("", WORDS[0])
    return name.removesuffix(end) if name.endswith(end) else ""


_OF_NESTEROV = {  # entries, and why a mean does not read them
    "outer_lr": "it takes no step of its own",
    "outer_momentum": "it takes no step of its own",
    "wire": "parameters are not rounded, but the way from where islands last met is",
    "overlap": "it is of the parameters as they are, and not of how far they have come",
}
_USUAL = {each.name: each.default for each in fields(LocalSteps)}


def is_outer(name: str) -> bool:
    """Whether a buffer of a program is what islands keep of a parameter, none of the model's."""
    return name.endswith(MARK)


def read_local_steps(table: Mapping[str, Any], where: str) -> LocalSteps:
    """The table of a plan.toml as LocalSteps; PlanError for an unknown or wrong entry."""
    made: LocalSteps = _ENTRIES.read(table, where)
    for what, why, do in _clashes(made, table):
        raise _ENTRIES.wrong(where, what, why, do)
    return made


def _clashes(how: LocalSteps, table: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Entries that mean nothing beside others: what, why, and what to do."""
    for name, why in _OF_NESTEROV.items():
        if not how.keeps and name in table:
            yield (
                f'outer = "mean" reads no {name}', why,
                f'Leave {name} out, or write outer = "nesterov".',
            )  # fmt: skip
    if how.keeps and how.partners != ALL:
        yield (
            f"outer = {how.outer!r} and partners = {how.partners!r}",
            "an outer optimizer goes on from one place, which all islands have to know",
            'Leave partners out, or write outer = "mean".',
        )  # fmt: skip
    if "block" in table and not how.wire:
        yield (
            "without a wire nothing reads block", "numbers of their own size have no blocks",
            "Leave it out, or write a wire.",
        )  # fmt: skip
    if how.period % how.fragments:
        yield (
            f"{how.period} steps are not divided evenly among {how.fragments} fragments",
            "fragments meet in turn, equally many steps apart",
            "Write a period that is a multiple of fragments.",
        )  # fmt: skip
    yield from _overlap_clashes(how)


def _overlap_clashes(how: LocalSteps) -> Iterator[tuple[str, str, str]]:
    """The same of islands that go on while they meet."""
    apart = how.period // how.fragments
    if how.overlap >= apart:
        yield (
            f"overlap = {how.overlap}, and parts of the model meet every {apart} steps",
            "one part is under way at a time",
            "Write a smaller overlap, a longer period, or fewer fragments.",
        )  # fmt: skip
    if how.overlap and how.wire:
        yield (
            f"overlap = {how.overlap} and wire = {how.wire!r}",
            "a rounded sum is two transfers, of which the second waits for the first",
            "Leave one of both out.",
        )  # fmt: skip
    if how.mix and not how.overlap:
        yield (
            "without an overlap nothing reads mix", "islands take no steps while they meet",
            "Leave it out, or write an overlap.",
        )  # fmt: skip


def _is_period(given: Any) -> str:
    fits = is_whole(given) and 1 <= given < 1e9
    return (
        "" if fits else "it says how many steps, from 1, islands take from one meeting to the next"
    )


def _is_outer(given: Any) -> str:
    return "" if given in OUTER else f"it is one of {', '.join(map(repr, OUTER))}"


def _is_lr(given: Any) -> str:
    return "" if is_number(given) and 0 < given < 1e6 else "it is a learning rate, above 0"


def _is_overlap(given: Any) -> str:
    return "" if is_whole(given) and 0 <= given < 1e9 else "it is a number of steps, from 0"


def _is_mix(given: Any) -> str:
    return "" if is_number(given) and 0 <= given < 1 else "it is a share, from 0 to below 1"


def _is_momentum(given: Any) -> str:
    return "" if is_number(given) and 0 <= given < 1 else "it is from 0 to below 1"


def _is_number_of_fragments(given: Any) -> str:
    return "" if is_whole(given) and 1 <= given <= 10_000 else "it is a number of parts, from 1"


def _is_wire(given: Any) -> str:
    return "" if given in OUTER_WIRES else f"it is one of {', '.join(map(repr, OUTER_WIRES))}"


def _is_partners(given: Any) -> str:
    return "" if given in PARTNERS else f"it is one of {', '.join(map(repr, PARTNERS))}"


_ENTRIES = Entries(
    LOCAL_STEPS, LocalSteps,
    {
        "period": _is_period, "outer": _is_outer, "outer_lr": _is_lr,
        "outer_momentum": _is_momentum, "fragments": _is_number_of_fragments,
        "start_step": of_steps, "wire": _is_wire, "block": is_block, "partners": _is_partners,
        "overlap": _is_overlap, "mix": _is_mix,
    },
    "period = 16", "it does not say how often islands meet",
    {"outer": OUTER, "wire": OUTER_WIRES, "partners": PARTNERS},
    dict.fromkeys(
        ("every", "sync_every", "h", "local_steps", "inner_steps", "steps", "interval"),
        "Write period = 16, after how many steps islands meet.",
    ) | {"outer_optimizer": 'Write outer = "nesterov".'},
)  # fmt: skip
