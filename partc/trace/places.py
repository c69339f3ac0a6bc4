"""Find what a step can reach besides its inputs: attributes of modules, variables of its functions.

Each value has the name under which the user knows it: ``model.attn.scale``, ``weights[0] of
loss_of``, ``teacher.0.weight of loss_of``.
"""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

NUMBERS = (bool, int, float, complex, str, type(None))
MOST = 200  # entries of a list or dict that are looked at
DEPTH = 2  # of lists in lists; of plain objects the attributes alone are looked at
_CONTAINERS = (dict, list, tuple, deque)
_INNER = {name for name in vars(nn.Module()) if name != "training"}  # torch's own attributes
_OURS = "partc."


@dataclass(frozen=True)
class Place:
    """A value by name; ``owner`` is the object that has it, ``key`` its attribute or index there.

    ``outer`` is the place of the owner, if that is itself an entry or attribute of another object;
    ``attribute`` the class and name of the model's attribute that the value is in.
    """

    name: str
    value: Any
    owner: Any
    key: Any
    outer: Place | None = None
    attribute: tuple[type, str] | None = None

    def inside(self, name: str, value: Any, owner: Any, key: Any) -> Place:
        """A value that is in this one."""
        return Place(name, value, owner, key, self, self.attribute)

    @property
    def root(self) -> Place:
        """The attribute or variable that the value is in, or is."""
        return self.outer.root if self.outer else self


@dataclass(frozen=True)
class Reach:
    """What a step can reach at some time, without the model's parameters and buffers.

    ``attributes``: the names of attributes that its functions read of any object.
    """

    places: tuple[Place, ...]
    attributes: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, objective: Callable[..., Any]) -> Reach:
        """What ``objective(model, *inputs)`` can reach now."""
        walk = _Walk()
        found = tuple(walk.step(model, objective))
        return cls(found, frozenset(name for code in walk.codes for name in _attributes(code)))

    def numbers(self) -> dict[str, str]:
        """Numbers, and the lengths of lists, by name."""
        found = {}
        for place in self.places:
            if isinstance(place.value, NUMBERS):
                found[place.name] = repr(place.value)
            elif isinstance(place.value, list | dict | set):
                found[f"len({place.name})"] = repr(len(place.value))
        return found


@dataclass
class _Walk:
    """A walk along references, which visits each object once.

    ``codes`` has the code of the functions that were met. ``of`` ends the names of what a function
    reaches, such as `` of loss_of``.
    """

    seen: set[int] = field(default_factory=set)
    codes: list[CodeType] = field(default_factory=list)

    def step(self, model: nn.Module, objective: Callable[..., Any]) -> Iterator[Place]:
        self.seen |= {id(module) for module in model.modules()}
        for path, module in model.named_modules():
            name = f"model.{path}" if path else "model"
            for key, value in list(vars(module).items()):
                if key not in _INNER:
                    own = type(module), key
                    place = Place(f"{name}.{key}", value, module, key, attribute=own)
                    yield from self.value(place, "")
        yield from self.function(objective, "")
        for kind in dict.fromkeys(type(module) for module in model.modules()):
            if not kind.__module__.startswith("torch."):
                yield from self.function(kind.forward, "")

    def value(self, place: Place, of: str, depth: int = DEPTH) -> Iterator[Place]:
        """A value and what is inside of it."""
        value = place.value
        if isinstance(value, (*NUMBERS, Tensor)):
            yield place
            return
        ours = isinstance(value, FunctionType) and _is_ours(value)
        if id(value) in self.seen or ours:
            return
        self.seen.add(id(value))
        yield place
        if isinstance(value, FunctionType | MethodType | partial):
            yield from self.function(value, of)
        elif isinstance(value, nn.Module):
            yield from self._outer_module(place, value, of)
        elif depth:
            name = place.name.removesuffix(of)
            within = depth - 1 if isinstance(value, _CONTAINERS) else 0
            for key, each in _entries(value):
                inner = place.inside(f"{name}{_spelled(value, key)}{of}", each, value, key)
                yield from self.value(inner, of, within)

    def _outer_module(self, place: Place, outer: nn.Module, of: str) -> Iterator[Place]:
        """The tensors and attributes of a module that is no part of the model, as a teacher."""
        for path, module in outer.named_modules(prefix=place.name.removesuffix(of)):
            if module is not outer and id(module) in self.seen:
                continue
            self.seen.add(id(module))
            own = {**module._parameters, **module._buffers, **vars(module)}
            for key, each in own.items():
                if key not in _INNER:
                    inner = place.inside(f"{path}.{key}{of}", each, module, key)
                    yield from self.value(inner, of)

    def function(self, function: Any, of: str) -> Iterator[Place]:
        """The variables of a function from outside of it, and of those that it was made of."""
        if isinstance(function, partial):
            given: dict[Any, Any] = {**dict(enumerate(function.args)), **function.keywords}
            for key, each in given.items():
                place = Place(f"argument {key} of the loss", each, function, key)
                yield from self.value(place, " of the loss")
            function = function.func
        if isinstance(function, MethodType):
            yield from self._bound(function)
            function = function.__func__
        if not isinstance(function, FunctionType):
            return
        self.codes.append(function.__code__)
        if not _is_ours(function):
            of = f" of {function.__name__}".replace("<lambda>", "a lambda")
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            with suppress(ValueError):  # of a variable that has no value yet
                place = Place(f"{name}{of}", cell.cell_contents, cell, "cell_contents")
                yield from self.value(place, of)
        known = function.__globals__
        for name in _globals(function.__code__):
            if name in known and _is_variable(known[name], function):
                yield from self.value(Place(f"{name}{of}", known[name], known, name), of)

    def _bound(self, method: MethodType) -> Iterator[Place]:
        """The attributes that a method's code reads from its object, of those that are there."""
        owner, code = method.__self__, getattr(method.__func__, "__code__", None)
        if id(owner) in self.seen or code is None:
            return
        of = f" of {method.__name__}"
        for key in _attributes(code):
            if key in getattr(owner, "__dict__", {}):
                yield from self.value(Place(f"self.{key}{of}", vars(owner)[key], owner, key), of)


def _is_ours(function: FunctionType) -> bool:
    """Whether partc has a function; one that ``exec`` made may name no module."""
    return str(function.__module__).startswith(_OURS)


def _is_variable(value: Any, function: FunctionType) -> bool:
    """Whether a global that a function reads is a value, or a function beside it."""
    if isinstance(value, FunctionType):
        return value.__module__ == function.__module__
    return isinstance(value, (*NUMBERS, Tensor, nn.Module, list, tuple, dict, deque))


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """The first entries of a list or dict, or the attributes of a plain object."""
    if isinstance(value, dict):
        yield from list(value.items())[:MOST]
    elif isinstance(value, list | tuple | deque):
        yield from list(enumerate(value))[:MOST]
    elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
        yield from list(vars(value).items())[:MOST]


def _spelled(owner: Any, key: Any) -> str:
    return f"[{key!r}]" if isinstance(owner, _CONTAINERS) else f".{key}"


def _globals(code: CodeType) -> tuple[str, ...]:
    """The global names that a function's code reads, also inside of functions that it defines."""
    return _loaded(code, ("LOAD_GLOBAL",))


def _attributes(code: CodeType) -> tuple[str, ...]:
    """The attributes that a function's code reads of any object."""
    return _loaded(code, ("LOAD_ATTR", "LOAD_METHOD"))


@lru_cache(1000)
def _loaded(code: CodeType, ops: tuple[str, ...]) -> tuple[str, ...]:
    own = [str(each.argval) for each in dis.get_instructions(code) if each.opname in ops]
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return tuple(dict.fromkeys([*own, *(name for each in inner for name in _loaded(each, ops))]))


# leaving them as they were ------------------------------------------------------------------------
@contextmanager
def restored(reach: Reach) -> Iterator[None]:
    """Restore what a run changes in lists, dicts, plain objects and variables that it can reach.

    The attributes of the model's own modules are restored by ``capture.untouched``.
    """
    before = [(place, _content(place.value)) for place in reach.places]
    try:
        yield
    finally:
        for place, content in before:
            _restore(place, content)


def _content(value: Any) -> Any:
    if isinstance(value, list | dict | deque | set):
        return value.copy()
    plain = hasattr(value, "__dict__") and not isinstance(value, nn.Module | type | ModuleType)
    return dict(vars(value)) if plain and not isinstance(value, Tensor | FunctionType) else None


def _restore(place: Place, content: Any) -> None:
    value = place.value
    if isinstance(place.owner, CellType) and place.owner.cell_contents is not value:
        place.owner.cell_contents = value
    own = vars(place.owner) if isinstance(place.owner, nn.Module) else {}
    if own.get(place.key, value) is not value:
        own[place.key] = value
    if content is None or _is_same(_content(value), content):
        return
    inner = value if isinstance(value, list | dict | deque | set) else vars(value)
    inner.clear()
    (inner.extend if isinstance(inner, list | deque) else inner.update)(content)


def _is_same(now: Any, before: Any) -> bool:
    """Whether two copies of a container hold the same objects."""
    if len(now) != len(before):
        return False
    entries = (now.items(), before.items()) if isinstance(now, dict) else (now, before)
    return all(map(_is_same_entry, *entries))


def _is_same_entry(now: Any, before: Any) -> bool:
    pair = isinstance(now, tuple) and isinstance(before, tuple) and len(now) == len(before) == 2
    return all(a is b for a, b in zip(now, before, strict=True)) if pair else now is before
