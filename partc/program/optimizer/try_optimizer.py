"""Find out by trying whether an optimizer treats each element, or each tensor, by itself.

An optimizer of any class is tried with the options of its groups on small random tensors, and on
tensors of its parameters' shapes: if steps on pieces end where steps on whole tensors end, it may
step on this rank's pieces.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partc.errors import RunError
from partc.program.role import Shard

Optimizer = torch.optim.Optimizer
NUM_STEPS = 3
LR = 0.1  # a schedule may begin at 0, where every optimizer does nothing
LARGEST = 2**20  # elements of a parameter whose own shape is tried
Take = Callable[[Shard, Tensor], Tensor]
Split = Callable[[Tensor], Sequence[Tensor]]


def check_elementwise(optimizer: Optimizer, shards: Mapping[Tensor, Shard], take: Take) -> None:
    """RunError if an optimizer may not step on pieces of tensors.

    ``shards``: the layout of each of its parameters, whose shapes are tried too, as a rule may
    depend on a tensor's size. ``take`` gives this rank's piece of a whole tensor.
    """
    if not (is_elementwise(optimizer) and _is_on_own_shapes(optimizer, shards, take)):
        raise RunError(
            where=f"stage.step_on_pieces({type(optimizer).__name__})",
            what="its steps on pieces of a tensor are not those on the whole tensor",
            why="it was tried on small tensors and on the shapes of its parameters, with the "
            "options of its groups",
            do="Use it on stage.parameters() as they are, or call stage.step_on_whole(optimizer).",
        )


def check_per_tensor(optimizer: Optimizer) -> None:
    """RunError if an optimizer joins parameters, of which a pipeline rank has its own alone."""
    if not is_per_tensor(optimizer):
        raise RunError(
            where=f"stage.step_on_whole({type(optimizer).__name__})",
            what="its step on one parameter depends on others",
            why="a pipeline rank has the parameters of its own stages alone",
            do="Compile for a mesh without pp, or take an optimizer that treats each parameter "
            "by itself.",
        )


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether its steps on pieces of a tensor, one by one, equal those on the whole tensor."""
    cases = (((4, 6), 0), ((4, 6), 1), ((6,), 0))
    groups = optimizer.param_groups
    return all(_alike(optimizer, groups, [shape], [_halves(dim)]) for shape, dim in cases)


def _is_on_own_shapes(optimizer: Optimizer, shards: Mapping[Tensor, Shard], take: Take) -> bool:
    """Whether its steps on pieces of tensors like its own parameters equal those on wholes."""
    for group in optimizer.param_groups:
        own = [shards[param] for param in group["params"]]
        for shard in {(each.shape, each.cuts): each for each in own}.values():
            tried = shard.cuts and math.prod(shard.shape) <= LARGEST
            if tried and not _alike(optimizer, [group], [shard.shape], [_piece(shard, take)]):
                return False
    return True


def _piece(shard: Shard, take: Take) -> Split:
    return lambda x: [take(shard, x)]


def _halves(dim: int) -> Split:
    return lambda x: x.chunk(2, dim)


def is_per_tensor(optimizer: Optimizer) -> bool:
    """Whether its steps on several tensors, one by one, equal those on all of them."""
    return _alike(optimizer, optimizer.param_groups, [(4, 6), (6, 4)], [lambda x: [x]] * 2)


def _alike(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]],
    shapes: Sequence[tuple[int, ...]], splits: Sequence[Split],
) -> bool:  # fmt: skip
    """Compare a run on whole tensors with runs on each of their pieces alone, by each group."""
    generator = torch.Generator().manual_seed(0)
    params = (param for group in groups for param in group["params"])
    device = next((param.device for param in params), torch.device("cpu"))  # a stage may have none

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    starts = [random(shape) for shape in shapes]
    grads = [[random(shape) for _ in range(NUM_STEPS)] for shape in shapes]
    for options in groups:
        try:
            whole = _run(optimizer, options, starts, grads)
            for end, start, given, split in zip(whole, starts, grads, splits, strict=True):
                pieces = zip(split(end), split(start), *map(split, given), strict=True)
                for expected, begin, *its in pieces:
                    (found,) = _run(optimizer, options, [begin], [its])
                    if not torch.allclose(found, expected, rtol=1e-9, atol=1e-12):
                        return False
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
            return False  # one that takes other tensors, or needs a closure
    return True


def _run(
    optimizer: Optimizer, options: Mapping[str, Any], starts: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
) -> list[Tensor]:  # fmt: skip
    """Where the optimizer's class takes these tensors with these gradients."""
    params = [nn.Parameter(start.clone()) for start in starts]
    twin = _twin(optimizer, {**options, "params": params})
    with torch.random.fork_rng(devices=[]):
        for each in zip(*grads, strict=True):
            for param, grad in zip(params, each, strict=True):
                param.grad = grad.clone()
            type(optimizer).step(twin)
    return [param.detach() for param in params]


def _twin(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """An optimizer of the same class and settings, over one group, without hooks and states."""
    twin = object.__new__(type(optimizer))
    if "lr" in group:
        group["lr"] = torch.full_like(group["lr"], LR) if _is_tensor(group["lr"]) else LR
    group.pop("param_names", None)
    settings = {k: v for k, v in vars(optimizer).items() if isinstance(v, bool | int | float | str)}
    defaults = dict(optimizer.defaults)
    twin.__setstate__(
        {**settings, "defaults": defaults, "state": defaultdict(dict), "param_groups": [group]}
    )
    return twin


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
