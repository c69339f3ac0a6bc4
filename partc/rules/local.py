"""Write a call for one rank: the same op with local sizes, or a few ops instead of it.

``write_local_call`` appends the call to a local graph. A mean becomes a sum and a division; an
index into a sharded dim becomes an index into this rank's window of that dim. All appended nodes
have their `Value` and their fake. The rank's coordinate on an axis appears in the graph as a call
of ``collectives.axis_index``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from partc.errors import RuleError
from partc.graph import (
    changed,
    fake_of,
    is_backward,
    is_tensor,
    ops,
    results_of,
    set_fake,
    set_value,
    value,
)
from partc.graph.collectives import axis_index
from partc.graph.graph_edits import run_fake_of
from partc.plan.mesh import Mesh
from partc.plan.sharding import REPLICATED, Sharding
from partc.rules.call import Call, Shape, arguments_of, local_call, parameters, whole_call
from partc.rules.notation import resolve
from partc.rules.strategy import Strategy, applied
from partc.rules.strides import in_order
from partc.rules.table import Rule, Windowed, find, name_of

aten = torch.ops.aten


def write_local_call(
    out: fx.Graph,
    node: fx.Node,
    operands: Sequence[fx.Node],
    chosen: Mapping[str, Strategy],
    mesh: Mesh,
) -> fx.Node:
    """Append to ``out`` the call of ``node`` as one rank computes it; return the new node.

    ``operands`` are nodes of ``out``, one per entry of ``tensor_args(node)``, already in the
    layouts that the strategies ask for. ``chosen`` has the strategy of each mesh axis; replicated
    axes are left out.

    RuleError if the op does not run on the pieces that its rule promises.
    """
    given = iter(operands)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda _: next(given))
    write = _Writer(out, node)
    entry = find(node.target)
    args = in_order(write.like, node, args)
    if entry is None or not chosen:
        return write(node.target, *args, **kwargs)
    try:
        return _Localizer(write, node, entry, dict(chosen), mesh, args, dict(kwargs)).written()
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise _untrue(node, entry, chosen, operands, error) from error


def _unchecked(window: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a window without those of its check: no row has a number below 0."""
    negative = isinstance(ignore := window.get("ignore"), int) and ignore < 0
    return {k: v for k, v in window.items() if k != "of" and not (negative and k == "ignore")}


def _untrue(
    node: fx.Node, entry: Rule, chosen: Mapping[str, Strategy], operands: Sequence[fx.Node],
    error: Exception,
) -> RuleError:  # fmt: skip
    """The refusal of a rule by which an op is given pieces that it does not run on."""
    known, op = value(node), name_of(node.target)
    source = f"({known.source})" if known.source else ""
    pieces = ", ".join(str(list(fake_of(n).shape)) for n in operands if is_tensor(n))
    ways = "; ".join(f"{axis}: {strategy}" for axis, strategy in chosen.items())
    return RuleError(
        where=f"{known.module} {source}".strip() or str(node),
        what=f'rule("{op}", "{entry.written(whole_call(node))}") does not hold ({ways})',
        why=f"the op does not run on pieces of shapes {pieces}: {str(error).partition(chr(10))[0]}",
        do="Correct the rule; `partc.rules.prove` tries one.",
    )


@dataclass(frozen=True)
class _Writer:
    """Appends the calls that compute a node of the whole graph on one rank; the last one is its
    result, the others are intermediates."""

    out: fx.Graph
    node: fx.Node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.like(self.node, target, *args, **kwargs)

    def like(self, other: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call whose result has the whole shape, dtype and sharding of ``other``."""
        new = self.out.call_function(target, args, kwargs)
        here, known = value(self.node), value(other)
        set_value(
            new,
            changed(here, kind="op", shape=known.shape, dtype=known.dtype, sharding=known.sharding),
        )
        set_fake(new, run_fake_of(self.node.graph, target, args, kwargs))
        return new


@dataclass
class _Localizer:
    write: _Writer
    node: fx.Node
    rule: Rule
    chosen: dict[str, Strategy]
    mesh: Mesh
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def written(self) -> fx.Node:
        """Append the call on pieces; return its node."""
        self.results = self._local_results()
        if self.rule.reshapes:
            return self.write(aten.reshape.default, self.args[0], list(self.results[0] or ()))
        if any(s.variant == "mean" for s in self.chosen.values()):
            return self._mean()
        self._set(dict(self._literals()))
        windows = [axis for axis, s in self.chosen.items() if s.variant == "window"]
        if windows and self.rule.windowed is not None:
            return self._windowed(self.rule.windowed, windows)
        return self.write(self.node.target, *self.args, **self.kwargs)

    def _local_results(self) -> list[Shape | None]:
        """The local shapes of the call's results; None for absent ones."""
        found: list[Shape | None] = []
        for i, whole in enumerate(results_of(self.node)):
            layouts = {axis: strategy.outs[i] for axis, strategy in self.chosen.items()}
            sharding = Sharding.of(layouts, self.mesh)
            found.append(None if whole is None else sharding.local_shape(whole.shape, self.mesh))
        return found

    def _call(self) -> Call:
        return local_call(self.node, self.results, self.args, self.kwargs)

    def _literals(self) -> Iterator[tuple[str, Any]]:
        """The arguments that change on pieces, with their new values: sizes, bounds, counts."""
        if self.rule.sizes:
            yield self.rule.sizes, list(self.results[0] or ())
        if not self.rule.scales:
            return
        whole = whole_call(self.node)
        notation, factors = applied(self.rule, whole)
        if factors.sizes.keys().isdisjoint("".join(self.rule.scales.values())):
            return  # none of the letters is cut in this call
        local = self._call()
        num = len(notation.operands)
        sizes = resolve(notation, (*local.shapes, *[None] * num)[:num], local.results).sizes
        for name, letters in self.rule.scales.items():
            known = [letter for letter in letters if letter in factors.sizes]
            ratio = prod(factors.sizes[x] for x in known), prod(sizes[x] for x in known)
            if ratio[0] != ratio[1] and whole[name] is not None:
                yield name, _scaled(whole[name], *ratio)

    def _set(self, changes: Mapping[str, Any]) -> None:
        """Change arguments at their positions, or add them as keywords."""
        names = [name for name, _, _ in parameters(self.node.target)][: len(self.args)]
        self.args = tuple(changes.get(n, a) for n, a in zip(names, self.args, strict=True))
        added = {name: new for name, new in changes.items() if name not in names}
        self.kwargs = {**self.kwargs, **added}

    def _windowed(self, windowed: Windowed, axes: list[str]) -> fx.Node:
        """Change indices to count from this rank's first row, and skip indices into other ranks'
        rows.

        Of two axes that shard the rows, the later mesh axis has the larger pieces, so its window is
        applied first.
        """
        arguments = arguments_of(self.node.target, self.args, self.kwargs)
        name, rows = self._indices()
        ignore = arguments.get(windowed.ignore)
        extra = {} if ignore is None else {"ignore": ignore}
        if is_backward(self.node):  # it reads what the forward has checked
            extra = {} if ignore is None or ignore < 0 else extra
        else:
            extra["of"] = rows
        window = arguments[name]
        whole = window
        for axis in sorted(axes, key=self.mesh.names.index, reverse=True):
            num = self.mesh.size(axis)
            rows //= num
            index = self._rank_on(axis, whole)
            extra |= {} if windowed.outside == -1 else {"outside": windowed.outside}
            window = self._once(whole, ops.window, window, index, rows, **extra)
            extra = {}  # the next one counts rows of this one, not of the whole
        self._set({name: window} | ({windowed.ignore: windowed.outside} if windowed.ignore else {}))
        if windowed.target is None:
            return self.write(self.node.target, *self.args, **self.kwargs)
        taken = len(inspect.signature(windowed.target).parameters)
        return self.write(windowed.target, *self.args[:taken])

    def _once(self, like: fx.Node, target: Any, x: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        """A call on ``x``; an equal call is reused, so that forward and backward share it.

        So is one that also checks the indices: a backward has those of its forward.
        """
        for user in x.users:
            given = _unchecked(user.kwargs) if is_backward(self.node) else user.kwargs
            if user.target is target and user.args == (x, *args) and given == kwargs:
                return user
        return self.write.like(like, target, x, *args, **kwargs)

    def _rank_on(self, axis: str, like: fx.Node) -> fx.Node:
        """The node of this rank's coordinate on an axis, which is a number."""
        index = self._once(like, axis_index, like, axis=axis, num=self.mesh.size(axis))
        set_value(index, changed(value(index), shape=(), dtype=torch.int64, sharding=REPLICATED))
        return index

    def _indices(self) -> tuple[str, int]:
        """The name of the argument with indices, and the size of the whole dim that they index."""
        notation, factors = applied(self.rule, whole_call(self.node))
        names = [name for name, _, takes_tensors in parameters(self.node.target) if takes_tensors]
        at = next(i for i, term in enumerate(notation.operands) if term.index_of)
        return names[at], factors.sizes[notation.operands[at].index_of]

    def _mean(self) -> fx.Node:
        """Write a mean as the local sum divided by the whole's count; all ranks' values add up."""
        call = whole_call(self.node)
        reduced = call.dim_list() if "dim" in call.arguments else list(range(call.rank()))
        dtype = call.arguments.get("dtype")
        extra = {} if dtype is None else {"dtype": dtype}
        keep = bool(call.arguments.get("keepdim"))
        total = self.write(aten.sum.dim_IntList, self.args[0], reduced, keep, **extra)
        return self.write(aten.div.Tensor, total, prod(call.shape(0)[d] for d in reduced))


def _scaled(given: Any, whole: int, local: int) -> Any:
    """A size, bound or list of sizes, times ``local / whole``; "to the end" (maxsize) stays."""
    if isinstance(given, list | tuple):
        return [_scaled(each, whole, local) for each in given]
    return given if given == sys.maxsize else given * local // whole
