"""A single call written for one rank by a strategy, as a small graph that runs on pieces.

Proofs of rules run these graphs rank by rank in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from partc.errors import RuleError
from partc.graph import Value, collectives, fake_of, set_fake, set_value, tensor_args, value
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, Sharding
from partc.rules.experiment import Refused, Results, first_line
from partc.rules.local import write_local_call
from partc.rules.signature import Signature, fake_mode, results_list
from partc.rules.strategy import Strategy

AXIS = "x"


@dataclass(frozen=True)
class LocalCall:
    """The call on pieces as a small graph.

    ``unchanged`` says that the call on pieces is the same as on the whole, with equal literals.
    """

    graph: fx.Graph
    unchanged: bool

    @classmethod
    @lru_cache(maxsize=32)
    def of(cls, signature: Signature, strategy: Strategy, num: int) -> LocalCall:
        """The call that `write_local_call` writes for ``num`` equal pieces; may be Refused."""
        node, mesh, out = signature.node(), Mesh(((AXIS, num),)), fx.Graph()
        pairs = zip(tensor_args(node), strategy.ins, strict=True)
        try:
            operands = [_local_operand(out, whole, layout, mesh) for whole, layout in pairs]
            with fake_mode():
                local = write_local_call(out, node, operands, {AXIS: strategy}, mesh)
        except RuleError as error:
            raise Refused(error.why) from None
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise Refused(f"it cannot be written on pieces: {first_line(error)}") from None
        out.output(local)
        written_anew = len(out.nodes) != len(operands) + 2 or tensor_args(local) != operands
        return cls(out, not written_anew and signature.has_text_of(Signature.of(local)))

    def run(self, rank: int, pieces: Sequence[Tensor]) -> Results:
        """The results of one rank on its pieces."""
        given = iter(pieces)
        known: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(given)
            elif node.target is collectives.axis_index:
                known[node] = rank
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)
        return results_list(known[next(iter(self.graph.output_node().all_input_nodes))])


def _local_operand(out: fx.Graph, whole: fx.Node, layout: Layout, mesh: Mesh) -> fx.Node:
    """A placeholder with the fake of a rank's piece of an operand."""
    known = value(whole)
    sharding = Sharding.of({AXIS: layout}, mesh)
    if sharding.local_shape(known.shape, mesh) is None:
        raise Refused(f"{layout} does not fit {list(known.shape)} on {mesh}")
    place = out.placeholder(whole.name)
    set_value(place, Value("input", known.shape, known.dtype, sharding, known.name))
    with fake_mode():  # a piece of the whole, since the localiser looks at strides
        set_fake(place, sharding.local(torch.empty_like(fake_of(whole)), {AXIS: 0}, mesh))
    return place
