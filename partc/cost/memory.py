"""What a rank keeps in memory: its state, and the live bytes during each call of its program.

The account is of pieces of memory, not of values. A view shares the memory of its base. An
all-reduce writes into its operand. A value is freed after its last reader, the operand of a
collective after the wait; gradients live to the end of the step.
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
# The calls whose result generated programs write into an operand, with that operand's position.
WRITTEN_OVER: dict[Any, int] = {
    collectives.all_reduce: 0, torch.ops.aten._log_softmax.default: 0, ops.cross_entropy_grad: 1,
    **dict.fromkeys(GRADS_OF_ACTIVATIONS, 0),
}  # fmt: skip


@dataclass(frozen=True)
class Buffer:
    """A piece of memory: the call that allocates it, its bytes, and when it is live.

    ``born`` and ``dies``: positions in ``MemoryCurve.calls`` of the first and last call.
    """

    name: str
    module: str
    num_bytes: int
    born: int
    dies: int
    result: int = 0  # which of the tensors that the call returns
    times: int = 1  # its block, and the equal blocks that the graph leaves out

    def __str__(self) -> str:
        return f"{self.module}: {self.name}" if self.module else self.name


@dataclass(frozen=True)
class MemoryCurve:
    """Live bytes during each call of a graph; parameters, buffers and inputs are not counted.

    ``first_backward`` is the position of the first call of the backward.
    """

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
        """The position of the call during which most bytes are live."""
        live = self.live_bytes
        return live.index(max(live)) if live else 0

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)

    @property
    def saved_bytes(self) -> int:
        """Bytes of saved activations: memory that the forward makes and the backward reads."""
        return sum(b.times * b.num_bytes for b in self.saved())

    def saved(self) -> list[Buffer]:
        """The saved activations: pieces of memory made by the forward and live in the backward."""
        at = self.first_backward
        return [b for b in self.buffers if b.born < at <= b.dies]

    def holders(self, num: int = 5) -> list[Buffer]:
        """The largest pieces of memory that are live at the peak, largest first."""
        at = self.peak_at
        live = [b for b in self.buffers if b.born <= at <= b.dies]
        return sorted(live, key=lambda b: (-b.num_bytes, b.born, b.name))[:num]


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one rank keeps from step to step, by purpose."""

    params: int
    grads: int
    optimizer: int
    buffers: int
    inputs: int


def state_bytes(graph: Graph, optimizer: str = "adamw") -> StateBytes:
    """The state of a graph's rank in bytes: of shards if the graph is local, else of whole tensors.

    UsageError for an optimizer that ``STATE_COPIES`` does not know.
    """
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

    With ``in_place`` the results of ``WRITTEN_OVER`` take their operand's memory, as in generated
    programs; otherwise only those of all-reduces do.
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
    """The position of each value's last reader; the graph's results get one behind all calls."""
    at = {node: i for i, node in enumerate(calls)}
    at[graph.fx.output_node()] = len(calls)
    return {n: max([at[n], *(at[r] for u in n.users for r in _readers(u))]) for n in calls}


def _readers(user: fx.Node) -> list[fx.Node]:
    """The nodes at which a user reads: itself, and its waits if it starts a collective."""
    if user.target not in collectives.COLLECTIVES:
        return [user]
    return [user, *(u for u in user.users if u.target is collectives.wait)]


def _written_in_place(
    graph: Graph, ran: Replay, calls: Sequence[fx.Node], over: Mapping[Any, int]
) -> dict[Storage, Storage]:
    """Which results take the memory of an operand: the result's memory -> the operand's.

    ``over`` gives the operand's position by the function called. The operand must not be read
    later, must be large enough, and must be no parameter, buffer or input.
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
            # a parameter, buffer or input is read again in the next step
            if operand not in outside and needs <= size and last.get(operand, -1) <= at[node]:
                shared[result] = shared.get(operand, operand)
    return shared


def _num_bytes(node: fx.Node) -> int:
    """Bytes of a value in this graph's shapes: of the shard if the graph is local."""
    tensor: Tensor = fake_of(node)
    return tensor.numel() * tensor.element_size()
