"""What a rank keeps in memory: its state, and the live bytes along the order of its program.

The curve counts memory, not values: views share it, a reduction writes into its operand, a value
is freed after its last reader, an operand in flight lives until its wait, gradients to the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from partc.cost.storage import GRADS_OF_ACTIVATIONS, Replay, Storage, replay
from partc.errors import UsageError
from partc.graph import Graph, collectives, fake_of, ops, tensor_args, value

STATE_COPIES = {  # tensors as large as the parameter that an optimizer keeps for it
    "none": 0, "sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2,
}  # fmt: skip
WRITTEN_OVER: dict[Any, int] = {  # by the place of the operand that programs write it over
    collectives.all_reduce: 0, torch.ops.aten._log_softmax.default: 0, ops.cross_entropy_grad: 1,
    **dict.fromkeys(GRADS_OF_ACTIVATIONS, 0),
}  # fmt: skip


@dataclass(frozen=True)
class Buffer:
    """One piece of memory: who allocated it, its bytes, the first and last call it is live in."""

    name: str
    module: str
    num_bytes: int
    born: int
    dies: int
    result: int = 0  # which of the tensors that the call returns
    times: int = 1  # blocks like its own that are left out of the graph count here

    def __str__(self) -> str:
        return f"{self.module}: {self.name}" if self.module else self.name


@dataclass(frozen=True)
class MemoryCurve:
    """Live bytes during each call of a graph, beyond parameters, buffers and inputs."""

    calls: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    temporary_bytes: tuple[int, ...]
    first_backward: int

    @property
    def live_bytes(self) -> list[int]:
        """Bytes live during each call, its temporaries among them."""
        change = [0] * (len(self.calls) + 2)
        for buffer in self.buffers:
            change[buffer.born] += buffer.num_bytes
            change[buffer.dies + 1] -= buffer.num_bytes
        lasting = accumulate(change[: len(self.calls)])
        return [a + b for a, b in zip(lasting, self.temporary_bytes, strict=True)]

    @property
    def peak_at(self) -> int:
        """The call during which most is live."""
        live = self.live_bytes
        return live.index(max(live)) if live else 0

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)

    @property
    def saved_bytes(self) -> int:
        """What the forward leaves for the backward."""
        return sum(b.times * b.num_bytes for b in self.saved())

    def saved(self) -> list[Buffer]:
        """The pieces that the forward leaves for the backward."""
        at = self.first_backward
        return [b for b in self.buffers if b.born < at <= b.dies]

    def holders(self, num: int = 5) -> list[Buffer]:
        """The largest pieces that are live at the peak."""
        at = self.peak_at
        live = [b for b in self.buffers if b.born <= at <= b.dies]
        return sorted(live, key=lambda b: (-b.num_bytes, b.born, b.name))[:num]


@dataclass(frozen=True)
class StateBytes:
    """What one rank keeps between steps."""

    params: int
    grads: int
    optimizer: int
    buffers: int
    inputs: int


def state_bytes(graph: Graph, optimizer: str = "adamw") -> StateBytes:
    """Bytes of parameters, gradients, optimizer, buffers and inputs as this graph holds them."""
    if optimizer not in STATE_COPIES:
        known = ", ".join(STATE_COPIES)
        what = f"no optimizer is named {optimizer!r}"
        raise UsageError(where="optimizer", what=what, why="", do=f"Known: {known}.")
    params = graph.params
    sizes = {name: graph.times(node) * _num_bytes(node) for name, node in params.items()}
    grads = graph.grads
    return StateBytes(
        params=sum(sizes.values()),
        grads=sum(graph.times(params[name]) * _num_bytes(node) for name, node in grads.items()),
        optimizer=STATE_COPIES[optimizer] * sum(sizes[name] for name in params if name in grads),
        buffers=sum(graph.times(node) * _num_bytes(node) for node in graph.buffers.values()),
        inputs=sum(map(_num_bytes, graph.inputs.values())),
    )


def memory_curve(graph: Graph, ran: Replay | None = None, *, in_place: bool = True) -> MemoryCurve:
    """The live memory of a graph run in node order, each value freed after its last use.

    With ``in_place`` results are written over operands as generated programs do it, else by
    reductions alone.
    """
    ran = ran or replay(graph)
    calls = list(graph.calls())
    ends = _ends(graph, calls)
    over = WRITTEN_OVER if in_place else {collectives.all_reduce: 0}
    shared = _written_in_place(graph, ran, calls, over)
    outside = {s for n in graph.fx.nodes if n.op == "placeholder" for s in ran.storages(n)}
    buffers: dict[Storage, Buffer] = {}
    for i, node in enumerate(calls):
        for result, tensor in enumerate(ran.tensors(node)):
            memory = tensor.untyped_storage()
            first = shared.get(memory._cdata, memory._cdata)
            made = Buffer(
                node.name, value(node).module, memory.nbytes(), i, i, result, graph.times(node)
            )
            known = buffers.get(first, made)
            buffers[first] = replace(known, dies=max(known.dies, ends[node]))
    backward = [i for i, node in enumerate(calls) if value(node).phase == "B"]
    return MemoryCurve(
        calls=tuple(node.name for node in calls),
        buffers=tuple(b for storage, b in buffers.items() if storage not in outside),
        temporary_bytes=tuple(ran.temporary_bytes[node] for node in calls),
        first_backward=min(backward, default=len(calls)),
    )


def _ends(graph: Graph, calls: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The position of each value's last reader; results of the graph outlive every call."""
    at = {node: i for i, node in enumerate(calls)}
    at[graph.fx.output_node()] = len(calls)
    return {n: max([at[n], *(at[r] for u in n.users for r in _readers(u))]) for n in calls}


def _readers(user: fx.Node) -> list[fx.Node]:
    """A call, and where it starts a collective also the waits that end its reading."""
    if user.target not in collectives.COLLECTIVES:
        return [user]
    return [user, *(u for u in user.users if u.target is collectives.wait)]


def _written_in_place(
    graph: Graph, ran: Replay, calls: Sequence[fx.Node], over: Mapping[Any, int]
) -> dict[Storage, Storage]:
    """Memory of a result -> that of the operand that it is written over, where nobody reads that
    later; ``over`` has the place of the operand by what is called.
    """
    at = {node: i for i, node in enumerate([*calls, graph.fx.output_node()])}
    outside = {s for n in graph.fx.nodes if n.op == "placeholder" for s in ran.storages(n)}
    last: dict[Storage, int] = {}  # reader of each piece of memory, reductions of it apart
    for node in calls:
        readers = [at[u] for u in node.users if u.target is not collectives.all_reduce]
        for storage in ran.storages(node):
            last[storage] = max([last.get(storage, -1), *readers])
    shared: dict[Storage, Storage] = {}
    for node in calls:
        if node.target in over:
            into = tensor_args(node)[over[node.target]]
            ((operand, size),), ((result, needs),) = (ran.storages(n).items() for n in (into, node))
            if operand not in outside and needs <= size and last.get(operand, -1) <= at[node]:
                shared[result] = shared.get(operand, operand)
    return shared


def _num_bytes(node: fx.Node) -> int:
    """Bytes that this graph holds of a value."""
    tensor: Tensor = fake_of(node)
    return tensor.numel() * tensor.element_size()
