"""Rules of embeddings: sharded by column, by index, or by row with a window of indices.

A table sharded by row (a vocabulary-parallel embedding) gives zeros for indices into other ranks'
rows, so that the result is an unfinished sum.
"""

from __future__ import annotations

from partc.graph.ops import masked_embedding
from partc.rules.call import Call
from partc.rules.table import Windowed, rule


def embedding_backward(call: Call) -> str:
    """``...d, ... -> vd``; scaling by frequency needs all indices, and all rows.

    There the kernel counts every index, those that it skips too: one outside of its rows would be
    counted in memory that is not its own.
    """
    return "!...d,...->_d" if call["scale_grad_by_freq"] else "...d,... @v->vd"


rule("aten.embedding", "vd,... @v->...d", linear="0", windowed=Windowed(masked_embedding))
rule(
    "aten.embedding_dense_backward",
    embedding_backward,
    linear="0",
    scales={"num_weights": "v"},
    windowed=Windowed(ignore="padding_idx", outside=-1),
)
rule("partc.ops.masked_embedding", "vd,... @v->...d", linear="0", windowed=Windowed())
rule("partc.ops.window", "...->...")
