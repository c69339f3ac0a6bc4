"""Small models in the styles of people who have never seen partc, each with a batch and a loss.

``STYLES["mixture by sort"]()`` builds one. ``python -m tests.styles [NAME ...]`` compiles them
under several plans and prints what becomes of each: right, refused by name, or a raw error.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

BATCH = 8


class Style(NamedTuple):
    """A model, the example inputs of its global batch, and the loss."""

    model: nn.Module
    inputs: Any
    loss: Callable[..., Any] | None


STYLES: dict[str, Callable[[], Style]] = {}


def style(made: Callable[[], Style]) -> Callable[[], Style]:
    """Add a style under its function's name, with blanks in place of underscores."""
    STYLES[made.__name__.replace("_", " ")] = made
    return made


for _module in ("mixtures", "graphs", "sequences", "losses", "odd_calls"):
    import_module(f"{__name__}.{_module}")
