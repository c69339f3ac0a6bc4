"""Modules of a model's classes without its tensors, and whether a script has changed them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from partc.errors import RunError
from partc.program.model.closures import closed_over, over_others
from partc.program.model.parametrized import class_of_copy
from partc.program.model.read_numbers import ReadNumbers
from partc.program.tensors.elsewhere import Table
from partc.trace.frozen_numbers import CHANGING, Number

TABLES = ("_parameters", "_buffers", "_modules")
AT_ONCE = 100  # things that one step looks at, which takes some 10 us
T = TypeVar("T")


class Turns(Generic[T]):
    """Things of which each step looks at some, all of them in turn."""

    def __init__(self, every: Sequence[T]) -> None:
        self.every, self.next = every, 0

    def some(self) -> Sequence[T]:
        """Those whose turn it is."""
        first = self.next
        self.next = first + AT_ONCE if first + AT_ONCE < len(self.every) else 0
        return self.every[first : first + AT_ONCE]


class Likeness:
    """Modules of a model's classes, with its plain attributes and without its tensors.

    The model's own modules are not kept, so that its memory goes when the script lets it go.
    ``root``: the whole. ``read``: what a forward reads of the modules, as it was compiled.
    """

    def __init__(self, model: nn.Module, read: ReadNumbers) -> None:
        made: dict[nn.Module, nn.Module] = {}
        self.root, self.read = _like(model, made), read
        point_at_twins(made)
        self._tables = {twin: _tables(module, made) for module, twin in made.items()}
        self._own_tensors = _own_tensors(model, made)
        self._plain = {twin: dict(_numbers(twin)) for twin in made.values()}
        self._parts = {path: made[module] for path, module in model.named_modules()}
        self._modes = {path: flag for path, flag in read.modes.items() if path in self._parts}
        self.whole = True  # the mode that the whole was brought into
        self._numbers = Turns([*read.numbers.items()])
        self._others = Turns([*self._alike(read.others)])
        self._forwards: Turns[tuple[str, nn.Module, object]] = Turns([])
        self._children: Turns[tuple[str, dict[str, Any], object]] = Turns([])

    def _alike(self, others: Iterable[tuple[str, Number]]) -> Iterator[tuple[str, Number]]:
        """Of what a forward reads of the model's modules that which these modules have too; what
        has the model's own tensors gets those of the stage.
        """
        own = {(twin, attribute) for twin, attribute, _, _ in self._own_tensors}
        for path, number in others:
            twin = self._parts[path]
            if (twin, number.keys[0]) not in own and not number.differs(number.inside_of(twin)):
                yield path, number

    def clear(self) -> None:
        """Give each module its children; of its tensors only the names that stand for none."""
        for twin, tables in self._tables.items():
            for name, entries in tables.items():
                vars(twin)[name].clear()
                vars(twin)[name].update(entries)

    def show(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the stage's tensors where modules have their own (an LSTM its flat weights, a model a
        list of what decays), by name; None for one of another pipeline rank.
        """
        for twin, attribute, value, names in self._own_tensors:
            found = {key: tensors.get(name) for key, name in names.items()}
            vars(twin)[attribute] = _exchanged(value, found)

    def follow(self, mode: bool) -> None:
        """The whole was brought into a mode. In that in which it was compiled every part has to be
        in its mode of then; programs of the other one are compiled with the parts as they are now.
        """
        self.whole, alike = mode, mode == self.read.mode
        self._modes = {
            path: flag if alike else self._parts[path].training
            for path, flag in self.read.modes.items()
            if path in self._modes
        }

    def check_read(self, stage: nn.Module) -> None:
        """RunError if a part is in another mode than the program, or a number has changed that a
        forward reads; of many numbers each step looks at some.
        """
        for path, flag in {**self._modes, "": self.whole}.items():
            if (self._parts[path] if path else stage).training != flag:
                raise _other_mode(path, flag)
        if "forward" in vars(stage):
            raise _gone("stage.forward")
        for (path, name), value in self._numbers.some():
            part = self._part(stage, path, name)
            if part is not None and vars(part).get(name, value) != value:
                what = f"was {value!r}, is {vars(part)[name]!r}"
                raise _changed(f"{path}.{name}".strip("."), what)
        for path, number in self._others.some():
            part = self._part(stage, path, number.keys[0])
            if part is not None and number.differs(number.inside_of(part)):
                what = "it is not what it was when the program was compiled"
                raise _changed(f"{path}.{number.keys[0]}".strip("."), what, "tensors and lists")
        for path, part, forward in self._forwards.some():
            if vars(part).get("forward") is not forward:
                raise _gone(f"forward of {path}".removesuffix(" of "))
        for path, table, child in self._children.some():
            if table.get(path.rpartition(".")[2]) is not child:
                raise _gone(path)

    def _part(self, stage: nn.Module, path: str, name: str) -> nn.Module | None:
        """What has an attribute of the model's module at a path: the stage, of its own."""
        return stage if path == "" and name in vars(stage) else self._parts.get(path)

    def keep(self) -> None:
        """From now on modules and their forwards have to stay as they are."""
        parts = self._parts.items()
        self._forwards = Turns([(path, part, vars(part).get("forward")) for path, part in parts])
        self._children = Turns(
            [
                (f"{path}.{name}".strip("."), vars(part)["_modules"], child)
                for path, part in parts
                for name, child in vars(part)["_modules"].items()
            ]
        )

    def check(self) -> None:
        """RunError if a number, a flag or a word of a module has changed."""
        for path, twin in self._parts.items():
            known = self._plain[twin]
            for attribute, value in _numbers(twin):
                if known.get(attribute, value) != value:
                    what = f"was {known[attribute]!r}, is {value!r}"
                    raise _changed(f"{path}.{attribute}".strip("."), what)


def _like(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """A module like this one, with empty tables; ``made`` has those that were made, by original."""
    if module in made:
        return made[module]
    is_script = isinstance(module, torch.jit.ScriptModule)
    twin: nn.Module = object.__new__(nn.Module if is_script else class_of_copy(module))
    vars(twin).update(vars(nn.Module() if is_script else module))
    for name in TABLES:
        vars(twin)[name] = Table()
    vars(twin)["_non_persistent_buffers_set"] = set()
    made[module] = twin
    for child in module.children():
        _like(child, made)
    return twin


def point_at_twins(made: Mapping[nn.Module, nn.Module]) -> None:
    """Let plain attributes of the twins have twins where the model's have modules of the model.

    Adapters of peft have a method of the model inside, blocks of minGPT a lambda over a part of
    themselves: these would run on, and keep, the model's own.
    """
    for twin in made.values():
        for name, held in list(vars(twin).items()):
            if name not in TABLES and any(
                of in made for _, x in _held(held) for of in _modules_of(x)
            ):
                new = {key: _of_twin(x, made) for key, x in _held(held)}
                vars(twin)[name] = _exchanged(held, new)


def _held(value: Any) -> Iterator[tuple[Any, Any]]:
    """What a list, dict or tuple has, by key; what is none of these has itself."""
    entries = type(value) in (list, tuple, dict)
    yield from _entries(value) if entries else [(None, value)]


def _modules_of(value: Any) -> list[nn.Module]:
    """A module, that of which a bound method is, or those that a function takes from around it."""
    of = value.__self__ if isinstance(value, MethodType) else value
    every = closed_over(of) if isinstance(of, FunctionType) else [of]
    return [each for each in every if isinstance(each, nn.Module)]


def _of_twin(value: Any, made: Mapping[Any, nn.Module]) -> Any:
    if made.keys().isdisjoint(_modules_of(value)):
        return value
    if isinstance(value, FunctionType):
        return over_others(value, made)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, made[value.__self__])
    return made[value]


def _tables(module: nn.Module, made: dict[nn.Module, nn.Module]) -> dict[str, dict[str, Any]]:
    """What stays in the tables of a module's likeness when its tensors are registered anew."""
    return {
        table: {n: made[x] if x is not None else None for n, x in vars(module)[table].items()
                if x is None or isinstance(x, nn.Module)}
        for table in TABLES
    }  # fmt: skip


def _own_tensors(
    model: nn.Module, made: Mapping[nn.Module, nn.Module]
) -> list[tuple[nn.Module, str, Any, dict[Any, str]]]:
    """What modules have of the model's tensors beside their tables.

    The likeness, the attribute, its value without these tensors, and by key (None for the value
    itself) the name of each.
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    names = {id(tensor): name for name, tensor in named}
    found = []
    for module, twin in made.items():
        for attribute, value in vars(module).items():
            own = {key: names[id(x)] for key, x in _entries(value) if id(x) in names}
            if own and attribute not in TABLES:
                found.append((twin, attribute, _exchanged(value, dict.fromkeys(own)), own))
    return found


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Tensor):
        yield None, value
    elif type(value) is dict:
        yield from value.items()
    elif type(value) in (list, tuple):
        yield from enumerate(value)


def _exchanged(value: Any, new: Mapping[Any, Any]) -> Any:
    """A list, dict, tuple or tensor with some entries exchanged, by key."""
    if type(value) is dict:
        return {**value, **new}
    if type(value) in (list, tuple):
        return type(value)(new.get(i, x) for i, x in enumerate(value))
    return new[None]


def _numbers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The plain attributes of a module that a program may have been compiled with."""
    for name, value in vars(module).items():
        if name != "training" and isinstance(value, bool | int | float | str):
            yield name, value


def _changed(name: str, what: str, has: str = "numbers") -> RunError:
    return RunError(
        where=name,
        what=what,
        why=f"a program has the {has} of the model as they were when it was compiled",
        do=CHANGING,
    )


def _other_mode(path: str, compiled: bool) -> RunError:
    words = {True: "train", False: "eval"}
    this = f"stage.get_submodule({path!r})" if path else "stage"
    return RunError(
        where=path or "stage",
        what=f"it is in {words[not compiled]} mode, and the program has it in {words[compiled]} "
        "mode",
        why="a program was compiled with the mode of each module; stage.train() and stage.eval() "
        "change that of the whole",
        do=f"Bring this module back: {this}.{words[compiled]}(), or compile "
        f"the model with it in {words[not compiled]} mode.",
    )


def _gone(path: str) -> RunError:
    return RunError(
        where=path,
        what="it was taken away or replaced in the stage",
        why="the program computes with the modules that the model had when it was compiled",
        do="Change the model, and compile again.",
    )
