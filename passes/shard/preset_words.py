"""The words of presets, such as ``fsdp+megatron``: which there are, and what they say of a mesh."""

from __future__ import annotations

from typing import Any

from partc.errors import PlanError
from partc.passes.shard.meant_preset import meant
from partc.plan import Plan
from partc.plan.axis_words import axis_instead
from partc.plan.batch import DATA_AXES
from partc.plan.mesh import ISLAND, MICROBATCH_AXIS, Mesh
from partc.wrong_calls import did_you_mean, quoted

TENSOR_AXES = ("tp",)
_DATA_WORDS = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
_TENSOR_WORDS = ("megatron", "megatron-sp")
PRESETS = (*_DATA_WORDS, *_TENSOR_WORDS)


def preset_words(preset: str) -> list[str]:
    """The words of a preset; PlanError for an unknown word or two for the same axes."""
    words = [w.strip() for w in preset.split("+")]
    for word in words:
        if word not in PRESETS:
            raise PlanError(
                where=f"plan {quoted(preset)}",
                what=f"there is no preset {quoted(word)}",
                why=f"presets are {', '.join(PRESETS)}",
                do=meant(preset, word, PRESETS),
            )
    twice = next((word for word in words if words.count(word) > 1), None)
    if twice is not None:
        raise PlanError(
            where=f"plan {preset!r}", what=f"it has {twice!r} twice",
            why="a preset is said of all axes of its kind at once", do="Keep one.",
        )  # fmt: skip
    for family in (_DATA_WORDS, _TENSOR_WORDS):
        if len({*words} & {*family}) > 1:
            raise PlanError(
                where=f"plan {preset!r}",
                what="two presets for the same axes",
                why=f"{', '.join(family)} exclude each other",
                do="Keep one.",
            )
    return words


def axes_of(mesh: Mesh, words: list[str], plan: Plan) -> tuple[list[str], list[str]]:
    """The mesh's data axes, and its tensor axes of several ranks, by their names.

    Data axes of one rank are among them: an input's entry in the plan says which dim is the batch.
    """
    data = [a for a in mesh.names if a in (*DATA_AXES, MICROBATCH_AXIS)]
    tensor = [a for a in mesh.names if a in TENSOR_AXES]
    pinned = {a for table in (plan.params, plan.inputs) for cuts in table.values() for a in cuts}
    for axis in mesh.names:
        if axis not in (*data, *tensor) and axis not in pinned and mesh.size(axis) > 1:
            raise PlanError(
                where=f"mesh {mesh}",
                what=f"no preset knows the axis {axis!r}",
                why=f"presets use {', '.join((*DATA_AXES, *TENSOR_AXES))}",
                do=axis_instead(axis, mesh.names)
                or did_you_mean(axis, (*DATA_AXES, *TENSOR_AXES, ISLAND))
                or "Call it dp (each rank has "
                "samples of its own) or tp (each has a part of the weights), or say in a plan what "
                "it cuts.",
            )
    for word, axes, kind in [
        (w, [a for a in data if a != MICROBATCH_AXIS], DATA_AXES) for w in words if w in _DATA_WORDS
    ] + [(w, tensor, TENSOR_AXES) for w in words if w in _TENSOR_WORDS]:
        if not axes and set(mesh.names) - {MICROBATCH_AXIS}:
            raise PlanError(
                where=f"mesh {mesh}",
                what=f"preset {word!r} finds no axis to work on",
                why=f"it uses {' or '.join(kind)}",
                do=_without(word, words, kind[0]),
            )
    return data, [axis for axis in tensor if mesh.size(axis) > 1]


def _without(word: str, words: list[str], axis: str) -> str:
    """What to do about a preset for axes that the mesh has not: an axis, or a plan without it."""
    rest = "+".join(w for w in words if w != word)
    other = rest or ("fsdp" if axis in TENSOR_AXES else "megatron")
    return f"Add such an axis, for example {axis}=2, or leave {word} out: plan={other!r}."


def sharded_axes(words: list[str], data: list[str], mesh: Mesh) -> list[str]:
    """The data axes over which the preset stores parameters sharded; PlanError for hsdp without
    ``dp_replicate`` and ``dp_shard``.
    """
    if not {"zero1", "zero2", "fsdp", "hsdp"} & set(words):
        return []
    data = [a for a in data if a != MICROBATCH_AXIS]
    if "hsdp" in words and not {"dp_replicate", "dp_shard"} <= set(data):
        raise PlanError(
            where=f"mesh {mesh}",
            what="hsdp needs the axes dp_replicate and dp_shard",
            why="it shards inside groups and replicates across them",
            do="Name the data axes so.",
        )
    return [a for a in data if a != "dp_replicate" and mesh.size(a) > 1]


def said_by(plan: Plan, mesh: Mesh) -> dict[str, Any]:
    """The fields ``gather`` and ``scatter``, and ``reduce`` where it says that, as a plan's preset
    has them on a mesh; empty without a preset.
    """
    if not plan.preset:
        return {}
    words = preset_words(words_of_auto(mesh) if plan.preset == "auto" else plan.preset)
    data, tensor = axes_of(mesh, words, plan)
    return said_of(words, sharded_axes(words, data, mesh), tensor)


def said_of(words: list[str], shard: list[str], tensor: list[str]) -> dict[str, Any]:
    """The same of the words of a preset, with the axes of stored shards and of split products."""
    life = "use" if {"fsdp", "hsdp"} & set(words) else "step"
    of_each = {"reduce": "microbatch"} if {"zero2", "fsdp", "hsdp"} & set(words) else {}
    scatter = dict.fromkeys(tensor, 1) if "megatron-sp" in words else {}
    return {"gather": dict.fromkeys(shard, life), "scatter": scatter, **of_each}


def words_of_auto(mesh: Mesh) -> str:
    """The preset for the mesh's axis names: fsdp for data axes, megatron-sp for tensor axes."""
    words = ["fsdp"] if set(mesh.names) & set(DATA_AXES) else []
    words += ["megatron-sp"] if set(mesh.names) & set(TENSOR_AXES) else []
    return "+".join(words) or "ddp"
