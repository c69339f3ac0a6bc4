"""Batches of other lengths on each rank, filled up to the longest of all ranks."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from partc.errors import TraceError, UsageError
from partc.program.ranks.other_ranks import of_other_ranks
from partc.program.tensors.holders import exchange_texts
from partc.trace.arguments import Given
from partc.users_line import warn
from partc.wrong_calls import did_you_mean, quoted

_BY_NAME = (
    inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)  # fmt: skip


def filled(
    model: nn.Module, call: Callable[..., Any] | None, args: Any, named: Mapping[str, Any],
    pad: Mapping[str, float], device_type: str, batch_dims: Mapping[str, int],
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """The arguments of a call behind the model, by place, by name or in a dict; those that ``pad``
    names, as a program names its inputs, are filled up, in all dims but that of the batch
    (``batch_dims``; else dim 0). All ranks call this together.
    """
    if not pad:
        return args, dict(named)
    try:
        given = Given.of_call(model, args, named, call)
    except TraceError:  # the call itself says what is wrong, and tells the other ranks
        given = None
    if given is not None:
        _check_values(pad, given)
    tensors = {} if given is None else dict(zip(given.names, given.tensors, strict=True))
    lengths = {
        name: [dim for dim in range(x.dim()) if dim != batch_dims.get(name, 0)]
        for name, x in tensors.items()
        if name in pad
    }
    mine = {name: [tensors[name].shape[dim] for dim in dims] for name, dims in lengths.items()}
    wanted = dict(zip(mine, largest([*mine.values()], device_type), strict=True))
    if given is None or wanted == mine:
        return args, dict(named)
    for name, sizes in wanted.items():
        more = dict(zip(lengths[name], sizes, strict=True))
        tensors[name] = _longer(tensors[name], more, pad[name])
    bound = given.filled([*tensors.values()])
    return bound.args, bound.kwargs


@of_other_ranks("a call of the model")
def largest(shapes: list[list[int]], device_type: str) -> list[list[int]]:
    """The most of every size over all ranks, which are given batches of different lengths."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return shapes
    device = torch.device(device_type)
    texts = exchange_texts(json.dumps(shapes), dist.group.WORLD, device)
    each = [json.loads(text) for text in texts]
    if len({json.dumps([len(shape) for shape in one]) for one in each}) > 1:
        return shapes  # the programs differ, which partc says on every rank
    return [[max(sizes) for sizes in zip(*same, strict=True)] for same in zip(*each, strict=True)]


def _longer(x: Tensor, sizes: Mapping[int, int], value: float) -> Tensor:
    """A tensor whose dims are filled up to ``sizes``, by dim."""
    missing = [sizes.get(dim, has) - has for dim, has in enumerate(x.shape)]
    sides = [side for more in reversed(missing) for side in (0, more)]
    return F.pad(x, sides, value=value) if any(missing) else x


def inputs_of(call: Callable[..., Any], *, of_loss: bool) -> list[str]:
    """The names of a call's arguments; of a loss those behind the model."""
    try:
        each = [*inspect.signature(call).parameters.values()][int(of_loss) :]
    except (ValueError, TypeError):  # of a function in C
        return []
    return [p.name for p in each if p.kind in _BY_NAME]


def check_names_of_pad(pad: Mapping[str, float], known: Collection[str]) -> None:
    """UsageError for a misspelt name: one that no input has, and that is near to one. Others may be
    of a loss that comes later; ``"batch.ids"`` is an entry of an input.
    """
    for name in (each for each in pad if each.partition(".")[0] not in known):
        if meant := did_you_mean(name, known):
            raise UsageError(
                where=f"pad={{{name!r}: ...}}", what="there is no such input",
                why=f"the inputs are {', '.join(sorted(known))}", do=meant,
            )  # fmt: skip


def warn_of_pad(pad: Mapping[str, float], known: Collection[str]) -> None:
    """Warn where a script says how inputs are filled up of which it has none by its first step."""
    lost = [name for name in pad if name.partition(".")[0] not in known]
    if lost and len(lost) == len(pad):
        warn(
            f"partc: pad={{{lost[0]!r}: ...}} fills up nothing: the inputs are "
            f"{', '.join(sorted(known))}, by whose names pad goes ('batch.ids' of a dict)"
        )  # fmt: skip


def _check_values(pad: Mapping[str, float], given: Given) -> None:
    """UsageError for an input under ``pad`` that is no tensor."""
    for name, value in given.bound.arguments.items():
        if name in pad and name not in given.names and value is not None:
            entries = isinstance(value, Mapping)
            raise UsageError(
                where=f"pad={{{name!r}: ...}}", what=f"the input is {quoted(value)}",
                why="a number fills up a tensor",
                do=f"Name its entries: pad={{{f'{name}.{next(iter(value), None)}'!r}: ...}}."
                if entries else "Fill up its tensors in collate_fn, or pass them as inputs of "
                "their own.",
            )  # fmt: skip
