"""A registry maps names to values; a lookup of an unknown name lists the names that exist."""

from collections.abc import Callable, ItemsView, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar

from partc.errors import UsageError

T = TypeVar("T")


def is_again(new: Any, old: Any) -> bool:
    """Whether a function is another of the same place defined anew, as a notebook's cell does.

    In a module that is imported once, the same name twice is a mistake, and so it is at two lines
    of one script.
    """
    if is_said_twice(place_of(new), place_of(old)):
        return False
    places = [(getattr(f, "__module__", ""), getattr(f, "__qualname__", "")) for f in (new, old)]
    return places[0] == places[1] and places[0][0] == "__main__" and "<lambda>" not in places[0][1]


Place = tuple[Any, str, int]  # the names of a module as it runs, a file, a line


def place_of(function: Any) -> Place:
    """Where a function was defined."""
    code = getattr(function, "__code__", None)
    names = getattr(function, "__globals__", None)
    return names, getattr(code, "co_filename", ""), getattr(code, "co_firstlineno", 0)


def is_said_twice(new: Place, old: Place) -> bool:
    """Whether one run of a script says something at two of its lines; cells are no files."""
    names, file, line = new
    return names is old[0] and file == old[1] and line != old[2] and Path(file).is_file()


class Registry(Generic[T]):
    """Values of one kind (schedules, passes, rules) by name, in the order of registration."""

    def __init__(self, kind: str) -> None:
        """Name the kind in the singular, as messages use it: `Registry("schedule")`."""
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, value: T) -> T:
        """Register the value under the name and return the value; UsageError for a taken name."""
        if name in self._entries:
            raise UsageError(
                where=f"{self.kind} {name!r}", what="the name is taken",
                why=f"each {self.kind} is known by a name of its own, and there are "
                f"{', '.join(self)}",
                do="Give yours another name.",
            )  # fmt: skip
        return self._entries.setdefault(name, value)

    def replace(self, name: str, value: T) -> T:
        """Put the value in the place of the one that the name has; return it."""
        self._entries[name] = value
        return value

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that registers a function or class under the name and leaves it unchanged."""
        return lambda value: self.add(name, value)

    def __getitem__(self, name: str) -> T:
        """The value under the name; UsageError lists close names, or all names if none is close."""
        if name in self._entries:
            return self._entries[name]
        near = get_close_matches(name, self._entries)
        known = f"Known: {', '.join(self) or 'none'}."
        do = f"Did you mean {' or '.join(near)}?" if near else known
        raise UsageError(where=self.kind, what=f"no {self.kind} is named {name!r}", why="", do=do)

    def items(self) -> ItemsView[str, T]:
        """Every name with its value, in the order of registration."""
        return self._entries.items()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
