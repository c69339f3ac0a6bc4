"""Nested values as a description and the tensors in it: batches, and what a loss returns.

``{"ids": f32[8,64], "scale": 0.5}`` is the ``Tree`` of a dict with a tensor named ``ids`` and the
number 0.5. Programs compute with the tensors; everything else is part of the program. A tree is
plain data (``as_json``), so a saved program has it without pickle.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from torch import Tensor

Kind = Literal["tensor", "value", "tuple", "list", "dict", "fields", "left out"]
KINDS = ("tensor", "value", "tuple", "list", "dict", "fields", "left out")
Plain = bool | int | float | str | None
Key = str | int
MOST_DEEP = 100
OF_ROWS = "rows"  # of a number that follows from how many rows a rank was given


class TreeError(ValueError):
    """A value cannot be described, or is not as described; ``where`` is its path."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where, self.what = where, what


@dataclass(frozen=True)
class Tree:
    """The description of a nested value.

    - tensor: a tensor, which programs know by ``name``;
    - value: None, a bool, number or string, the ``plain`` one; ``of`` is ``OF_ROWS`` of a result
      that follows from the number of a rank's rows;
    - tuple, list, dict: ``entries`` by index or key;
    - fields: a named tuple or a dataclass, ``entries`` by field; ``of`` is its class, ``made`` the
      class itself in the process that has it;
    - left out: an argument's default that is none of these; ``of`` says what.
    """

    kind: Kind
    name: str = ""
    plain: Plain = None
    entries: tuple[tuple[Key, Tree], ...] = ()
    of: str = ""
    made: type | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without the class, which may be known to this process alone."""
        return Tree, (self.kind, self.name, self.plain, self.entries, self.of)

    def names(self) -> Iterator[str]:
        """The names of the tensors, in order."""
        if self.kind == "tensor":
            yield self.name
        for _, each in self.entries:
            yield from each.names()

    def parts(self) -> Iterator[Tree]:
        """This description, and those inside of it."""
        yield self
        for _, each in self.entries:
            yield from each.parts()

    @property
    def form(self) -> Tree:
        """The same without what numbers are: of which values there are tensors, or nothing."""
        number = self.kind == "value" and type(self.plain) in (int, float)
        entries = tuple((key, each.form) for key, each in self.entries)
        return dataclasses.replace(self, plain=0 if number else self.plain, entries=entries)

    def may_be(self, other: Tree) -> bool:
        """Whether a function may be called with either form: a part is left out, or None, or a word
        differs. A list where a tensor was is rather a mistake.
        """
        if self._is_word or other._is_word:
            return True
        mine, theirs = dict(self.entries), dict(other.entries)
        same = self.kind == other.kind and (self.kind == "dict" or {*mine} == {*theirs})
        return same and all(mine[key].may_be(theirs[key]) for key in {*mine} & {*theirs})

    @property
    def _is_word(self) -> bool:
        """Whether it is None, a truth or a string, or what is left out."""
        plain = self.kind == "value" and type(self.plain) not in (int, float)
        return plain or self.kind == "left out"

    # with tensors ----------------------------------------------------------------------------
    def tensors(self, value: Any, where: str) -> Iterator[Tensor]:
        """The tensors of a value that has to be as described, in order of ``names``.

        TreeError if it is not; ``where`` is its path for that. A list may stand for a tuple, and
        any mapping for a dict: the tensors are the same.
        """
        if self.kind == "tensor":
            if not isinstance(value, Tensor):
                raise TreeError(where, f"it was a tensor when compiled, and is {told(value)} now")
            yield value
        elif self.kind == "value":
            self._check_plain(value, where)
        elif self.kind == "left out":
            raise TreeError(where, f"it was left out when compiled (its default is {self.of})")
        else:
            found = self._found(value, where)
            for key, each in self.entries:
                yield from each.tensors(found[key], f"{where}.{key}")

    def _check_plain(self, value: Any, where: str) -> None:
        if isinstance(value, Plain) and _same(self.plain, value):
            return
        now = "a tensor" if isinstance(value, Tensor) else told(value)
        raise TreeError(where, f"it was {told(self.plain)} when compiled, and is {now} now")

    def _found(self, value: Any, where: str) -> Mapping[Key, Any]:
        """The entries of a value, of the same keys as the described ones."""
        found, known = _entries(value), dict(self.entries)
        in_a_row = self.kind in ("tuple", "list") and isinstance(value, list | tuple)
        if in_a_row:
            found = dict(enumerate(value))
        if found is None or not (in_a_row or _kind(value) == self.kind):
            raise TreeError(where, f"it was {self._told()} when compiled, and is {told(value)} now")
        for key in known:
            if key not in found:
                raise TreeError(f"{where}.{key}", "it is missing")
        for key in found:
            if key not in known:
                raise TreeError(f"{where}.{key}", "there was none when compiled")
        return found

    def _told(self) -> str:
        return f"a {self.of.rpartition(':')[2] or self.kind}"

    def built(self, tensors: Mapping[str, Tensor], *, alike: bool = False) -> Any:
        """The described value with these tensors.

        With ``alike`` a named tuple is a plain one, and a dataclass an object with the same
        attributes, which ``tensors`` takes for it. TreeError if this process lacks a class.
        """
        if self.kind == "tensor":
            return tensors[self.name]
        if self.kind == "value":
            return self.plain
        values = {key: each.built(tensors, alike=alike) for key, each in self.entries}
        if self.kind == "dict":
            return values
        if self.kind == "fields":
            fields = {str(key): each for key, each in values.items()}
            return Fields(**fields) if alike else _filled(self._class(), fields)
        return (tuple if self.kind == "tuple" else list)(values.values())

    def _class(self) -> type:
        """The class of a named tuple or dataclass, which has to be imported already."""
        found: Any = self.made
        if found is None:
            module, _, path = self.of.partition(":")
            found = sys.modules.get(module)
            for part in path.split("."):
                found = getattr(found, part, None)
        if not isinstance(found, type) or _fields_of(found) != [key for key, _ in self.entries]:
            raise TreeError(self.of, "this process has no such class")
        return found

    # as plain data ---------------------------------------------------------------------------
    def as_json(self) -> Any:
        """Plain data, which ``of_json`` reads."""
        if self.kind == "tensor":
            return {"tensor": self.name}
        if self.kind == "value":
            return {"value": self.plain, **({"of": self.of} if self.of else {})}
        if self.kind == "left out":
            return {"left out": self.of}
        entries = [[key, each.as_json()] for key, each in self.entries]
        return {self.kind: entries, **({"of": self.of} if self.of else {})}

    @classmethod
    def of_json(cls, data: Any, deep: int = 0) -> Tree:
        """Read ``as_json``; ValueError and alike for anything else."""
        kind = next((each for each in KINDS if each in data), None)
        if kind is None:
            raise ValueError(f"{data!r} describes no value")
        content, of = data[kind], data.get("of", "")
        if deep > MOST_DEEP or not isinstance(of, str) or {*data} - {kind, "of"}:
            raise ValueError(f"{data!r} describes no value")
        if kind == "tensor":
            return cls("tensor", name=_text(content))
        if kind == "value":
            if not isinstance(content, Plain):
                raise ValueError(f"{content!r} is no plain value")
            return cls("value", plain=content, of=OF_ROWS if of == OF_ROWS else "")
        if kind == "left out":
            return cls("left out", of=_text(content))
        entries = tuple((_key(key), cls.of_json(each, deep + 1)) for key, each in content)
        return cls(kind, entries=entries, of=of)  # type: ignore[arg-type]


class Fields(SimpleNamespace):
    """Stands for a named tuple or a dataclass whose class is not known."""


# values to trees ------------------------------------------------------------------------------
class Names:
    """Names for tensors by their paths: no two alike, and none of those that are ``taken``."""

    def __init__(self, taken: Sequence[str] = ()) -> None:
        self.taken, self.given = {*taken}, set[str]()

    def fresh(self, path: str) -> str:
        """``batch.ids`` for the path of that name; ``input_batch.ids`` if the model has one."""
        name = base = f"input_{path}" if path in self.taken else path
        number = 0
        while name in self.given | self.taken:
            number += 1
            name = f"{base}_{number}"
        self.given.add(name)
        return name


def tree_of(value: Any, path: str, names: Names, where: str, deep: int = 0) -> Tree:
    """The description of a value; its tensors are named after ``path`` and their place below it.

    TreeError at what no program can have as input or give back.
    """
    if isinstance(value, Tensor):
        return Tree("tensor", name=names.fresh(path or "extra"))
    if isinstance(value, Plain):
        return Tree("value", plain=_plain(value))
    entries = _entries(value)
    if entries is None or deep > MOST_DEEP:
        raise TreeError(where, f"it is {told(value)}")
    _check_rest(value, entries, where)
    found = []
    for key, each in entries.items():
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise TreeError(f"{where}[{key!r}]", f"its key is {told(key)}, no string or number")
        word = re.sub(r"[^\w\-]", "_", str(key), flags=re.ASCII)
        inner = f"{path}.{word}" if path else word
        found.append((key, tree_of(each, inner, names, f"{where}.{key}", deep + 1)))
    kind = _kind(value)
    made = type(value) if kind == "fields" else None
    of = f"{made.__module__}:{made.__qualname__}" if made else ""
    return Tree(kind, entries=tuple(found), of=of, made=made)


def filled(example: Any, tensors: Iterator[Tensor]) -> Any:
    """A value like the example, new down to its leaves, with the next tensors in place of its own.

    Containers are of the example's own classes.
    """
    if isinstance(example, Tensor):
        return next(tensors)
    entries = _entries(example)
    if isinstance(example, Plain) or entries is None:
        return example
    values = {key: filled(each, tensors) for key, each in entries.items()}
    if isinstance(example, list):
        return [*values.values()]
    if isinstance(example, tuple):
        made = type(example)
        return made(*values.values()) if hasattr(made, "_fields") else tuple(values.values())
    if _is_fields(example):
        return _with_fields(copy.copy(example), values)
    if type(example) is dict or not isinstance(example, MutableMapping):
        return values
    new: Any = copy.copy(example)
    for key, each in values.items():
        new[key] = each
    return new


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a value that ``tree_of`` describes, in the order of the tree's names."""
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, Plain):
        for each in (_entries(value) or {}).values():
            yield from tensors_of(each)


def _kind(value: Any) -> Kind:
    if _is_fields(value):
        return "fields"
    if isinstance(value, Mapping):
        return "dict"
    return "list" if isinstance(value, list) else "tuple"


def _entries(value: Any) -> Mapping[Any, Any] | None:
    """What a container has, by key, index or field; None for what is none that is known."""
    if isinstance(value, Fields):
        return vars(value)
    if _is_fields(value):
        return {name: getattr(value, name) for name in _fields_of(type(value))}
    if isinstance(value, Mapping):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, list | tuple) else None


def _is_fields(value: Any) -> bool:
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    plain = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return named or plain or isinstance(value, Fields)


def _fields_of(kind: type) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [each.name for each in dataclasses.fields(kind)]
    return list(getattr(kind, "_fields", ()))


def _check_rest(value: Any, entries: Mapping[Any, Any], where: str) -> None:
    """TreeError if an object has tensors beside its entries: a step would not see new ones."""
    own = getattr(value, "__dict__", {}) if _is_fields(value) else {}
    for name, each in own.items():
        if name not in entries and isinstance(each, Tensor):
            raise TreeError(f"{where}.{name}", "it is a tensor beside the fields of a dataclass")


def _filled(kind: type, fields: Mapping[str, Any]) -> Any:
    """A named tuple or dataclass of these fields."""
    if issubclass(kind, tuple):
        return kind(**fields)
    if issubclass(kind, Mapping):  # as the outputs of transformers' models
        return kind(**fields)
    return _with_fields(object.__new__(kind), fields)


def _with_fields(made: Any, fields: Mapping[str, Any]) -> Any:
    """A dataclass with its fields set, frozen or not."""
    for name, each in fields.items():
        if isinstance(made, Mapping):
            setattr(made, name, each)
        else:
            object.__setattr__(made, name, each)
    return made


def _plain(value: Any) -> Plain:
    """A plain value as its own kind: numpy's float64 is a float."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            plain: Plain = kind(value)
            return plain
    return None


def _same(known: Plain, value: Any) -> bool:
    now = _plain(value)
    return type(known) is type(now) and repr(known) == repr(now)


def told(value: Any) -> str:
    """A value in an error: ``the number 0.5``, ``None``, ``a list``."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float):
        return f"the number {value!r}"
    if isinstance(value, str):
        return f"the string {value!r}" if len(value) < 40 else "a string"
    name = type(value).__name__
    return f"an {name}" if name[:1] in "aeiouAEIOU" else f"a {name}"


def _text(data: Any) -> str:
    if not isinstance(data, str):
        raise ValueError(f"{data!r} is no text")
    return data


def _key(data: Any) -> Key:
    if isinstance(data, bool) or not isinstance(data, str | int):
        raise ValueError(f"{data!r} is no key")
    return data
