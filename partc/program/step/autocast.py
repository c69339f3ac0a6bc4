"""``torch.autocast`` around a call of a stage: another program, whose casts are those of the call.

A program's text has its casts written out, so it runs without autocast. The program for a call in
autocast is compiled with the loss, or the model's forward, inside of the same autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from partc.plan.sharding import dtype_name

DEVICES = "cuda", "cpu"


def autocast_now(*devices: str) -> str:
    """The autocast that is open for one of these kinds of devices: ``cpu bfloat16``; or empty."""
    for device in devices:
        if torch.is_autocast_enabled(device):
            return f"{device} {dtype_name(torch.get_autocast_dtype(device))}"
    return ""


def without(autocast: str) -> AbstractContextManager[Any]:
    """The same autocast, switched off."""
    return torch.autocast(autocast.split()[0], enabled=False) if autocast else nullcontext()


def run_without(autocast: str, run: Callable[[], Any]) -> Callable[[], Any]:
    """A function that runs another with this autocast switched off."""

    def plain() -> Any:
        with without(autocast):
            return run()

    return plain if autocast else run


def within(call: Callable[..., Any], autocast: str) -> Callable[..., Any]:
    """A function that calls another in this autocast."""
    if not autocast:
        return call
    device, name = autocast.split()
    dtype = getattr(torch, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            return call(*args, **kwargs)

    return function


def check_autocast(text: str) -> None:
    """ValueError unless a text is as ``autocast_now`` gives it."""
    device, _, name = text.partition(" ")
    if text and (
        device not in DEVICES or name not in ("bfloat16", "float16", "float32", "float64")
    ):
        raise ValueError(f"{text!r} is no autocast")
