"""The table ``[local_steps]`` of a plan: how often islands that train apart meet, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from partc.plan.entries import Entries, is_block, is_number, is_whole, of_steps

LOCAL_STEPS = "local_steps"  # the word of ``allow``, and the name of the table
MEAN, NESTEROV = "mean", "nesterov"
OUTER = (MEAN, NESTEROV)
WORDS = ("outer", "outer_momentum")  # in the names of what an outer optimizer keeps of a parameter
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
    2004), which are equal there; in ``"pairs"`` with one, drawn anew for each meeting.
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

    @property
    def keeps(self) -> tuple[str, ...]:
        """What islands keep of each parameter from one meeting to the next, by word."""
        return WORDS if self.outer == NESTEROV else ()

    def lines(self) -> dict[str, str]:
        """The entries of the table as TOML, by name: those that say something."""
        every = {each.name: getattr(self, each.name) for each in fields(self)}
        said = {"period", "outer"} | ({"outer_lr", "outer_momentum"} if self.keeps else set())
        usual = ("fragments", "start_step", "partners")
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


_USUAL = {each.name: each.default for each in fields(LocalSteps)}


def is_outer(name: str) -> bool:
    """Whether a buffer of a program is what islands keep of a parameter, none of the model's."""
    return name.endswith(MARK)


def read_local_steps(table: Mapping[str, Any], where: str) -> LocalSteps:
    """The table of a plan.toml as LocalSteps; PlanError for an unknown or wrong entry."""
    made: LocalSteps = _ENTRIES.read(table, where)
    for name in ("outer_lr", "outer_momentum", "wire"):
        if not made.keeps and name in table:
            why = "it takes no step of its own"
            if name == "wire":
                why = "parameters are not rounded, but the way from where islands last met is"
            do = f'Leave {name} out, or write outer = "nesterov".'
            raise _ENTRIES.wrong(where, f'outer = "mean" reads no {name}', why, do)
    if made.keeps and made.partners != ALL:
        raise _ENTRIES.wrong(
            where, f"outer = {made.outer!r} and partners = {made.partners!r}",
            "an outer optimizer goes on from one place, which all islands have to know",
            'Leave partners out, or write outer = "mean".',
        )  # fmt: skip
    if "block" in table and not made.wire:
        why, do = "numbers of their own size have no blocks", "Leave it out, or write a wire."
        raise _ENTRIES.wrong(where, "without a wire nothing reads block", why, do)
    if made.period % made.fragments:
        raise _ENTRIES.wrong(
            where, f"{made.period} steps are not divided evenly among {made.fragments} fragments",
            "fragments meet in turn, equally many steps apart",
            "Write a period that is a multiple of fragments.",
        )  # fmt: skip
    return made


def _is_period(given: Any) -> str:
    fits = is_whole(given) and 1 <= given < 1e9
    return "" if fits else "it says how many steps islands take from one meeting to the next"


def _is_outer(given: Any) -> str:
    return "" if given in OUTER else f"it is one of {', '.join(map(repr, OUTER))}"


def _is_lr(given: Any) -> str:
    return "" if is_number(given) and 0 < given < 1e6 else "it is a learning rate, above 0"


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
    },
    "period = 16", "it does not say how often islands meet",
    {"outer": OUTER, "wire": OUTER_WIRES, "partners": PARTNERS},
)  # fmt: skip
