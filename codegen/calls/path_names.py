"""Names that come from a module path: ``mlp`` of ``h.0.mlp``, or ``h_0_mlp``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import pairwise, takewhile

LONG, WORDS = 40, 3  # of longer names an attribute has the end alone, of so many words at least


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
    """The last name of a module path; an index at its end stands at the name.

    >>> module_name("h.0.mlp"), module_name("encoder.layers.3"), module_name("blocks.0.1")
    ('mlp', 'layers3', 'blocks0x1')
    """
    parts = path.split(".")
    numbers = [*takewhile(str.isdigit, reversed(parts))][::-1]
    word = parts[-len(numbers) - 1] if len(parts) > len(numbers) else "m"
    return word + "x".join(numbers)


def qualifiers(path: str) -> Iterator[str]:
    """What a module path can add to a name, from little to much.

    Of lists the last name is shown, or the name in front of all lists, with all indices.

    >>> list(qualifiers("encoder.block.0.layer.1.mlp.wi"))
    ['layer_0_1', 'encoder_0_1', 'encoder_0_1_wi', 'encoder_0_1_mlp_wi']
    >>> list(qualifiers("mlp.up"))
    ['up', 'mlp_up']
    >>> list(qualifiers("encoder.block.layer.attention"))[:2]
    ['attention', 'encoder_attention']
    """
    parts = path.split(".") if path else []
    numbers = "_".join(part for part in parts if part.isdigit())
    first = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    lists = [a for a, b in pairwise(parts) if b.isdigit() and not a.isdigit()]
    outer, inner = parts[: max(first - 1, 0)], parts[first:]
    words = [w for w, then in pairwise([*inner, ""]) if not w.isdigit() and not then.isdigit()]
    if numbers:
        yield f"{lists[-1]}_{numbers}" if lists else f"m_{numbers}"
        outer = outer or lists[:1]
        yield f"{outer[-1]}_{numbers}" if outer else f"m_{numbers}"
    within = [f"{outer[-1]}_{numbers}"] if numbers and outer else []
    for num in range(1, len(words) + 1):
        yield "_".join([*within, *words[-num:]])
        if num == 1 and not numbers and len(words) > 2:
            yield f"{words[0]}_{words[-1]}"
    for num in range(2, len(outer) + 1) if numbers else ():
        yield "_".join([*outer[-num:], numbers, *words])


def last_words(name: str) -> str:
    """A parameter's short name, used if no other parameter has the same one.

    It has the last two words of the full name, with the list's name before a layer's number.

    >>> last_words("self_attn.q_proj.weight"), last_words("model.blocks.5.weight")
    ('q_proj.weight', 'blocks.5.weight')
    """
    parts = name.split(".")
    first = max((i for i, part in enumerate(parts[:-1]) if not part.isdigit()), default=0)
    return ".".join(parts[first:])


def short_names(names: Collection[str]) -> dict[str, str]:
    """For each name of a parameter the part of it that an attribute is called after.

    That is the whole name where it is not long, else the shortest end that no other of the names
    has. It begins with a word, and has three words at least: the parameter's own and two modules'.

    >>> long = "model.encoder.stages.1.layers.0.shortcut.conv.weight"
    >>> short_names({long, long.replace("conv", "norm"), "model.head.weight"})[long]
    'shortcut.conv.weight'
    """
    ends = {name: [*_ends(name)] for name in names}
    shared = Counter(end for name in names for end in ends[name])
    return {
        name: name if len(name) <= LONG else next((e for e in ends[name] if shared[e] == 1), name)
        for name in names
    }


def _ends(name: str) -> Iterator[str]:
    """The ends of a name that begin with a word, from the last three words on."""
    parts = name.split(".")
    for first in range(len(parts) - 1, -1, -1):
        words = [part for part in parts[first:] if not part.isdigit()]
        if not parts[first].isdigit() and len(words) >= min(WORDS, len(parts)):
            yield ".".join(parts[first:])
