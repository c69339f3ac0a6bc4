"""Which values of a graph share memory, and what each call needs beside its results.

The graph runs once on fake tensors, from its placeholders on, so the answer does not rest on what
earlier passes noted down.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from partc.graph import Graph, held
from partc.passes.workspaces import workspace_of

Storage = int  # names one piece of memory within a Replay


@dataclass(frozen=True)
class Replay:
    """A graph run on fakes: every result, and per call the bytes of temporaries at its worst."""

    results: dict[fx.Node, Any] = field(default_factory=dict)
    temporary_bytes: dict[fx.Node, int] = field(default_factory=dict)

    def tensors(self, node: fx.Node) -> list[Tensor]:
        """The tensors of one node's result."""
        return [x for x in pytree.tree_leaves(self.results[node]) if isinstance(x, Tensor)]

    def storages(self, node: fx.Node) -> dict[Storage, int]:
        """The memory behind one node's result, with its bytes."""
        memories = (t.untyped_storage() for t in self.tensors(node))
        return {m._cdata: m.nbytes() for m in memories}


class _Allocations(TorchDispatchMode):
    """Watches the ops inside one call: composite ones allocate more than their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: set[Storage] = set()
        self.begin()

    def begin(self) -> None:
        """Start to watch the next call."""
        self.inner: dict[Storage, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                memory = tensor.untyped_storage()
                if memory._cdata not in self.known:
                    self.inner[memory._cdata] = (StorageWeakRef(memory), memory.nbytes())
        alive = sum(size for ref, size in self.inner.values() if not ref.expired())
        self.peak_bytes = max(self.peak_bytes, alive)
        return result


def replay(graph: Graph, ran: Replay | None = None) -> Replay:
    """Run a graph on fake tensors of its own shapes; ``ran`` has what succeeded, come what may."""
    ran, watch = ran or Replay(), _Allocations()
    with torch.no_grad(), FakeTensorMode(), watch:
        for node in graph.fx.nodes:
            if node.op == "placeholder":
                ran.results[node] = _fresh(held(node))
            elif node.op == "call_function":
                _run(node, ran, watch)
            else:
                assert node.op == "output", node.op
                continue
            watch.known |= ran.storages(node).keys()
    return ran


def _fresh(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _run(node: fx.Node, ran: Replay, watch: _Allocations) -> None:
    """One call: its result, and how far the memory inside it rose above that result."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), ran.results.__getitem__)
    watch.begin()
    assert callable(node.target)
    ran.results[node] = node.target(*args, **kwargs)
    kept = sum(b for s, b in ran.storages(node).items() if s not in watch.known)
    composite = max(0, watch.peak_bytes - kept)
    ran.temporary_bytes[node] = composite + workspace_of(
        node.target, ran.results[node], args, kwargs
    )
