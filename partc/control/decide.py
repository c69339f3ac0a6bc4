"""Choose the variant of the next step: a pure function of numbers that all ranks have.

In: what each variant is predicted to take now, and how things stand. Out: how they stand next. The
same numbers give the same choice on every rank, and again when a log is replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

KEPT = 0.5  # of what a variant was off before, beside what it is off now


@dataclass(frozen=True)
class Rules:
    """What a controller is told.

    ``order``: the variants, the one that is preferred first. ``gain``: of two variants of which one
    is faster by a smaller part, the preferred one runs. ``steps``: in so many steps one behind the
    other the same variant has to be the better one. ``stay``: so many steps lie between two
    switches. ``seconds``: a step need not be faster than this; 0 for as fast as it can be.
    """

    order: tuple[str, ...]
    gain: float = 0.1
    steps: int = 3
    stay: int = 20
    seconds: float = 0.0


@dataclass(frozen=True)
class Standing:
    """How things stand behind a step.

    ``wish``: the variant that has been the better one for ``count`` steps. ``stayed``: steps since
    the last switch. ``off``: by variant, what its steps took, divided by what was predicted.
    """

    variant: str
    wish: str = ""
    count: int = 0
    stayed: int = 0
    off: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "variant": self.variant, "wish": self.wish, "count": self.count,
            "stayed": self.stayed, "off": dict(self.off),
        }  # fmt: skip

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Standing:
        """The same from the data of ``as_json``; KeyError, ValueError and alike if malformed."""
        off = {str(name): float(each) for name, each in data["off"].items()}
        words = str(data["variant"]), str(data["wish"])
        return cls(*words, int(data["count"]), int(data["stayed"]), off)


def expected(standing: Standing, predicted: Mapping[str, float]) -> dict[str, float]:
    """Seconds by variant, corrected by what each was off; what never ran by what this one is."""
    here = standing.off.get(standing.variant, 1.0)
    return {name: s * standing.off.get(name, here) for name, s in predicted.items()}


def after(
    rules: Rules, standing: Standing, step_s: float, predicted: Mapping[str, float]
) -> Standing:
    """How things stand behind a step that took ``step_s``; ``wish`` then is the better variant, and
    ``is_due`` says whether it runs next.
    """
    now, off = standing.variant, dict(standing.off)
    seen = step_s / predicted[now]
    off[now] = KEPT * off[now] + (1 - KEPT) * seen if now in off else seen
    standing = replace(standing, off=off, stayed=standing.stayed + 1)
    wish = _better(rules, now, expected(standing, predicted))
    count = standing.count + 1 if wish == standing.wish else 1
    return replace(standing, wish=wish, count=count)


def is_due(rules: Rules, standing: Standing) -> bool:
    """Whether another variant runs next."""
    differs = standing.wish not in ("", standing.variant)
    return differs and standing.count >= rules.steps and standing.stayed >= rules.stay


def switched(standing: Standing) -> Standing:
    """How things stand where the variant that was wished runs."""
    return Standing(standing.wish, off=standing.off)


def _better(rules: Rules, now: str, seconds: Mapping[str, float]) -> str:
    """The most preferred variant that is about as fast as the fastest, or as the budget asks.

    The one that runs may be slower by ``gain``, another one by half of that, so that two that are
    about as fast do not take turns.
    """
    limit = max(min(seconds.values()), rules.seconds)
    for name in rules.order:
        margin = rules.gain if name == now else rules.gain / 2
        if seconds[name] <= limit * (1 + margin):
            return name
    return min(seconds, key=seconds.__getitem__)
