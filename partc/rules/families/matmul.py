"""Rules of matrix products. Sharding the summed letter ``k`` leaves an unfinished sum.

For ``mk,kn->mn`` on axis tp: sharding ``n`` is column parallelism (``f32[8,16@tp]``), sharding
``k`` is row parallelism (``f32[8,16]{U:tp}``, which an all_reduce finishes).
"""

from __future__ import annotations

from partc.rules.call import Call
from partc.rules.table import rule


def matmul(call: Call) -> str:
    """``...mk,...kn->...mn``, a vector lacking its ``m`` or ``n``."""
    left = "...mk" if call.rank(0) > 1 else "k"
    right = "...kn" if call.rank(1) > 1 else "k"
    result = ("...m" if call.rank(0) > 1 else "...") + ("n" if call.rank(1) > 1 else "")
    return f"{left},{right}->{result}"


def linear(call: Call) -> str:
    """With a bias ``k`` stays whole: ``passes.split_bias`` makes it an addition of its own.

    With ``k`` sharded every rank would add the bias, so that it counts once per rank.
    """
    return "...k,nk->...n" if call["bias"] is None else "...!k,nk,n->...n"


def grouped_mm(call: Call) -> str:
    """Rows belong to groups whose ends ``offs`` holds, so rows and groups stay whole.

    In a mixture of experts a group is the rows of one expert. ``rules/rows.py`` has the strategies
    for ranks that have sorted their own rows by expert.
    """
    left = "!gmk" if call.rank(0) == 3 else "!mk"
    right = "!gkn" if call.rank(1) == 3 else "kn"
    if call.rank(0) == 2 and call.rank(1) == 2:
        return "m!k,!kn,!g,n->gmn"
    result = "mn" if call.rank(0) == 2 or call.rank(1) == 2 else "gmn"
    return f"{left},{right},!g,n->{result}"


rule("aten.linear", linear, linear="0|1", added=2)
rule("aten.mm", "mk,kn->mn", linear="0|1")
rule("aten.bmm", "bmk,bkn->bmn", linear="0|1")
rule("aten.mv", "mk,k->m", linear="0|1")
rule("aten.dot aten.vdot", "k,k->", linear="0|1")
rule("aten.outer aten.ger", "m,n->mn", linear="0|1")
rule("aten.matmul", matmul, linear="0|1")
rule("aten.addmm", "mn,mk,kn->mn", linear="1|2", added=0)
rule("aten.baddbmm", "bmn,bmk,bkn->bmn", linear="1|2", added=0)
rule("aten.addmv", "m,mk,k->m", linear="1|2", added=0)
rule("aten.addbmm", "mn,bmk,bkn->mn", linear="1|2", added=0)
rule("aten._grouped_mm", grouped_mm, linear="0|1", added=3)
rule("partc.ops.weight_grad", "...n,...k->nk", linear="0|1")
