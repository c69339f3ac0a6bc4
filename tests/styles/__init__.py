"""Small models in the styles of people who have never seen partc, each with a batch and a loss.

``STYLES["mixture by sort"]()`` builds one. ``python -m tests.styles [NAME ...]`` compiles them
under several plans and prints what becomes of each: right, refused by name, or a raw error.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

from partc.errors import CheckError, PartcError

BATCH = 8


class Style(NamedTuple):
    """A model, the example inputs of its global batch, and the loss."""

    model: nn.Module
    inputs: Any
    loss: Callable[..., Any] | None


class Ill(Exception):
    """A model whose gradients are so small that rounding decides them: it proves nothing."""


STYLES: dict[str, Callable[[], Style]] = {}


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {  # mesh, and what else compile is told
    "ddp": ("dp=2", {"plan": "ddp"}),
    "ddp, microbatches": ("dp=2", {"plan": "ddp", "microbatches": 2}),
    "zero1, microbatches": ("dp=2", {"plan": "zero1", "microbatches": 2}),
    "fsdp": ("dp=2", {"plan": "fsdp"}),
    "megatron": ("tp=2", {"plan": "megatron"}),
    "pipeline": ("pp=2", {"plan": "ddp", "microbatches": 2}),
    "auto": ("dp=2,tp=2", {"plan": "auto"}),
}


def outcome(run: Callable[[], object]) -> tuple[str, str]:
    """What becomes of a program that ``run`` compiles and compares: "right", "refused" by name,
    "ill" (rounding alone decides its gradients), "WRONG" or "RAW", and the message.
    """
    try:
        run()
    except CheckError as error:
        return "WRONG", str(error)
    except PartcError as error:
        return "refused", str(error)
    except Ill as error:
        return "ill", str(error)
    except Exception as error:
        return "RAW", f"{type(error).__name__}: {error}"
    return "right", ""


def style(made: Callable[[], Style]) -> Callable[[], Style]:
    """Add a style under its function's name, with blanks in place of underscores."""
    name = made.__name__.replace("_", " ")
    assert name not in STYLES, f"two styles are called {name!r}"
    STYLES[name] = made
    return made


for _module in (
    "mixtures", "graphs", "sequences", "losses", "odd_calls",
    "attention", "networks", "aims", "images", "patches", "adapters",
):  # fmt: skip
    import_module(f"{__name__}.{_module}")
