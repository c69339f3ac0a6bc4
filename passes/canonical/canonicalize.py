"""Rewrite a traced graph in the canonical calls that sharding rules, passes and printing know."""

from __future__ import annotations

from partc.graph import Graph
from partc.graph.graph_edits import rename_calls
from partc.passes.canonical.cancel_transposes import cancel_transposes
from partc.passes.canonical.cast_first import cast_first
from partc.passes.canonical.copy_for_buffers import copy_for_buffers
from partc.passes.canonical.drop_noops import drop_noops
from partc.passes.canonical.fold_dropout import fold_dropout
from partc.passes.canonical.fold_linear import fold_linear
from partc.passes.canonical.fold_masks import fold_masks
from partc.passes.canonical.free_fills import free_fills
from partc.passes.canonical.index_rows import index_rows
from partc.passes.canonical.join_scatters import join_scatters
from partc.passes.canonical.merge_draws import merge_draws
from partc.passes.canonical.merge_given import merge_given
from partc.passes.canonical.merge_reshapes import merge_reshapes
from partc.passes.canonical.narrow_expands import narrow_expands
from partc.passes.canonical.open_bags import open_bags
from partc.passes.canonical.open_dropout import open_dropout
from partc.passes.canonical.open_masks import open_masks
from partc.passes.canonical.open_means import open_means
from partc.passes.canonical.open_strides import open_strides
from partc.passes.canonical.pad_slices import pad_slices
from partc.passes.canonical.products_first import products_first
from partc.passes.canonical.squeeze_sums import squeeze_sums
from partc.passes.canonical.start_sums import start_sums
from partc.passes.canonical.sums_first import sums_first
from partc.passes.canonical.unsort_rows import unsort_rows
from partc.passes.runner import Pass

JOINT = "joint graph"


def name_calls(graph: Graph) -> None:
    """Name every call after its op (``mul``, ``mul_1``), and check the graph with fx's lint."""
    rename_calls(graph)
    graph.fx.lint()


# The order matters: a pass finds its pattern only in the form that earlier passes leave behind
# (``fold_linear`` knows ``reshape`` alone, which ``drop_noops`` writes for every view). Two passes
# stand twice, as later passes leave new work for them.
CANONICAL = (
    Pass(open_strides, JOINT, "strides of a whole tensor mean nothing for its pieces; shapes do"),
    Pass(open_dropout, JOINT, "a draw inside of an op takes no generator"),
    Pass(merge_draws, JOINT, "a checkpoint's repeated random draw is the first draw"),
    Pass(
        drop_noops,
        JOINT,
        "what changes no value (detach, x * 1, a device) hides what calls have in common; views "
        "are spelled reshape, with all sizes",
    ),
    Pass(fold_dropout, JOINT, "a dropout's mask can be told how its tensor is cut"),
    Pass(fold_masks, JOINT, "a causal mask is a word to the attention kernel, not a tensor"),
    Pass(
        open_masks,
        JOINT,
        "x[mask] = 1.5 as a choice between two values may be cut; places in order may not",
    ),
    Pass(open_bags, JOINT, "a bag's places count the whole batch; rows and a sum may be cut"),
    Pass(
        open_means,
        JOINT,
        "the sum of a cut dim is finished by adding what ranks have; a mean is not",
    ),
    Pass(
        pad_slices,
        JOINT,
        "the backward of a slice is padding, which rules can cut; of slices "
        "that fill a dim it is their cat",
    ),
    Pass(
        index_rows,
        JOINT,
        "what each row picks from itself is gathered: it looks at each sample alone",
    ),
    Pass(join_scatters, JOINT, "pieces written side by side are their cat"),
    Pass(unsort_rows, JOINT, "sorted rows come back by the inverse order: a look-up, no scatter"),
    Pass(narrow_expands, JOINT, "compute on small tensors before they are expanded"),
    Pass(cast_first, JOINT, "a weight's shard can be cast where it is stored, a view of it cannot"),
    Pass(
        cancel_transposes,
        JOINT,
        "t(t(x)) becomes x, and t(mm(a, b)) becomes mm(t(b), t(a)): no gradient of a weight ends "
        "in a transpose any more",
    ),
    Pass(
        fold_linear,
        JOINT,
        "a linear layer's view and mm become linear; those of its backward become matmul, and "
        "for the weight partc's own weight_grad: all dims stay, so that batch and sequence can be "
        "cut; views that are left cancel out in merge_reshapes",
    ),
    Pass(merge_reshapes, JOINT, "two reshapes in a row are one, or none"),
    Pass(squeeze_sums, JOINT, "a sum without the dims that are squeezed away at once"),
    Pass(
        cancel_transposes,
        JOINT,
        "where reshapes between two transposes were none: tokens become an image and come back",
    ),
    Pass(drop_noops, JOINT, "the mean of one entry has become its sum, divided by 1"),
    Pass(merge_reshapes, JOINT, "and reshapes side by side, where a view between them was none"),
    Pass(free_fills, JOINT, "a tensor of a constant needs no tensor that lends it a dtype"),
    Pass(
        merge_given,
        JOINT,
        "masks and positions of equal blocks, and what all compute of one value, are computed once",
    ),
    Pass(sums_first, JOINT, "and so is what all apply alike to their part of its gradient"),
    Pass(
        products_first,
        JOINT,
        "of what several cut products give one value the sum is finished, not each",
    ),
    Pass(
        start_sums,
        JOINT,
        "the first block to add to a gradient that all blocks add to is then like the others",
    ),
    Pass(
        copy_for_buffers,
        JOINT,
        "buffers are written one by one: none takes over another's new value",
    ),
    Pass(name_calls, JOINT, "names count ops, so that equal models read alike"),
)


def canonicalize(graph: Graph) -> None:
    """Run the passes of ``CANONICAL`` in order, in place; the graph's results stay the same."""
    for each in CANONICAL:
        each.run(graph)
