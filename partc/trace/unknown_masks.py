"""Keep ``torch.nn.Transformer`` from comparing a mask that it is given with a causal one.

The comparison tells whether attention may leave the mask out and be causal. While a step runs on
fakes the value of an input is not known; then attention reads the mask, which is right for any.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn.modules import transformer

from partc.trace.swallowed import Refused

NAME = "_detect_is_causal_mask"


@contextmanager
def masks_read() -> Iterator[None]:
    """Let a mask whose value is not known be taken for one that is not causal."""
    plain = getattr(transformer, NAME)

    @functools.wraps(plain)
    def is_causal(*args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        except DataDependentOutputException as error:
            Refused.forget(error)
            return False

    setattr(transformer, NAME, is_causal)
    try:
        yield
    finally:
        setattr(transformer, NAME, plain)
