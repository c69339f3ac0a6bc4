"""Find which values of a graph share memory, and the temporary memory inside of each call.

The graph runs once on fake tensors, from its placeholders on, so nothing depends on the fakes that
earlier passes stored on its nodes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from partc.cost.workspaces import workspace_of
from partc.errors import CheckError
from partc.graph import Graph, fake_of
from partc.graph.fake_calls import FakeCalls, RememberingMode, quiet_log, tensors_in
from partc.graph.places import named_place
from partc.quoting import Named
from partc.rules.strides import ordered
from partc.rules.table import name_of

# Ops that can write the result into their first operand, by the ``grad_input`` overload.
GRADS_OF_ACTIVATIONS = (
    torch.ops.aten.gelu_backward.default,
    torch.ops.aten.sigmoid_backward.default,
    torch.ops.aten.silu_backward.default,
    torch.ops.aten.tanh_backward.default,
    torch.ops.aten.threshold_backward.default,
)

Storage = int  # names one piece of memory within a Replay


@dataclass(frozen=True)
class Replay:
    """A graph's run on fakes: each node's result, and the peak of temporaries in each call."""

    results: dict[fx.Node, Any] = field(default_factory=dict)
    temporary_bytes: dict[fx.Node, int] = field(default_factory=dict)

    def tensors(self, node: fx.Node) -> list[Tensor]:
        """The tensors of one node's result."""
        return list(tensors_in(self.results[node]))

    def storages(self, node: fx.Node) -> dict[Storage, int]:
        """The pieces of memory behind one node's result, each with its bytes."""
        return _memories(self.tensors(node))


def _memories(tensors: Iterable[Tensor]) -> dict[Storage, int]:
    memories = (t.untyped_storage() for t in tensors)
    return {memory._cdata: memory.nbytes() for memory in memories}


class _Allocations(TorchDispatchMode):
    """Counts the memory allocated inside one call: a composite op makes temporaries too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outside: set[Storage] = set()  # the memory of the call's operands
        self.inner: dict[Storage, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def run(self, target: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, int]:
        """Execute a call; return its result, and the peak bytes it needs beside the result."""
        # writing into or viewing an operand allocates nothing
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.outside, self.inner, self.peak_bytes = set(_memories(operands)), {}, 0
        with self:
            result = target(*ordered(target, args), **kwargs)
        made = _memories(tensors_in(result))
        kept = sum(size for memory, size in made.items() if memory not in self.outside)
        composite = max(0, self.peak_bytes - kept)
        return result, composite + workspace_of(target, result, args, kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                memory = tensor.untyped_storage()
                if memory._cdata not in self.outside:
                    self.inner[memory._cdata] = (StorageWeakRef(memory), memory.nbytes())
        alive = sum(size for ref, size in self.inner.values() if not ref.expired())
        self.peak_bytes = max(self.peak_bytes, alive)
        return result


# Shared by all graphs: it keeps the shapes of results for equal calls, and no tensors.
_CALLS = FakeCalls(_Allocations().run)


def _number(argument: Any) -> Any:
    """An argument; of a name under which blocks have numbers of their own, the number here."""
    return argument.value if isinstance(argument, Named) else argument


def replay(graph: Graph) -> Replay:
    """Run a graph on fake tensors of its own shapes, and return the results.

    CheckError at the first call that does not run on what it is given. A graph that is as it was at
    its last replay is not run again: checks, predictions and reports read the same graph.
    """
    ran, calls = Replay(), _calls_of(graph)
    before, known = vars(graph.fx).get(_KEPT, ((), ran))
    if len(before) == len(calls) and all(map(is_, chain(*before), chain(*calls))):
        ran.results.update(known.results)
        ran.temporary_bytes.update(known.temporary_bytes)
        return ran
    with torch.no_grad(), quiet_log(), RememberingMode():
        for node in graph.fx.nodes:
            try:
                _run(node, ran)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise _does_not_run(node, error) from error
    vars(graph.fx)[_KEPT] = calls, ran
    return ran


def _run(node: fx.Node, ran: Replay) -> None:
    """Add the result of one node."""
    if node.op == "placeholder":
        ran.results[node] = _fresh(fake_of(node))
    elif node.op == "call_function":
        given = map_aggregate((node.args, dict(node.kwargs)), _number)
        args, kwargs = fx.map_arg(given, ran.results.__getitem__)
        ran.results[node], ran.temporary_bytes[node] = _CALLS(node.target, args, kwargs)
    else:
        assert node.op == "output", node.op


def _does_not_run(node: fx.Node, error: Exception) -> CheckError:
    return CheckError(
        where=named_place(node),
        what=f"{name_of(node.target)} does not run on these shapes",
        why=str(error).strip().partition("\n")[0],
        do="Look at the shardings of its operands.",
    )


_KEPT = "_partc_replay"  # an attribute of the fx graph, so that it goes where the graph goes


def _calls_of(graph: Graph) -> list[tuple[Any, ...]]:
    """All that a replay depends on; edits give a node new arguments or an input another fake."""
    return [
        (n, n.target, n.args, n.kwargs, n.meta["val"] if n.op == "placeholder" else None)
        for n in graph.fx.nodes
    ]


def _fresh(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
