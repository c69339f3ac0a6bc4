"""Models that the mistakes of the command line name."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.mistakes.things import Net, batch_of, loss_of

SIZE = 4  # what no model is


def right() -> Any:
    return Net(), batch_of(), loss_of


def other() -> Any:
    return Net(5), batch_of(8, 5), loss_of


def nothing() -> None:
    return None


def alone() -> Net:
    return Net()


def unlike() -> Any:
    return nn.Sequential(nn.Linear(4, 4)), batch_of(), loss_of
