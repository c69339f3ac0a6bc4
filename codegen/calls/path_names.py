"""Names that come from a module path: ``mlp_0`` of ``h.0.mlp``."""

from __future__ import annotations


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
    """The last name of a module path with the indices around it: ``h.0.mlp`` is ``mlp_0``.

    >>> module_name("encoder.layers.3.fc.1")
    'fc_3_1'
    """
    words: list[str] = []
    numbers: list[str] = []
    for part in path.split("."):
        (numbers if part.isdigit() else words).append(part)
    return "_".join([*(words[-1:] or ["m"]), *numbers])


def last_words(name: str) -> str:
    """A parameter's short name, used if no other parameter has the same one.

    It has the last two words of the full name, with the list's name before a layer's number.

    >>> last_words("self_attn.q_proj.weight"), last_words("model.blocks.5.weight")
    ('q_proj.weight', 'blocks.5.weight')
    """
    parts = name.split(".")
    first = max((i for i, part in enumerate(parts[:-1]) if not part.isdigit()), default=0)
    return ".".join(parts[first:])
