"""The default dtype of a script, under which its model runs, and float32 for all else.

A program's text names no dtype where that is float32, so that partc makes and runs programs with
float32 as the default. Under another default of the script (``torch.set_default_dtype``) the model
is recorded as the script runs it, and what names no dtype there is given one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from partc.errors import TraceError

aten = torch.ops.aten

_USERS: list[torch.dtype] = []  # defaults of the script, the latest last
_CHOOSES = ("where", "masked_fill")  # by a mask, which is no operand to be cast


@contextmanager
def float32_default() -> Iterator[None]:
    """Run with float32 as the default; works as a decorator, too."""
    users = torch.get_default_dtype()
    _USERS.append(users if users != torch.float32 or not _USERS else _USERS[-1])
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        _USERS.pop()
        torch.set_default_dtype(users)


@contextmanager
def users_default() -> Iterator[None]:
    """Inside of ``float32_default`` run code of the script's under the default that it has set."""
    now = torch.get_default_dtype()
    torch.set_default_dtype(default_of_script())
    try:
        yield
    finally:
        torch.set_default_dtype(now)


def default_of_script() -> torch.dtype:
    """The default that the script has set, also while partc runs under float32."""
    return _USERS[-1] if _USERS else torch.get_default_dtype()


def name_dtypes(graph: fx.Graph) -> list[fx.Node]:
    """Give each call that makes numbers of the default dtype that dtype, in place; the calls that
    cannot be told.
    """
    untold, default = [], default_of_script()
    for node in [n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload)]:
        made = node.meta.get("val")
        operands = [n.meta.get("val") for n in node.all_input_nodes]
        numbers = [x for x in operands if isinstance(x, Tensor)]
        if not isinstance(made, Tensor) or made.dtype not in (default, default.to_complex()):
            continue
        if any(map(_is_of_numbers, numbers)):
            continue
        named = {argument.name for argument in node.target._schema.arguments}
        if "dtype" in named:
            node.kwargs = {**node.kwargs, "dtype": node.kwargs.get("dtype") or made.dtype}
        elif _is_elementwise(node.target):
            _cast_operands(node, made.dtype)
        else:
            untold.append(node)
    return untold


def _is_of_numbers(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _is_elementwise(target: Any) -> bool:
    chooses = target._schema.name.removeprefix("aten::").startswith(_CHOOSES)
    return torch.Tag.pointwise in target.tags and not chooses


def _cast_operands(node: fx.Node, dtype: torch.dtype) -> None:
    """Let an op on whole numbers, ``n / 10``, compute with numbers of a dtype."""
    with node.graph.inserting_before(node):
        for each in dict.fromkeys(node.all_input_nodes):
            cast = node.graph.call_function(aten._to_copy.default, (each,), {"dtype": dtype})
            cast.meta = {**node.meta, "val": each.meta["val"].to(dtype)}
            node.replace_input_with(each, cast)


def makes_default(source: str) -> TraceError:
    """The refusal of a line whose numbers are of the default dtype, which cannot be told."""
    dtype = default_of_script()
    return TraceError(
        where=source, what=f"it makes {dtype}, as torch.get_default_dtype() says",
        why="a program runs where that is float32",
        do=f"Name the dtype there, as torch.tensor(1.0, dtype={dtype}) in the place of 1.0; or set "
        "the default to torch.float32 before the first step.",
    )  # fmt: skip
