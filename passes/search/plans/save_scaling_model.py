"""A search as JSON and back, so that a saved program can be explained without its model.

Equal calls are written once, and so are units that differ only in their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from partc.machines.objective import Batch, objective_of
from partc.machines.topology_text import parse_topology
from partc.passes.search.plans.candidate import Candidate
from partc.passes.search.plans.scaling_model import Calls, ScalingModel, Sizes, Transfer, Weights
from partc.passes.search.plans.search_plans import Search, Taken
from partc.plan.mesh import Mesh

Json = dict[str, Any]


def taken_as_json(taken: Taken) -> Json:
    """The JSON form of a search and the candidate that was taken."""
    search = taken.search
    return {
        "machine": str(search.mesh.hardware),
        "axes": [list(axis) for axis in search.mesh.axes],
        "memory_bytes": search.memory_bytes,
        "microbatches": search.microbatches,
        "schedule": search.schedule,
        "recompute": list(search.recompute),
        "objective": search.objective,
        "batch": asdict(search.batch),
        "in_turns": search.in_turns,
        "candidate": {**asdict(taken.candidate), "given": None},
        "searched": taken.searched,
        "profiles": [
            {"recompute": again, **_profile_as_json(found)}
            for (_, again), found in search.scaling_models.items()
        ],
    }


def taken_of_json(data: Mapping[str, Any]) -> Taken:
    """The search and candidate that ``taken_as_json`` has written.

    KeyError, ValueError or the like for data that it has not written.
    """
    topology = parse_topology(data["machine"], "the saved machine")
    mesh = Mesh(tuple((name, size) for name, size in data["axes"]), topology)
    scaling_models = {
        (each["word"], each["recompute"]): _profile_of_json(each) for each in data["profiles"]
    }
    search = Search(
        mesh=mesh, scaling_models=scaling_models, memory_bytes=data["memory_bytes"],
        microbatches=data["microbatches"], schedule=data["schedule"],
        recompute=tuple(data["recompute"]),
        objective=objective_of(data["objective"]), batch=Batch(**data["batch"]),
        in_turns=bool(data.get("in_turns", True)),
    )  # fmt: skip
    given = mesh if mesh.axes else None
    candidate = Candidate(**{**data["candidate"], "given": given})
    return Taken(search, candidate, bool(data["searched"]))


# profiles -----------------------------------------------------------------------------------------
def _profile_as_json(found: ScalingModel) -> Json:
    calls, kinds = _Table(), _Table()
    columns = found.calls
    of_unit: list[list[int]] = [[] for _ in found.units]
    for i, unit in enumerate(columns.unit):
        of_unit[unit].append(calls.add(_call_text(columns, i)))
    units = [
        f"{kinds.add(_unit_text(found, number, of_unit[number]))} {int(block)} {name}"
        for number, (name, block) in enumerate(zip(found.units, found.is_block, strict=True))
    ]
    return {
        "word": found.word,
        "calls": calls.rows,
        "kinds": [kind.split("\n") for kind in kinds.rows],
        "units": units,
        "chain": _words(found.chain),
        "working": _size_text(found.working),
        "dp_divides": found.dp_divides,
        "tp_divides": found.tp_divides,
        "flops": found.flops,
    }


class _Table:
    """Numbers texts; equal texts have one number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def add(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def rows(self) -> list[str]:
        return list(self._numbers)


def _call_text(calls: Calls, i: int) -> str:
    flags = calls.phase[i], calls.is_weight_grad[i], *calls.cut[i], *calls.product_cut[i].flat
    amounts = calls.flops[i], *calls.bytes[i], *calls.product[i], *calls.written[i]
    return f"{_words((*flags, *amounts))} {calls.work[i]} {calls.dtype[i]}"


def _unit_text(found: ScalingModel, number: int, calls: Iterable[int]) -> str:
    """A unit as lines: calls, parameters, ``saved``, ``boundary``, ``beside``, then transfers."""
    weights = found.weights[number]
    lines = [
        _words(calls),
        _weights_text(weights),
        _size_text(found.saved[number]),
        _size_text(found.boundary[number]),
        _size_text(found.beside[number]),
    ]
    moves = (move for move in found.transfers if move.unit == number)
    return "\n".join([*lines, *map(_move_text, moves)])


def _weights_text(weights: Weights) -> str:
    """Bytes, number, dtype; the bytes that are gathered where these are others."""
    text = f"{_size_text(weights.size)} {weights.count} {weights.largest_dtype}"
    return text if weights.gathered == weights.size else f"{text} {_size_text(weights.gathered)}"


def _weights(words: list[str]) -> Weights:
    size = _size(words[:4])
    return Weights(size, int(words[4]), words[5], _size(words[6:]) if words[6:] else size)


def _move_text(move: Transfer) -> str:
    return f"{_size_text(move.size)} {_words((move.phase, move.sums_gradient))} {move.kind}"


def _words(numbers: Iterable[float]) -> str:
    """The numbers as integers, separated by blanks."""
    return " ".join(str(int(number)) for number in numbers)


def _size_text(size: Sizes) -> str:
    return _words(size.by_cut)


def _profile_of_json(data: Mapping[str, Any]) -> ScalingModel:
    units = [text.split(" ", 2) for text in data["units"]]
    kinds = [data["kinds"][int(kind)] for kind, _, _ in units]
    weights = [kind[1].split() for kind in kinds]
    return ScalingModel(
        word=data["word"],
        units=tuple(name for _, _, name in units),
        is_block=tuple(block == "1" for _, block, _ in units),
        chain=tuple(map(int, data["chain"].split())),
        calls=_calls(data["calls"], [kind[0] for kind in kinds]),
        transfers=tuple(_transfers(kinds)),
        weights=tuple(map(_weights, weights)),
        saved=tuple(_size(kind[2].split()) for kind in kinds),
        boundary=tuple(_size(kind[3].split()) for kind in kinds),
        beside=tuple(_size(kind[4].split()) for kind in kinds),
        working=_size(data["working"].split()),
        dp_divides=data["dp_divides"],
        tp_divides=data["tp_divides"],
        flops=data["flops"],
    )


def _calls(rows: list[str], of_units: Iterable[str]) -> Calls:
    units = [[int(number) for number in text.split()] for text in of_units]
    used = [rows[number].split() for unit in units for number in unit]
    columns = np.array([row[:-2] for row in used], dtype=np.float64).reshape(-1, 22)
    flags = columns[:, :10].astype(np.int64)
    return Calls(
        unit=np.repeat(np.arange(len(units)), [len(unit) for unit in units]),
        phase=flags[:, 0],
        is_weight_grad=flags[:, 1].astype(np.bool_),
        flops=columns[:, 10],
        cut=flags[:, 2:4].astype(np.bool_),
        bytes=columns[:, 11:15],
        dtype=tuple(row[-1] for row in used),
        work=np.array([row[-2] for row in used]),
        product=columns[:, 15:18],
        product_cut=flags[:, 4:10].astype(np.bool_).reshape(-1, 3, 2),
        written=columns[:, 18:],
    )


def _transfers(kinds: Iterable[list[str]]) -> Iterable[Transfer]:
    for unit, kind in enumerate(kinds):
        for text in kind[5:]:
            *size, phase, sums, name = text.split()
            yield Transfer(unit, int(phase), name, _size(size), sums == "1")


def _size(words: list[str]) -> Sizes:
    none, tensor, data, both = map(float, words)
    return Sizes((none, tensor, data, both))
