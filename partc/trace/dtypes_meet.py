"""Products of tensors of two dtypes, which torch's kernels refuse, and its fake ones let pass."""

from __future__ import annotations

import torch
from torch import fx

from partc.errors import TraceError
from partc.graph import Graph, fake_of, value
from partc.plan.sharding import dtype_name

_ATEN = torch.ops.aten
_PRODUCTS = {
    _ATEN.mm.default, _ATEN.bmm.default, _ATEN.addmm.default, _ATEN.baddbmm.default,
    _ATEN.addbmm.default, _ATEN.mv.default, _ATEN.addmv.default, _ATEN.dot.default,
    _ATEN.linear.default, _ATEN.convolution.default,
}  # fmt: skip


def check_dtypes_meet(graph: Graph) -> None:
    """TraceError for a matrix product or convolution whose operands have different dtypes."""
    for node in graph.fx.nodes:
        if node.op != "call_function" or node.target not in _PRODUCTS:
            continue
        dtypes = [fake_of(x).dtype for x in node.args if isinstance(x, fx.Node)]
        other = next((dtype for dtype in dtypes if dtype != dtypes[0]), None)
        if other is not None:
            raise _refusal(graph, node, dtypes[0], other)


def _refusal(graph: Graph, node: fx.Node, one: torch.dtype, other: torch.dtype) -> TraceError:
    known = value(node)
    module = known.module or graph.model
    return TraceError(
        where=f"{module} ({known.source})" if known.source else module,
        what=f"a product of {dtype_name(one)} and {dtype_name(other)}",
        why="torch multiplies tensors of one dtype",
        do="Give inputs of the dtype that the weights have, or compute under torch.autocast.",
    )
