"""A typed view over ``torch.fx.Graph``: each node's shape, dtype, sharding, module and source line.

In: an fx graph. Out: a `Graph`, each of whose nodes has a `Value`; the graph's text, which parses
back. Start: here; then `graph_edits.py`, which changes graphs, and `collectives.py`. Never: a pass
or a rule.

The facts about a node are stored in ``node.meta``; other modules read and set them through the
functions here. A graph has placeholders (parameters, buffers, inputs, in this order), calls of ATen
ops or of ``partc.graph.collectives``, and one output node, whose dict ``Outputs.as_dict`` makes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx import Graph as FxGraph
from torch.fx import Node

import partc.graph.fake_kernels  # noqa: F401  (graphs are run on fake tensors everywhere)
from partc.graph.early import EarlyReduction
from partc.graph.folds import RepeatedBlocks, TracedStages
from partc.graph.rows import RowOrder
from partc.graph.targets import check_target
from partc.plan.mesh import Mesh
from partc.plan.sharding import REPLICATED, Layout, Sharding

Kind = Literal["param", "buffer", "input", "received", "op"]
# F forward, B backward. In a pipeline stage also: S once before and E once after all microbatches,
# and W the weight gradients, the part of the backward that no other stage waits for.
Phase = Literal["F", "B", "S", "E", "W"]

NESTED = (list, tuple, dict, slice)  # what an argument may hold nodes in
ANYWHERE = -1  # the pipeline stage of a value that every stage computes for itself (a mask)
NO_GRADIENT = "the loss does not depend on it"  # of a note that names untrained parameters


class Origin(Enum):
    """Why a call is in the graph, where passes and checks treat the call in a special way.

    The member's text is shown beside the call in printed graphs.
    """

    MODEL = ""  # the model's own, or a collective
    LOCAL_STATISTICS = "statistics of this rank's piece of the batch"
    PIECES = "of a block's pieces"  # splits a value into a block's overlap pieces, or joins them


@dataclass(frozen=True)
class Value:
    """The facts about one node beside its op: the whole's shape and dtype, sharding, and origin.

    A call with several results (layer norm) has ``shape == ()`` here; the results' shapes are those
    of its getitem nodes.
    """

    kind: Kind = "op"
    shape: tuple[int, ...] = ()  # of the whole tensor, over all ranks
    dtype: torch.dtype = torch.float32
    sharding: Sharding = REPLICATED
    name: str = ""  # parameter, buffer or input: the user's name; op: "" or a hint for its name
    module: str = ""  # path of the module whose forward made it, "" for loss code
    at: str = ""  # in a module that is called several times, the place with its calls' numbers
    source: str = ""  # "model.py:14" and the source line's text after ": "
    calls: tuple[tuple[str, int], ...] = ()  # the user's functions in that module, and their lines
    torch_line: str = ""  # torch's own line that made it, or ours: "q = q.view(...)", "mean = "
    phase: Phase = "F"
    stage: int = 0  # the pipeline stage that computes it, or ANYWHERE: every stage that reads it
    forward: str = ""  # in the backward: name of the forward node whose gradient this helps compute
    rows: RowOrder | None = None  # the order of its rows, if a sort has permuted them
    decomposed_from: str = ""  # the op whose decomposition this call belongs to
    note: str = ""  # of a collective: why it is there, which computing hides it
    origin: Origin = Origin.MODEL
    turn: int | None = None  # the overlap piece of its block that this call belongs to
    from_forward: bool = False  # in the backward, but computed from forward values; no gradient
    site: str = ""  # of a random draw: what decides its numbers (`draws.py`)

    @property
    def remark(self) -> str:
        """The text that is shown beside the call: its note, or its origin's text; "" for none."""
        return self.note or self.origin.value


@dataclass
class Graph:
    """One training step of the whole model, or of one rank, as a graph.

    ``aliases`` maps each second name of a tied parameter or buffer to its name in the graph.
    ``constants`` has the values of buffers that are known at compile time, ``classes`` the name of
    each module's class by path. ``folds`` are blocks that the graph leaves out, since they equal a
    block that the graph has. ``untrained`` are trainable parameters that the loss does not depend
    on, so that they have no gradient. ``trained_elsewhere`` are parameters of a stage for which
    other stages alone compute gradients. ``frozen`` has a sentence on each thing outside of the
    graph that a program does not follow, such as a tensor of a closure. ``decided`` has the buffers
    whose values decided what was traced, each with the line that asked for them. ``sites`` has the
    site of every random draw that was traced, with the name under which the model draws: another
    one, where the draw was made between two blocks and named after one of them. ``rows`` has the
    layout along the batch of each result that its own samples do not tell, as they were moved.
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
    trained_elsewhere: frozenset[str] = frozenset()
    frozen: tuple[str, ...] = ()
    decided: dict[str, str] = field(default_factory=dict)
    sites: dict[str, str] = field(default_factory=dict)
    rows: Mapping[str, Layout] = field(default_factory=dict)
    early: EarlyReduction | None = (
        None  # of a stage's sums over ranks, which begin in its last backward
    )

    def __str__(self) -> str:
        from partc.graph.graph_text import graph_text  # it needs this module

        return graph_text(self)

    if not TYPE_CHECKING:  # else every name would be one of its attributes

        def __getattr__(self, name: str) -> Any:
            from partc.graph.fx_words import no_name

            raise no_name(name, [each for each in dir(self) if not each.startswith("_")])

    # nodes -----------------------------------------------------------------------------------
    def placeholders(self, kind: Kind) -> dict[str, Node]:
        """The parameter, buffer or input nodes by the model's name, in graph order."""
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
        """All call nodes in order of execution, with the getitem nodes."""
        return (n for n in self.fx.nodes if n.op == "call_function")

    def times(self, node: Node) -> int:
        """How many equal blocks a value stands for: 1, plus those left out that equal its block."""
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

    @property
    def trained(self) -> set[str]:
        """The parameters that have a gradient when the step has ended."""
        return {*self.grads, *self.trained_elsewhere}


@dataclass(frozen=True)
class Outputs:
    """The outputs of a graph; in the fx graph they are a plain dict with these entries.

    ``results`` are the named tensors that the model returns if there is no loss (inference).
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
    """The `Value` of a node: its shape, dtype, sharding, module and source line."""
    known: Value = node.meta["value"]
    return known


def has_value(node: fx.Node) -> bool:
    return "value" in node.meta


def set_value(node: fx.Node, known: Value) -> None:
    node.meta["value"] = known


def update(node: fx.Node, **changes: Any) -> None:
    """Change some fields of a node's Value."""
    known = node.meta["value"]
    if any(getattr(known, name) != new for name, new in changes.items()):
        node.meta["value"] = changed(known, **changes)


def changed(known: Value, **changes: Any) -> Value:
    """As ``replace(known, **changes)``, which reads and checks each of the many fields again."""
    assert changes.keys() <= vars(known).keys(), changes
    made = object.__new__(Value)
    vars(made).update(vars(known))
    vars(made).update(changes)
    return made


def set_like(copy: fx.Node, node: fx.Node) -> None:
    """Give a copy of a node all facts about that node (its whole ``meta``)."""
    copy.meta = dict(node.meta)


def fake_of(node: fx.Node) -> Any:
    """A node's fake tensor, or tuple of fake tensors (fx's ``meta["val"]``).

    The shapes are those of the whole tensors in a whole graph and local shapes in a local graph.
    """
    return node.meta["val"]


def set_fake(node: fx.Node, fake: Any) -> None:
    node.meta["val"] = fake
    # A known shape stays: in a local graph the Value has the whole shape, the fake the local one.
    if isinstance(fake, Tensor) and has_value(node) and value(node).shape == ():
        update(node, shape=tuple(fake.shape), dtype=fake.dtype)


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def tensor_args(node: fx.Node) -> list[fx.Node]:
    """The nodes that a call reads, in argument order and with repeats, as rules count operands."""
    found: list[fx.Node] = []
    for each in (*node.args, *node.kwargs.values()):
        if isinstance(each, fx.Node):
            found.append(each)
        elif isinstance(each, NESTED):
            fx.map_arg(each, lambda n: found.append(n))
    return found


def literals(node: fx.Node, but: Collection[int] = ()) -> str:
    """A call's arguments as text, with ``%0``, ``%1`` for operands: ``((%0, %1), {'alpha': 2})``.

    Two calls of an op are equal up to their operands if these texts are equal. ``but``: positions
    of arguments of which nothing is said.
    """
    args = tuple("#" if i in but else arg for i, arg in enumerate(node.args))
    numbers: dict[fx.Node, int] = {}
    numbered = fx.map_arg(
        (args, dict(node.kwargs)), lambda n: f"%{numbers.setdefault(n, len(numbers))}"
    )
    return repr(numbered)


def innermost_block(node: fx.Node) -> str:
    """The path of the innermost block that a call belongs to: its module up to the last number.

    For example ``layers.3.experts.1`` for ``layers.3.experts.1.w1``; "" outside of blocks.
    """
    parts = value(node).module.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[: last + 1])


def picked(getitem: fx.Node) -> tuple[fx.Node, int]:
    """The call whose result a getitem node picks, and the number of that result."""
    call, index = getitem.args
    assert isinstance(call, fx.Node)
    assert isinstance(index, int)
    return call, index


def first_operand(node: fx.Node) -> fx.Node:
    """The first argument of a call, which must be a node: the tensor that a collective moves."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def is_weight(node: fx.Node) -> bool:
    """Whether a value is a parameter, or follows from one parameter alone (a transpose, a cast)."""
    while node.op == "call_function" and len(read := tensor_args(node)) == 1:
        node = read[0]
    return node.op == "placeholder" and value(node).kind == "param"


def results_of(node: fx.Node) -> list[Tensor | None]:
    """The fake results of a call as a list, with None for absent results; a single tensor gives a
    list of one."""
    fake = fake_of(node)
    if isinstance(fake, Tensor):  # first, as it is the commonest, and asking for Sequence is slow
        return [fake]
    if isinstance(fake, Sequence):
        return [f if isinstance(f, Tensor) else None for f in fake]
    return [None]


def typed(node: fx.Node) -> str:
    """A node's dtype, whole shape and layouts as text, such as ``f32[8,64,1024@tp]``."""
    known = value(node)
    return known.sharding.typed(known.shape, known.dtype)


def stage_of(node: fx.Node) -> int:
    """The pipeline stage that computes a value, or ANYWHERE."""
    return value(node).stage


def is_forward(node: fx.Node) -> bool:
    """Whether a call belongs to the forward, or runs once before all microbatches."""
    return value(node).phase in ("F", "S")


def is_backward(node: fx.Node) -> bool:
    """Whether a call computes gradients."""
    return value(node).phase in ("B", "W")


def layout_on(node: fx.Node, axis: str) -> Layout:
    return value(node).sharding.on(axis)


def is_call(node: Any, *targets: Any) -> bool:
    """Whether an argument is a call of one of these ops.

    UsageError for what no graph calls, as ``F.gelu``, ``aten.gelu`` without its overload, or a
    name: it would be false of every call.
    """
    for target in targets:
        if not isinstance(target, OpOverload):
            check_target(target, "is_call")
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's fake tensor: whole in a whole graph, local in a local graph."""
    return tuple(fake_of(node).shape)


def op_word(target: Any) -> str:
    """The short name of an op or function: ``mul`` for ``aten.mul.Tensor``."""
    word: str = getattr(target, "_opname", None) or target.__name__
    return word.lstrip("_")
