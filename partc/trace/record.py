"""Record a model and its loss as one Graph of forward and backward.

In: an ``nn.Module`` (real or on the meta device), example inputs, a loss. Out: a ``Graph`` of the
recorded ATen ops. Each value has its module path, source line and phase, and each value of the
backward the name of the forward call whose gradient it computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn

from partc.errors import PartcError, TraceError
from partc.graph import (
    Graph,
    Outputs,
    Value,
    fake_of,
    set_fake,
    set_like,
    set_value,
    update,
    value,
)
from partc.graph.blocks import blocks_of
from partc.graph.draws import set_site
from partc.graph.folds import RepeatedBlocks
from partc.graph.graph_edits import fake_like
from partc.graph.places import numbered, put
from partc.rules.strides import keep_order
from partc.trace.arguments import Given
from partc.trace.between_blocks import adopt_between, name_adopted
from partc.trace.capture import Objective, Recording, names_of, record
from partc.trace.default_dtype import default_of_script, makes_default, name_dtypes
from partc.trace.dtypes_meet import check_dtypes_meet
from partc.trace.frozen_numbers import FrozenNumbers
from partc.trace.hooks_ahead import install_ahead
from partc.trace.kept_fakes import check_none_kept
from partc.trace.known_values import SMALL_BYTES
from partc.trace.linalg_checks import keep_checks
from partc.trace.returns import Returns
from partc.trace.scan_blocks import skipping, spare_blocks
from partc.trace.shared_values import free_shared
from partc.trace.why_failed import explained
from partc.wrong_calls import did_you_mean, quoted

# What is recorded: a training step, its loss without gradients, or what the model returns.
Kind = Literal["step", "loss", "forward"]


@dataclass(frozen=True)
class Source:
    """What is traced: a model, its arguments, and the function that computes the loss.

    ``returns``: what the loss returns, known once it is recorded.
    """

    model: nn.Module
    given: Given
    objective: Objective
    kind: Kind
    returns: Returns

    @classmethod
    def of(
        cls, model: nn.Module, inputs: Any, loss: Objective | None, kind: Kind | None = None
    ) -> Source:
        """Check the arguments of ``trace``, and choose what is recorded.

        With a loss, or without one where gradients are on, a training step is recorded. Without a
        loss its loss is the model's result, or the result's ``.loss``. Without a loss and under
        ``torch.no_grad()`` the forward alone is recorded, with every tensor of the result by name.
        A ``kind`` says which of these it is, whatever the loss and the mode of gradients.
        """
        install_ahead(model)
        kind = kind or kind_of(loss)
        if kind not in get_args(Kind):
            raise TraceError(
                where=f"Traced(kind={quoted(kind)})", what="there is no such kind of step",
                why=f"there are {', '.join(get_args(Kind))}",
                do=did_you_mean(kind, get_args(Kind)) or "Leave it out for a training step.",
            )  # fmt: skip
        loss = None if kind == "forward" else loss
        given, returns = Given.of(model, inputs, loss), Returns(own=loss is None)
        of = returns.forward if kind == "forward" else returns.objective
        objective = of(given.function)
        return cls(model, given, objective, kind, returns)

    def recorded(self, left_out: Sequence[RepeatedBlocks]) -> tuple[Graph, FrozenNumbers]:
        """Record the graph without the blocks in ``left_out``; its ops may still write in place.

        With it come the Python numbers that it was recorded with.
        """
        try:
            with skipping(self.model, left_out):
                recording = record(
                    self.model, self.given.tensors, self.objective, self.train, left_out
                )
            torch.clear_autocast_cache()  # of casts of weights, which is kept until autocast ends
            check_none_kept(recording.module.graph)  # once what skipped blocks return is gone
        except PartcError:
            raise
        except Exception as error:
            check_none_kept()  # a run before may have left what this one has met
            raise explained(error, self.model, self.given.names, self.given.tensors) from error
        if self.kind == "loss":
            recording.results = [self.returns.loss_name, *self.returns.names]
        extras = self.returns.names if self.train else None
        graph = _build(recording, self.model, self.given.names, extras)
        return graph, recording.numbers

    @property
    def train(self) -> bool:
        """Whether the step has a backward."""
        return self.kind == "step"

    def spare_blocks(self) -> tuple[RepeatedBlocks, ...]:
        """The equal blocks that need not be recorded, found by running the forward alone."""
        return spare_blocks(self.model, self.given.tensors, self.objective, self.train)


def kind_of(loss: Objective | None) -> Kind:
    """What is recorded where nobody says it."""
    return "step" if loss is not None or torch.is_grad_enabled() else "forward"


def keep_known_buffers(graph: Graph, model: nn.Module, left_out: Sequence[RepeatedBlocks]) -> None:
    """Keep the values of small buffers that the step does not change, as constants of the graph.

    TraceError if it changes one on whose values it depends what was recorded.
    """
    changed, decided = graph.outputs.buffers, dict(graph.decided)
    for name, buffer in names_of(model).buffers.items():
        fits = buffer.numel() * buffer.element_size() <= SMALL_BYTES
        alike = next((fold.twin(name) for fold in left_out if fold.covers(name)), name)
        if fits and alike not in changed and type(buffer) is Tensor and not buffer.is_meta:
            graph.constants[name] = buffer.detach().cpu().clone()
        if alike in decided and alike in changed:
            raise _decides_and_changes(model, name, decided[alike])
        if alike in decided:
            graph.decided[name] = decided[alike]


def _decides_and_changes(model: nn.Module, name: str, line: str) -> TraceError:
    """The error for a buffer that decides what is recorded and that the step changes."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return TraceError(
        where=f"{name} ({line})" if line else name,
        what="the step asks for the value of this buffer, and changes it",
        why="a program does in every step what followed from the value when it was compiled",
        # torch itself divides by the number of batches then, as a number
        do=f"Give the {type(owner).__name__} a momentum: without one torch divides by this value."
        if getattr(owner, "momentum", 0) is None
        else "Compute with the tensor itself, without item(), a branch or a selection by it.",
    )


# from the raw graph to a Graph ---------------------------------------------------------------
def _build(
    recording: Recording, model: nn.Module, inputs: list[str], extras: list[str] | None
) -> Graph:
    """A Graph whose placeholders, values and outputs are named and described.

    ``extras``: the names of what is returned beside the loss; None where there is no loss.
    """
    names = recording.names
    graph = Graph(recording.module.graph, model=type(model).__name__, aliases=dict(names.aliases))
    graph.classes = {path: type(m).__name__ for path, m in model.named_modules() if _computes(m)}
    placeholders = [n for n in graph.fx.nodes if n.op == "placeholder"]
    kinds = (
        ["param"] * len(names.params) + ["buffer"] * len(names.buffers) + ["input"] * len(inputs)
    )
    for node, kind, name in zip(
        placeholders, kinds, (*names.params, *names.buffers, *inputs), strict=True
    ):
        fake = fake_of(node)
        node._rename(name.replace(".", "_"))
        set_value(node, Value(kind, tuple(fake.shape), fake.dtype, name=name))  # type: ignore[arg-type]
    _lift_constants(graph, recording, len(names.params) + len(names.buffers))
    untold = name_dtypes(graph.fx) if default_of_script() != torch.float32 else []
    _describe(graph)
    if untold:
        raise makes_default(value(untold[0]).source)
    check_dtypes_meet(graph)
    keep_order(graph)
    keep_checks(graph)
    _set_outputs(graph, recording, model, extras)
    graph.frozen, graph.decided = tuple(recording.frozen), dict(recording.decided)
    return graph


def _set_outputs(
    graph: Graph, recording: Recording, model: nn.Module, extras: list[str] | None
) -> None:
    """Set the graph's outputs; the raw graph returns results, then gradients, then buffers.

    Of a training step the first result is the loss, and the others are its extras.
    """
    train = extras is not None
    trainable = recording.names.trainable if train else []
    raw: Any = graph.fx.output_node().args[0]
    results, grads = raw[: len(recording.results)], raw[len(recording.results) :]
    grads, buffers = grads[: len(trainable)], grads[len(trainable) :]
    names = recording.results if extras is None else extras
    graph.set_outputs(
        Outputs(
            loss=results[0] if train else None,
            grads=_all_grads(trainable, grads, model),
            buffers=dict(zip(recording.names.buffers, buffers, strict=True)),
            results=dict(zip(names, results[train:], strict=True)),
        )
    )
    graph.untrained = tuple(name for name in trainable if name not in graph.grads)


def _all_grads(
    trainable: list[str], grads: Sequence[fx.Node | None], model: nn.Module
) -> dict[str, fx.Node]:
    """Gradients by parameter name, for the parameters that the loss depends on.

    TraceError if the loss depends on no trainable parameter.
    """
    pairs = zip(trainable, grads, strict=True)
    found = {name: grad for name, grad in pairs if grad is not None}
    if trainable and not found:
        raise TraceError(
            where=type(model).__name__,
            what="the loss depends on no trainable parameter",
            why=f"the gradient of {trainable[0]} is None, and so are all others",
            do="Compute the loss from the model's result, without detach(), .data, "
            "torch.tensor(loss) or torch.no_grad(); classes that argmax picks, comparisons (an "
            "accuracy) and rounding have no gradient: train on F.cross_entropy and alike, and "
            "return accuracy beside it, (loss, extras).",
        )
    return found


def _lift_constants(graph: Graph, recording: Recording, num_own: int) -> None:
    """Turn constant tensors that are neither parameters nor buffers into buffers with known values.

    Equal tensors become one buffer: layers that each make the same mask then read the same value,
    and stay equal blocks. A 0-d constant becomes a call of ``full``.
    """
    placeholders = [n for n in graph.fx.nodes if n.op == "placeholder"]
    # after the model's own buffers, as placeholders stand in the order params, buffers, inputs
    anchor = placeholders[num_own] if num_own < len(placeholders) else placeholders[-1].next
    lifted: dict[str, fx.Node] = {}
    for node in [n for n in graph.fx.nodes if n.op == "get_attr"]:
        tensor: Tensor = getattr(recording.module, str(node.target))
        if tensor.dim() == 0:
            new = _number(node, tensor)
        else:
            name = _constant_name(graph, tensor.detach().cpu().clone())
            if name not in lifted:
                lifted[name] = _constant(graph, anchor, graph.constants[name], name)
            new = lifted[name]
        node.replace_all_uses_with(new)
        graph.fx.erase_node(node)


def _constant_name(graph: Graph, tensor: Tensor) -> str:
    """The name of the constant that equals a tensor bit by bit, or the name of a new constant."""
    for name, known in graph.constants.items():
        # compared as bytes, since NaN differs from NaN and -0.0 equals 0.0
        pair = (each.flatten().view(torch.uint8) for each in (known, tensor))
        if (known.dtype, known.shape) == (tensor.dtype, tensor.shape) and torch.equal(*pair):
            return name
    name = f"constant_{len(graph.constants)}"
    graph.constants[name] = tensor
    return name


def _number(node: fx.Node, tensor: Tensor) -> fx.Node:
    """A 0-d constant as a call of ``full`` with its number."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(
            torch.ops.aten.full.default, ([], tensor.item()), {"dtype": tensor.dtype}
        )
    set_like(new, node)
    set_fake(new, fake_like(node.graph, tensor))
    return new


def _constant(graph: Graph, anchor: fx.Node, tensor: Tensor, name: str) -> fx.Node:
    """A lifted tensor as a buffer placeholder before ``anchor``."""
    with graph.fx.inserting_before(anchor):
        placeholder = graph.fx.placeholder(name)
    set_value(placeholder, Value("buffer", tuple(tensor.shape), tensor.dtype, name=name))
    set_fake(placeholder, fake_like(graph.fx, tensor))
    return placeholder


def _computes(module: nn.Module) -> bool:
    """Whether a module computes something itself: it is no container such as ``ModuleList``."""
    return not type(module).__module__.startswith("torch.nn.modules.container")


# provenance ----------------------------------------------------------------------------------
def _describe(graph: Graph) -> None:
    """Give every call its Value: module path, source line, phase, and a backward's forward call."""
    times = _times(graph)
    for node in graph.calls():
        noted = node.meta.get("custom", {})
        fake = node.meta.get("val")
        known = Value(
            module=noted.get("module", ""),
            at=_place(noted, times),
            source=noted.get("source", ""),
            calls=noted.get("calls", ()),
            torch_line=noted.get("torch_line", ""),
        )
        set_value(node, known)
        set_fake(node, fake)
        set_site(node, noted.get("site", ""))
    # before the backward, whose calls take over the module paths of forward calls
    in_forward = [n for n in graph.calls() if not _is_noted_backward(n)]
    free_shared(in_forward)
    adopt_between(in_forward)
    name_adopted(graph)
    forward: dict[int, fx.Node] = {}
    for node in graph.calls():
        if _is_noted_backward(node):
            _describe_backward(node, forward)
        else:
            forward.setdefault(node.meta.get("seq_nr", -1), node)


def _times(graph: Graph) -> set[str]:
    """The paths of the modules that the forward calls several times.

    Not of those that have a list of equal blocks: the loops of a program go through that list, each
    of its blocks has all calls.
    """
    forward = [n.meta.get("custom", {}) for n in graph.calls() if not _is_noted_backward(n)]
    found = {path for noted in forward for path, num in noted.get("entered", {}).items() if num}
    lists = [f"{block.rpartition('.')[0]}." for block in blocks_of(graph)]
    return {path for path in found if not any(each.startswith(f"{path}.") for each in lists)}


def _place(noted: Mapping[str, Any], several: Collection[str]) -> str:
    """Where a call stands among those of modules that are called several times; "" in no such."""
    numbers = {p: num for p, num in noted.get("entered", {}).items() if p in several}
    return numbered(noted.get("module", ""), numbers) if numbers else ""


def _is_noted_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("custom", {}).get("phase") == "B")


def _describe_backward(node: fx.Node, forward: dict[int, fx.Node]) -> None:
    """Give a backward call the module and line of its forward call.

    A recomputed call has its own. A call without a forward call takes those of its last operand.
    """
    update(node, phase="B")
    of = forward.get(node.meta.get("seq_nr", -1)) if _has_forward(node) else None
    if of is not None:
        update(node, forward=of.name)
    origin = of or max(node.all_input_nodes, key=_order, default=None)
    if not value(node).module and origin is not None:
        put(node, like=origin if of is not None else _in_call(node, origin))
        if not value(node).source:
            update(node, source=value(origin).source, calls=value(origin).calls)


def _in_call(node: fx.Node, origin: fx.Node) -> fx.Node:
    """Of several calls of a module, the one whose gradient a call without a forward call computes.

    It is the call that made what it reads of the forward; ``origin``, where it reads nothing so.
    """
    near = [n for n in node.all_input_nodes if value(n).phase == "F" and value(n).at]
    near = [n for n in near if value(origin).module in ("", value(n).module)]
    return max(near, key=_order, default=origin)


def _has_forward(node: fx.Node) -> bool:
    """Whether a backward call has a forward call.

    Autograd's sum of several gradients of one value has none, though it carries a ``seq_nr``.
    """
    return bool(node.meta.get("autograd_backward")) and "Gradient addition" not in (
        node.stack_trace or ""
    )


def _order(node: fx.Node) -> Any:
    return node._sort_key
