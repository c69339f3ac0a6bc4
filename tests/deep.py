"""Models with so many equal blocks that a trace records some of them and leaves the others out."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.pipelines import toy
from tests.zoo import FAMILIES, Case

DEPTH: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 6},
    "llama": {"num_hidden_layers": 6},
    "t5": {"num_layers": 8, "num_decoder_layers": 2},
}


@cache
def deep(name: str) -> Case:
    """A family of the zoo, or ``"toy"``, with enough layers; the same object for every test."""
    return toy(38) if name == "toy" else FAMILIES[name].case(name, **DEPTH[name])
