"""FLOPs of each node, two per multiply-add; element-wise work is not counted.

A formula gets a call's arguments with each tensor replaced by its shape. The dims of a shape are
numbers or sympy expressions, of the whole tensors or of one rank's shards.
"""

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from partc.graph import Graph, fake_of
from partc.registry import Registry

Shape = tuple[Any, ...]  # of ints or of sympy expressions
Formula = Callable[..., Any]

FORMULAS: Registry[Formula] = Registry("FLOP formula")


def target_name(target: Any) -> str:
    """`aten.mm` for any overload of an ATen op, `weight_grad` for a function of partc."""
    packet = getattr(target, "overloadpacket", None)
    if packet is not None:
        return str(packet).replace("::", ".")
    return str(getattr(target, "__name__", target))


def op_name(node: fx.Node) -> str:
    """The name of the op or function that a node calls, without the overload: ``aten.mm``."""
    return target_name(node.target)


def node_flops(node: fx.Node, shape_of: Callable[[fx.Node], Any] | None = None) -> Any:
    """FLOPs of one node at its fake's shape, or at the shapes that `shape_of` gives (symbolic)."""
    name = op_name(node)
    if node.op != "call_function" or name not in FORMULAS:
        return 0
    shapes = shape_of or held_shapes
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), shapes)
    return FORMULAS[name](shapes(node), *args, **kwargs)


def total_flops(graph: Graph) -> int:
    """FLOPs of all calls: of the whole step, or of one rank's part where the graph is local."""
    return sum(graph.times(node) * node_flops(node) for node in graph.calls())


def held_shapes(node: fx.Node) -> Any:
    """The shape of a node's fake, or a list of shapes where the call has several results."""
    return pytree.tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else x, fake_of(node))


def _for(*names: str) -> Callable[[Formula], Formula]:
    """Register one formula for several ops; it is called as `formula(result, *args, **kwargs)`."""

    def add(formula: Formula) -> Formula:
        for name in names:
            FORMULAS.add(name, formula)
        return formula

    return add


@_for("aten.mm", "aten.bmm", "aten.matmul", "aten.linear", "aten.mv", "aten.dot", "aten._scaled_mm")
def _matmul(out: Shape, a: Shape, b: Shape, *rest: Any, **named: Any) -> Any:
    return 2 * prod(out) * a[-1]


@_for("aten.addmm", "aten.baddbmm", "aten.addmv")
def _add_matmul(out: Shape, bias: Shape, a: Shape, b: Shape, *rest: Any, **named: Any) -> Any:
    return 2 * prod(out) * a[-1]


@_for("weight_grad")
def _weight_grad(out: Shape, d_y: Shape, x: Shape) -> Any:
    return 2 * prod(d_y) * x[-1]


@_for("aten._grouped_mm", "aten._scaled_grouped_mm", "transformers.grouped_mm_fallback")
def _grouped_mm(out: Shape, a: Shape, b: Shape, *rest: Any, **named: Any) -> Any:
    """The groups divide the rows among them; where both operands are 2-d, the summed dim."""
    if len(a) == len(b) == 2:
        return 2 * a[0] * a[1] * b[1]
    return 2 * prod(out) * a[-1]


@_for("aten.convolution", "aten._convolution")
def _convolution(
    out: Shape, x: Shape, weight: Shape, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, *rest: Any,
) -> Any:  # fmt: skip
    """One multiply-add per output point (input point, if transposed) and element of the filter."""
    points = (x if transposed else out)[2:]
    return 2 * x[0] * prod(points) * prod(weight)


@_for("aten.convolution_backward")
def _convolution_backward(
    out: Any, d_y: Shape, x: Shape, weight: Shape, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: Any, mask: Any,
) -> Any:  # fmt: skip
    """The gradient of the input costs as much as the forward, so does that of the weight."""
    forward = _convolution(d_y, x, weight, None, stride, padding, dilation, transposed)
    return forward * (int(mask[0]) + int(mask[1]))


@_for(
    "aten.scaled_dot_product_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
)
def _attention(out: Any, q: Shape, k: Shape, v: Shape, *rest: Any, **named: Any) -> Any:
    """Two products, q k^T and scores v; the half that a causal mask spares is counted too."""
    return 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


@_for(
    "aten._scaled_dot_product_flash_attention_backward",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "aten._scaled_dot_product_efficient_attention_backward",
    "aten._scaled_dot_product_cudnn_attention_backward",
    "aten._scaled_dot_product_fused_attention_overrideable_backward",
)
def _attention_backward(
    out: Any, d_out: Shape, q: Shape, k: Shape, v: Shape, *rest: Any, **named: Any
) -> Any:
    """Five products: the scores are computed again, then d_scores, d_v, d_q and d_k."""
    return 2 * prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1])
