"""Find the line that writes in place over what a gradient needs, once autograd has refused it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx
from torch.autograd.graph import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from partc.errors import TraceError
from partc.graph.fake_calls import storage_of, tensors_in
from partc.graph.writes import written_to

_REFUSED = "modified by an inplace operation"


@contextmanager
def overwrites_named(loss: Tensor) -> Iterator[None]:
    """While the backward of ``loss`` runs: TraceError with the line that writes in place."""
    try:
        yield
    except RuntimeError as error:
        named = _named(loss) if _REFUSED in str(error) else None
        if named is None:
            raise
        raise named from error


def _named(loss: Tensor) -> TraceError | None:
    mode = get_proxy_mode()
    if mode is None:
        return None
    calls: list[fx.Node] = list(mode.tracer.graph.nodes)
    for node in _nodes(loss.grad_fn):
        number: Any = getattr(node, "_sequence_nr", int)()
        if _is_damaged(node):
            reader = [i for i, call in enumerate(calls) if call.meta.get("seq_nr") == number]
            return _refusal(_writer(calls, reader), node.name())
    return None


def _nodes(first: Node | None) -> Iterator[Node]:
    """The nodes of a backward, the latest first."""
    left, seen = [first], {first}
    for node in left:
        if node is not None:
            yield node
            new = [before for before, _ in node.next_functions if before not in seen]
            seen.update(new)
            left += dict.fromkeys(new)


def _is_damaged(node: Node) -> bool:
    """Whether a tensor that a node has saved was written to since."""
    try:
        for name in dir(node):
            if name == "saved_tensors" or name.startswith("_saved_"):
                getattr(node, name)
    except RuntimeError as error:
        return _REFUSED in str(error)
    return False


def _writer(calls: list[fx.Node], reader: list[int]) -> str:
    """The line of the first call behind the ``reader`` that writes over what that one has read."""
    known = [calls[i] for i in reader]
    memory = {m for call in known for each in (call, *call.all_input_nodes) for m in _memory(each)}
    behind = calls[reader[-1] + 1 :] if reader else []
    for call in behind:
        written = written_to(call.target, call.args, call.kwargs)
        if any(memory & set(_memory(each)) for each in written if isinstance(each, fx.Node)):
            return str(call.meta.get("custom", {}).get("source", ""))
    return ""


def _memory(node: fx.Node) -> list[int]:
    return [storage_of(each) for each in tensors_in(node.meta.get("val"))]


def _refusal(line: str, name: str) -> TraceError:
    return TraceError(
        where=line or "the backward",
        what="it writes in place over what a gradient needs",
        why=f"{name} reads it in the backward, and torch refuses this too",
        do="Use the op that gives a new tensor (y = y + 1 instead of y.add_(1)).",
    )
