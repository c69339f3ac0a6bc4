"""Which calls draw random numbers, and the *site* that decides which numbers a call draws.

A site is a text in the user's words: the path of the module that draws, ``h.3.attn.dropout``, with
a number behind it where one module draws several times, ``h.3.attn.dropout#1``; outside of modules
the word of the op, ``rand``. The numbers of a draw follow from seed, step, microbatch, site, and
this rank's place on the mesh axes that cut the value. So copies of one call (a recomputation,
another pipeline stage) draw equal numbers, and calls of two sites never do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch import fx

from partc.graph import Graph, ops, update, value
from partc.graph.folds import spread

aten = torch.ops.aten
# Ops that take a generator, by name; `native_dropout` and `rrelu` are rewritten with these.
DRAWABLE = frozenset(
    (
        "bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal", "multinomial",
        "native_dropout", "normal", "normal_functional", "poisson", "rand", "rand_like", "randint",
        "randint_like", "randn", "randn_like", "random", "randperm", "rrelu_with_noise",
        "sample_dirichlet", "standard_gamma", "uniform",
    )
)  # fmt: skip
FILLS = (  # in-place ops of torch that fill a tensor, of which they read shape and dtype alone
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal_functional", "random",
    "uniform",
)  # fmt: skip
LIKES = ("rand_like", "randn_like", "randint_like")


def takes_numbers(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments draws random numbers.

    Attention whose ``dropout_p`` is 0 does not, nor a dropout that is not told to train.
    """
    if not _is_random(target):
        return False
    if target in ops.DRAWS:
        return True
    given = {**dict(zip(_names(target), args, strict=False)), **kwargs}
    for argument in target._schema.arguments:
        if argument.name in ("dropout_p", "train", "training"):
            return bool(given.get(argument.name, argument.default_value))
    return True


@cache
def _is_random(target: Any) -> bool:
    """Whether an op may draw; torch's tag is missing on some (``random_``, ``binomial``)."""
    if not isinstance(target, torch._ops.OpOverload):
        return target in ops.DRAWS
    types = [str(argument.type) for argument in target._schema.arguments]
    known = target.namespace == "aten" and word_of(target) in DRAWABLE
    tagged = torch.Tag.nondeterministic_seeded in target.tags
    return tagged or known or any("Generator" in each for each in types)


def draws_numbers(node: fx.Node) -> bool:
    """Whether a call of a graph draws random numbers."""
    return node.op == "call_function" and takes_numbers(node.target, node.args, node.kwargs)


def site_of(node: fx.Node) -> str:
    """The site of a draw; "" for a call that draws nothing."""
    return value(node).site if draws_numbers(node) else ""


def set_site(node: fx.Node, site: str) -> None:
    update(node, site=site)


def word_of(target: Any) -> str:
    """The name of a random op, one for its in-place and other forms: ``bernoulli``."""
    return str(target._opname).strip("_") if hasattr(target, "_opname") else target.__name__


def reads_shape_alone(node: fx.Node) -> bool:
    """Whether a draw reads nothing of its first operand but shape and dtype."""
    if node.target in ops.DRAWS:
        return True
    word = word_of(node.target)
    fills = word in FILLS and (word != "bernoulli" or node.target is aten.bernoulli.p)
    return word in LIKES or fills


def draws_of(graph: Graph) -> list[fx.Node]:
    """The calls of a graph that draw random numbers, in order."""
    return [node for node in graph.calls() if draws_numbers(node)]


def site_in(node: fx.Node, block: str) -> str:
    """The site of a call from a block on, alike in equal blocks; outside of it the whole site."""
    site = site_of(node)
    inside = site.startswith(f"{block}.")
    return f"*{site.removeprefix(block)}" if inside else site


def seed_of(seed: int, step: int, microbatch: int | None, site: str, place: tuple[int, ...]) -> int:
    """The seed of the generator of one draw, by the rule that programs have in their own words.

    ``place``: the rank's coordinates on the axes that cut what is drawn. ``microbatch``: None for a
    draw that is the same in all. A program's text is checked by this second copy of the rule.
    """
    key = f"{seed} {step} {microbatch} {site} {place}"
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")


SORTED, UNREAD = "sorted", "unread"


@dataclass(frozen=True)
class Draw:
    """What a program draws at one site: the whole value's shape, and the cuts that make pieces.

    ``name``: the site as the model's own run counts it, which differs where the draw was given to a
    block. ``cuts``: (axis, dim, outer, pieces) in the order in which they cut the whole. ``kind``:
    SORTED where each rank has sorted its rows by itself, so that piece i is not that of place i;
    UNREAD where the model draws, and the program need not.
    """

    name: str
    shape: tuple[int, ...] = ()
    cuts: tuple[tuple[str, int, int, int], ...] = ()
    kind: str = ""

    @classmethod
    def of(cls, graph: Graph, node: fx.Node) -> Draw:
        known, mesh = value(node), graph.mesh
        cuts = tuple(
            (axis, layout.dim, known.sharding.local_outer(axis, mesh), mesh.size(axis))
            for axis, layout in known.sharding.cuts()
        )
        kind = SORTED if any(layout.permuted for _, layout in known.sharding.cuts()) else ""
        return cls(known.site, tuple(known.shape), cuts, kind)


def drawn_in(graph: Graph) -> dict[str, Draw]:
    """What a graph draws by site, with the draws of the blocks that it leaves out."""
    found = {site_of(node): Draw.of(graph, node) for node in draws_of(graph)}
    every = spread(found, graph.folds)
    return {site: replace(draw, name=graph.sites.get(site, site)) for site, draw in every.items()}


def _names(target: Any) -> list[str]:
    return [argument.name for argument in target._schema.arguments]
