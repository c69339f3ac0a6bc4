"""Topologies as TOML: read the files that come with partc or a user's file, and write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from partc.errors import PlanError
from partc.file_text import Unreadable, file_text, toml_table
from partc.machines.devices import Device, Points
from partc.machines.topology import Level, Topology
from partc.machines.topology_checks import check_keys, check_unit, refusal
from partc.wrong_calls import as_path, did_you_mean, quoted

T = TypeVar("T", Device, Level)
NUMBERS = ("start_s", "contention", "skew", "sharing")
_SEVERAL = ("devices", "levels")
_TABLES = {  # of a device, and what one looks like
    "flops_per_s": "{ bf16 = 400e12, f32 = 60e12 }",
    "efficiency": "{ matmul = [[1e9, 0.5], [1e12, 0.8]] }",
}
TOPOLOGY_KEYS = ("name", "library", *NUMBERS, "notes", "devices", "levels")


def shipped() -> tuple[str, ...]:
    """The names that ``Topology.load`` takes."""
    files = (resources.files("partc") / "machines").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def read_shipped(name: str) -> Topology:
    """A topology that comes with partc; PlanError lists the known names."""
    if not isinstance(name, str) or name not in shipped():
        raise PlanError(
            where=f"topology {name!r}",
            what="no such machine comes with partc",
            why=f"there are {', '.join(shipped())}",
            do=_instead(name),
        )
    file = resources.files("partc") / "machines" / f"{name}.toml"
    return parse_topology(file.read_text(encoding="utf-8"), f"{name}.toml")


def _instead(name: str) -> str:
    if str(name).endswith(".toml"):
        return f"Pass the path of a file for the mesh itself: mesh={name!r}."
    if "=" in str(name):
        return f"These are axes: Mesh.of({str(name)!r}), or mesh={str(name)!r} itself."
    return did_you_mean(name, shipped()) or "Take one of these, or write a mesh.toml of your own."


def read_topology(path: str | Path) -> Topology:
    """The topology in a file; PlanError names the file and the entry that is wrong.

    UsageError for what is no path.
    """
    return topology_of(read_toml(as_path(path, "Topology.read")), str(path))


def parse_topology(text: str, where: str = "topology") -> Topology:
    """The topology of a TOML text; PlanError names the entry that is wrong."""
    return topology_of(parse_toml(text, where), where)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table in a TOML file; PlanError if the file cannot be read."""
    try:
        text = file_text(Path(path))
    except Unreadable as error:
        raise _unreadable(str(path), error) from None
    return parse_toml(text, str(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The table of a TOML text; PlanError if the text is not TOML."""
    try:
        return toml_table(text)
    except Unreadable as error:
        raise _unreadable(where, error) from None


def topology_of(table: Mapping[str, Any], where: str) -> Topology:
    """The topology that a TOML table describes; PlanError names the entry that is wrong."""
    check_keys(where, table, TOPOLOGY_KEYS, _as_axes(table))
    given = {key: table[key] for key in ("name", "library", *NUMBERS) if key in table}
    if "name" not in given:
        raise refusal(where, "name is missing", "machines have one", 'Write name = "mine" on top.')
    try:
        return Topology(
            **given,
            groups=tuple(_group(entry) for entry in _tables(table, "devices")),
            levels=tuple(_level(entry) for entry in _tables(table, "levels")),
            notes=tuple(_texts(table, "notes")),
        )
    except PlanError as error:
        raise PlanError(
            where=f"{where}, {error.where}", what=error.what, why=error.why, do=error.do
        ) from None


def _as_axes(table: Mapping[str, Any]) -> str:
    """What to do about keys that look like a device's, or like axes; "" if none does."""
    sizes = {k: n for k, n in table.items() if type(n) is int and k not in TOPOLOGY_KEYS}
    of_devices = [each.name for each in fields(Device) if each.name in sizes]
    if of_devices:
        return f"{of_devices[0]} is a device's: write it below its line [[devices]]."
    if not sizes:
        return ""
    lines = ", ".join(f"{key} = {size}" for key, size in sizes.items())
    return f"Sizes of axes stand below a line [axes]: {lines}."


def _check_table(where: str, own: Mapping[str, Any], key: str, example: str) -> None:
    """PlanError for a number or a list in the place of a table; ``example``: such a table."""
    if not isinstance(own.get(key, {}), Mapping):
        raise refusal(
            where, f"{key} = {quoted(own[key])} is no table",
            "it has a figure for each kind, by name", f"Write {key} = {example}.",
        )  # fmt: skip


def _group(entry: Mapping[str, Any]) -> tuple[Device, int]:
    count = entry.get("count", 1)
    own = {key: value for key, value in entry.items() if key != "count"}
    for key, example in _TABLES.items():
        _check_table(f"device {own.get('name', '')}", own, key, example)
    own["efficiency"] = {work: _points(p) for work, p in own.get("efficiency", {}).items()}
    where = f"device {own.get('name', '')}".strip()
    for dtype, peak in own.get("flops_per_s", {}).items():
        check_unit(f"{where}, flops_per_s.{dtype}", "flops_per_s", peak)
    _check_units(where, own)
    return _made(Device, own), count


def _level(entry: Mapping[str, Any]) -> Level:
    own = dict(entry)
    _check_table(f"level {own.get('name', '')}", own, "factors", "{ all_reduce = [1.2, 1.1] }")
    _check_units(f"level {own.get('name', '')}".strip(), own)
    own["factors"] = {kind: _pair(pair) for kind, pair in own.get("factors", {}).items()}
    return _made(Level, own)


def _check_units(where: str, own: Mapping[str, Any]) -> None:
    for key in ("memory_bytes", "memory_bytes_per_s", "bytes_per_s"):
        check_unit(f"{where}, {key}", key, own.get(key))


def _made(kind: type[T], entry: Mapping[str, Any]) -> T:
    """A Device or Level from its table; PlanError for an unknown or a missing key."""
    where = f"{kind.__name__.lower()} {entry.get('name', '')}".strip()
    known = fields(kind)
    check_keys(where, entry, [one.name for one in known])
    for one in known:
        optional = one.default is not MISSING or one.default_factory is not MISSING
        if one.name not in entry and not optional:
            what, why = f"{one.name} is missing", f"every {kind.__name__.lower()} has it"
            raise refusal(where, what, why, f"Write a line {one.name} = ... below it.")
    return kind(**entry)


def _points(points: Any) -> Any:
    """Lists of pairs as tuples; anything else unchanged, which `check_points` refuses by name."""
    if not isinstance(points, list):
        return points
    return tuple(map(_pair, points))


def _pair(pair: Any) -> Any:
    """A list as a tuple; anything else unchanged."""
    return tuple(pair) if isinstance(pair, list) else pair


def _tables(table: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    entries = table.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        why = f"a machine may have several {key}"
        raise refusal(key, "it is not a list of tables", why, _brackets(key))
    return entries


def _brackets(key: str) -> str:
    return f"Write [[{key}]] over each entry, in two pairs of brackets."


def _texts(table: Mapping[str, Any], key: str) -> Sequence[str]:
    texts = table.get(key, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise refusal(
            key, "it is not a list of texts", "notes are for readers", 'Write notes = ["..."].'
        )
    return texts


def _unreadable(where: str, error: Exception) -> PlanError:
    twice = next((key for key in _SEVERAL if str(error).startswith(f"[{key}] stands")), "")
    do = _brackets(twice) if twice else "Mend or name another."
    if not Path(where).exists() and where.endswith(".toml"):
        do = f"Name a file that is there, write one by `partc calibrate -o {where}`, or name axes: "
        do += '"dp=2,tp=4".'
    return PlanError(where=where, what="the file cannot be read", why=str(error), do=do)


# writing ------------------------------------------------------------------------------------------
def write_topology(topology: Topology) -> str:
    """The topology as TOML text; `parse_topology` reads it back to an equal topology."""
    lines = [f"name = {_text(topology.name)}", f"library = {_text(topology.library)}"]
    lines += [f"start_s = {_number(topology.start_s)}"]
    # The figures that are written only if they are not 0; sharing is 1 where nothing is shared.
    told = {
        "contention": topology.contention,
        "skew": topology.skew,
        "sharing": topology.sharing - 1,
    }
    lines += [f"{name} = {_number(getattr(topology, name))}" for name in told if told[name]]
    if topology.notes:
        lines += ["notes = [", *(f"    {_text(note)}," for note in topology.notes), "]"]
    for device, count in topology.groups:
        lines += ["", "[[devices]]", *_device_lines(device, count)]
    for level in topology.levels:
        lines += ["", "[[levels]]", *_plain_lines(level)]
        if level.factors:
            factors = (f"{kind} = {_pair_text(pair)}" for kind, pair in level.factors.items())
            lines += ["[levels.factors]", *factors]
    return "\n".join(lines) + "\n"


def _device_lines(device: Device, count: int) -> Iterable[str]:
    name, *rest = _plain_lines(device)
    yield from (name, f"count = {count}", *rest)
    yield "[devices.flops_per_s]"
    yield from (f"{dtype} = {_number(peak)}" for dtype, peak in device.flops_per_s.items())
    if device.efficiency:
        yield "[devices.efficiency]"
        yield from (
            f"{work} = {_points_text(points)}" for work, points in device.efficiency.items()
        )


def _plain_lines(entry: Device | Level) -> list[str]:
    """The lines of all fields that are texts or numbers and differ from their defaults."""
    lines = []
    for one in fields(entry):
        content = getattr(entry, one.name)
        if content == one.default or isinstance(content, Mapping):
            continue
        text = _text(content) if isinstance(content, str) else _number(content)
        lines.append(f"{one.name} = {text}")
    return lines


def _points_text(points: Points) -> str:
    return f"[{', '.join(map(_pair_text, points))}]"


def _pair_text(pair: tuple[float, float]) -> str:
    return f"[{_number(pair[0])}, {_number(pair[1])}]"


def _number(number: float) -> str:
    """The shortest text that reads back to this number."""
    if isinstance(number, bool):
        return str(number).lower()
    if isinstance(number, int):
        return f"{number:_}"
    short = f"{number:.6g}"
    text = short if float(short) == number else repr(number)
    return text if set(text) & {*".e"} else f"{text}.0"


def _text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
