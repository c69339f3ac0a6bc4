"""What describes no mesh: the refusals, each with what to write in its place."""

from __future__ import annotations

import re
import sys

from partc.errors import PlanError
from partc.machines.topology_text import shipped
from partc.wrong_calls import LONGEST, quoted

_OTHERWISE = re.compile(r"([A-Za-z]\w*?)\s*[:=x*]?\s*(\d{1,18})\s*(?:[,;]\s*|\Z)")  # of name=size
_AXIS_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z", re.ASCII)  # "$" would allow a line break


def no_mesh(given: object) -> PlanError:
    """The refusal of what names no axes, with what to write in its place."""
    do = 'Give a Mesh, a DeviceMesh with names, a dict, "dp=2,tp=4" or a .toml path.'
    sizes = given if isinstance(given, list | tuple) else [given]
    sizes = [int(x) if isinstance(x, float) and x.is_integer() else x for x in sizes]
    if (
        all(isinstance(size, int) and size is not True and size > 0 for size in sizes)
        and 0 < len(sizes) < 3
    ):
        axes = ",".join(f"{name}={size}" for name, size in zip(("dp", "tp"), sizes, strict=False))
        do = f"Name the axes, for example {axes!r}."
        if len(sizes) == 1:
            do += f' Where plan="auto" is to choose them: partc.Mesh.load("cpu", {sizes[0]}), or '
            do += "another machine."
    elif hasattr(given, "mesh_dim_names"):
        do = 'Name its axes: init_device_mesh(..., mesh_dim_names=("dp",)).'
    elif "torch" in sys.modules and isinstance(given, sys.modules["torch"].optim.Optimizer):
        do += " An optimizer is made over the parameters of what this call gives."
    elif not isinstance(given, int | float | None):
        do += " Inputs come behind it: compile(model, mesh, inputs, loss=loss)."
    return PlanError(
        where="mesh", what=f"{quoted(given)} does not describe a mesh",
        why="no named axes could be read from it", do=do,
    )  # fmt: skip


def no_axes(given: object) -> PlanError:
    """The refusal of what is no tuple of axes."""
    return PlanError(
        where="Mesh(axes)", what=f"the axes are {quoted(given)}",
        why='they are pairs, such as (("dp", 2), ("tp", 4))',
        do='Write Mesh.of("dp=2,tp=4"), or Mesh.of({"dp": 2}).',
    )  # fmt: skip


def no_axis(text: str, part: str) -> PlanError:
    """The refusal of a part of a mesh's text that is not name=size, with what it may mean."""
    do = 'Write for example "dp=2,tp=4"; a file ends in .toml, and Mesh.load(name) takes a machine.'
    if 0 < len(text) <= LONGEST and not _OTHERWISE.sub("", text):  # blanks, colons, semicolons
        do = f"Write {','.join(f'{n}={size}' for n, size in _OTHERWISE.findall(text))!r}."
    if text.strip().isdecimal() and int(text) > 0:
        do = f'Name the axis: "dp={int(text)}".'
    if text in shipped():
        do = f"Pass partc.Mesh.load({text!r}, devices), of which the plan chooses the axes."
    return PlanError(
        where=f"mesh {quoted(text)}", what=f"{quoted(part)} is not an axis",
        why="an axis is written name=size", do=do,
    )  # fmt: skip


def check_axis(name: str, size: int) -> None:
    """PlanError for what cannot name an axis, or is no number of ranks."""
    if not isinstance(name, str) or not _AXIS_NAME.match(name):
        raise PlanError(
            where="mesh",
            what=f"{name!r} cannot name an axis",
            why="axis names become Python identifiers",
            do="Use letters, digits and _ only, a letter first.",
        )
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise PlanError(
            where=f"mesh axis {name}",
            what=f"{quoted(size)} is not a size",
            why="an axis has one rank or more",
            do=_size_instead(name, size),
        )


def _size_instead(name: str, size: object) -> str:
    """What to write in the place of what is no size; -1 means the rest in other libraries."""
    if size == -1:
        return f'Count the ranks: "{name}=4" for 4 processes, as a program is made for so many.'
    if isinstance(size, str) and size.isascii() and size.isdigit():
        return f"Write {int(size)}, without quotation marks."
    if name in ("machine", "name", "library", "notes"):  # of a mesh.toml
        return f"Write the line {name} = ... above the line [axes]."
    return "Give a whole number from 1."
