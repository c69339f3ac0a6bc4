"""Names of a graph's calls that a plan may use: the module's path and the op, ``model.norm:mul``.

They hold as long as the model's text does: they do not depend on which equal blocks are left out,
nor on the layouts. What stands in the backward has ``d_`` before the op; several calls of one op
in one module are numbered, ``mul``, ``mul_1``. Calls that an op was opened into have its name
before theirs: ``:log_softmax.exp``.
"""

from __future__ import annotations

import operator
from collections import Counter

from torch import fx

from partc.graph import Graph, is_backward, op_word, value


def value_names(graph: Graph) -> dict[fx.Node, str]:
    """The name of every call, getitem nodes left out."""
    numbers: Counter[str] = Counter()
    names: dict[fx.Node, str] = {}
    for node in graph.calls():
        if node.target is operator.getitem:
            continue
        known = value(node)
        word = op_word(node.target)
        if known.decomposed_from:
            word = f"{known.decomposed_from}.{word}"
        name = f"{known.module}:{'d_' if is_backward(node) else ''}{word}"
        names[node] = f"{name}_{numbers[name]}" if numbers[name] else name
        numbers[name] += 1
    return names
