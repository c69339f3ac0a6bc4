"""A plan in the making, from the keys of another tool's configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from partc.errors import PlanError, UsageError
from partc.plan import Plan

# What becomes of a key: a function of its value that says so, or why there is nothing for it.
Entry = str | Callable[[Any, "Draft"], str]
Table = Mapping[str, Entry]
AXES = ("pp", "dp_replicate", "dp_shard", "dp", "tp")  # outermost first
LONGEST = 60  # characters of a value that a comment quotes


@dataclass
class Draft:
    """A plan that grows key by key.

    ``mesh``: sizes of axes. ``is_open``: whether the data axis has the devices that other axes
    leave. ``data``: the preset over data axes, ``tensor`` over tp. ``fields``: further lines of the
    plan. ``told``: by key, what became of it. ``left_out``: what no plan says, and what changes a
    training if nobody says it elsewhere. ``unknown``: keys that partc does not know.
    """

    tool: str
    file: str
    devices: int | None = None
    machines: int = 1
    is_open: bool = True
    mesh: dict[str, int] = field(default_factory=dict)
    data: str = ""
    tensor: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def refuse_key(self, key: str, meant: str) -> NoReturn:
        """UsageError for a misspelt key: the tool leaves it out, or refuses it too."""
        raise UsageError(
            where=f"{self.file}: {key}", what=f"{self.tool} has no such key that partc knows",
            why="the plan would have nothing of it", do=f"{meant} Else delete it from the file.",
        )  # fmt: skip

    def put(self, key: str, value: Any, entry: Entry | None) -> None:
        """Add what a key of the configuration asks for."""
        shown = json.dumps(value, default=str)
        shown = shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}..."
        if entry is None:
            self.unknown.append(key)
            said = f"unknown to partc: look up what it does in {self.tool}"
        elif value == "auto":
            said = "no line: the Trainer fills it in, so set it there"
        else:
            said = entry if isinstance(entry, str) else self._asked(key, value, entry)
        self.told[f"{key} = {shown}"] = said

    def _asked(self, key: str, value: Any, entry: Callable[[Any, Draft], str]) -> str:
        try:
            return entry(value, self)
        except (TypeError, ValueError) as error:
            raise UsageError(
                where=f"{self.file}: {key}", what=f"{value!r} is no value for it", why=str(error),
                do="Correct the file.",
            ) from None  # fmt: skip

    def set(self, name: str, value: Any) -> str:
        """Give the plan a line, and return it."""
        self.fields[name] = value
        return f"{name} = {_toml(value)}"

    def axis(self, name: str, size: Any) -> str:
        """Give the mesh an axis; one of size 1 is none."""
        number = whole(size)
        if number > 1:
            self.mesh[name] = number
        return f"[mesh] {name} = {number}" if number > 1 else f"no line: one rank is no axis {name}"

    def leave(self, key: str, why: str) -> str:
        """Note that a training needs a key and the plan has nothing for it."""
        self.left_out.append(key)
        return f"no line: {why}"

    def finish(self) -> None:
        """Divide the ranks over the data axes that the file leaves open; name these as partc does.

        UsageError if there are other numbers of ranks and of devices.
        """
        known = math.prod(self.mesh.values())
        if "dp_shard" not in self.mesh and self.is_open:
            copies = self.machines if self.data == "hsdp" and "dp_replicate" not in self.mesh else 1
            rest = self._rest(known * copies)
            self.mesh |= {"dp_replicate": copies} if copies > 1 else {}
            self.mesh |= {"dp_shard": rest} if rest > 1 else {}
        elif self.devices and self.devices != known:
            self._refuse(f"the axes {self._axes()} have {known} ranks")
        if not {"dp_shard", "dp_replicate"} <= self.mesh.keys():
            is_copied = "dp_replicate" in self.mesh
            self.mesh = {"dp" if n.startswith("dp_") else n: s for n, s in self.mesh.items()}
            self.data = "ddp" if is_copied else {"hsdp": "fsdp"}.get(self.data, self.data)
        elif self.data == "fsdp":
            self.data = "hsdp"

    def _rest(self, known: int) -> int:
        """How many ranks each point of the axes so far has; 1 where nobody says how many there are
        in all, and the mesh may be left to the compile.
        """
        if self.devices is None:
            if self.mesh:
                self._refuse(f"the axes {self._axes()} leave the data axis open")
            return 1
        if self.devices % known:
            self._refuse(f"they are no multiple of the {known} ranks of {self._axes()}")
        return self.devices // known

    def _axes(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.mesh.items()) or "of all machines"

    def _refuse(self, why: str) -> NoReturn:
        raise UsageError(
            where=f"{self.file}: {self.devices or 'an unknown number of'} devices",
            what="they cannot be divided over the axes", why=why,
            do="Say with --devices N how many there are, or correct the sizes.",
        )  # fmt: skip

    def __str__(self) -> str:
        """The plan's text, with a comment for every key; PlanError if it is no plan."""
        lines = [f"# From {self.file}, a configuration of {self.tool}. What became of each key:"]
        lines += [f"#   {key}: {said}" for key, said in self.told.items()]
        has_data = not self.mesh or bool({"dp", "dp_shard"} & self.mesh.keys())
        words = [self.data] * has_data + [self.tensor] * ("tp" in self.mesh)
        plan = [f"preset = {_toml('+'.join(filter(None, words)))}"] if any(words) else []
        plan += [f"{name} = {_toml(value)}" for name, value in self.fields.items()]
        if self.mesh:
            axes = [f"{name} = {self.mesh[name]}" for name in AXES if name in self.mesh]
            plan += ["", "[mesh]", *axes]
        text = "\n".join([*lines, "", *plan, ""])
        try:
            Plan.parse(text, self.file)
        except PlanError as error:
            raise UsageError(
                where=error.where, what=error.what, why=error.why,
                do="Correct the configuration, or write the plan by hand.",
            ) from error  # fmt: skip
        return text


def whole(value: Any, least: int = 1) -> int:
    """A whole number in a configuration; ValueError for another value."""
    if isinstance(value, bool) or not isinstance(value, int | str) or not str(value).isdecimal():
        raise ValueError("it counts, so that it is a whole number")
    if int(value) < least:
        raise ValueError(f"it counts from {least}")
    return int(value)


def flag(value: Any) -> bool:
    """Whether a value says yes; ValueError for another than yes or no."""
    text = str(value).strip().lower()
    if text not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError("it is true or false")
    return text in ("true", "1", "yes")


def megabytes(elements: Any) -> int:
    """Numbers of a bucket as megabytes of float32."""
    return max(1, round(float(elements) * 4 / 1e6))


def _toml(value: Any) -> str:
    return json.dumps(value)
