"""What torch's single ops say of operands that do not fit them, and what to write instead."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from partc.wrong_calls import did_you_mean

# By what torch says: what happened, and what to do.
OPS = (
    ("a leaf Variable that requires grad|a view of a leaf Variable",
     "the step writes into a parameter in place, which torch refuses without partc too",
     "Compute a new tensor, w = self.weight * 0.9, and use that; or change the parameter behind "
     "the step, under torch.no_grad()."),
    ("attn_mask dtype|predicate to be bool|(m|M)ask.*must be.*bool|only supports bool",
     "a mask has numbers where True and False are needed",
     "Give mask.bool(), whose True says of attention that a word takes part, and of masked_fill "
     "and torch.where that a place is chosen."),
    ("Boolean value of Tensor with more than one value",
     "a tensor of several numbers is asked for yes or no",
     "Choose place by place, torch.where(x > 0, a, b), or ask for one answer, (x > 0).all(). A "
     "criterion is made first: nn.MSELoss()(prediction, target), or F.mse_loss(prediction, target)."
    ),
    (r"KeyError: FakeTensor", "a tensor is looked up as a key",
     "Give the step a number, n.item(), which is part of the program; or choose by the tensor, "
     "table[n] of a tensor with all entries."),
    (r"'NoneType' object has no attribute|must be Tensor, not NoneType|got \(NoneType",
     "None stands where a tensor is needed",
     "Pass what is None here: an input that was left out, or the result of a function that has no "
     "return."),
    (r"einsum\(\)", "the operands do not fit the equation of an einsum",
     "Correct the equation: each letter of the result stands before -> too, there are as many "
     "letters as dims, and a letter has one size in all operands."),
)  # fmt: skip
# What to do about shapes that do not fit each other, by what torch says.
SHAPES = (
    (r"input\[.*\] to have \d+ channels",
     "A convolution reads channels along dim 1, [rows, channels, height, width]: of images with "
     "channels last give x.permute(0, 3, 1, 2), of gray ones without that dim x.unsqueeze(1); or "
     "correct the layer."),
    (r"\bt\(\) expects", "Write x.transpose(-2, -1), or x.mT, which swap the last two dims."),
    (r"Dimension out of range|Dimension specified as",
     "Name a dim in that range: the tensor of this line has no other. One number, as a loss that "
     'is a mean already, has none: leave the call out, or give the criterion reduction="none".'),
    (r"Sizes of tensors must match except|stack expects each tensor",
     "Give the tensors of this line the same sizes, but for the dim along which cat joins them; "
     "F.pad makes one longer."),
    (r"is invalid for input of size",
     "Give sizes whose product is that number; one of them may be -1, which follows from the "
     "others."),
    (r"key_padded_mask|key_padding_mask",
     "A key_padding_mask has the shape [rows, words], rows first whatever batch_first says, and "
     "True for words that are left out."),
)  # fmt: skip


def of_shapes(reason: str) -> str:
    """What to do about shapes of which torch says this; "" where nothing special is known."""
    return next((do for words, do in SHAPES if re.search(words, reason)), "")


def of_name(error: Exception) -> str:
    """What to write for an attribute that a module has not; "" where nothing is near."""
    owner: Any = getattr(error, "obj", None)
    name = getattr(error, "name", None)
    if not isinstance(owner, nn.Module) or not name:
        return ""
    if name == "module":
        return "Leave .module out: a model is given as it is, without a wrapper around it."
    known = [*owner._modules, *owner._parameters, *owner._buffers, *vars(owner)]
    return did_you_mean(name, [each for each in known if not each.startswith("_")])
