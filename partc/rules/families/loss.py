"""Rules of losses: with reduction "sum", sharding samples or classes leaves an unfinished sum.

A mean is not sharded, since a rank's mean divides by the rank's own count.
"""

from __future__ import annotations

import torch

from partc.rules.call import Call
from partc.rules.table import Windowed, rule, whole_only

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for reductions
CLASSES = Windowed(ignore="ignore_index", outside=-100)  # -100 is torch's default ignore_index


def nll(call: Call) -> str:
    """``nvxy, nxy @v, v -> ,``: the loss and the weight of the targets that count.

    n are samples, v classes, x and y places; with reduction "none" the loss has the dims ``nxy``.
    """
    samples = "n" + "xyz"[: call.rank() - 2]
    scores = f"nv{samples[1:]}"
    if call["reduction"] == MEAN:
        return whole_only(call)
    loss = samples if call["reduction"] == NONE and call.rank() > 1 else ""
    return f"{scores},{samples} @v,v->{loss},"


def nll_backward(call: Call) -> str:
    """``, nvxy, nxy @v, v, -> nvxy``: a mean's count comes from the forward."""
    samples = "n" + "xyz"[: call.rank(1) - 2]
    scores = f"nv{samples[1:]}"
    loss = samples if call.rank() else ""
    return f"{loss},{scores},{samples} @v,v,->{scores}"


def elementwise_loss(call: Call) -> str:
    """A term per element, reduced or not."""
    if call["reduction"] == MEAN:
        return whole_only(call)
    return ",".join(["..."] * len(call.slots)) + ("->..." if call["reduction"] == NONE else "->")


def elementwise_loss_backward(call: Call) -> str:
    """Elementwise; only a mean's gradient is divided by the number of elements."""
    if call["reduction"] == MEAN:
        return whole_only(call)
    return ",".join(["..."] * len(call.slots)) + "->..."


def connectionist(call: Call) -> str:
    """``tnc, ns, n, n -> n, n__``: a loss for each sample, and what its backward reads again.

    Not cut where the lengths are numbers, of the whole batch, or the targets follow each other.
    """
    if call.target is not torch.ops.aten._ctc_loss.Tensor or call.rank(1) != 2:
        return whole_only(call)
    return "!tn!c,n!s,n,n->n,n__"


def connectionist_backward(call: Call) -> str:
    """The gradient of each sample by the scores of its steps."""
    if call.target is not torch.ops.aten._ctc_loss_backward.Tensor or call.rank(2) != 2:
        return whole_only(call)
    return "n,!tn!c,n!s,n,n,n,n__->tnc"


rule("aten.nll_loss_forward aten.nll_loss2d_forward", nll, windowed=CLASSES)
rule("aten.nll_loss_backward", nll_backward, linear="0", windowed=CLASSES)
rule("aten.nll_loss2d_backward", nll_backward, linear="0", windowed=CLASSES, contiguous=("self",))
rule(
    "partc.ops.cross_entropy_grad",
    ",nv,n,n @v->nv",
    linear="0",
    windowed=Windowed(outside=CLASSES.outside),
)
rule("aten.mse_loss aten.smooth_l1_loss aten.huber_loss", elementwise_loss)
rule("aten.binary_cross_entropy aten.binary_cross_entropy_with_logits", elementwise_loss)
rule("aten.soft_margin_loss", elementwise_loss)
rule("aten.mse_loss_backward aten.smooth_l1_loss_backward", elementwise_loss_backward, linear="0")
rule("aten.huber_loss_backward", elementwise_loss_backward, linear="0")
rule("aten.binary_cross_entropy_backward", elementwise_loss_backward, linear="0")
rule("aten.soft_margin_loss_backward", elementwise_loss_backward, linear="0")
rule("aten._ctc_loss", connectionist)
rule("aten._ctc_loss_backward", connectionist_backward, linear="0")
