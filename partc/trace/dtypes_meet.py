"""Dtypes which torch's kernels refuse, and its fake ones let pass: products of tensors of two
dtypes, class numbers and indices that are not of the kind of whole numbers that an op reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partc.errors import TraceError
from partc.graph import Graph, Value, fake_of, is_tensor, value
from partc.plan.sharding import dtype_name

_ATEN = torch.ops.aten
_PRODUCTS = {
    _ATEN.mm.default, _ATEN.bmm.default, _ATEN.addmm.default, _ATEN.baddbmm.default,
    _ATEN.addbmm.default, _ATEN.mv.default, _ATEN.addmv.default, _ATEN.dot.default,
    _ATEN.linear.default, _ATEN.convolution.default, _ATEN.binary_cross_entropy.default,
}  # fmt: skip
_CASTS = {
    torch.float64: "double()", torch.float32: "float()", torch.float16: "half()",
    torch.bfloat16: "bfloat16()",
}  # fmt: skip
_AUTOCAST = {torch.float32, torch.float16, torch.bfloat16}
_LONG, _INT, _BYTE = torch.int64, torch.int32, torch.uint8
# By op: which argument has class numbers or indices, and the dtypes that its kernels read.
_NUMBERS = {
    _ATEN.nll_loss_forward.default: (1, (_LONG, _BYTE)),
    _ATEN.nll_loss2d_forward.default: (1, (_LONG, _BYTE)),
    _ATEN.multi_margin_loss.default: (1, (_LONG,)),
    _ATEN.multilabel_margin_loss_forward.default: (1, (_LONG,)),
    _ATEN.index_select.default: (2, (_LONG, _INT)),
    _ATEN.index_add.default: (2, (_LONG, _INT)),
    _ATEN.index_copy.default: (2, (_LONG,)),
    _ATEN.index_fill.int_Scalar: (2, (_LONG,)),
    _ATEN.index_fill.int_Tensor: (2, (_LONG,)),
}


def check_dtypes_meet(graph: Graph) -> None:
    """TraceError for a matrix product or convolution whose operands have different dtypes, and for
    class numbers or indices of a dtype that no kernel reads.
    """
    for node in graph.fx.nodes:
        if node.op == "call_function" and node.target in _PRODUCTS:
            _check_product(graph, node)
        elif node.op == "call_function" and node.target in _NUMBERS:
            _check_numbers(graph, node)


def _check_product(graph: Graph, node: fx.Node) -> None:
    operands = [x for x in node.args if isinstance(x, fx.Node)]
    dtypes = [fake_of(x).dtype for x in operands]
    other = next((dtype for dtype in dtypes if dtype != dtypes[0]), None)
    if other is None:
        return
    if node.target == _ATEN.binary_cross_entropy.default:
        raise _refusal(
            graph, node, f"binary_cross_entropy of {dtype_name(dtypes[0])} and {dtype_name(other)}",
            "torch compares probabilities with targets of their dtype",
            f"Give targets of that dtype: target.to({dtypes[0]}).",
        )  # fmt: skip
    factors = {_origin(x).name: dtype_name(fake_of(x).dtype) for x in operands[-2:]}
    named = [f"{name} is {dtype}" for name, dtype in factors.items() if name]
    told = f": {', '.join(named)}" if named else ""
    raise _refusal(
        graph, node, f"a product of {dtype_name(dtypes[0])} and {dtype_name(other)}{told}",
        "torch multiplies tensors of one dtype", _alike(graph, operands),
    )  # fmt: skip


def _alike(graph: Graph, operands: list[fx.Node]) -> str:
    """How the operands of a product become of one dtype: that of the weights, where it has some."""
    dtypes = {x: fake_of(x).dtype for x in operands}
    weights = [x for x in operands if _origin(x).kind == "param"]
    wanted = dtypes[(weights or operands)[0]]
    cast = _CASTS.get(wanted, f"to({wanted})")
    odd = (_origin(x) for x in operands if dtypes[x] != wanted)
    name = next((each.name for each in odd if each.kind == "input"), "")
    do = f"Give {name} in the dtype of the weights, {name}.{cast}"
    if weights and not name:  # of what the model computes: no input would change it
        computed = next(dtypes[x] for x in operands if dtypes[x] != wanted)
        layer = _cast_of_layer(graph, _origin(weights[0]).name, wanted, computed)
        do = f"Cast {layer}in this line what is multiplied with the weights, x.{cast}"
    if not weights:
        do = f"Cast one of them, {name or 'x'}.{cast}"
    if {*dtypes.values()} <= _AUTOCAST:  # it casts no other dtypes
        do += ", or compute under torch.autocast"
    return f"{do}."


def _cast_of_layer(graph: Graph, name: str, dtype: torch.dtype, wanted: torch.dtype) -> str:
    """How a layer whose weights are of another dtype than most of the model is cast; "" else."""
    like = [fake_of(x).dtype == dtype for x in graph.params.values()]
    layer = name.rpartition(".")[0]
    if not layer or 2 * sum(like) > len(like) or wanted not in _CASTS:
        return ""
    named = all(part.isidentifier() for part in layer.split("."))
    reached = f"model.{layer}" if named else f'model.get_submodule("{layer}")'
    return f"the layer, {reached}.{_CASTS[wanted]}, or "


def _origin(node: fx.Node) -> Value:
    """The facts of the parameter or input that a node is, whole or as a view, else of the node."""
    here = node
    while here.op == "call_function" and len(here.all_input_nodes) == 1:
        here = here.all_input_nodes[0]
        if is_tensor(here) and fake_of(here).dtype != fake_of(node).dtype:
            return value(node)
    return value(here)


def _check_numbers(graph: Graph, node: fx.Node) -> None:
    target: Any = node.target
    place, read = _NUMBERS[target]
    held = node.args[place]
    dtype = fake_of(held).dtype if isinstance(held, fx.Node) else read[0]
    if dtype in read:
        return
    op = target.__name__.partition(".")[0].removesuffix("_forward")
    name = value(held).name if isinstance(held, fx.Node) else ""
    raise _refusal(
        graph, node, f"{name or 'a tensor'}, of class numbers or indices, is {dtype_name(dtype)}",
        f"{op} reads {' or '.join(map(dtype_name, read))}",
        f"Give whole numbers that it reads: {name or 'labels'}.long().",
    )  # fmt: skip


def _refusal(graph: Graph, node: fx.Node, what: str, why: str, do: str) -> TraceError:
    known = value(node)
    module = known.module or graph.model
    return TraceError(
        where=f"{module} ({known.source})" if known.source else module, what=what, why=why, do=do
    )
