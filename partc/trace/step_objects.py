"""Refuse a step that exchanges modules, parameters or hooks of the model, or ties their memory.

A program has the modules, parameters and hooks that the model had when it was compiled, and knows
a parameter by its name. A step that puts others there, such as a copy of a layer, would compute
with them from the next step on. Buffers alone may be set to new values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from partc.errors import TraceError
from partc.graph.fake_calls import storage_of
from partc.plan.sharding import DTYPE_NAMES
from partc.trace.closed_over import overlap
from partc.trace.param_hooks import place_of
from partc.trace.untouched import hooks_of

_BY_NAME = "a program has what the model had under this name when it was compiled"
_RENEW = (
    "Keep it, and put what a step renews into a buffer, which programs carry from step to step: "
    "self.old = layer.weight.detach().clone(), where old is a buffer."
)
_OF_FAKES = {*dir(FakeTensor), "_is_param", "fake_mode", "fake_device", "constant", "real_tensor"}


class StepObjects:
    """The objects that a model has under its names while a step begins to run on fakes.

    ``fakes``: by name, aliases too, what stands for the parameters and buffers that are traced.
    ``params``: the model's own parameters by name.
    """

    def __init__(
        self, model: nn.Module, fakes: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> None:
        self.model, self.fakes, self.params = model, dict(fakes), params
        self.mine = {id(self.fakes[name]) for name in params}
        self.known = dict(model.named_parameters(remove_duplicate=False)).keys()
        self.modules = dict(_modules(model))
        self.ids = {id(each) for each in self.modules.values()}
        self.hooks = {name: hooks_of(each) for name, each in self.modules.items()}
        self.states = {name: _state(each) for name, each in self.fakes.items()}
        self.versions = {name: each._version for name, each in self.fakes.items()}
        self.attributes = {name: _attributes(each) for name, each in params.items()}

    def check(self) -> None:
        """TraceError if others are there now than when the step began."""
        self._check_modules()
        self._check_hooks()
        now = _tensors(self.model)
        for name, fake in self.fakes.items():
            if name not in now:
                raise _refusal(name, "the step removes it")
            if id(fake) in self.mine and now[name] is not fake:
                raise _refusal(name, "the step puts another parameter in its place")
        made = dict(self.model.named_parameters(remove_duplicate=False))
        for name in (n for n, x in made.items() if n not in self.known and id(x) not in self.mine):
            raise _made_here(name)
        for name, before in self.states.items():
            _check_state(name, before, _state(self.fakes[name]))
        for name, param in self.params.items():
            _check_attributes(name, self.attributes[name], _attributes(param))
        self._check_values({name: now[name] for name in self.fakes})

    def _check_modules(self) -> None:
        now = dict(_modules(self.model))
        for name, module in self.modules.items():
            if name not in now:
                raise _refusal(name, "the step removes this module")
            if now[name] is not module and not self._is_made_new(module, now[name]):
                raise _refusal(name, "the step puts another module in its place")
        for name, there in zip(self.modules, (n for n in now if n in self.modules), strict=True):
            if name != there:
                raise _refusal(there, "the step changes the order of the modules")

    def _is_made_new(self, before: nn.Module, module: nn.Module) -> bool:
        """Whether a module was made in this run, and has no tensor: ``self.act = nn.ReLU()``.

        The second run tells whether it computes the same.
        """
        return id(module) not in self.ids and not {**_tensors(before), **_tensors(module)}

    def _check_hooks(self) -> None:
        for name, module in self.modules.items():
            before, now = self.hooks[name], hooks_of(module)
            for key in now.keys() ^ before.keys():
                what = "puts a hook on" if key in now else "removes a hook from"
                raise TraceError(
                    where=f"{name or type(module).__name__} ({place_of({**now, **before}[key])})",
                    what=f"the step {what} this module",
                    why="the next step would run with other hooks than this one",
                    do="Register hooks before you compile, and remove them behind the steps.",
                )

    def _check_values(self, now: Mapping[str, Tensor]) -> None:
        """TraceError if a buffer has another form, or is memory of another tensor."""
        shared: dict[int, list[str]] = {}
        for name, tensor in now.items():
            before, after = _typed(self.fakes[name]), _typed(tensor)
            if before != after:
                raise _other_form(name, before, after)
            shared.setdefault(storage_of(tensor), []).append(name)
        for one, other in (pair for names in shared.values() for pair in combinations(names, 2)):
            is_new = now[one] is not self.fakes[one] or now[other] is not self.fakes[other]
            tied = self.fakes[one] is self.fakes[other] and now[one] is now[other]
            if is_new and not tied and self._matters(one, other) and overlap(now[one], now[other]):
                raise _shares(*((one, other) if now[one] is not self.fakes[one] else (other, one)))

    def _matters(self, *names: str) -> bool:
        """Whether tensors must not share memory: one is trained, or a step writes to it in place.

        Two buffers that each step sets anew are the same ever after.
        """
        fakes = {name: self.fakes[name] for name in names}
        return any(id(f) in self.mine or f._version != self.versions[n] for n, f in fakes.items())


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield from model.named_modules(remove_duplicate=False)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {**dict(named), **dict(model.named_buffers(remove_duplicate=False))}


def _state(fake: Tensor) -> tuple[int, bool, dict[str, Any]]:
    return storage_of(fake), fake.requires_grad, _attributes(fake)


def _attributes(tensor: Tensor) -> dict[str, Any]:
    """The attributes that the user has given to a tensor."""
    return {key: value for key, value in vars(tensor).items() if key not in _OF_FAKES}


def _typed(tensor: Tensor) -> str:
    """``f32[8,4]``."""
    sizes = ",".join(map(str, tensor.shape))
    return f"{DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}[{sizes}]"


# what is refused ------------------------------------------------------------------------------
def _refusal(name: str, what: str) -> TraceError:
    return TraceError(where=name, what=what, why=_BY_NAME, do=_RENEW)


def _made_here(name: str) -> TraceError:
    return TraceError(
        where=name, what="the step makes this parameter",
        why="the model had none of this name when the step began, so that no optimizer has it",
        do="Make it in __init__; or run the model once on a batch before, without partc, and make "
        "the optimizer behind that.",
    )  # fmt: skip


def _check_state(name: str, before: tuple[Any, ...], now: tuple[Any, ...]) -> None:
    if before[0] != now[0]:
        raise TraceError(
            where=name,
            what="the step assigns to its .data",
            why="a trace records no assignment to .data",
            do="Set a buffer itself (self.mean = ...); change a parameter outside of the step.",
        )
    if before[1] != now[1]:
        raise TraceError(
            where=name,
            what=f"the step sets its requires_grad to {now[1]} and leaves it so",
            why="a program computes the same gradients in every step",
            do="Freeze it before you compile; compile again to train other parameters.",
        )
    _check_attributes(name, before[2], now[2])


def _check_attributes(name: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    for key in {**before, **now}:
        if key not in now or key not in before or before[key] is not now[key]:
            raise TraceError(
                where=f"{name}.{key}",
                what="the step sets this attribute of a parameter",
                why="a program runs no Python of the model, and has its own parameters",
                do="Keep a tensor in a buffer of the module, and a number outside of the step.",
            )


def _other_form(name: str, before: str, after: str) -> TraceError:
    return TraceError(
        where=name,
        what=f"it is {before}, and the step makes it {after}",
        why="a program keeps one memory for it in all steps",
        do="Register the buffer with the shape and dtype that it keeps.",
    )


def _shares(name: str, other: str) -> TraceError:
    return TraceError(
        where=name,
        what=f"the step makes it share memory with {other}",
        why="it would change with the other from then on, and ranks keep two values",
        do="Put a copy there: self.old = self.layer.weight.detach().clone().",
    )
