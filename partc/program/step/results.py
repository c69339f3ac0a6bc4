"""What a forward gives back: what the model returns, or its tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from partc.trace.trees import Tree, TreeError


class Results(dict[str, Tensor]):
    """Several results of a model by their names: ``results["logits"]``, ``results.logits``.

    A number takes the one at that place, as from a tuple that the model returns: ``results[0]``.
    """

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the model returns {', '.join(self)}, not {name}") from None

    def __getitem__(self, key: Any) -> Tensor:
        if isinstance(key, int) and str(key) not in self:
            return list(self.values())[key]
        return super().__getitem__(str(key))


def results_of(found: Any, returned: Tree | None) -> Any:
    """A forward program's results as the model returns them.

    ``returned`` is the structure of that; without one, or where this process lacks its class, they
    are one tensor or `Results`.
    """
    if not isinstance(found, Mapping):
        return found
    if returned is not None and set(returned.names()) <= found.keys():
        with suppress(TreeError):
            return returned.built(found)
    return found["result"] if list(found) == ["result"] else Results(found)
