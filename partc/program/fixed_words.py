"""The words by which a statement decides on what a run on one processor in float64 cannot judge."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from partc.graph.draws import DRAWABLE
from partc.plan.coded import CODED_WEIGHTS
from partc.plan.wires import HELPERS
from partc.program.helper_file import imported, imports_helpers

DEVICE = "the device, or the library that moves tensors"
DRAWS = "which random numbers are drawn"
DTYPE = "the dtype in which numbers are kept"
TIED = "which tensors are one"
TEXT = "a value as text, which says more than its numbers"
ROUNDED = "in which numbers gradients or weights are sent"
MEETS = "when islands meet, and what becomes of their parameters"
CALLED = "which function a name stands for"

# Words in the names of functions and modules of torch. Behind `self` stand a model's own names, of
# which a word says nothing (`self.generator_weight`): there whole names count.
DEVICE_WORDS = {
    "device", "devices", "cuda", "backend", "backends", "nccl", "gloo", "accelerator", "version",
    "xpu", "mps", "mtia", "hpu",
}  # fmt: skip
DEVICE_NAMES = {
    "device", "cpu", "cuda", "get_device", "is_cuda", "is_cpu", "is_meta", "is_xpu", "is_mps",
    "is_mtia", "is_hpu", "is_ipu", "is_xla", "is_maia", "is_vulkan", "is_privateuseone",
    "is_available", "compiler",
}  # fmt: skip
DRAW_WORDS = {"rng", "random", "dropout", "generator", "seed"}
DRAW_NAMES = {"rng", "Draws"}
CASTS = {"to", "type", "type_as", "dtype", "autocast", "amp", "finfo"}
TABLES = {
    "ALIASES": TIED,
    "DTYPES": DTYPE,
    "FRAGMENTS": MEETS,
    "FROZEN": MEETS,
    "MICROBATCHES": MEETS,
    "SERVERS": MEETS,
    "WORKERS": MEETS,
}
LOCALS = {"device": DEVICE, "rng": DRAWS, "Draws": DRAWS, "DTYPES": DTYPE, "str": TEXT}
LOCALS |= dict.fromkeys([*HELPERS, *CODED_WEIGHTS], ROUNDED)
ISLAND_HELPERS = {
    "average_over", "average_rounded", "average_with", "beside", "buckets_of", "copy_back",
    "give_params", "in_blocks", "paired_with", "served_by", "start_messages", "start_sums",
    "take_gradients",
}  # fmt: skip


@dataclass(frozen=True)
class Names:
    """Names of a text that decide on what a run cannot judge, where something is put under them.

    ``keyed``: attributes of which random numbers are drawn, ``self.dp_rank``. ``methods``,
    ``functions``: names of what the text defines in classes, and outside of them or in helpers.py.
    """

    keyed: frozenset[str] = frozenset()
    methods: frozenset[str] = frozenset()
    functions: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tree: ast.Module) -> Names:
        defined = ast.FunctionDef | ast.ClassDef
        outside = frozenset(node.name for node in tree.body if isinstance(node, defined))
        every = frozenset(node.name for node in ast.walk(tree) if isinstance(node, defined))
        return cls(_keyed(tree), every - outside, outside | imported(tree))


def _keyed(tree: ast.AST) -> frozenset[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    drawing = [call for call in calls if "rng" in ast.unparse(call.func).split(".")]
    read = [n for call in drawing for each in call.args for n in ast.walk(each)]
    return frozenset(n.attr for n in read if isinstance(n, ast.Attribute)) - {"rng"}


def reason_of(node: ast.AST, names: Names) -> str:
    """What a statement or expression decides on, of the above; "" if it decides on none of them."""
    if imports_helpers(node):  # a name of that file stands for its function alone
        return ""
    found = {reason for each in _words(node) if (reason := _reason(each, names))}
    return next(
        (
            each
            for each in (TIED, DEVICE, DRAWS, ROUNDED, MEETS, DTYPE, CALLED, TEXT)
            if each in found
        ),
        "",
    )


def _words(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all in it but annotations, where a tensor is put, and dtypes of integers."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST) and not _decides_nothing(each):
                    yield from _words(each)


def _decides_nothing(node: ast.AST) -> bool:
    """Whether a node is ``device=x.device`` or ``dtype=torch.int64``."""
    if not isinstance(node, ast.keyword) or not isinstance(node.value, ast.Name | ast.Attribute):
        return False
    return node.arg == "device" or (node.arg == "dtype" and _is_whole(node.value))


def _is_whole(node: ast.Name | ast.Attribute) -> bool:
    dtype = getattr(torch, node.attr, None) if isinstance(node, ast.Attribute) else None
    return isinstance(dtype, torch.dtype) and not _has_floats(dtype)


def _has_floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _reason(node: ast.AST, names: Names) -> str:
    match node:
        case ast.Name(ctx=ast.Store()) if node.id in TABLES:
            return TABLES[node.id]
        case ast.Name(ctx=ast.Store(), id="Step") if ISLAND_HELPERS & names.functions:
            return MEETS
        case ast.Name(ctx=ast.Store()) if node.id in names.functions:
            return CALLED
        case ast.Attribute(ctx=ast.Store()) if node.attr in names.keyed:
            return DRAWS
        case ast.Attribute(ctx=ast.Store()) if node.attr in names.methods:
            return CALLED
        case ast.Attribute():
            return _of_attribute(node)
        case ast.Name():
            return LOCALS.get(node.id, "")
        case ast.Call(func=ast.Attribute(value=ast.Name("reduced"), attr="finish"), args=[_, *_]):
            return ROUNDED  # the ranks that agree on what is kept of sums
        case ast.FormattedValue() | ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod()):
            return TEXT
        case ast.arg() if node.arg in names.functions:
            return CALLED
        case ast.alias() if (node.asname or node.name) in names.functions:
            return CALLED
        case ast.arg():
            return DEVICE if node.arg == "device" else ""
        case ast.keyword(arg=str()):
            return _of_keyword(str(node.arg))
    return ""


def _of_keyword(name: str) -> str:
    if name.endswith("dtype"):
        return DTYPE
    return {"device": DEVICE, "generator": DRAWS}.get(name, "")


def _of_attribute(node: ast.Attribute) -> str:
    word, bare = node.attr, node.attr.strip("_")
    parts = set() if _root(node) == "self" else {*bare.split("_")}
    if parts & DEVICE_WORDS or word in DEVICE_NAMES:
        return DEVICE
    if parts & DRAW_WORDS or word in DRAW_NAMES or bare in DRAWABLE:
        return DRAWS
    if word == "format":
        return TEXT
    dtype = getattr(torch, word, None)
    casts = isinstance(dtype, torch.dtype) and _has_floats(dtype)
    return DTYPE if casts or word in CASTS or (parts and word.startswith("set_")) else ""


def _root(node: ast.expr) -> str:
    """The name with which a chain of attributes begins: ``self`` of ``self.stage0.rng``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
