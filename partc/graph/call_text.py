"""One call as text, and such text as an op and its arguments.

``add.Tensor(x, blocks.0.weight, alpha=2)``, ``max_1[0]``. Values stand by name: one that begins
with a digit after ``%``, one that is no chain of words, as a user may call an input, in backticks
behind it. An op of a namespace other than ATen has it before its name: ``mine::scale``. A random
draw has its site behind its arguments: ``rand([8], site='noise')``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from partc.graph import collectives, ops, value
from partc.graph.draws import site_of
from partc.plan.sharding import DTYPE_NAMES

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last)
_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.jagged)
WORDS: dict[str, Any] = {
    "inf": float("inf"), "nan": float("nan"), **DTYPES,
    **{str(word): word for word in (*_FORMATS, torch.channels_last_3d, *_LAYOUTS)},
}  # fmt: skip
_CHAIN = r"[A-Za-z_]\w*(?:[.#]\w+)*"  # a second stage's copy of a tied parameter is `weight#1`
_CHAIN_OR_DIGIT = re.compile(r"\w+(?:[.#]\w+)*")
_NAME = re.compile(rf"%`[^`]*`|%\w+(?:[.#]\w+)*|\b{_CHAIN}")


# writing -----------------------------------------------------------------------------------------
def call_text(node: fx.Node) -> str:
    """A call as ``parsed_call`` reads it."""
    if node.target is operator.getitem:
        return f"{argument_text(node.args[0])}[{node.args[1]}]"
    given = [argument_text(a) for a in node.args]
    given += [f"{name}={argument_text(a)}" for name, a in node.kwargs.items()]
    given += [f"site={site!r}" for site in [site_of(node)] if site]
    return f"{op_text(node.target)}({', '.join(given)})"


def op_text(target: Any) -> str:
    """``linear``, ``add.Tensor``, ``mine::scale``: an op's name, with its namespace unless that is
    ATen, and its overload unless that is the default.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return str(target.__name__)
    space = "" if target.namespace == "aten" else f"{target.namespace}::"
    overload = "" if target._overloadname == "default" else f".{target._overloadname}"
    return f"{space}{target._opname}{overload}"


def argument_text(item: Any) -> str:
    """An argument as the parser reads it: values by name, dtypes by their short names."""
    if isinstance(item, fx.Node):
        return _quoted(value(item).name if item.op == "placeholder" else item.name)
    if isinstance(item, list | tuple):
        return f"[{', '.join(argument_text(i) for i in item)}]"
    if isinstance(item, torch.dtype):
        return DTYPE_NAMES[item]
    return repr(item)


def _quoted(name: str) -> str:
    if not _CHAIN_OR_DIGIT.fullmatch(name):
        return f"%`{name}`"
    return f"%{name}" if name[0].isdigit() else name


# reading -----------------------------------------------------------------------------------------
def parsed_call(
    call: str, nodes: Mapping[str, fx.Node]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """``add.Tensor(x, y, alpha=2)`` as target and arguments, ``x[0]`` as a getitem."""
    if picked := re.fullmatch(r"(\w+)\[(\d+)\]", call):
        return operator.getitem, (nodes[picked[1]], int(picked[2])), {}
    op, _, rest = call.partition("(")
    tree, found = _tree(f"f({rest}")
    args = tuple(_argument(a, found, nodes) for a in tree.args)
    return _op(op), args, {k.arg: _argument(k.value, found, nodes) for k in tree.keywords}


def parsed_literal(text: str) -> Any:
    """The value of ``[0.0, -inf]``."""
    tree, found = _tree(f"f({text})")
    return _argument(tree.args[0], found, {})


def parsed_name(text: str) -> str:
    """The name of a value, which ``argument_text`` wrote."""
    return text.removeprefix("%").strip("`")


def _tree(call: str) -> tuple[Any, list[str]]:
    """A call's syntax tree, where each name is ``_[i]``, and the names."""
    found: list[str] = []
    return ast.parse(_mark_names(call, found), mode="eval").body, found


def _argument(tree: Any, found: list[str], nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(tree, ast.List):
        return [_argument(item, found, nodes) for item in tree.elts]
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_argument(tree.operand, found, nodes)
    if isinstance(tree, ast.Call):
        return _device(tree, found)
    if isinstance(tree, ast.Subscript):
        name: str = found[tree.slice.value]  # type: ignore[attr-defined]
        return nodes[name] if name in nodes else WORDS[name]
    return ast.literal_eval(tree)


def _device(tree: Any, found: list[str]) -> torch.device:
    """``device(type='cuda', index=0)``."""
    name = found[tree.func.slice.value]
    if name != "device":
        raise ValueError(f"{name!r} is called inside of a call")
    return torch.device(*(word.value.value for word in tree.keywords))


def _mark_names(call: str, found: list[str]) -> str:
    """Names become ``_[i]``, so that what is left is a Python expression."""

    def mark(match: re.Match[str]) -> str:
        word = match[0]
        keyword = call[match.end() : match.end() + 1] == "="
        plain = word in ("True", "False", "None") or match.start() == 0
        if plain or keyword or _in_string(call, match.start()):
            return word
        found.append(parsed_name(word))
        return f"_[{len(found) - 1}]"

    return _NAME.sub(mark, call)


def _in_string(text: str, at: int) -> bool:
    return text.count("'", 0, at) % 2 == 1


def _op(text: str) -> Any:
    """The op that a name stands for: ours, a collective, or one that torch knows."""
    space, _, word = text.rpartition("::")
    name, _, overload = word.partition(".")
    for module in (ops, collectives):
        if hasattr(module, name) and not overload and not space:
            return getattr(module, name)
    return getattr(getattr(getattr(torch.ops, space or "aten"), name), overload or "default")
