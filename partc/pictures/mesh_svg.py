"""Draw a mesh on its machines: which device is which rank, and over what each axis sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from partc.amounts import amount, time_text
from partc.drawing import AXIS_COLOURS, box, label, page
from partc.plan.mesh import Mesh
from partc.program import Program

WIDTH = 900
CELL, GAP, MARGIN = 58, 6, 14  # pixels: of a device, between two, around those of a machine
STRIPE = 5  # of the colour of an axis
TOP = 64
MOST_DEVICES, MOST_MACHINES = 64, 6  # that are drawn; more are counted


def mesh_svg(program: Program) -> str:
    """The SVG text of a program's mesh on the machines that it was planned for."""
    mesh = Mesh(program.mesh.axes, program.basis.topology() if program.basis.machine else None)
    prediction = (program.cost.as_json() or {}).get("prediction") or {}
    exposed = {each["axis"]: each["exposed_s"] for each in prediction.get("axes", ())}
    return drawn(mesh, exposed)


def drawn(mesh: Mesh, exposed: dict[str, float]) -> str:
    """The picture of a mesh; ``exposed``: seconds of a step that computing waits for an axis."""
    machine = mesh.hardware
    each = machine.unit_sizes[0] if len(machine.levels) > 1 else mesh.num_ranks
    num = ceil(mesh.num_ranks / each)
    shown = min(each, MOST_DEVICES)
    columns = min(shown, 8 if num == 1 else 4 if shown <= 16 else 8)
    wide = 2 * MARGIN + columns * (CELL + GAP) - GAP
    high = 2 * MARGIN + 18 + ceil(shown / columns) * (CELL + GAP) - GAP
    across = max((WIDTH - 20) // (wide + 16), 1)
    machines = min(num, max(MOST_MACHINES, across))
    body: list[str] = []
    for number in range(machines):
        x, y = 10 + number % across * (wide + 16), TOP + number // across * (high + 14)
        body += [*_machine(mesh, number, each, shown, columns, (x, y), (wide, high))]
    bottom = TOP + ceil(machines / across) * (high + 14)
    if num > machines:
        body.append(label(10, bottom + 8, f"and {num - machines} more machines alike", "faint"))
        bottom += 20
    title = f"{mesh or 'one device'}: {mesh.num_ranks} ranks on {machine.name}"
    kinds = f"{machine.kinds}, {amount(machine.memory_bytes, 'B')} each"
    head = [label(10, 20, f"{title}.", "bold"), label(10, 38, kinds, "small")]
    told = "A stripe marks the ranks that share the group of rank 0 along an axis."
    head.append(label(10, 54, told, "small faint"))
    rows = [*_axes(mesh, exposed, bottom + 12)]
    height = bottom + 40 + 20 * len(mesh.axes)
    return page(WIDTH, height, title, [*head, *body, *rows])


def _machine(
    mesh: Mesh, number: int, each: int, shown: int, columns: int, at: tuple[float, float],
    size: tuple[float, float],
) -> Iterator[str]:  # fmt: skip
    """A machine's frame, and a box for each of its devices."""
    x, y = at
    yield box(x, y, *size, kind="panel")
    last = min((number + 1) * each, mesh.num_ranks) - 1
    more = f", of which {shown} are shown" if each > shown else ""
    yield label(
        x + MARGIN, y + 18, f"machine {number}: ranks {number * each} to {last}{more}", "small"
    )
    for index in range(shown):
        rank = number * each + index
        if rank < mesh.num_ranks:
            place = x + MARGIN + index % columns * (CELL + GAP)
            yield from _device(mesh, rank, place, y + MARGIN + 14 + index // columns * (CELL + GAP))


def _device(mesh: Mesh, rank: int, x: float, y: float) -> Iterator[str]:
    coords = mesh.coords(rank)
    told = f"rank {rank}: " + ", ".join(f"{axis}={at}" for axis, at in coords.items())
    yield box(x, y, CELL, CELL, "#c9d5e8", told)
    yield f'<text class="in bold" x="{x + CELL / 2}" y="{y + 15}">{rank}</text>'
    names = [f"{axis}{at}" for axis, at in coords.items() if mesh.size(axis) > 1]
    for row, words in enumerate(_lines(names)):
        yield f'<text class="in" x="{x + CELL / 2}" y="{y + 29 + 12 * row}">{words}</text>'
    for index, (axis, _) in enumerate(mesh.axes):
        others = {name: at for name, at in coords.items() if name != axis}
        if mesh.size(axis) > 1 and not any(others.values()):
            colour = AXIS_COLOURS[index % len(AXIS_COLOURS)]
            yield box(x, y + CELL - STRIPE * (1 + _stripe(mesh, index)), CELL, STRIPE, colour)


def _stripe(mesh: Mesh, index: int) -> int:
    """The place of an axis's stripe, counted from the bottom, of axes with several ranks."""
    return sum(size > 1 for _, size in mesh.axes[:index])


def _lines(names: Sequence[str]) -> Iterator[str]:
    """Coordinates in lines of two, short enough for a device's box."""
    each = 2 if all(len(name) <= 4 for name in names) else 1
    for begin in range(0, min(len(names), 2 * each), each):
        yield " ".join(names[begin : begin + each])


def _axes(mesh: Mesh, exposed: dict[str, float], top: float) -> Iterator[str]:
    """A row per axis: its colour, ranks, the links that it crosses, and what computing waits."""
    levels = mesh.hardware.levels
    for index, (axis, size) in enumerate(mesh.axes):
        y = top + 20 * index
        spread = mesh.crosses(axis)
        over = [
            f"{level.name} ({amount(round(level.bytes_per_s), 'B')}/s)"
            for level, units in zip(levels, spread, strict=True) if units > 1
        ]  # fmt: skip
        yield box(12, y, 12, 12, AXIS_COLOURS[index % len(AXIS_COLOURS)])
        yield label(32, y + 11, f"{axis} = {size}", "bold")
        yield label(150, y + 11, f"over {' and '.join(over)}" if over else "sends nothing")
        if wait := exposed.get(axis):
            said = f"computing waits {time_text(float(f'{wait:.3g}'))} for it in a step"
            yield label(520, y + 11, said)
