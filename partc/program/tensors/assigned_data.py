"""``param.data = x``, where a parameter is an ordinary one and ``x`` a stage's tensor.

Scripts write averages of weights so: ``mean.data = 0.9 * mean.data + 0.1 * param.data``. torch lets
the parameter have the memory of ``x``; a stage's tensor has none of its own, and the next op on
such a parameter would end the process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from partc.program.tensors.homes import HomeTensor
from partc.program.tensors.script_tensors import kept_elsewhere

_DATA: Any = torch.Tensor.data


def _read(param: nn.Parameter) -> Tensor:
    data: Tensor = _DATA.__get__(param)
    return data


def _write(param: nn.Parameter, value: Tensor) -> None:
    if isinstance(value, HomeTensor):
        if value.home.in_pipeline:
            raise kept_elsewhere(value, "parameter.data = ...")
        value = value.full_tensor()
    _DATA.__set__(param, value)


def serve_assignments() -> None:
    """From now on an ordinary parameter takes a whole copy; all ranks assign it together."""
    nn.Parameter.data = property(_read, _write)  # type: ignore[assignment]
