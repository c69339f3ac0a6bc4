"""What ``torch.linalg`` checks by looking at numbers, as calls that programs keep.

``torch.linalg.cholesky`` is a routine that gives ``L`` and ``info``, and a check of ``info`` that
gives nothing. Passes leave out what gives nothing; so the check becomes part of ``L``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from partc.graph import Graph, ops
from partc.graph.graph_edits import call_before


def keep_checks(graph: Graph) -> None:
    """``check(info)`` becomes ``solved(L, info)``, which all that read ``L`` read in its place."""
    for node in list(graph.calls()):
        if node.target is torch.ops.aten._linalg_check_errors.default:
            info: Any = node.args[0]
            result = _result(info)
            if result is not None:
                kept = call_before(node, ops.solved, result, info, node.args[1])
                first, second = sorted((result, info))  # fx nodes compare by graph position
                first.append(second)  # ahead of all that reads the result
                second.append(kept)
                for user in [user for user in result.users if user is not kept]:
                    user.replace_input_with(result, kept)
            graph.fx.erase_node(node)


def _result(info: Any) -> fx.Node | None:
    """The first result of the routine behind ``info`` that something reads."""
    (routine,) = info.all_input_nodes
    results = [user for user in routine.users if user.target is operator.getitem]
    read = [each for each in results if each.users and each is not info]
    return min(read, key=lambda each: str(each.args[1]), default=None)
