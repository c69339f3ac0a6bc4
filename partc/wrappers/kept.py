"""What a script keeps of a model from before its first step, and would use in vain behind it."""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from partc.errors import RunError

_OWN_REFERENCES = 2  # of a parameter while it is counted: the loop's name and the argument


class Kept:
    """A model's parameters, from before its first step until it has left them.

    ``leave`` is called when nothing of partc holds the model any more.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self._params = {name: ref(param) for name, param in model.named_parameters()}
        self._own = {id(each) for each in _own_containers(model)}
        self._name = type(model).__name__

    def follow(self, shown: Mapping[str, nn.Parameter]) -> None:
        """Put the stage's parameters into the lists and dicts in which the script has the model's.

        ``shown``: by name, those of this rank.
        """
        alive = {id(p): name for name, each in self._params.items() if (p := each()) is not None}
        new = {number: shown[name] for number, name in alive.items() if name in shown}
        every = tuple(each() for each in self._params.values())
        for holder in gc.get_referrers(*every):
            if type(holder) is list and id(holder) not in self._own:
                holder[:] = [new.get(id(x), x) for x in holder]
            elif type(holder) is dict and id(holder) not in self._own:
                holder.update({key: new[id(x)] for key, x in holder.items() if id(x) in new})

    def leave(self) -> None:
        """RunError where the script keeps a parameter elsewhere, or a module of the model; a
        warning where it keeps the model.
        """
        if any(param() is not None for param in self._params.values()):
            gc.collect()  # modules that refer to each other
        alive = [name for name, param in self._params.items() if param() is not None]
        if not alive:
            return
        model = self._model()
        if model is None:
            raise _kept(alive[0])
        inside = _references_in(model)
        for name in alive:
            param = self._params[name]()
            if sys.getrefcount(param) > _OWN_REFERENCES + inside[id(param)]:
                raise _kept(name)
        warnings.warn(
            f"partc: the script keeps the {self._name} that it gave to parallelize, whose weights "
            "are trained no more from the first step on. Keep what parallelize gave in its place: "
            "model = partc.parallelize(model, ...); another loss of it is model.also(loss)",
            stacklevel=2,
        )


def _own_containers(model: nn.Module) -> Iterator[Any]:
    """The tables of a model's modules, and what else they have of lists (as LSTMs) and dicts."""
    for module in model.modules():
        yield from (each for each in vars(module).values() if type(each) in (list, dict, tuple))


def _references_in(model: nn.Module) -> Counter[int]:
    """How often a model's own containers have each object, by its id."""
    found: Counter[int] = Counter()
    for each in _own_containers(model):
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


def _kept(name: str) -> RunError:
    return RunError(
        where=f"the first step: {name}",
        what="the script keeps this parameter, or its module, from before the first step",
        why="the model has other parameters from now on. They are put into optimizers, lists and "
        "dicts; what else has the old ones would read and write what is not trained",
        do="Take parameters and modules of the model behind its first step; or compile before they "
        "are taken: model.compile_for(*batch), with any batch of the same shapes. Variables keep "
        "them too, that of a loop the last one: del them (del net) before that.",
    )
