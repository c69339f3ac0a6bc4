"""A typed view over ``torch.fx.Graph``: what each value is, where it came from, how it lies on the
mesh.

In: an fx graph. Out: a `Graph` whose nodes each have a `Value`; its text, which parses back. Start:
here; then `graph_edits.py`, which changes graphs, and `collectives.py`. Never: a pass or a rule.

What partc knows of a node is read and set through this module alone. A graph has placeholders
(parameters, buffers, inputs, in this order), calls of ATen ops or of ``partc.graph.collectives``,
and one output, the dict made by ``outputs``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.fx import Graph as FxGraph
from torch.fx import Node

import partc.graph.fake_kernels  # noqa: F401  (graphs are run on fake tensors everywhere)
from partc.graph.early import EarlyReduction
from partc.graph.folds import RepeatedBlocks, TracedStages
from partc.graph.rows import RowOrder
from partc.plan.mesh import Mesh
from partc.plan.sharding import REPLICATED, Layout, Sharding

Kind = Literal["param", "buffer", "input", "received", "op"]
# forward, backward; of a pipeline stage also: once before and once after all microbatches, and the
# part of the backward that no other stage waits for
Phase = Literal["F", "B", "S", "E", "W"]

ANYWHERE = -1  # the pipeline stage of what each stage computes for itself


class Origin(Enum):
    """Why a call stands in the graph, where passes and checks treat it apart; its text is shown."""

    MODEL = ""  # the model's own, or a collective
    LOCAL_STATISTICS = "statistics of this rank's piece of the batch"
    PIECES = "of a block's pieces"  # takes pieces out of a value, or joins them


@dataclass(frozen=True)
class Value:
    """What is known of one node beside its op: the whole's shape and dtype, its origin, its
    sharding.

    A node with several outputs (layer norm) has ``shape == ()`` here; its getitem nodes carry the
    values.
    """

    kind: Kind = "op"
    shape: tuple[int, ...] = ()  # of the whole tensor, over all ranks
    dtype: torch.dtype = torch.float32
    sharding: Sharding = REPLICATED
    name: str = ""  # parameter, buffer or input: the user's name; op: "" or a hint for its name
    module: str = ""  # path of the module whose forward made it, "" for loss code
    source: str = ""  # "model.py:14" and the source line's text after ": "
    calls: tuple[tuple[str, int], ...] = ()  # the user's functions in that module, and their lines
    phase: Phase = "F"
    stage: int = 0  # of the pipeline, or ANYWHERE: wherever it is read
    forward: str = ""  # in the backward: name of the forward node whose gradient this helps compute
    rows: RowOrder | None = None  # of what lies in an order that a sort made
    decomposed_from: str = ""  # the op that was written as several calls, this one among them
    note: str = ""  # for a collective: why it is there, what hides it
    origin: Origin = Origin.MODEL
    turn: int | None = None  # which piece, of a block that is computed in several
    from_forward: bool = False  # made of forward values alone in the backward, and no gradient

    @property
    def remark(self) -> str:
        """What is shown beside the call, "" for nothing."""
        return self.note or self.origin.value


@dataclass
class Graph:
    """One training step (or one rank's share of it) as a graph.

    ``aliases`` maps each second name of a tied parameter or buffer to the name that stands in the
    graph.
    ``constants`` holds the values of buffers that are known when compiling, ``classes`` the name
    of every module's class by path. ``untrained`` are trainable parameters without a gradient: the
    loss does not depend on them.
    """

    fx: FxGraph
    mesh: Mesh = field(default_factory=lambda: Mesh(()))
    model: str = ""
    aliases: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    folds: tuple[RepeatedBlocks, ...] = ()
    kept: TracedStages | None = (
        None  # the stages that stand for a pipeline's, where not all are here
    )
    untrained: tuple[str, ...] = ()
    early: EarlyReduction | None = (
        None  # of a stage's sums over ranks, which begin in its last backward
    )

    def __str__(self) -> str:
        from partc.graph.graph_text import graph_text  # it needs this module

        return graph_text(self)

    # nodes -----------------------------------------------------------------------------------
    def placeholders(self, kind: Kind) -> dict[str, Node]:
        """The parameter, buffer or input nodes by the user's name, in order."""
        leading = takewhile(lambda n: n.op == "placeholder", self.fx.nodes)
        return {value(n).name: n for n in leading if value(n).kind == kind}

    @property
    def params(self) -> dict[str, Node]:
        return self.placeholders("param")

    @property
    def buffers(self) -> dict[str, Node]:
        return self.placeholders("buffer")

    @property
    def inputs(self) -> dict[str, Node]:
        return self.placeholders("input")

    def calls(self) -> Iterator[Node]:
        """Every call node in order of execution, getitem nodes among them."""
        return (n for n in self.fx.nodes if n.op == "call_function")

    def times(self, node: Node) -> int:
        """How many blocks a value stands for: itself, and those like its own that are left out."""
        known = value(node)
        path = f"{known.name if node.op == 'placeholder' else known.module}."
        return 1 + sum(fold.num for fold in self.folds if path.startswith(f"{fold.like}."))

    # results ---------------------------------------------------------------------------------
    @property
    def outputs(self) -> Outputs:
        results: Any = self.fx.output_node().args[0]
        return Outputs(**results)

    def set_outputs(self, outputs: Outputs) -> None:
        self.fx.output_node().args = (outputs.as_dict(),)

    @property
    def loss(self) -> Node | None:
        return self.outputs.loss

    @property
    def grads(self) -> dict[str, Node]:
        return self.outputs.grads


@dataclass(frozen=True)
class Outputs:
    """What a graph gives back. In the fx graph it is a plain dict of these four entries.

    ``results`` are the named tensors that the model returns when there is no loss (inference).
    """

    loss: fx.Node | None = None
    grads: dict[str, fx.Node] = field(default_factory=dict)  # parameter name -> gradient
    buffers: dict[str, fx.Node] = field(default_factory=dict)  # buffer name -> its new value
    results: dict[str, fx.Node] = field(default_factory=dict)
    sent: dict[str, fx.Node] = field(default_factory=dict)  # what other pipeline stages read

    def as_dict(self) -> dict[str, Any]:
        sent = {"sent": self.sent} if self.sent else {}
        return {
            "loss": self.loss,
            "grads": self.grads,
            "buffers": self.buffers,
            "results": self.results,
            **sent,
        }


def value(node: fx.Node) -> Value:
    """What is known of a node."""
    known: Value = node.meta["value"]
    return known


def has_value(node: fx.Node) -> bool:
    return "value" in node.meta


def set_value(node: fx.Node, known: Value) -> None:
    node.meta["value"] = known


def update(node: fx.Node, **changes: Any) -> None:
    """Change some fields of a node's Value."""
    node.meta["value"] = replace(node.meta["value"], **changes)


def set_like(copy: fx.Node, node: fx.Node) -> None:
    """Let a node have all that is known of another, of which it is a copy."""
    copy.meta = dict(node.meta)


def fake_of(node: fx.Node) -> Any:
    """The fake tensor (or tuple of them) of this graph's own shapes: the whole's before partition,
    local after.
    """
    return node.meta["val"]


def set_fake(node: fx.Node, fake: Any) -> None:
    node.meta["val"] = fake
    if isinstance(fake, Tensor) and has_value(node) and value(node).shape == ():
        update(node, shape=tuple(fake.shape), dtype=fake.dtype)


def draw_of(node: fx.Node) -> str:
    """Which state of the random generator a traced random op drew from; equal means equal
    numbers.
    """
    drawn: str = node.meta.get("draw", "")
    return drawn


def set_draw(node: fx.Node, state: str) -> None:
    node.meta["draw"] = state


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def tensor_args(node: fx.Node) -> list[fx.Node]:
    """The nodes a call reads, in argument order, repeats kept: the operand order of rules."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return found


def literals(node: fx.Node) -> str:
    """A call's arguments as text, operands as ``%0``, ``%1``: what it has in common with equal
    calls of other values.
    """
    numbers: dict[fx.Node, int] = {}
    numbered = fx.map_arg(
        (node.args, dict(node.kwargs)), lambda n: f"%{numbers.setdefault(n, len(numbers))}"
    )
    return repr(numbered)


def innermost_block(node: fx.Node) -> str:
    """The path up to its last number: the block of a stack that a value stands in, "" if none."""
    parts = value(node).module.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[: last + 1])


def picked(getitem: fx.Node) -> tuple[fx.Node, int]:
    """The call whose result a getitem node picks, and which result it is."""
    call, index = getitem.args
    assert isinstance(call, fx.Node)
    assert isinstance(index, int)
    return call, index


def first_operand(node: fx.Node) -> fx.Node:
    """The first argument of a call that has a value there: what a collective moves."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def is_weight(node: fx.Node) -> bool:
    """Whether a value is a parameter or made of one alone, as its transpose or a cast."""
    while node.op == "call_function" and len(tensor_args(node)) == 1:
        node = tensor_args(node)[0]
    return node.op == "placeholder" and value(node).kind == "param"


def results_of(node: fx.Node) -> list[Tensor | None]:
    """The fake results of a call as a list: one for a tensor, one each (None where absent) for a
    tuple.
    """
    fake = fake_of(node)
    if isinstance(fake, Sequence):
        return [f if isinstance(f, Tensor) else None for f in fake]
    return [fake if isinstance(fake, Tensor) else None]


def typed(node: fx.Node) -> str:
    """``f32[8,64,1024@tp]{U:tp}`` of a node's whole value."""
    known = value(node)
    return known.sharding.typed(known.shape, known.dtype)


def stage_of(node: fx.Node) -> int:
    """The pipeline stage that computes a value, or ANYWHERE."""
    return value(node).stage


def is_forward(node: fx.Node) -> bool:
    """Whether a call belongs to the forward, or to what all microbatches' forwards share."""
    return value(node).phase in ("F", "S")


def is_backward(node: fx.Node) -> bool:
    """Whether a call computes gradients."""
    return value(node).phase in ("B", "W")


def layout_on(node: fx.Node, axis: str) -> Layout:
    return value(node).sharding.on(axis)


def is_call(node: Any, *targets: Any) -> bool:
    """Whether an argument is a call of one of these ops."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape this graph holds of a one-tensor node."""
    return tuple(fake_of(node).shape)


def op_word(target: Any) -> str:
    """The short name of an op or function: ``mul`` for ``aten.mul.Tensor``."""
    word: str = getattr(target, "_opname", None) or target.__name__
    return word.lstrip("_")
