"""Which memory traffic is left where a compiler fuses element-wise calls into one kernel.

partc's programs call one kernel per line. Published systems fuse by hand or by torch.compile: to
compare with them, their kernels are found in the graph of partc's program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from partc.cost.bytes import moved_bytes
from partc.cost.flops import node_flops, op_name
from partc.cost.storage import Replay, replay
from partc.graph import Graph, collectives, innermost_block, tensor_args, value

Kernel = tuple[str, str, int]  # block, phase, and how many other kernels must run before
Values = Mapping[fx.Node, Sequence[fx.Node]]
# Sums over rows and scattered additions cannot run where what they read is made.
ALONE = frozenset({"aten.sum", "aten.embedding_dense_backward", "aten.index_put"})
NORMS = frozenset({"aten.native_layer_norm", "aten.native_layer_norm_backward"})
SOFTMAX = frozenset({"aten._softmax", "aten._softmax_backward_data"})


def compiled_values(local: Graph) -> Values:
    """The values that every call reads from memory or writes there, if a compiler fuses all that
    it can, as torch.compile does.
    """
    return _Kernels(local, replay(local), ALONE, frozenset()).touched()


def by_hand_values(local: Graph) -> Values:
    """The same with the kernels that Megatron-LM has: bias and GELU; bias, dropout and sum; scale,
    mask and softmax, behind which dropout is a kernel of its own, as each norm is.
    """
    return _Kernels(local, replay(local), ALONE | NORMS, SOFTMAX).touched()


@dataclass
class _Kernels:
    """Element-wise calls, softmax and norms of one block and phase that wait for no other kernel
    between them are one kernel; ``alone`` are kernels by themselves, ``last`` end theirs.
    """

    local: Graph
    ran: Replay
    alone: frozenset[str]
    last: frozenset[str]
    level: dict[fx.Node, int] = field(default_factory=dict)
    kernel: dict[fx.Node, Kernel] = field(default_factory=dict)

    def touched(self) -> dict[fx.Node, list[fx.Node]]:
        for node in self.local.calls():
            self._place(node)
        found, read = {}, set[tuple[Kernel, fx.Node]]()
        for node in self.local.calls():
            operands = list(dict.fromkeys(map(self._source, tensor_args(node))))
            mine = self.kernel.get(node)
            if mine is None:
                found[node] = [*operands, node]
                continue
            fresh = [n for n in operands if self.kernel.get(n) != mine and (mine, n) not in read]
            read |= {(mine, n) for n in fresh}
            found[node] = [*fresh, *([node] if self._leaves(node, mine) else [])]
        return found

    def _place(self, node: fx.Node) -> None:
        before = max((self.level.get(n, 0) for n in tensor_args(node)), default=0)
        together = self._is_view(node) or (self._fuses(node) and op_name(node) not in self.last)
        self.level[node] = before + (not together)
        if self._fuses(node):
            self.kernel[node] = (innermost_block(node), value(node).phase, before)

    def _fuses(self, node: fx.Node) -> bool:
        moves = node.target in (*collectives.COLLECTIVES, collectives.wait)
        return not (moves or node_flops(node) or self._is_view(node) or op_name(node) in self.alone)

    def _is_view(self, node: fx.Node) -> bool:
        moves = node.target in (*collectives.COLLECTIVES, collectives.wait)
        is_call = node.op == "call_function" and not moves
        return is_call and not node_flops(node) and not moved_bytes(node, self.ran)

    def _source(self, node: fx.Node) -> fx.Node:
        """What a view shows."""
        while self._is_view(node) and (operands := tensor_args(node)):
            node = operands[0]
        return node

    def _leaves(self, node: fx.Node, mine: Kernel) -> bool:
        """Whether anything reads a value, or a view of it, outside of the kernel that makes it."""
        for user in node.users:
            if self._is_view(user) and user.op != "output":
                if self._leaves(user, mine):
                    return True
            elif self.kernel.get(user) != mine:
                return True
        return False
