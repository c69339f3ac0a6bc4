"""Let an optimizer over a stage's DTensors step on plain tensors: on this rank's pieces, or whole.

The optimizer keeps the shown parameters in its groups, so schedulers, GradScaler and torch's state
dicts see them. Only during ``step`` other tensors stand in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partc.errors import RunError, UsageError
from partc.program.role import Shard
from partc.program.tensors.elsewhere import drop_stand_ins
from partc.program.tensors.own_writes import OWN_WRITES
from partc.program.tensors.shown import Shown
from partc.wrong_calls import quoted

Optimizer = torch.optim.Optimizer
StateDict = dict[str, Any]


class Route(Protocol):
    """What stands in for a shown parameter while an optimizer steps."""

    def enter(self, shown: Shown) -> nn.Parameter:
        """The tensor to step on, with its gradient."""
        ...

    def leave(self, shown: Shown) -> None:
        """Bring what the step changed to the program."""
        ...


class OnPieces:
    """Steps on this rank's pieces, for elementwise optimizers."""

    def enter(self, shown: Shown) -> nn.Parameter:
        shown.read()
        return shown.piece

    def leave(self, shown: Shown) -> None:
        """The program reads the same memory; a fused GradScaler has unscaled the gradient."""
        shown.write_back()


class OnWhole:
    """Steps on whole tensors, the same on every rank. All ranks step together."""

    def __init__(
        self, join: Callable[[Shard, Tensor], Tensor], take: Callable[..., Tensor]
    ) -> None:
        self._join, self._take = join, take
        self._whole: dict[str, nn.Parameter] = {}

    def enter(self, shown: Shown) -> nn.Parameter:
        shown.read()
        shard, piece = shown.shard, shown.piece
        whole = self._whole.get(shard.name)
        if whole is None:
            whole = self._whole[shard.name] = nn.Parameter(torch.empty(0), piece.requires_grad)
        whole.data = self._join(shard, piece.detach())
        whole.grad = None if piece.grad is None else self._join(shard, piece.grad)
        return whole

    def leave(self, shown: Shown) -> None:
        whole = self._whole[shown.shard.name]
        with torch.no_grad():
            shown.piece.copy_(self._take(shown.shard, whole))
        whole.grad, whole.data = None, whole.new_empty(0)


class Stepping:
    """An optimizer's hooks: before a step its parameters are replaced, afterwards put back."""

    def __init__(self, optimizer: Optimizer, shown: Iterable[Shown], route: Route) -> None:
        self._by_param, self._route = {id(each.param): each for each in shown}, route
        self._entered: list[tuple[Shown, nn.Parameter]] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Replace the parameters; a closure, which runs the model, sees the shown ones."""
        self._enter(optimizer)
        _unwrap_verdict(optimizer)
        args = tuple(self._outside(optimizer, x) if callable(x) else x for x in args)
        kwargs = {k: self._outside(optimizer, x) if callable(x) else x for k, x in kwargs.items()}
        return args, kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._leave(optimizer)

    def _outside(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            self._leave(optimizer)
            try:
                return closure()
            finally:
                self._enter(optimizer)

        return run

    def _enter(self, optimizer: Optimizer) -> None:
        if self._entered:  # the last step raised
            self._leave(optimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        added = next((param for param in params if id(param) not in self._by_param), None)
        if added is not None:
            raise _not_of_stage(optimizer, added)
        shown = [self._by_param[id(param)] for param in params]
        self._entered = [(each, self._route.enter(each)) for each in shown]
        _replace(optimizer, {id(each.param): stand_in for each, stand_in in self._entered})

    def _leave(self, optimizer: Optimizer) -> None:
        for each, stand_in in self._entered:
            if stand_in.grad is not None:
                OWN_WRITES.note_one(each.shard)
            self._route.leave(each)
        _replace(optimizer, {id(stand_in): each.param for each, stand_in in self._entered})
        self._entered = []


def check_is_optimizer(given: Any) -> None:
    """UsageError for what is no optimizer, as its class or the parameters."""
    if isinstance(given, type) or not hasattr(given, "param_groups"):
        do = "Make one, and pass it itself: torch.optim.AdamW(stage.parameters())."
        if isinstance(given, Mapping):
            do = "The optimizer itself comes first, and a state dict behind it."
        raise UsageError(
            where="optimizer", what=f"it is {quoted(given)}",
            why="an optimizer has groups of parameters", do=do,
        )  # fmt: skip


def check_of_stage(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """RunError if an optimizer has a parameter that is none of the stage's.

    Stand-ins of parameters that other ranks have are taken out of its groups.
    """
    check_is_optimizer(optimizer)
    drop_stand_ins(optimizer)
    known = {id(param) for param in params}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in known:
                raise _not_of_stage(optimizer, param)


def _replace(optimizer: Optimizer, by_id: Mapping[int, Tensor]) -> None:
    """Put other tensors in the place of an optimizer's parameters, with their states."""
    for group in optimizer.param_groups:
        for i, old in enumerate(group["params"]):
            new = group["params"][i] = by_id[id(old)]
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)


def _unwrap_verdict(optimizer: Optimizer) -> None:
    """GradScaler hands a fused optimizer its scale and verdict; plain tensors need plain ones."""
    for name in ("grad_scale", "found_inf"):
        value = getattr(optimizer, name, None)
        if isinstance(value, DTensor):
            setattr(optimizer, name, value.full_tensor())


class SavedMoments:
    """A hook that shows the moments of an optimizer on pieces as DTensors in its state dict.

    ``loaded_states.py`` takes them, and whole ones, in again.
    """

    def __init__(
        self, optimizer: Optimizer, shown: Iterable[Shown], wrap: Callable[[Shard, Tensor], Tensor]
    ) -> None:
        self._by_param, self._wrap = {id(each.param): each for each in shown}, wrap
        optimizer.register_state_dict_post_hook(self._save)

    def _save(self, optimizer: Optimizer, state: StateDict) -> StateDict:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        keys = [key for group in state["param_groups"] for key in group["params"]]
        by_key = {k: self._by_param[id(p)] for k, p in zip(keys, params, strict=True)}
        wrapped = {
            key: {n: self._wrapped(by_key[key], v) for n, v in fields.items()}
            if key in by_key else fields for key, fields in state["state"].items()
        }  # fmt: skip
        return {**state, "state": wrapped}

    def _wrapped(self, shown: Shown, value: Any) -> Any:
        alike = isinstance(value, Tensor) and value.shape == shown.piece.shape
        sharded = alike and value.dim()  # a number is whole on every rank, moment or counter
        return self._wrap(shown.shard, value) if sharded else value


def _not_of_stage(optimizer: Optimizer, param: Tensor) -> RunError:
    return RunError(
        where=type(optimizer).__name__,
        what=f"has a parameter of shape {list(param.shape)} that is none of the stage's",
        why="it steps on the program's memory in the place of stage.parameters()",
        do="Build the optimizer over stage.parameters(), in groups as you like; in a "
        "LightningModule over self.parameters().",
    )
