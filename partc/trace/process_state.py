"""What a step can change in the process itself: the environment, variables of threads and contexts.

A program runs no Python of the model, so that a count kept there would stand still.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from partc.trace.states import FIXED


def process_states() -> dict[str, str]:
    """The environment, and the numbers and texts in context variables, by name."""
    found = {f"os.environ[{name!r}]": text for name, text in os.environ.items()}
    for variable, value in contextvars.copy_context().items():
        if isinstance(value, FIXED):
            found[f"the context variable {variable.name}"] = repr(value)
    return found


@contextmanager
def process_restored() -> Iterator[None]:
    """Restore the environment and the context variables afterwards."""
    environment, variables = dict(os.environ), dict(contextvars.copy_context().items())
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in environment]:
            del os.environ[name]
        os.environ.update({n: text for n, text in environment.items() if os.environ.get(n) != text})
        _put_back(variables)


def _put_back(variables: dict[contextvars.ContextVar[Any], Any]) -> None:
    for variable, value in variables.items():
        if variable.get() is not value:
            variable.set(value)
