"""Find what a step can reach besides its inputs, along the names that its functions read.

Each value has the name under which the user knows it: ``model.attn.scale``, ``weights[0] of
loss_of``, ``teacher.0.weight of loss_of``.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import Tensor, nn

from partc.trace.code_names import names_in
from partc.trace.owners import ABSENT, DEFAULTS, entries, getattr_dict, in_class, slots, static
from partc.trace.ran import Ran
from partc.trace.source_lines import line_text
from partc.trace.states import FIXED, MOST

MOST_PLACES = 20_000
DEEP = 6  # objects and lists in one another
_INNER = {name for name in vars(nn.Module()) if name != "training"}  # torch's own attributes
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CALLED = {"forward", "backward", "setup_context"}  # by torch
_CONTAINERS = (dict, list, tuple, deque)
_LEFT = {"partc", "logging", "warnings", "threading", "weakref", "inspect", "typing"}
_MADE_UP = {"__dict__", "attrgetter"}  # by which code reads attributes whose names it makes up
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "partc"}
_INSTALLED = {"site-packages", "dist-packages"}
Reads = set[tuple[type, str]]  # class and name of the attributes that a step has read


@dataclass(frozen=True)
class Place:
    """A value by name; ``owner`` is the object that has it, ``key`` its attribute or index there.

    ``outer`` is the place of the owner, if that is itself an entry or attribute of another object.
    ``again``: the value is an object that another place has too, where what is inside of it is.
    """

    name: str
    value: Any
    owner: Any
    key: Any
    outer: Place | None = None
    again: bool = False

    @property
    def root(self) -> Place:
        """The attribute or variable that the value is in, or is."""
        return self.outer.root if self.outer else self

    @property
    def depth(self) -> int:
        return self.outer.depth + 1 if self.outer else 0


@dataclass
class _Holder:
    """An object whose attributes are looked at under the names that code reads."""

    name: str
    owner: Any
    of: str
    place: Place | None = None
    asked: set[str] = field(default_factory=set)

    @cached_property
    def keys(self) -> set[str]:
        """The names of its attributes; of those that its class has, the user's alone."""
        own = set(getattr_dict(self.owner)) | {key for key, _ in slots(self.owner)}
        if isinstance(self.owner, nn.Module):
            own = set()  # were met with the module
        kind = self.owner if isinstance(self.owner, type) else type(self.owner)
        return own | class_keys(kind)


@dataclass
class Walk:
    """A walk along references, which visits each object once.

    ``reads``: the attributes that the step has read, if that is known; others are left out then.
    ``ran``: the code that has run, if that is known; functions are not followed into other code
    then.
    ``of`` ends the names of what a function reaches, such as `` of loss_of``. ``unseen``: the names
    of objects in which nothing was looked at, as they lie too deep or are too many.
    """

    reads: Reads | None = None
    watched: frozenset[type] = frozenset()  # classes of which ``reads`` has every attribute
    ran: Ran | None = None
    found: list[Place] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=lambda: set(_CALLED))
    holders: list[_Holder] = field(default_factory=list)
    left: deque[tuple[Place, str]] = field(default_factory=deque)
    met: set[tuple[int, Any]] = field(default_factory=set)  # owners and keys
    alive: list[Any] = field(default_factory=list)  # so that no other object gets the same id
    classes: set[int] = field(default_factory=set)
    functions: set[int] = field(default_factory=set)
    codes: set[CodeType] = field(default_factory=set)
    unseen: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)  # of hooks and lambdas, by such an end
    makes_up: bool = False  # whether a script reads attributes by names that stand nowhere

    def step(self, model: nn.Module, objective: Callable[..., Any]) -> None:
        """Find what ``objective(model, *inputs)`` reaches."""
        self.seen |= {id(module) for module in model.modules()}
        for path, module in model.named_modules():
            self._module(f"model.{path}" if path else "model", module, None, "")
        for code, known in (self.ran or {}).items():
            if not is_library(str(known.get("__name__", ""))):
                self._read_by(code, known, f" of {code.co_name}")
        self._function(objective, "")
        while self.left or self._ask():
            while self.left and len(self.found) < MOST_PLACES:
                self._visit(*self.left.popleft())
            if self.left:
                first = self.left[0][0].name
                self.unseen.append(f"{first}, and what comes after it: over {MOST_PLACES} objects")
                return

    def _ask(self) -> bool:
        """Look at the holders' attributes under names that are new; whether there was one."""
        for holder in list(self.holders):
            for key in sorted(self._named(holder) - holder.asked):
                holder.asked.add(key)
                value = static(holder.owner, key)
                if value is not ABSENT:
                    self._attribute(holder, key, value)
        return bool(self.left)

    def _named(self, holder: _Holder) -> set[str]:
        """Its attributes under names that code has, or that a step made up and has read."""
        made_up = self._read_of.get(type(holder.owner), set())
        if self.makes_up and type(holder.owner) is SimpleNamespace:  # whose reads nobody can note
            self.names |= holder.keys
        return holder.keys if "__dict__" in made_up else holder.keys & (self.names | made_up)

    @cached_property
    def _read_of(self) -> dict[type, set[str]]:
        """The names of the attributes that the step has read, by class."""
        found: dict[type, set[str]] = defaultdict(set)
        for kind, name in self.reads or ():
            found[kind].add(name)
        return found

    def _attribute(self, holder: _Holder, key: str, value: Any) -> None:
        inherited = in_class(holder.owner, key)
        if inherited and hasattr(type(value), "__get__"):
            self._function(value, "")
        elif isinstance(holder.owner, nn.Module) and not inherited:
            return  # was met with the module
        elif self._is_read(holder.owner, key):
            name = f"{holder.name}.{key}{holder.of}"
            self._later(Place(name, value, holder.owner, key, holder.place), holder.of)

    def _is_read(self, owner: Any, key: str) -> bool:
        kind = type(owner)
        if self.reads is None or not (isinstance(owner, nn.Module) or kind in self.watched):
            return True
        plain = not isinstance(owner, nn.Module)
        return (kind, key) in self.reads or (plain and (kind, "__dict__") in self.reads)

    def _later(self, place: Place, of: str) -> None:
        at = id(place.owner), place.key
        if at not in self.met:
            self.met.add(at)
            self.alive.append(place.owner)
            self.left.append((place, of))

    def _visit(self, place: Place, of: str) -> None:
        """Note a value, and put what is inside of it on the list."""
        value = place.value
        if isinstance(value, (*FIXED, Tensor)):
            self.found.append(place)
            return
        if _is_left(value):
            if isinstance(value, WeakKeyDictionary | WeakValueDictionary):
                self.found.append(place)  # a cache; its entries are of no other place
            return
        if id(value) in self.seen:
            if not isinstance(value, nn.Module | type | ModuleType):
                self.found.append(replace(place, again=True))
            return
        self.seen.add(id(value))
        self.found.append(place)
        if place.depth < DEEP:
            self._inside(place, of)
        elif any(True for _ in entries(value)):
            self.unseen.append(f"what is in {place.name}, {DEEP} objects deep")

    def _inside(self, place: Place, of: str) -> None:
        value, name = place.value, place.name.removesuffix(of)
        if isinstance(value, MethodType | partial) or function_in(value):
            self._function(value, of)
        elif isinstance(value, nn.Module):
            for path, module in value.named_modules(prefix=name):
                if module is value or id(module) not in self.seen:
                    self.seen.add(id(module))
                    self._module(path, module, place, of)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, ModuleType):
            if not is_library(value.__name__):
                self.holders.append(_Holder(name, value, of))
        else:
            if isinstance(value, _CONTAINERS) and len(value) > MOST:
                self.unseen.append(f"the entries of {place.name} behind the first {MOST}")
            for key, each in entries(value):
                spelled = f"[{key!r}]" if isinstance(value, _CONTAINERS) else f".{key}"
                self._later(Place(f"{name}{spelled}{of}", each, value, key, place), of)
            if not isinstance(value, _CONTAINERS) or not is_library(type(value).__module__):
                self._class(type(value))
                self.holders.append(_Holder(name, value, of, place))

    def _class(self, kind: type) -> None:
        """The functions of a user's class that run without being named, and others by name."""
        for each in kind.__mro__:
            if id(each) in self.classes or is_library(each.__module__):
                continue
            self.classes.add(id(each))
            self.holders.append(_Holder(each.__name__, each, ""))
            for key, value in list(vars(each).items()):
                if key.startswith("__") and not issubclass(each, nn.Module):
                    self._function(value, "")

    def _module(self, name: str, module: nn.Module, outer: Place | None, of: str) -> None:
        """The attributes of a module; of one beside the model its tensors too."""
        own = vars(module)
        if outer is not None:
            own = {**module._parameters, **module._buffers, **own}
        for key, value in list(own.items()):
            if key not in _INNER and (isinstance(value, Tensor) or self._is_read(module, key)):
                self._later(Place(f"{name}.{key}{of}", value, module, key, outer), of)
        for hooks in _HOOKS:
            for hook in list(own[hooks].values()):
                self._function(hook, "", f", a {hooks.strip('_s').replace('_', ' ')} of {name}")
        self._class(type(module))
        if not is_library(type(module).__module__):
            self.holders.append(_Holder(name, module, of, outer))

    # functions -------------------------------------------------------------------------------
    def _function(self, function: Any, of: str, as_what: str = "") -> None:
        """The variables of a function from outside of it, and of those that it was made of.

        ``as_what``: what follows its name where it stands with no name that a line has.
        """
        function = function_in(function) or function
        if isinstance(function, partial):
            self._partial(function)
            function = function.func
        if isinstance(function, MethodType):
            self._bound(function)
            function = function.__func__
        if not isinstance(function, FunctionType):
            if callable(function) and getattr_dict(function) and not isinstance(function, type):
                self._later(Place(type(function).__name__, function, [function], 0), "")
            return
        if id(function) in self.functions:
            return
        self.functions.add(id(function))
        ours = is_ours(function)
        of = of if ours else f" of {function.__name__}{as_what}".replace("<lambda>", "a lambda")
        if not ours and (as_what or "a lambda" in of):
            code = function.__code__
            self.lines[of] = line_text(code.co_filename, code.co_firstlineno)
        self._closed_over(function, of)
        if self._follows(function):
            self._read_by(function.__code__, function.__globals__, of)
            for name, key, value in _defaults(function):
                self._later(Place(f"{name}{of}", value, function, key), of)
        if vars(function):
            self.holders.append(_Holder(function.__name__, function, ""))

    def _follows(self, function: FunctionType) -> bool:
        if is_library(str(function.__globals__.get("__name__", ""))):
            return False
        return self.ran is None or function.__code__ in self.ran

    def _partial(self, function: partial[Any]) -> None:
        given: dict[Any, Any] = {**dict(enumerate(function.args)), **function.keywords}
        for key, each in given.items():
            of = " of the loss"
            self._later(Place(f"argument {key}{of}", each, function, key), of)

    def _bound(self, method: MethodType) -> None:
        """The attributes that are read of a method's object."""
        owner, of = method.__self__, f" of {method.__name__}"
        if id(owner) not in self.seen and not isinstance(owner, type):
            self.seen.add(id(owner))
            self._class(type(owner))
            self.holders.append(_Holder("self", owner, of))

    def _closed_over(self, function: FunctionType, of: str) -> None:
        """The variables of a function from around it; of a library's the functions alone."""
        ours = is_ours(function)
        others = ours or is_library(str(function.__module__))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            with suppress(ValueError):  # of a variable that has no value yet
                held = cell.cell_contents
                if ours and isinstance(held, FunctionType) and is_ours(held):
                    self._function(held, of)  # partc wraps a loss more than once
                elif not others or callable(held):
                    name = "loss" if ours else f"{name}{of}"
                    self._later(Place(name, held, cell, "cell_contents"), of)
        wrapped = vars(function).get("__wrapped__")
        if wrapped is not None:
            self._function(wrapped, of)

    def _read_by(self, code: CodeType, known: dict[str, Any], of: str) -> None:
        """The globals, attributes and imported modules that code reads."""
        if code in self.codes:
            return
        self.codes.add(code)
        read = names_in(code)
        self.names.update(read.attributes)
        is_script = "site-packages" not in code.co_filename
        self.makes_up |= is_script and not _MADE_UP.isdisjoint({*read.attributes, *read.globals})
        for name in read.globals:
            if name in known:
                self._later(Place(f"{name}{of}", known[name], known, name), of)
        for name in read.imports:
            if name in sys.modules and not is_library(name):
                self._later(Place(f"{name}{of}", sys.modules[name], sys.modules, name), of)


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any, Any]]:
    """The parameters that have a default: name, place in the function and value."""
    given = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    for i, (name, value) in enumerate(zip(names[len(names) - len(given) :], given, strict=True)):
        yield name, (DEFAULTS, i), value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield name, (DEFAULTS, name), value


def function_in(value: Any) -> Any:
    """The function that a property, a class method or a wrapper calls; None for what is none."""
    if isinstance(value, FunctionType):
        return value
    if isinstance(value, property):
        return value.fget
    if isinstance(value, cached_property):
        return value.func
    wraps = type(value).__name__ in ("staticmethod", "classmethod", "_lru_cache_wrapper")
    return function_in(value.__wrapped__) if wraps else None


def is_ours(function: Any) -> bool:
    """Whether partc has a function; one that ``exec`` made may name no module."""
    return str(getattr(function, "__module__", "")).startswith("partc.")


def class_keys(kind: type) -> frozenset[str]:
    """The names that a class and its bases define, without those of libraries."""
    own = [each for each in kind.__mro__ if not is_library(each.__module__)]
    return frozenset(key for each in own for key in vars(each) if not key.startswith("__"))


@cache
def is_library(module: str) -> bool:
    """Whether the functions of a Python module are taken to hold no numbers of the step.

    So it is with installed packages: their registries and caches grow with whatever is imported.
    """
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return top in _LIBRARIES or not _INSTALLED.isdisjoint(Path(file).parts)


def _is_left(value: Any) -> bool:
    """Whether a value is none of a step: a function of partc, a logger, a lock."""
    kind = type(value) if not isinstance(value, type | FunctionType) else value
    return str(getattr(kind, "__module__", "")).partition(".")[0] in _LEFT
