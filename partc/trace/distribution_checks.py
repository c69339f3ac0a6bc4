"""Keep ``torch.distributions`` from looking at the values of arguments while a step runs on fakes.

By default a distribution asks of its arguments whether all are valid. Fakes have no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution

from partc.trace.source_lines import frames_of


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Switch off the checks that distributions make by default, and restore the default."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def is_wanted_check(error: BaseException) -> bool:
    """Whether an error arose in the check of a distribution with ``validate_args=True``."""
    running = [frame.f_locals.get("self") for frame, _ in frames_of(error.__traceback__)]
    made = [each for each in running if isinstance(each, Distribution)]
    return any(vars(each).get("_validate_args", False) for each in made)
