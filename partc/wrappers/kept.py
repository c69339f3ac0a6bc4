"""What a script keeps of a model from before its first step, and would use in vain behind it."""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cache, cached_property
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partc.errors import RunError
from partc.program.model.habits import once
from partc.program.model.old_weights import refuse_in_one_backward
from partc.program.tensors.whole_states import is_whole_state
from partc.users_line import warn
from partc.wrappers.unread import unread_values

_LOOKS, _LOOK_S = 5, 0.02  # at a parameter that somebody seems to keep
_OWN_REFERENCES = 3  # of a parameter while it is counted: two names and the argument
_LEFT: WeakSet[nn.Module] = WeakSet()  # models that are trained no more; copies of them may be
_NO_OBJECTS = (type, FunctionType, ModuleType)  # a script's own variables are followed


class Kept:
    """A model's parameters and modules, from before its first step until it has left them.

    ``leave`` is called when nothing of partc holds the model any more.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self._params = {name: ref(param) for name, param in model.named_parameters()}
        self._modules = {name: ref(part) for name, part in model.named_modules() if name}
        self._own = {id(each) for each in _own_containers(model)}
        self._name = type(model).__name__

    def follow(self, shown: Mapping[str, nn.Parameter], like: nn.Module | None) -> None:
        """Put the stage's parameters and modules into the lists and dicts in which the script has
        the model's: also into the variables of a script, which are those of a module.

        ``shown``: by name, the parameters of this rank. ``like``: the stage's modules.
        """
        new: dict[int, Any] = {}
        for name, each in self._params.items():
            if (param := each()) is not None and name in shown:
                new[id(param)] = shown[name]
        for name, part in self._modules.items():
            if like is not None and (module := part()) is not None:
                new[id(module)] = like.get_submodule(name)
        every = [each() for each in (*self._params.values(), *self._modules.values())]
        own = {*self._own, id(every)}
        for holder in gc.get_referrers(*every):
            if type(holder) is list and id(holder) not in own:
                holder[:] = [new.get(id(x), x) for x in holder]
            elif type(holder) is dict and id(holder) not in own:
                holder.update({key: new[id(x)] for key, x in holder.items() if id(x) in new})

    def leave(self) -> None:
        """RunError where the script keeps a parameter elsewhere, or a module of the model; a
        warning where it keeps the model. What no later line reads is not kept: scripts have the
        last parameter in the variable of a loop. Nor is what a result keeps that was computed
        before the first step: only its ``backward`` would read a parameter, and is refused.
        """
        if any(param() is not None for param in self._params.values()):
            gc.collect()  # modules that refer to each other
        alive = [name for name, param in self._params.items() if param() is not None]
        if not alive:
            return
        inside = self._references()
        for name in alive:
            if (param := self._params[name]()) is not None:
                self._check_left(name, param, inside[id(param)])
        if (model := self._model()) is None:
            return
        _LEFT.add(model)
        model.register_load_state_dict_pre_hook(_told_of_load)
        if sys.getrefcount(model) - 2 > inside[id(model)]:
            for name in alive:
                if (param := self._params[name]()) is not None and param.requires_grad:
                    param.register_hook(refuse_in_one_backward(name))
            warn(
                f"partc: the script keeps the {self._name} that it gave to parallelize, whose "
                "weights are trained no more from the first step on. Keep what parallelize gave in "
                "its place: model = partc.parallelize(model, ...); another loss of it is "
                "model.also(loss). To evaluate or save with it, first give it the trained weights, "
                "on all ranks: kept.load_state_dict(model.full_state_dict())"
            )

    def _check_left(self, name: str, param: nn.Parameter, inside: int) -> None:
        graphs = held_by_graphs(param)
        for _ in range(_LOOKS):  # what another thread, or garbage, has of it goes
            others = sys.getrefcount(param) - _OWN_REFERENCES - inside - graphs
            if others <= 0:
                break
            gc.collect()
            time.sleep(_LOOK_S)
        if others > 0 or (graphs and id(param) in self._scripted):
            raise _kept(name, self._where(name))
        if graphs and param.requires_grad:
            param.register_hook(_too_late(name))

    def _where(self, name: str) -> str:
        """Which object or variable of the script has a parameter, or a module with it; "" of none
        that is found, as of a tuple.
        """
        parts = [part() for path, part in self._modules.items() if name.startswith(f"{path}.")]
        held = {id(each) for each in (self._params[name](), *parts) if each is not None}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, whose objects warn when looked at
            return next(_holders(held, self._own), "")

    @cached_property
    def _scripted(self) -> set[int]:
        """The parameters of ``torch.jit`` modules, by id: these hold them as graphs do."""
        scripts = [x for x in gc.get_objects() if issubclass(type(x), torch.jit.ScriptModule)]
        return {id(param) for each in scripts for param in each.parameters()}

    def _references(self) -> Counter[int]:
        """How often the model and what no line reads again have each parameter, and the model
        itself, by its id.
        """
        unread = unread_values((nn.Module, nn.Parameter))
        held = [self._model(), *(each for each in unread if isinstance(each, nn.Module))]
        found = _references_in([each for each in held if each is not None])
        parts = {id(p): p for each in held if each is not None for p in each.modules()}
        found.update(id(x) for p in parts.values() for x in vars(p).values() if x is self._model())
        found.update(map(id, unread))
        return found


def attributes_of_copies(model: nn.Module, how: Any) -> list[dict[str, Any]]:
    """The attributes of functions that have those of what stands for a model, as
    ``functools.wraps`` copies them: torch.compile wraps a module so.
    """
    found = [each for each in gc.get_referrers(model) if type(each) is dict]
    return [each for each in found if each.get("_whole") is model and each.get("_how") is how]


def warn_of_dynamo() -> None:
    """A warning where torch.compile of what parallelize gave takes the first step."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if type(frame.f_locals.get("self")).__name__ == "OptimizedModule":
            warn(
                "partc: torch.compile leaves what parallelize gave as it is, a program. Take it "
                'out; parallelize(model, ..., compile="inductor") has TorchInductor compile the '
                "program",
            )
            return
        frame = frame.f_back


def _holders(held: Container[int], own: Container[int]) -> Iterator[str]:
    """Attributes and variables of functions whose values have these ids; ``own``: the ids of what
    the model's modules have themselves.
    """
    for each in gc.get_objects():
        attributes = _attributes(each)
        if type(attributes) is not dict or id(attributes) in own or isinstance(each, _NO_OBJECTS):
            continue
        for name, value in [*attributes.items()]:
            if id(value) in held and not _is_ours(type(each)):
                yield f"{type(each).__name__}.{name}"
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not _is_ours(frame.f_globals.get("__name__")):
            for name, value in [*frame.f_locals.items()]:
                if id(value) in held:
                    yield f"the variable {name} of {frame.f_code.co_name}"
        frame = frame.f_back


def _attributes(value: Any) -> Any:
    try:
        return value.__dict__
    except Exception:  # of a proxy of what is gone, or one with a __getattr__ of its own
        return None


def _is_ours(named: Any) -> bool:
    """Whether a class or a module, by its name, is partc's or torch's own."""
    name = str(getattr(named, "__module__", named))
    return name.partition(".")[0] in ("partc", "torch")


def held_by_graphs(param: nn.Parameter) -> int:
    """The references that Python counts for graphs of autograd which a parameter is part of: that
    of a result which was computed before, also of the weight that ``weight_norm`` makes.

    torch counts one while anything beside Python's objects holds a tensor.
    """
    return int(counts_graphs() and param._use_count() > 1)  # type: ignore[attr-defined]


@cache
def counts_graphs() -> bool:
    """Whether Python's references to a tensor have one for a graph, as of torch 2.13."""
    leaf = nn.Parameter(torch.zeros(()))
    alone = sys.getrefcount(leaf)
    result = leaf * 1
    return hasattr(leaf, "_use_count") and sys.getrefcount(leaf) > alone and result is not None


def _own_containers(*models: nn.Module) -> Iterator[Any]:
    """The tables of models' modules, and what else they have of lists (as LSTMs) and dicts."""
    modules = {id(module): module for model in models for module in model.modules()}
    for module in modules.values():
        yield from (each for each in vars(module).values() if type(each) in (list, dict, tuple))


def _references_in(models: Iterable[nn.Module]) -> Counter[int]:
    """How often the models' own containers have each object, by its id."""
    found: Counter[int] = Counter()
    for each in _own_containers(*models):
        found.update(map(id, each.values() if isinstance(each, dict) else each))
    return found


def check_not_stepping(optimizer: Optimizer) -> None:
    """RunError where an optimizer's own step calls for the model's first, as a closure does."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step" and frame.f_locals.get("self") is optimizer:
            raise RunError(
                where=f"{type(optimizer).__name__}.step(closure)",
                what="the closure takes the model's first step",
                why="the optimizer has begun with parameters that the model then leaves",
                do="Compile before: model.compile_for(*batch), with any batch of the same shapes.",
            )
        frame = frame.f_back


def _too_late(name: str) -> Callable[[Tensor], None]:
    """A hook that refuses the ``backward`` of what was computed before the first step."""

    def refused(_: Tensor) -> None:
        raise RunError(
            where=f"backward: {name}",
            what="what it differentiates was computed before the model's first step",
            why="the model has had other parameters since then, which would get no gradient",
            do="Compute it again, with the model that parallelize gave.",
        )

    return refused


def _told_of_load(module: nn.Module, state: Mapping[str, Any], *others: Any) -> None:
    """Warn of weights that are loaded into a model which is trained no more, unless these are the
    trained ones, with which scripts evaluate or save it.
    """
    if module in _LEFT and not is_whole_state(state.values()) and once("load of the kept model"):
        warn(
            f"partc: the {type(module).__name__} that parallelize was given gets other weights, "
            "which the model that it gave does not train on. Load them into that: "
            "model.load_state_dict(state), on all ranks",
        )


def _kept(name: str, by: str) -> RunError:
    return RunError(
        where=f"the first step: {name}",
        what="the script keeps this parameter, or its module, from before the first step"
        + (f", as {by}" if by else ""),
        why="the model has other parameters from now on. They are put into optimizers, lists and "
        "dicts; what else has the old ones would read and write what is not trained",
        do="Take parameters and modules of the model behind its first step; or compile before they "
        "are taken: model.compile_for(*batch), with any batch of the same shapes. A variable that "
        "a later line reads keeps them, too.",
    )
