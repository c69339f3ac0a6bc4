"""Replace in-place ops by out-of-place ops, also where a write goes through a view.

In: a graph whose calls may write to their arguments (``y = x.t(); y.add_(1)``). Out: a graph whose
values never change (``x2 = t(t(x) + 1)``, and later calls read ``x2`` for ``x``). The new value of
a buffer that the step changes stands in ``outputs.buffers``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from partc.errors import TraceError
from partc.graph import Graph, fake_of, value
from partc.graph.graph_edits import call_before, drop_dead, stand_in
from partc.graph.writes import write_places
from partc.passes.canonical.open_dropout import rrelu_noise
from partc.passes.canonical.views import UNDO, Step, step_of

aten = torch.ops.aten
_NEW_TENSOR = (
    "Take what an op returns in the place of what it writes: values, at = torch.max(x, 1)."
)
_RESHAPED = (
    "Take a tensor of the other shape in its place: y = x.reshape(4, 6) of as many numbers, "
    "y = x.flatten()[:n] of fewer; F.pad or torch.cat make a longer one."
)
_OF_A_FACTORY = ("dtype", "layout", "device", "pin_memory")
BATCH_NORMS = (aten.native_batch_norm.default, aten._native_batch_norm_legit.default)


@dataclass
class Memory:
    """The memory of one base tensor: the node that now has its content, and the count of writes."""

    node: fx.Node
    version: int = 0


@dataclass
class View:
    """An original node as a view: ``steps`` lead from the base in ``memory`` to the node.

    ``now`` is the new graph's node with the view's content when ``version`` writes had been made.
    """

    memory: Memory
    steps: tuple[Step, ...]
    now: fx.Node
    version: int


@dataclass
class _Rewrite:
    """The walk over one graph, call by call; ``views`` has each original node as a view."""

    graph: Graph
    views: dict[fx.Node, View] = field(default_factory=dict)

    def read(self, node: fx.Node, where: fx.Node) -> fx.Node:
        """The node with the present content of ``node``; after a write its view ops run again."""
        view = self.views[node]
        if view.version != view.memory.version:
            view.now = view.memory.node
            for step in view.steps:
                view.now = step.redo(where, view.now)
            view.version = view.memory.version
        return view.now

    def write(self, node: fx.Node, new: fx.Node, where: fx.Node) -> None:
        """Write ``new`` through the view ``node``: the base becomes a new tensor with that part."""
        view = self.views[node]
        memory = view.memory
        # Forward along the view ops to the tensor before each of them, then back: each op is undone
        # on the tensor that it was applied to.
        bases, base = [], memory.node
        for step in view.steps:
            bases.append((step, base))
            base = step.redo(where, base)
        whole = new
        for step, base in reversed(bases):
            whole = step.undo(where, base, whole)
        memory.node, memory.version = whole, memory.version + 1
        view.now, view.version = new, memory.version

    def look(self, node: fx.Node, at: fx.Node | None) -> None:
        """Register ``node``: as a view of the base of ``at``, or (``at`` is None) as a new base."""
        if at is None:
            self.views[node] = View(Memory(node), (), node, 0)
            return
        seen = self.views[at]
        # The tuple of a split is registered as a view too; a piece of it is one slice of the base.
        before = seen.steps[:-1] if node.target is operator.getitem else seen.steps
        self.views[node] = View(seen.memory, (*before, step_of(node)), node, seen.version)


def functionalize(graph: Graph) -> None:
    """``y = x.add_(1)`` becomes ``y = x + 1``; later readers of ``x`` or its views read ``y``."""
    rewrite = _Rewrite(graph)
    for node in list(graph.fx.nodes):
        fx_args = fx.map_arg((node.args, node.kwargs), lambda n: rewrite.read(n, node))  # noqa: B023
        original = (node.args, node.kwargs)
        places = write_places(node.target) if node.op == "call_function" else ()
        written = [name for _, name in places]
        if node.target in BATCH_NORMS:
            _open_batch_norm(rewrite, node, fx_args)
        elif written and torch.Tag.inplace_view in node.target.tags:
            _replace_restride(rewrite, node)
        elif written:
            _replace_write(rewrite, node, written, fx_args)
        else:
            node.args, node.kwargs = fx_args
            if node.op != "output":
                rewrite.look(node, viewed(node, original[0]))
    _keep_changes(graph, rewrite)


def viewed(node: fx.Node, args: tuple[Any, ...]) -> fx.Node | None:
    """The argument that a call's result is a view of; None if the result has memory of its own."""
    if node.op != "call_function" or not args or not isinstance(args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        parts = args[0]
        shows = viewed(parts, parts.args) if parts.op == "call_function" else None
        return parts if shows is not None else None
    # The schemas of these two do not say that the result shares the argument's memory.
    if node.target in (aten._unsafe_view.default, aten._reshape_alias.default):
        return args[0]
    schema = getattr(node.target, "_schema", None)
    aliased = schema is not None and any(r.alias_info is not None for r in schema.returns)
    return args[0] if aliased else None


# in-place ops --------------------------------------------------------------------------------
def _replace_write(rewrite: _Rewrite, node: fx.Node, written: list[str], args: Any) -> None:
    """Replace ``x.mul_(y)`` by ``mul(x, y)``, which later readers of ``x`` and its views read."""
    target: Any = node.target
    changed = node.args[0]
    name = target._schema.name.removeprefix("aten::")
    if written == ["out"]:
        changed, (given, named) = node.kwargs["out"], args
        kwargs = {key: each for key, each in named.items() if key != "out"}
        old = fake_of(named["out"])
        found = _out_of_place(node)
        new = call_before(node, found, *given, **_factory_options(found, old), **kwargs)
    elif name == "rrelu_with_noise" and written == ["noise"]:
        _draw_slopes(rewrite, node, args[0])
        return
    elif written == ["self"] and name.endswith("_"):
        new, old = _functional(node, name[:-1], args), fake_of(args[0][0])
    else:
        raise _refusal(node, f"{target} writes to {', '.join(written)}")
    assert isinstance(changed, fx.Node)
    # An in-place op keeps the dtype and shape of the tensor it writes to; type promotion and
    # broadcasting may give the out-of-place op others.
    if fake_of(new).dtype != old.dtype:
        new = call_before(node, aten._to_copy.default, new, dtype=old.dtype)
    if fake_of(new).shape != old.shape:
        new = call_before(node, aten.expand.default, new, list(old.shape))
    rewrite.write(changed, new, node)
    seen = rewrite.views[changed]
    rewrite.views[node] = replace(seen)
    stand_in(node, new)


def _replace_restride(rewrite: _Rewrite, node: fx.Node) -> None:
    """``x.t_()`` changes no memory: from this call on ``x`` is the view ``t(x)`` of its base."""
    target, changed = _out_of_place(node), node.args[0]
    assert isinstance(changed, fx.Node)
    if target not in UNDO:
        raise _refusal(node, f"{node.target} changes how memory is read", _RESHAPED)
    step, seen = Step(target, node.args[1:]), rewrite.views[changed]
    now = step.redo(node, rewrite.read(changed, node))
    rewrite.views[changed] = View(seen.memory, (*seen.steps, step), now, seen.version)
    rewrite.views[node] = replace(rewrite.views[changed])
    stand_in(node, now)


def _out_of_place(node: fx.Node) -> Any:
    """The out-of-place overload of an in-place op: ``mul_.Tensor -> mul.Tensor``.

    TraceError if torch has none.
    """
    target: Any = node.target
    name = target._schema.name.removeprefix("aten::").removesuffix("_")
    packet = getattr(aten, name, None)
    found = getattr(packet, target._overloadname, None)
    if found is None or found is target or _arguments(found) != _arguments(target):
        found = _same_arguments(packet, target) or (None if found is target else found)
    makes = found is not None and bool(_factory_options(found, torch.empty(0)))
    if found is None or (makes and torch.Tag.nondeterministic_seeded in found.tags):
        raise _refusal(node, f"{target} has no out-of-place form")
    return found


def _same_arguments(packet: Any, target: Any) -> Any:
    """The pure overload with the arguments of an in-place op: ``transpose_ -> transpose.int``."""
    wanted = _arguments(target)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet else []
    pure = (each for each in overloads if not each._schema.is_mutable)
    return next((each for each in pure if _arguments(each) == wanted), None)


def _arguments(target: Any) -> list[tuple[str, str]]:
    """Names and types of an op's arguments, without ``out`` and what a tensor in its place says."""
    given = (a for a in target._schema.arguments if a.name not in ("out", *_OF_A_FACTORY))
    return [(a.name, str(a.type)) for a in given]


def _factory_options(found: Any, like: torch.Tensor) -> dict[str, Any]:
    """What a factory (``eye``, ``arange``) is told where it made its numbers in a tensor."""
    names = {a.name for a in found._schema.arguments}
    return {"dtype": like.dtype, "device": like.device} if names.issuperset(_OF_A_FACTORY) else {}


def _functional(node: fx.Node, name: str, args: Any) -> fx.Node:
    """Write the out-of-place call for ``name`` (``copy``, ``add``); some names need another op."""
    (self, *rest), kwargs = args
    target: Any = node.target
    if name == "copy":
        return rest[0]  # type: ignore[no-any-return]
    if name == "zero":
        return call_before(node, aten.zeros_like.default, self)
    if name == "fill":
        return call_before(node, getattr(aten.fill, target._overloadname), self, *rest)
    if name == "bernoulli" and target._overloadname == "Tensor":
        chances = call_before(node, aten.expand.default, rest[0], list(fake_of(self).shape))
        return call_before(node, aten.bernoulli.default, chances)
    if name == "bernoulli":
        return call_before(node, aten.bernoulli.p, self, *(rest or [0.5]), **kwargs)
    if name == "normal":
        return call_before(node, aten.normal_functional.default, self, *rest, **kwargs)
    return call_before(node, _out_of_place(node), self, *rest, **kwargs)


def _draw_slopes(rewrite: _Rewrite, node: fx.Node, args: Any) -> None:
    """Replace an rrelu, which draws into ``noise``, by a draw of its slopes and a product."""
    x, noise, *options = args
    lower, upper, training = (*options, *(1 / 8, 1 / 3, False)[len(options) :])[:3]
    changed = node.args[1]
    assert isinstance(changed, fx.Node)
    if training:
        slopes = rrelu_noise(node, x, noise, lower, upper)
        new = call_before(node, aten.mul.Tensor, x, slopes)
        rewrite.write(changed, slopes, node)
    else:
        new = call_before(node, aten.leaky_relu.default, x, (lower + upper) / 2)
    stand_in(node, new)
    rewrite.views[node] = View(Memory(new), (), new, 0)


def _open_batch_norm(rewrite: _Rewrite, node: fx.Node, args: Any) -> None:
    """Replace a training batch norm by the functional op, which returns its new running statistics
    instead of writing them into its buffers.
    """
    (x, weight, bias, mean, var, training, momentum, eps), original = args[0], node.args
    functional = aten._native_batch_norm_legit_functional.default
    if not training or mean is None:
        node.args, node.kwargs = args
        rewrite.look(node, None)
        return
    new = call_before(node, functional, x, weight, bias, mean, var, training, momentum, eps)
    for i, statistic in ((3, original[3]), (4, original[4])):
        assert isinstance(statistic, fx.Node)
        now = call_before(node, operator.getitem, new, i)
        # Kernels keep the dtype of the buffer; torch's shape function says float32 for all.
        if fake_of(now).dtype != fake_of(statistic).dtype:
            now = call_before(node, aten._to_copy.default, now, dtype=fake_of(statistic).dtype)
        rewrite.write(statistic, now, node)
    stand_in(node, new)
    rewrite.views[node] = View(Memory(new), (), new, 0)


# results -------------------------------------------------------------------------------------
def _keep_changes(graph: Graph, rewrite: _Rewrite) -> None:
    """Write the changed buffers into the outputs; TraceError if a parameter or input changed."""
    for node in graph.fx.nodes:
        if node.op == "placeholder" and value(node).kind != "buffer":
            _refuse_if_written(node, rewrite)
    outputs, before = graph.outputs, graph.buffers
    changed = {name: n for name, n in outputs.buffers.items() if n is not before[name]}
    graph.set_outputs(replace(outputs, buffers=changed))
    drop_dead(graph)


def _refuse_if_written(node: fx.Node, rewrite: _Rewrite) -> None:
    memory = rewrite.views[node].memory
    if memory.version:
        line = value(memory.node).source  # of the latest write
        do = "Clone it before the write, or make it a buffer."
        if value(node).kind == "param":
            do = "Write to stage.parameters() behind the optimizer's step, under torch.no_grad(); "
            do += "leave max_norm out of an nn.Embedding, which shortens its rows in the forward."
        raise TraceError(
            where=f"{value(node).kind} {value(node).name}" + (f" ({line})" if line else ""),
            what="the step writes to it in place",
            why="a step returns the loss, gradients and new buffers, and changes nothing else",
            do=do,
        )


def _refusal(node: fx.Node, what: str, do: str = _NEW_TENSOR) -> TraceError:
    return TraceError(
        where=value(node).source or value(node).module,
        what=what,
        why="only ops that write to their own first tensor can be rewritten as new values",
        do=do,
    )
