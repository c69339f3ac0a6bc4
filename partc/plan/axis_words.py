"""What other libraries call the axes of a mesh, and what to write for them here."""

from __future__ import annotations

from collections.abc import Sequence

_SEQUENCE = (
    "Call it tp and take the preset megatron-sp, which shards the sequence between matrix "
    "products; inside of attention no preset shards it yet (context parallelism)."
)
_EXPERTS = (
    "Call it tp, which cuts the matrices of each expert, or dp: whole experts are not spread over "
    "ranks yet (expert parallelism)."
)
_INSTEAD = {
    **dict.fromkeys(("cp", "sp", "context", "sequence", "seq", "ring", "ulysses"), _SEQUENCE),
    **dict.fromkeys(("ep", "expert", "experts", "moe"), _EXPERTS),
    **dict.fromkeys(("model", "mp", "tensor", "mesh_tp"), "Call it tp."),
    **dict.fromkeys(("data", "ddp", "batch", "world"), "Call it dp."),
    **dict.fromkeys(("replicate", "replica"), "Call it dp_replicate."),
    **dict.fromkeys(("shard", "zero"), "Call it dp_shard."),
    **dict.fromkeys(("pipe", "pipeline", "stage", "stages"), "Call it pp."),
}


def axis_instead(axis: str, names: Sequence[str] = ()) -> str:
    """What to do about an axis that no preset knows; "" for a name that means nothing anywhere.

    ``names``: those of the mesh, of which none can be taken twice.

    >>> axis_instead("pipe")
    'Call it pp.'
    """
    do = _INSTEAD.get(axis.lower(), "")
    there = do.removeprefix("Call it ").removesuffix(".")
    if there in names:
        return f"Make it one axis with {there}, whose size is the product of both."
    return do
