"""The longer names of a value whose first name another value has: ``mul -> attn_mul``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import fx

from partc.codegen.calls.inline import is_free, is_pointwise
from partc.codegen.calls.op_names import VIEWS, op_name
from partc.codegen.calls.path_names import qualifiers
from partc.codegen.calls.wishes import Wishes
from partc.graph import collectives, has_value, tensor_args, value
from partc.graph.moves import carried, kind_of

# What a value is behind a collective: ``c_proj_whole`` is gathered from ``c_proj``.
BEHIND = {
    "all_gather": "whole",
    "all_reduce": "sum",
    "reduce_scatter": "shard",
    "all_to_all": "exchanged",
    "keep_piece": "local",
}
FAR = 6  # how many calls back a value is looked for that the user's code names


def longer_names(node: fx.Node, wish: str, wishes: Wishes) -> Iterator[str]:
    """Names for a value of the forward, the shortest first."""
    node = wishes.here(node)
    words = [re.sub(r"(?<=[a-z])_?(layer)?_?norm$", "", q) for q in qualifiers(wishes.module(node))]
    words = [
        word for word in words if word.replace("_", "") != wish
    ]  # ``m_2`` says what ``m2`` does
    more = _more(node, wish, wishes)
    if node in wishes.moved:
        yield more
    yield from (joined(word, wish) for word in words[:1])
    yield more
    for word in words:
        yield joined(word, wish)
        yield joined(word, more)
    pair = _pair(node, wish, wishes)
    yield pair
    yield from (joined(word, pair) for word in words)
    if node in wishes.same:
        yield f"{wish}_again"


def told_names(node: fx.Node, wish: str, wishes: Wishes) -> Iterator[str]:
    """For a view that no variable names the name of what it shows: ``targets_reshape``."""
    node = wishes.here(node)
    if wish in VIEWS and wish == op_name(node) and node not in wishes.said:
        yield _more(node, wish, wishes)


def _more(node: fx.Node, wish: str, wishes: Wishes) -> str:
    """A wish with what the value is made of (``query_states_cat``), or with its op."""
    if node in wishes.moved:
        return f"{wish}_{_behind(node)}"
    if node in wishes.said:
        return joined(wish, op_name(node))
    return joined(_source(node, wishes), wish)


def _behind(node: fx.Node) -> str:
    """What a value is behind the collective that gives it."""
    while node.target not in (*collectives.COLLECTIVES, *collectives.LOCAL):
        before = carried(node)
        if before is None:
            return "piece"
        if before.op != "call_function":
            return "whole"
        node = before
    return BEHIND.get(kind_of(node), "moved")


def _pair(node: fx.Node, wish: str, wishes: Wishes) -> str:
    """A wish with the first and the last value that it is made of."""
    operands = [n for n in tensor_args(node) if has_value(n) and value(n).kind != "param"]
    last = wishes.get(operands[-1]) if len(operands) > 1 else ""
    return joined(joined(_source(node, wishes), last), wish)


def _source(node: fx.Node, wishes: Wishes) -> str:
    """The name of the nearest value that the user's code names and this value is made of."""
    for _ in range(FAR):
        operands = [n for n in tensor_args(node) if has_value(n) and value(n).kind != "param"]
        if not operands:
            break
        node = operands[0]
        light = is_free(node) or is_pointwise(node)
        if node in wishes.said or node in wishes.given or not light:
            break
    return wishes.get(node, "")


def gradient_names(node: fx.Node, wish: str, wishes: Wishes, of: str) -> Iterator[str]:
    """Names for a gradient; ``of`` is the name that its value has got, "" if it has no line."""
    node = wishes.here(node)
    value_of = wishes.of.get(node)
    first = f"d_{of}" if of and node not in wishes.given else wish
    if not of and value_of is not None and first == f"d_{wishes.get(value_of)}":
        told = next(told_names(value_of, wishes.get(value_of), wishes), "")
        first = f"d_{told}" if told else first
    yield first
    moved = f"{first}_{_behind(node)}" if node in wishes.moved else ""
    if moved:
        yield moved
    through = wishes.get(value_of) if value_of is not None else ""
    via = _through(node, wishes)
    if via and via != through:
        yield f"{first}_via_{via}"
    words = [*qualifiers(wishes.module(node))]
    base = first.removeprefix("d_")
    for word in words:
        yield f"d_{joined(word, base)}"
    yield joined(first, op_name(node))
    for word in words:
        yield f"d_{joined(word, joined(base, op_name(node)))}"


def _through(node: fx.Node, wishes: Wishes) -> str:
    """The name of the forward call whose backward gives a gradient."""
    return wishes.through.get(node, "")


def joined(first: str, second: str) -> str:
    """Two names as one, without the words that end the first and begin the second.

    >>> joined("resid_dropout", "dropout_mask"), joined("attn", "mul"), joined("", "mul")
    ('resid_dropout_mask', 'attn_mul', 'mul')
    >>> joined("split", "")
    'split'
    """
    left, right = (name.split("_") if name else [] for name in (first, second))
    for num in range(min(len(left), len(right)), 0, -1):
        if left[-num:] == right[:num]:
            return "_".join([*left, *right[num:]])
    return "_".join([*left, *right])
