"""Note that a step takes derivatives by its own inputs, as a loss of a differential equation does.

Such inputs are given with ``requires_grad``. Of others that means that a script waits for their
``.grad``, which no program fills.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from partc.trace.contents import Contents
from partc.trace.swallowed import Refused

BY_INPUTS = "the step itself takes derivatives by its inputs"


def by_inputs(inputs: Sequence[Tensor]) -> bool:
    """Whether code that has just run took derivatives, and inputs ask for them."""
    return Refused.derived and any(each.requires_grad for each in inputs)


def notes_of_inputs(contents: Contents) -> list[str]:
    """A sentence where the step takes derivatives by inputs."""
    return [BY_INPUTS] if contents.differentiates else []
