"""The seconds that one call takes on a rank, given the shardings of its operands and results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from partc.cost.flops import node_flops, op_name
from partc.graph import fake_of, results_of, tensor_args
from partc.machines.devices import Device
from partc.passes.search.shardings.transfers import Transfers
from partc.plan.sharding import DTYPE_NAMES

aten = torch.ops.aten
_RESHAPES = (aten.reshape.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class CallCost:
    """The work of an unsharded call: FLOPs, bytes of each operand and result, dtype, kind of work.

    An operand that the call reads twice counts once. ``partc/machines/topology.py`` has the kinds.
    """

    flops: float
    operands: tuple[float, ...]
    results: tuple[float, ...]
    dtype: str
    work: str

    @classmethod
    def of(cls, node: fx.Node) -> CallCost:
        """The cost of a call of the joint graph; views move no bytes."""
        read = dict.fromkeys(tensor_args(node))
        operands = [
            _num_bytes(fake_of(o)) if read.pop(o, 0) is None else 0 for o in tensor_args(node)
        ]
        results = [_num_bytes(fake) for fake in results_of(node)]
        if is_view(node):
            operands, results = [0] * len(operands), [0] * len(results)
        made = next((fake for fake in results_of(node) if fake is not None), None)
        dtype = "f32" if made is None else DTYPE_NAMES.get(made.dtype, "f8")
        work = "attention" if "attention" in op_name(node) else "matmul"
        return cls(int(node_flops(node)), tuple(operands), tuple(results), dtype, work)

    def shrunk(self, share: float) -> CallCost:
        """The cost with all FLOPs and bytes times ``share``."""
        operands, results = (
            tuple(share * n for n in side) for side in (self.operands, self.results)
        )
        return replace(self, flops=self.flops * share, operands=operands, results=results)

    def seconds(
        self, ins: Sequence[int], outs: Sequence[int], transfers: Transfers, device: Device
    ) -> float:
        """Seconds on one rank by the roofline model; ``ins`` and ``outs`` number the shardings.

        Every axis that shards an operand or result divides the FLOPs.
        """
        axes = {axis for n in (*ins, *outs) for axis, _ in transfers.shardings[n].cuts()}
        shared = math.prod(transfers.mesh.size(axis) for axis in sorted(axes))
        pairs = (*zip(self.operands, ins, strict=True), *zip(self.results, outs, strict=True))
        num_bytes = sum(each * transfers.share(n) for each, n in pairs)
        return device.seconds(self.flops / shared, self.dtype, num_bytes, self.work)


def is_view(node: fx.Node) -> bool:
    """Whether a call's result shares its operand's memory, so that the call moves no bytes."""
    if node.target in _RESHAPES:
        return bool(fake_of(tensor_args(node)[0]).is_contiguous())
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _num_bytes(fake: Tensor | None) -> int:
    return fake.numel() * fake.element_size() if isinstance(fake, Tensor) else 0
