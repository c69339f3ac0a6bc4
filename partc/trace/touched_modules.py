"""Modules whose call is more than their class's forward: hooks, and a forward of their own.

A saved program has what these did when it was compiled, and calls none of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

HOOKS = {  # torch's own attributes of a module
    "_forward_pre_hooks": "forward pre-hook", "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook", "_backward_hooks": "backward hook",
}  # fmt: skip


def touched_modules(model: nn.Module) -> dict[str, str]:
    """What each module has of these, in words, by path; those that have none are left out.

    >>> layer = nn.Linear(2, 2)
    >>> _ = layer.register_forward_hook(print)
    >>> touched_modules(nn.Sequential(layer))
    {'0': '1 forward hook'}
    """
    found = {path: ", ".join(_of(module)) for path, module in model.named_modules()}
    return {path: words for path, words in found.items() if words}


def _of(module: nn.Module) -> list[str]:
    nums = {word: len(getattr(module, name, None) or ()) for name, word in HOOKS.items()}
    words = [f"{num} {word}{'s' * (num > 1)}" for word, num in nums.items() if num]
    return [*words, *["a forward of its own"] * ("forward" in vars(module))]


def changes(compiled: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """One line per module that has others of these: compiled, given."""
    return [
        f"{path or 'the model itself'}: {compiled.get(path, 'none')} compiled, "
        f"{given.get(path, 'none')} given"
        for path in sorted({*compiled, *given})
        if compiled.get(path) != given.get(path)
    ]
