"""Which module has returned a tuple that stands where a tensor is needed.

``nn.LSTM`` returns ``(output, (h, c))``, and what fails is the layer behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

from torch import Tensor, nn

from partc.trace.source_lines import source_here, source_of

_NOTED = "_partc_tuple"
_KINDS = r"(tuple|list|dict|OrderedDict|\w+Output\w*)"
_SAYS = rf"(not|got|concatenate) \(?{_KINDS}\b|'{_KINDS}'"  # in words of Python and of torch
_RESULTS = {  # of modules of torch
    "LSTM": "(output, (h, c))", "GRU": "(output, h)", "RNN": "(output, h)", "LSTMCell": "(h, c)",
    "MultiheadAttention": "(output, weights)",
}  # fmt: skip


@dataclass(frozen=True)
class Returner:
    """A module that has returned several things.

    ``entry``: how the first of them is reached. ``line``: the user's, which had called it.
    """

    path: str
    kind: str
    results: str  # the name of their type
    entry: str
    line: str

    @property
    def what(self) -> str:
        """What stands where it cannot stand."""
        shape = _RESULTS.get(self.kind, "")
        told = f", {shape}," if shape else ","
        article = "an" if self.kind[0] in "AEFHILMNORSX" and self.kind.isupper() else "a"
        return (
            f"a {self.results}{told} which {self.path} ({article} {self.kind}) has returned, "
            "stands where a tensor is needed"
        )

    @property
    def do(self) -> str:
        """How its tensor is taken."""
        name = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", f"self.{self.path}")
        taken = f"out, *_ = {name}(...)" if self.entry == "[0]" else f"{name}(...){self.entry}"
        return (
            f"Take the tensor out of it: {taken}. A Sequential hands on all that a module returns: "
            "call its layers in a forward of your own, or put a module between that returns x[0]."
        )


class TupleResults:
    """What modules have returned in one step that is no tensor, by identity."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[int, ...], Returner] = {}
        self._latest: Returner | None = None

    def note(self, path: str, module: nn.Module, result: Any) -> None:
        """A module returns; of the model itself the loss knows what it returns."""
        if path and isinstance(result, tuple | list | Mapping):
            kind = type(module).__name__
            key = next(iter(result), 0) if isinstance(result, Mapping) else 0
            made = Returner(path, kind, type(result).__name__, f"[{key!r}]", source_here())
            self._by_id[_identity(result)] = self._latest = made

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note on an error which of them it speaks of."""
        self._by_id.clear()
        self._latest = None
        try:
            yield
        except Exception as error:
            if re.search(_SAYS, str(error)) and (found := self._of(error)):
                setattr(error, _NOTED, found)
            raise

    def _of(self, error: Exception) -> Returner | None:
        """The returner of what an error is about: of its object, of what the innermost functions
        were given, or else the one that the failing line has called last.
        """
        met = [getattr(error, "obj", None)]
        for frame, _ in reversed([*walk_tb(error.__traceback__)]):
            met += frame.f_locals.values()
        for each in met:
            if isinstance(each, tuple | list | Mapping) and _identity(each) in self._by_id:
                return self._by_id[_identity(each)]
        last = self._latest
        return last if last is not None and last.line and last.line == source_of(error) else None


def returner_of(error: BaseException) -> Returner | None:
    """The module whose results an error speaks of; None for another error."""
    found: Returner | None = getattr(error, _NOTED, None)
    return found


def _identity(result: Any) -> tuple[int, ...]:
    """Numbers that tell a result from others while it lives, and rarely fit another one later."""
    entries = [*(result.values() if isinstance(result, Mapping) else result)]
    return (id(result), *(id(x) for x in entries if isinstance(x, Tensor)))
