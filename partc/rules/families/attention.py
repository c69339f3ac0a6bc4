"""Rules of fused attention: sharded by sample, by head and, without a causal mask, by query.

A causal mask compares the places of queries and keys, so a rank with some of the queries would
compare wrong places.
"""

from __future__ import annotations

from partc.rules.call import Call, Shape, parameters
from partc.rules.table import name_of, rule

WHOLE = "=b=h=q"  # a result that stays replicated whatever is sharded: random state, offsets
QUERIES = {"query", "out", "grad_out", "grad_out_"}
KEYS = {"key", "value"}
MASKS = {"attn_mask", "attn_bias"}


def _terms(call: Call) -> dict[str, str]:
    """The terms of queries, keys and statistics, by kind of argument.

    In grouped-query attention several query heads share a key head: then the heads of the queries
    are ``(h n)`` and those of the keys ``h``.
    """
    shapes = dict(zip(_names(call), call.shapes, strict=True))
    query, key = shapes["query"] or (), shapes["key"] or ()
    heads = "h" if query[1] == key[1] else f"(h {query[1] // max(key[1], 1)})"
    statistics = shapes["logsumexp"] if "logsumexp" in shapes else (*call.results, None)[1]
    padded = "efficient" in name_of(call.target)  # its statistics, to whole blocks of queries
    tied = padded or call["is_causal"] or (statistics or ())[2:3] != query[2:3]
    place = f"b{heads}" + ("_" if tied else "q")
    return {"query": f"{place}_", "key": "bh__", "rank3": place, "rank4": f"{place}_"}


def _names(call: Call) -> list[str]:
    return [name for name, _, takes_tensors in parameters(call.target) if takes_tensors]


def _term(name: str, shape: Shape | None, terms: dict[str, str]) -> str:
    """The term of one argument, by its name and its number of dims."""
    if name in QUERIES | MASKS:
        return terms["query"]
    if name in KEYS:
        return terms["key"]
    if name == "logsumexp":
        return terms[f"rank{len(shape or ())}"]
    return "_" * len(shape or ())


def _ins(call: Call, terms: dict[str, str]) -> str:
    pairs = zip(_names(call), call.shapes, strict=True)
    return ",".join(_term(name, shape, terms) for name, shape in pairs)


def attention(call: Call) -> str:
    """Result, then statistics of each query, then what does not depend on the cut.

    The statistics are the logsumexp of each query's scores. The last results (random state, sizes)
    are replicated whatever is sharded.
    """
    terms = _terms(call)
    rest = ["_" * len(shape or ()) + WHOLE for shape in call.results]
    known = [terms["query"], *(terms[f"rank{len(s)}"] for s in call.results[1:2] if s is not None)]
    return f"{_ins(call, terms)}->{','.join([*known, *rest[len(known) :]])}"


def attention_backward(call: Call) -> str:
    """Gradients of query, key, value, perhaps mask; those of keys are sums over the queries.

    So sharding the queries over tp gives the gradients of keys and values as ``{U:tp}``.
    """
    terms = _terms(call)
    results = [terms["query"], terms["key"], terms["key"]]
    for bias in call.results[3:]:
        results.append(terms["query"] if bias is not None else "")
    return f"{_ins(call, terms)}->{','.join(results)}"


PAIRS = (
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
)
QKV = ("query", "key", "value")
for op in PAIRS:
    rule(op, attention, adjacent=QKV)
    rule(
        f"{op}_backward",
        attention_backward,
        linear="0",
        contiguous=("logsumexp",),
        adjacent=("grad_out", "grad_out_", *QKV, "out"),
    )
