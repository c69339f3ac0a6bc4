"""The depth of a Hugging Face configuration: which keys count layers, in all of its parts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

# Keys that count the layers of a stack, and those of smaller stacks beside it, which only shrink.
MAIN = re.compile(r"num_hidden_layers|num_layers|n_layers?|(num_)?(en|de)coder_layers|depth|layers")
ALSO = re.compile(
    r"\w+_(num_hidden_layers|num_layers|encoder_layers|decoder_layers)|[lrx]_layers|num_blocks"
    r"|resampler_depth|(en|de)coder_num_hidden_layers"
)
STAGES = ("depths", "block_sizes", "blocks_per_stage", "stage_num_blocks", "num_block_repeats")
PLACES = re.compile(r"\w*(layer|block|stage)\w*|out_indices")  # lists that may name layers


def has_depth(config: Any) -> bool:
    """Whether a key of a configuration, or of one inside of it, counts layers."""
    return any(_counts(part) or _stages(part) for part in parts_of(config))


def set_depth(config: Any, layers: int) -> None:
    """Give each stack ``layers`` layers, in all parts of a configuration.

    Of several stages each has no more than ``layers``. Lists with an entry for each layer get as
    many entries, and lists of layers' numbers lose those that are gone.
    """
    for part in parts_of(config):
        if stages := _stages(part):
            for key in stages:
                now = getattr(part, key)
                setattr(part, key, type(now)(min(number, layers) for number in now))
            continue
        counts = _counts(part)
        before = [getattr(part, key) for key in counts]
        for key in counts:
            _put(part, key, layers if MAIN.fullmatch(key) else min(layers, getattr(part, key)))
        if before:
            _shorten(part, max(before), layers)


def parts_of(config: Any) -> Iterator[Any]:
    """A configuration and those inside of it."""
    yield config
    for each in list(vars(config).values()):
        if hasattr(each, "to_diff_dict"):
            yield from parts_of(each)


def _counts(part: Any) -> list[str]:
    """The keys that count layers, under the names by which they are stored."""
    found = (n for n, value in vars(part).items() if type(value) is int and value > 0)
    return [name for name in found if MAIN.fullmatch(name) or ALSO.fullmatch(name)]


def _stages(part: Any) -> list[str]:
    """The keys that list how many layers each stage has."""
    lists = (name for name in STAGES if isinstance(getattr(part, name, None), list | tuple))
    return [name for name in lists if all(type(n) is int for n in getattr(part, name))]


def _shorten(part: Any, before: int, layers: int) -> None:
    """Lists that speak of layers, for fewer or more layers than before."""
    for key, value in list(vars(part).items()):
        if not isinstance(value, list | tuple) or not value or not PLACES.fullmatch(key):
            continue
        if len(value) == before:
            _put(part, key, type(value)((list(value) * layers)[:layers]))
        elif all(type(n) is int for n in value) and max(value) < before:
            _put(part, key, type(value)(n for n in value if n < layers))


def _put(part: Any, key: str, value: Any) -> None:
    if getattr(part, key) != value:
        setattr(part, key, value)
