"""Families of the zoo with one layer, or with one of each kind that they have.

For tests of what a layer computes: a second one that is equal to the first says nothing new.
"""

from __future__ import annotations

from typing import Any

from tests.zoo import FAMILIES, Case

OF_TWO_KINDS = ("gemma2", "deepseek_v3")  # windows and none; a dense layer and experts
DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
)  # fmt: skip


def short(name: str) -> Case:
    """The family's model and batch, as ``FAMILIES[name].case(name)`` with fewer layers."""
    family = FAMILIES[name]
    sizes: dict[str, Any] = {key: 1 for key in DEPTHS if key in family.config}
    if "depths" in family.config:
        sizes["depths"] = [2, 1]  # those of swin take turns, in resnet the first one is another
    return family.case(name, **({} if name in OF_TWO_KINDS else sizes))
