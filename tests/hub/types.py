"""The types that transformers knows, and what becomes of one when it is made and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import partc
from partc.cli.models import find_model
from partc.cli.target import Sizes, Target
from partc.errors import PartcError

LAYOUTS = {"ddp": "dp=2", "megatron": "tp=2"}
SIZES = Sizes(batch=4, layers=2)


def all_types() -> list[str]:
    """The model types of transformers, by name."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return sorted(CONFIG_MAPPING.keys())


def made(name: str) -> tuple[str, str, Target | None]:
    """The model of a type with a batch and a loss, or what is said of it."""
    found: list[Target] = []
    torch.manual_seed(0)
    word, text = outcome(lambda: found.append(find_model(f"hf:{name}", SIZES)))
    return word, text, found[0] if found else None


def compiled(name: str, target: Target) -> Iterator[tuple[str, str, str]]:
    """What becomes of a model under each layout; it is traced once."""
    step = partc.Traced(target.model, target.inputs, target.loss)
    for plan, mesh in LAYOUTS.items():
        word, text = outcome(partial(partc.compile, step, mesh, plan=plan))
        yield plan, word, text or target.note


def outcome(run: Callable[[], Any]) -> tuple[str, str]:
    """ "compiled", "refused" by name or "RAW", and the message."""
    try:
        run()
    except PartcError as error:
        return "refused", str(error)
    except Exception as error:
        return "RAW", f"{type(error).__name__}: {error}"
    return "compiled", ""
