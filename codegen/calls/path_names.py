"""Names that come from a module path: ``h_0_mlp`` of ``h.0.mlp``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise


def inside(path: str, prefix: str) -> str:
    """A module path or name as seen from the module at ``prefix``.

    >>> inside("h.0.mlp.fc", "h.0")
    'mlp.fc'
    """
    if path == prefix:
        return ""
    return path.removeprefix(f"{prefix}.") if prefix else path


def is_within(path: str, outer: str) -> bool:
    """Whether a path is that of a module or of something in it; ``""`` is the whole model."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def module_name(path: str) -> str:
    """The last name of a module path, behind the list and the indices around it.

    An index at the end stands at the name: ``h.0`` is ``h0``.

    >>> module_name("encoder.layers.3.fc.1"), module_name("h.0.mlp"), module_name("mlp.up")
    ('layers_3_fc1', 'h_0_mlp', 'up')
    """
    *around, last = path.split(".")
    if not last.isdigit():
        return "_".join(filter(None, [_list_of(around), last]))
    numbers = [last]
    while around and around[-1].isdigit():
        numbers.insert(0, around.pop())
    word = around.pop() if around else "m"
    return "_".join(filter(None, [_list_of(around), word + "x".join(numbers)]))


def _list_of(parts: Sequence[str]) -> str:
    """The last list on a path with all indices on it: ``layer_0_1`` of ``block.0.layer.1.mlp``."""
    lists = [a for a, b in pairwise(parts) if b.isdigit() and not a.isdigit()]
    return "_".join([*lists[-1:], *(part for part in parts if part.isdigit())])


def qualifiers(path: str) -> Iterator[str]:
    """What a module path can add to a name, from little to much.

    >>> list(qualifiers("encoder.block.0.layer.1.mlp.wi"))
    ['layer_0_1', 'layer_0_1_wi', 'layer_0_1_mlp_wi', 'encoder_layer_0_1_mlp_wi']
    """
    parts = path.split(".") if path else []
    within = _list_of(parts)
    words = [a for a, b in pairwise([*parts, ""]) if not a.isdigit() and not b.isdigit()]
    inner = [w for i, w in enumerate(parts) if w in words and any(p.isdigit() for p in parts[:i])]
    outer = [word for word in words if word not in inner] if within else []
    inner = inner if within else words
    if within:
        yield within
    for num in range(1, len(inner) + 1):
        yield "_".join(filter(None, [within, *inner[-num:]]))
    for num in range(1, len(outer) + 1):
        yield "_".join(filter(None, [*outer[-num:], within, *inner]))


def last_words(name: str) -> str:
    """A parameter's short name, used if no other parameter has the same one.

    It has the last two words of the full name, with the list's name before a layer's number.

    >>> last_words("self_attn.q_proj.weight"), last_words("model.blocks.5.weight")
    ('q_proj.weight', 'blocks.5.weight')
    """
    parts = name.split(".")
    first = max((i for i, part in enumerate(parts[:-1]) if not part.isdigit()), default=0)
    return ".".join(parts[first:])
