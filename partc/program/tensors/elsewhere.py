"""What the modules of one pipeline rank say of tensors that other pipeline ranks hold.

``stage.blocks.7.norm.weight`` of another rank's stage is refused by name. A module that has
parameters elsewhere gives empty stand-ins for them, so that an optimizer over
``stage.maker.parameters()`` can be made on every rank; it drops them before it steps. So is one
over no parameters, ``(p for p in stage.parameters() if p.requires_grad)``, on a rank that has none
to train.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch._guards import detect_fake_mode
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from partc.errors import RunError
from partc.plan.mesh import PP
from partc.program.tensors.exported import check_not_exported, no_export
from partc.program.tensors.holders import Holders
from partc.program.tensors.stand_in import StandIn, on_ranks
from partc.program.tensors.states_elsewhere import give_states

NAMES = "parameters", "named_parameters"  # the methods that give a module's parameters
_HOOKS: list[Any] = []
_ROOTS: WeakSet[Any] = WeakSet()  # stages of pipelines
# of each optimizer that had stand-ins, one of them
_DROPPED: WeakKeyDictionary[Any, StandIn] = WeakKeyDictionary()


class ElsewhereError(RunError, AttributeError):
    """An attribute of a module is on other pipeline ranks; ``hasattr`` says no."""


class EmptyError(RunError, ValueError):
    """An optimizer over no parameters, which torch refuses by ValueError."""


class Table(dict[str, Any]):
    """A module's parameters, buffers or modules by name, and the names of those elsewhere.

    torch's ``Module.__getattr__`` asks for a name with ``in``, and then takes it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.elsewhere: dict[str, tuple[str, tuple[int, ...]]] = {}

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.elsewhere

    def __missing__(self, name: str) -> Any:
        if name in self.elsewhere:
            raise _elsewhere(*self.elsewhere[name])
        raise KeyError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """RunError before torch puts another tensor into a tensor's place (``functional_call``)."""
        before = self.get(name)
        if isinstance(before, Tensor) and isinstance(value, Tensor) and value is not before:
            check_not_exported()  # exporters and transforms do so too, and have words of their own
            if detect_fake_mode() is not None:  # of an export that has not yet said so
                raise no_export("torch.export")
            raise other_weights(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        """RunError before torch takes a tensor away, to put another in its place (pruning, weight
        norm): the stage is then as it was.
        """
        if super().__contains__(name):
            raise RunError(
                where=f"{name} of a stage's module", what="it was to be taken away",
                why="the program computes with the tensors and modules that the model had when it "
                "was compiled", do="Prune, or parametrize, the model, and compile it again.",
            )  # fmt: skip
        super().__delitem__(name)

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        self.elsewhere.clear()


def other_weights(name: str, of: str = "a stage's module") -> RunError:
    """The refusal of a call with other tensors than the model's own."""
    return RunError(
        where=f"{name} of {of}",
        what="another tensor was to stand in its place, as torch.func.functional_call does",
        why="a program computes with its own weights, whatever stands there",
        do="Write values into them: param.copy_(value) under torch.no_grad(), and afterwards what "
        "was there; or compute with a plain model that has loaded full_state_dict().",
    )


class _Parameters:
    """``parameters`` or ``named_parameters`` of a module that has some of its own elsewhere.

    ``each``: stand-ins by the name of all of its parameters, in the model's order, of which those
    are taken that the module has not; None for one without. So two parts of a model can be walked
    side by side.
    """

    def __init__(
        self, module: nn.Module, each: Mapping[str, StandIn | None], *, named: bool
    ) -> None:
        self.module, self.each, self.named = module, each, named

    def __call__(
        self, prefix: Any = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[Any]:
        # `parameters` has `recurse` first
        start, deep = (prefix, recurse) if self.named else ("", prefix is not False and recurse)
        for name, param in self._in_order(deep, remove_duplicate):
            yield (f"{start}.{name}" if start else name, param) if self.named else param

    def _in_order(self, deep: bool, once: bool) -> Iterator[tuple[str, nn.Parameter]]:
        own = dict(nn.Module.named_parameters(self.module, "", deep, remove_duplicate=False))
        names = {**{n: None for n in self.each if deep or "." not in n}, **dict.fromkeys(own)}
        seen: set[Any] = set()
        for name in names:
            param = own[name] if name in own else self.each[name]
            key = param.called if isinstance(param, StandIn) else param
            if param is not None and not (once and key in seen):
                seen.add(key)
                yield name, param

    def __deepcopy__(self, memo: dict[int, Any]) -> _Parameters:
        module, each = copy.deepcopy((self.module, self.each), memo)
        return _Parameters(module, each, named=self.named)


def say_elsewhere(root: Any, holders: Holders) -> None:
    """Note in the modules under ``root``, a stage, the tensors that only other ranks have."""
    firsts = {**{name: name for name in holders.shards}, **holders.aliases}
    # first names of parameters, and of all that is saved, by module and rest of name
    inside: dict[str, dict[str, str]] = {}
    states: dict[str, dict[str, str]] = {"": {}}
    for name in sorted(firsts, key=holders.order.get):  # type: ignore[arg-type]
        first = firsts[name]
        is_param = first in holders.params
        if first in holders.places:
            _note(root, name, "_parameters" if is_param else "_buffers", holders.places[first])
        at = name.find(".")
        if name in holders.saved:
            states[""][name] = first
        while at >= 0:
            path, rest = name[:at], name[at + 1 :]
            if is_param or first in holders.aside:
                inside.setdefault(path, {})[rest] = first
            if name in holders.saved:
                states.setdefault(path, {})[rest] = first
            at = name.find(".", at + 1)
    for path, module in root.named_modules():
        names = inside.get(path, {})
        each = {n: _stand_in(first, holders, root) for n, first in names.items()}
        _give_stand_ins(module, each)
        whole = root.like_model if module is root else module  # a stage has states of its own
        if whole is not None:
            saved = states.get(path, {})
            give_states(whole, {n: _of_others(name, holders, root) for n, name in saved.items()})
    if holders.params & {*holders.places}:
        _ROOTS.add(root)
        _watch_optimizers()


def stand_ins(root: Any, holders: Holders) -> dict[str, StandIn]:
    """A stand-in for each parameter that other pipeline ranks have, by all of its names."""
    firsts = {**{name: name for name in holders.shards}, **holders.aliases}
    gone = {name: first for name, first in firsts.items() if first in holders.places}
    each = {name: _stand_in(first, holders, root) for name, first in gone.items()}
    return {name: made for name, made in each.items() if made is not None}


def freeze_alike(away: Mapping[str, StandIn], holders: Holders, root: Any) -> None:
    """Freeze, of what stands for tensors of other ranks in a copy of a stage, what the stage's own
    stand-ins (``away``) say; some are there only once a script has asked for them.
    """
    for name, known in away.items():
        _made(name, holders, root).requires_grad_(known.requires_grad)


def _stand_in(name: str, holders: Holders, root: Any) -> StandIn | None:
    return _made(name, holders, root) if name in holders.params else None


def _of_others(name: str, holders: Holders, root: Any) -> StandIn | None:
    """A stand-in for a parameter or a buffer that only other pipeline ranks have."""
    places = holders.places.get(name, ())
    return _made(name, holders, root) if places and root.coords[PP] not in places else None


def _made(name: str, holders: Holders, root: Any) -> StandIn:
    """The stand-in of a tensor, one in a stage: what a script freezes is frozen by each path."""
    empty = torch.empty(0, dtype=holders.shards[name].dtype, device=root.device)
    if name in root.away:
        known: StandIn = root.away[name]
        with DisableTorchFunctionSubclass():
            if known.device != empty.device:
                known.data = empty
        return known
    made = StandIn(empty, name in holders.params and empty.is_floating_point())
    made.called, made.groups = name, root.groups
    made.places = holders.places.get(name, ())
    root.away[name] = made
    return made


def _give_stand_ins(module: nn.Module, each: Mapping[str, StandIn | None]) -> None:
    """Let a module that has not all of these parameters here give stand-ins in their place."""
    for name in NAMES:
        vars(module).pop(name, None)
    here = dict(module.named_parameters(remove_duplicate=False))
    if any(name not in here for name, made in each.items() if made is not None):
        made = {name: _Parameters(module, each, named=name != NAMES[0]) for name in NAMES}
        vars(module).update(made)


def _watch_optimizers() -> None:
    """Let optimizers drop stand-ins before they step, and be made over nothing where that is right;
    once in a process.
    """
    if _HOOKS:
        return
    _HOOKS.append(register_optimizer_step_pre_hook(_before_step))
    plain = Optimizer.__init__

    @functools.wraps(plain)
    def made(self: Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(params, Tensor):
            params = _named_alike(list(params)) or _for_none(type(self).__name__)
        plain(self, params, *args, **kwargs)

    Optimizer.__init__ = made  # type: ignore[method-assign]
    unscale = GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def unscaled(
        self: GradScaler, optimizer: Optimizer, inverse: Tensor, found: Tensor, *args: Any
    ) -> Any:
        absent = _without_gradients(optimizer)
        if absent is not None:
            return _verdict(found, absent)
        return unscale(self, optimizer, inverse, found, *args)

    GradScaler._unscale_grads_ = unscaled  # type: ignore[method-assign, assignment]


def _named_alike(params: list[Any]) -> list[Any]:
    """Groups of parameters, of which an empty one has names where others have: on a pipeline rank
    that trains none of a group's parameters there is none that would bring its name.
    """
    groups = [group for group in params if isinstance(group, dict) and "params" in group]
    if not _ROOTS or len(groups) < len(params):
        return params
    for group in groups:
        if not isinstance(group["params"], Tensor | set):
            group["params"] = list(group["params"])
    named = any(isinstance(x, tuple) for group in groups for x in group["params"])
    for group in groups:
        if named and len(group["params"]) == 0:
            group.setdefault("param_names", [])
    return params


def _without_gradients(optimizer: Optimizer) -> StandIn | None:
    """A stand-in of an optimizer that has nothing to step on this rank."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(not isinstance(p, StandIn) and p.grad is not None for p in params):
        return None
    return stand_in_of(optimizer)


def _verdict(found: Tensor, of: StandIn) -> dict[torch.device, Tensor]:
    """Whether a gradient of the other ranks is infinite: they ask this rank too."""
    for group in of.groups.values():
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return {found.device: found}


def _for_none(optimizer: str) -> list[nn.Parameter]:
    """What an optimizer over no parameters is made over: a stand-in where this rank trains none.

    A rank that does train some refuses it, as torch would, so that not all ranks train nothing.
    """
    roots = [*_ROOTS]
    if roots and all(any(p.requires_grad for p in root.parameters()) for root in roots):
        raise EmptyError(
            where=f"{optimizer}(...)",
            what="it got an empty parameter list on this pipeline rank, which trains others",
            why="parameters of other pipeline ranks are not in stage.parameters()",
            do="Take those of a part, Adam(stage.head.parameters()), which every rank gives, or "
            "make the optimizer over groups, of which some may be empty.",
        )
    if not roots:
        return []
    made = StandIn(torch.empty(0, device=roots[-1].device))
    made.groups = roots[-1].groups
    return [made]


def _note(module: nn.Module, name: str, kind: str, places: tuple[int, ...]) -> None:
    """Note a tensor in the table of the last module on the way to it that this rank has."""
    parts = name.split(".")
    for number, part in enumerate(parts, start=1):
        which = kind if number == len(parts) else "_modules"
        child = dict.get(vars(module)[which], part)
        if child is None:
            table = _table(module, which)
            _, before = table.elsewhere.get(part, ("", ()))
            at = tuple(sorted({*before, *places}))
            table.elsewhere[part] = ".".join(parts[:number]), at
            return
        module = child


def _table(module: nn.Module, which: str) -> Table:
    """A table of a module, made one that knows what is elsewhere."""
    if not isinstance(vars(module)[which], Table):
        vars(module)[which] = Table(vars(module)[which])
    found: Table = vars(module)[which]
    return found


def check_norm(params: Iterable[Tensor]) -> None:
    """RunError for a norm of parameters that other ranks have: there it is refused too."""
    if any(isinstance(param, StandIn) for param in params):
        raise RunError(
            where="clip_grad_norm_",
            what="this pipeline rank has none of these parameters",
            why="the norm of their gradients is known to other ranks alone",
            do="Clip with stage.clip_grad_norm_, which is over the whole model.",
        )


def drop_stand_ins(optimizer: Optimizer) -> None:
    """Take what other ranks have out of an optimizer's groups, which may then be empty."""
    for group in optimizer.param_groups:
        for param in filter(_is_stand_in, group["params"]):
            _DROPPED[optimizer] = param
        group["params"][:] = [p for p in group["params"] if not isinstance(p, StandIn)]


def stand_in_of(optimizer: Optimizer) -> StandIn | None:
    """A stand-in that an optimizer has in its groups, or had."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    return next((p for p in params if isinstance(p, StandIn)), _DROPPED.get(optimizer))


def _is_stand_in(param: object) -> bool:
    return isinstance(param, StandIn)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    drop_stand_ins(optimizer)


def _elsewhere(name: str, places: tuple[int, ...]) -> ElsewhereError:
    return ElsewhereError(
        where=f"stage.{name}",
        what="this rank has not got it",
        why=f"it belongs to another stage of the pipeline{on_ranks(places)}",
        do="Call stage.full_state_dict() on all ranks, which has every tensor whole, or go by "
        "stage.named_parameters(), which has those of this rank.",
    )
