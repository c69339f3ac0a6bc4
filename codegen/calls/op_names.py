"""Names that come from an op: ``silu`` of ``aten.silu.default``, ``mean`` of a layer norm."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from partc.codegen.helpers import needed as helpers

PLAIN = {
    "to_copy": "cast", "unsafe_view": "view", "sum": "total", "pow": "power", "slice": "part",
    "cross_entropy_grad": "logits",
}  # fmt: skip
RESULTS = {  # names of the results of ops whose schema does not name them
    "native_layer_norm": ("", "mean", "rstd"),
    "native_group_norm": ("", "mean", "rstd"),
    "native_batch_norm": ("", "mean", "rstd"),
    "native_batch_norm_legit_functional": ("", "mean", "rstd", "running_mean", "running_var"),
    "nll_loss_forward": ("", "count"),
    "nll_loss2d_forward": ("", "count"),
    "max_pool2d_with_indices": ("", "indices"),
    "max_pool3d_with_indices": ("", "indices"),
    "adaptive_max_pool2d": ("", "indices"),
    "adaptive_max_pool3d": ("", "indices"),
    "fractional_max_pool2d": ("", "indices"),
    "embedding_bag": ("", "offset2bag", "bag_size", "max_indices"),
    "embedding_bag_forward_only": ("", "offset2bag", "bag_size", "max_indices"),
    "ctc_loss": ("", "log_alpha"),
    "unique2": ("", "inverse_indices", "counts"),
    "var_mean": ("var", "mean"),
}


def op_name(node: fx.Node) -> str:
    """The op's own name: ``silu`` of ``aten.silu.default``, ``attention`` of every fused kernel."""
    target = node.target
    if isinstance(target, helpers.Outlined):
        return target.results[0]
    if target is operator.getitem and isinstance(node.args[0], fx.Node):
        return op_name(node.args[0])
    name = str(
        getattr(getattr(target, "_schema", None), "name", "")
        or getattr(target, "__name__", "value")
    )
    name = name.split("::")[-1].strip("_")
    if name.startswith("scaled_dot_product"):
        return "attention"
    return PLAIN.get(name, name)


def result_name(node: fx.Node) -> str:
    """The name that an op with several results has for this one; "" if it has none."""
    if node.target is not operator.getitem:
        return ""
    index, names = node.args[1], _names_of_results(node.all_input_nodes[0])
    known = isinstance(index, int) and index < len(names) and names[index] != "output"
    return names[index] or "" if known else ""  # type: ignore[index]


def _names_of_results(call: fx.Node) -> Sequence[str | None]:
    if isinstance(call.target, helpers.Outlined):
        return call.target.results
    schema = getattr(call.target, "_schema", None)
    returns = [result.name for result in schema.returns] if schema is not None else []
    return RESULTS.get(op_name(call)) or returns
