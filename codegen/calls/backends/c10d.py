"""Collectives as calls of ``torch.distributed``: the line that starts one, and the line that makes
the result of what has arrived, behind the wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from partc.codegen.helpers.needed import Helpers
from partc.codegen.text import ATOM, COMPARE, NONE, Line, Text
from partc.graph import collectives, typed
from partc.graph.moves import Move, code_of, gathers_param, kind_of, wire_of
from partc.passes.shard.zeros import is_zero
from partc.plan.coded import CODES
from partc.plan.mesh import MICROBATCH_AXIS
from partc.plan.wires import THRESHOLD, WIRES
from partc.quoting import comment, literal

FIRST_DIM = (0, 1)  # dim 0, which is not fused: pieces lie there as they arrive
WEIGHTS_AND_GRADS = {
    "all_gather": "gather_weights",
    "all_reduce": "sum_grads",
    "reduce_scatter": "scatter_grads",
}


def start(node: fx.Node, x: Text, name: str, helpers: Helpers, done: str = "") -> str:
    """The statement that starts a collective on ``x``: ``y, y_done = gather(x, 2, self.dp)``.

    It binds the result ``name`` and the handle to wait for, ``done`` or else ``name_done``. An
    all_reduce works in place, so that ``x`` is ``name``.
    """
    done = done or f"{name}_done"
    k: dict[str, Any] = dict(node.kwargs)
    group = f"self.{k['axis']}"
    if node.target is collectives.all_reduce:
        return f"{done} = {all_reduce(node, name, at_once=False)}"
    operands = [str(x), str(k["num"]), group]
    if node.target is collectives.all_gather:
        call = helpers.use("gather")
    elif node.target is collectives.reduce_scatter:
        # `scatter_sum` splits dim 0: pieces of another dim are first laid out along dim 0.
        call = helpers.use("scatter_sum")
        if cut := _cut(k["dim"], k.get("outer", 1)):
            operands[0] = f"{helpers.use('in_pieces')}({', '.join([str(x), str(k['num']), *cut])})"
    else:
        call = helpers.use("exchange")
        operands += _cut(k["to_dim"], k.get("to_outer", 1), always=True)
    return f"{name}, {done} = {call}({', '.join(operands)})"


def at_once(node: fx.Node, x: Text, name: str, helpers: Helpers) -> str:
    """The statement that starts a collective and waits for it: ``y = all_gather(x, 2, self.dp)``.

    An all_reduce works in place, so that ``x`` is ``name``.
    """
    if node.target is collectives.all_reduce:
        return all_reduce(node, name)
    k: dict[str, Any] = dict(node.kwargs)
    operands = [str(x), str(k["num"]), f"self.{k['axis']}"]
    if node.target is collectives.all_to_all:
        outer = [k.get("outer", 1), k.get("to_outer", 1)]
        operands += map(str, [k["dim"], k["to_dim"], *(outer if outer != [1, 1] else [])])
    else:
        operands += _cut(k["dim"], k.get("outer", 1))
    return f"{name} = {helpers.use(kind_of(node))}({', '.join(operands)})"


def narrow_sum(
    node: fx.Node, texts: Sequence[str], state: Sequence[str], helpers: Helpers
) -> str:  # fmt: skip
    """The call that starts a sum with fewer bytes: ``Int8Sum(flat, 4, 256, [...], self.dp)``.

    ``texts``: of the memory that is summed, of the gradients in it, and of a generator or none;
    ``state``: of the buffers for what is not sent.
    """
    wire, k = WIRES[wire_of(node)], dict(node.kwargs)
    flat, grads, key = texts
    operands = [flat, grads if wire.takes_grads else str(k["num"]), str(k["size"])]
    operands += [f"[{', '.join(state)}]", f"self.{k['axis']}", *([key] if key else [])]
    operands += [literal(k[THRESHOLD])] if wire.has_threshold else []
    call = f"{helpers.use(wire.helper)}({', '.join(operands)})"
    exact = f"dist.all_reduce({flat}, group=self.{k['axis']}, async_op=True)"
    return f"{call} if self.rng.step > {k['start']} else {exact}" if "start" in k else call


def narrow_scatter(node: fx.Node, grads: str, key: str, helpers: Helpers) -> str:
    """The call that starts a reduce-scatter with fewer bytes of a dict of gradients:
    ``scattered(grads, Int8Scatter(in_rows(grads, 4), 4, 256, [], self.dp))``. ``key``: the text of
    a generator, or "".
    """
    wire, k = WIRES[wire_of(node)], dict(node.kwargs)
    operands = [f"{helpers.use('in_rows')}({grads}, {k['num']})", str(k["num"]), str(k["size"])]
    operands += ["[]", f"self.{k['axis']}", *([key] if key else [])]
    made = f"{helpers.use(wire.scatter)}({', '.join(operands)})"
    call = f"{helpers.use('scattered')}({grads}, {made})"
    if "start" not in k:
        return call
    exact = f"{helpers.use('scatter_grads')}({grads}, {k['num']}, self.{k['axis']})"
    return f"{call} if self.rng.step > {k['start']} else {exact}"


def all_reduce(node: fx.Node, name: str, *, at_once: bool = True) -> str:
    """The call of an all_reduce, a sum or a maximum; ``at_once`` it also waits for the result."""
    assert not wire_of(node), "a sum with fewer bytes is no all_reduce of c10d"
    op = ", op=dist.ReduceOp.MAX" if node.kwargs.get("op", "sum") == "max" else ""
    later = "" if at_once else ", async_op=True"
    return f"dist.all_reduce({name}{op}, group=self.{node.kwargs['axis']}{later})"


def transfer(node: fx.Node, tensors: str, helpers: Helpers) -> str:
    """The call that starts to gather weights, or to reduce gradients, in one transfer.

    ``tensors`` is the text of a list of weights or of a dict of gradients. Gradients that are
    scattered lie in pieces, one after the other on dim 0 (``laid_out``).
    """
    if code_of(node):
        return coded_gather(node, tensors, helpers)
    name, operands = WEIGHTS_AND_GRADS[kind_of(node)], [tensors]
    name = "gather_grads" if name == "gather_weights" and not gathers_param(node) else name
    operands += [] if name == "sum_grads" else [str(node.kwargs["num"])]
    operands.append(f"self.{node.kwargs['axis']}")
    return f"{helpers.use(name)}({', '.join(operands)})"


def coded_gather(node: fx.Node, tensors: str, helpers: Helpers) -> str:
    """The call that starts to gather weights with fewer bytes:
    ``gathered_from(Int8Weights([self.w], 2, 256, self.dp))``.
    """
    code, k = CODES[code_of(node)], dict(node.kwargs)
    operands = f"{tensors}, {k['num']}, {k['block']}, self.{k['axis']}"
    return f"{helpers.use('gathered_from')}({helpers.use(code.weights)}({operands}))"


def shards(names: Sequence[str], gather: fx.Node, helpers: Helpers, every: str = "") -> str:
    """The list of weights that a gather sends, in the dtype in which it sends them:
    ``[self.q, self.k]``, ``cast([self.q, self.k], torch.bfloat16)``.

    ``every`` is the text that gives the same weights, where there is a shorter one.
    """
    dtype, listed = gather.kwargs.get("dtype"), f"*{every}" if every else ", ".join(names)
    if dtype is None:
        return f"[{listed}]"
    if len(names) == 1:
        return f"[{names[0]}.to({literal(dtype)})]"
    return f"{helpers.use('cast')}([{listed}], {literal(dtype)})"


def taken(gathered: str, each: Sequence[Move], helpers: Helpers) -> str:
    """The call that waits for gathered weights and gives a list that has them whole.

    ``gathered`` is the text of what the transfers started; ``each`` has their tensors in order.
    """
    cuts = {i: cut_of(m.kwargs) for i, m in enumerate(each) if cut_of(m.kwargs) != FIRST_DIM}
    return f"{helpers.use('take_cut')}({gathered}, {cuts})" if cuts else f"{gathered}.take()"


def put_together(names: Sequence[str], each: Sequence[Move], helpers: Helpers) -> Iterator[Line]:
    """The lines behind ``a, b = gathered.take()`` for weights that are not sharded on dim 0:
    ``b = join(b, 2, 1)``.
    """
    for name, move in zip(names, each, strict=True):
        cut = cut_of(move.kwargs)
        if cut != FIRST_DIM and name != "_":
            operands = [name, str(move.kwargs["num"]), *_cut(*cut, always=True)]
            remark = "" if move.result is None else comment(typed(move.result))
            yield Line(f"{name} = {helpers.use('join')}({', '.join(operands)})", remark)


def laid_out(grad: str, how: Mapping[str, Any], helpers: Helpers) -> str:
    """A gradient as ``scatter_grads`` takes it, its pieces on dim 0: ``in_pieces(grad, 2, 1)``.

    ``how``: the arguments of the collective that scatters it.
    """
    if cut_of(how) == FIRST_DIM:
        return grad
    operands = [grad, str(how["num"]), *_cut(*cut_of(how), always=True)]
    return f"{helpers.use('in_pieces')}({', '.join(operands)})"


def cut_of(how: Mapping[str, Any]) -> tuple[int, int]:
    """On which dim a tensor is sharded, and how many parts a fused dim has, such as 2 for the rows
    of a gated MLP: ``(dim, outer)``.
    """
    return how["dim"], how.get("outer", 1)


def after_wait(node: fx.Node, name: str, helpers: Helpers) -> str:
    """The statement behind a wait that puts the ranks' pieces together on the right dim.

    Pieces arrive one after the other on dim 0; a tensor that is sharded on dim 0 needs no statement
    ("").
    """
    k: dict[str, Any] = dict(node.kwargs)
    if node.target not in (collectives.all_gather, collectives.all_to_all):
        return ""
    if k["dim"] == 0 and k.get("outer", 1) == 1:
        return ""
    operands = [name, str(k["num"]), *_cut(k["dim"], k.get("outer", 1), always=True)]
    return f"{name} = {helpers.use('join')}({', '.join(operands)})"


def local(node: fx.Node, x: Text, helpers: Helpers) -> Text:
    """The text of an op that depends on the rank but moves nothing, such as ``keep_piece``.

    ``f32[8,64] -> f32[8@dp,64]`` is ``x.chunk(2)[self.dp_rank]``.
    """
    k: dict[str, Any] = dict(node.kwargs)
    # The pieces of the batch along the axis of microbatches are counted by the argument `i`.
    index = "i" if k["axis"] == MICROBATCH_AXIS else f"self.{k['axis']}_rank"
    if node.target is collectives.axis_index:
        return Text(index)
    # A zero is the same on every rank: it need not be kept on the first rank alone.
    if node.target is collectives.keep_first and is_zero(node.all_input_nodes[0]):
        return x
    if node.target is collectives.keep_first:
        return Text(f"{x.at(COMPARE)} if {index} == 0 else torch.zeros_like({x})", NONE - 1)
    if k.get("outer", 1) > 1:
        return Text(f"{helpers.use('piece')}({x}, {k['num']}, {index}, {k['dim']}, {k['outer']})")
    dim = f", {k['dim']}" if k["dim"] else ""
    return Text(f"{x.at(ATOM)}.chunk({k['num']}{dim})[{index}]")


def _cut(dim: int, outer: int, always: bool = False) -> list[str]:
    """``dim`` and ``outer`` as arguments of a helper; left out where they are 0 and 1."""
    if outer > 1:
        return [str(dim), str(outer)]
    return [str(dim)] if dim or always else []
