"""Write a call on one rank's pieces: the same op with local sizes, or a few ops in its stead.

``write_local_call`` appends to a graph and returns the node that computes what ``node`` computes.
That node and those before it (a rank's window of indices, the sum that a mean becomes) have their
value and their fake set; the number of a rank on an axis stands as a call of
``collectives.axis_index``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from partc.graph import fake_of, ops, results_of, set_fake, set_value, value
from partc.graph.collectives import axis_index
from partc.graph.graph_edits import run_fake_of
from partc.plan.mesh import Mesh
from partc.plan.sharding import REPLICATED, Sharding
from partc.rules.call import Call, Shape, arguments_of, local_call, parameters, whole_call
from partc.rules.notation import resolve
from partc.rules.strategy import Strategy, applied
from partc.rules.table import Rule, Windowed, find

aten = torch.ops.aten


def write_local_call(
    out: fx.Graph,
    node: fx.Node,
    operands: Sequence[fx.Node],
    chosen: Mapping[str, Strategy],
    mesh: Mesh,
) -> fx.Node:
    """Append ``node`` as one rank computes it and return the new node, its held shape set.

    ``operands`` are nodes of ``out``, one per entry of ``tensor_args(node)``, in the layouts that
    the strategies of all axes ask for; ``chosen`` has them by axis, replicated axes left out.
    """
    given = iter(operands)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda _: next(given))
    write = _Writer(out, node)
    entry = find(node.target)
    if entry is not None and entry.contiguous:
        args = _contiguous(write, entry, node.target, args)
    if entry is None or not chosen:
        return write(node.target, *args, **kwargs)
    return _Localizer(write, node, entry, dict(chosen), mesh, args, dict(kwargs)).written()


def _contiguous(write: _Writer, entry: Rule, target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Operands whose strides the kernel does not look at, copied where not contiguous."""
    names = [name for name, _, _ in parameters(target)]
    return tuple(
        write.like(arg, aten.clone.default, arg, memory_format=torch.contiguous_format)
        if name in entry.contiguous
        and isinstance(arg, fx.Node)
        and not fake_of(arg).is_contiguous()
        else arg
        for name, arg in zip(names, args, strict=False)
    )


@dataclass(frozen=True)
class _Writer:
    """Appends calls for a node of the whole graph; all but the last one are its intermediates."""

    out: fx.Graph
    node: fx.Node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.like(self.node, target, *args, **kwargs)

    def like(self, other: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call whose whole is shaped and laid out as ``other``."""
        new = self.out.call_function(target, args, kwargs)
        here, known = value(self.node), value(other)
        set_value(
            new,
            replace(here, kind="op", shape=known.shape, dtype=known.dtype, sharding=known.sharding),
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
        """The call on pieces."""
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
        """The shapes of this rank's results."""
        found: list[Shape | None] = []
        for i, whole in enumerate(results_of(self.node)):
            layouts = {axis: strategy.outs[i] for axis, strategy in self.chosen.items()}
            sharding = Sharding.of(layouts, self.mesh)
            found.append(None if whole is None else sharding.local_shape(whole.shape, self.mesh))
        return found

    def _call(self) -> Call:
        return local_call(self.node, self.results, self.args, self.kwargs)

    def _literals(self) -> Iterator[tuple[str, Any]]:
        """The arguments that mean other sizes on pieces."""
        if self.rule.sizes:
            yield self.rule.sizes, list(self.results[0] or ())
        if not self.rule.scales:
            return
        whole = whole_call(self.node)
        notation, factors = applied(self.rule, whole)
        local = self._call()
        num = len(notation.operands)
        sizes = resolve(notation, (*local.shapes, *[None] * num)[:num], local.results).sizes
        for name, letters in self.rule.scales.items():
            known = [letter for letter in letters if letter in factors.sizes]
            ratio = prod(factors.sizes[x] for x in known), prod(sizes[x] for x in known)
            if ratio[0] != ratio[1] and whole[name] is not None:
                yield name, _scaled(whole[name], *ratio)

    def _set(self, changes: Mapping[str, Any]) -> None:
        """Put changed arguments where they stand, or add them as keywords."""
        names = [name for name, _, _ in parameters(self.node.target)][: len(self.args)]
        self.args = tuple(changes.get(n, a) for n, a in zip(names, self.args, strict=True))
        added = {name: new for name, new in changes.items() if name not in names}
        self.kwargs = {**self.kwargs, **added}

    def _windowed(self, windowed: Windowed, axes: list[str]) -> fx.Node:
        """Count indices from this rank's first row and call what passes over the rows of others.

        Of two axes that cut the rows the later mesh axis has the larger blocks: it counts first.
        """
        arguments = arguments_of(self.node.target, self.args, self.kwargs)
        name, rows = self._indices()
        ignore = arguments.get(windowed.ignore)
        extra = {} if ignore is None or ignore < 0 else {"ignore": ignore}
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
        """A call on ``x``, or the same one where it stands: forward and backward share it."""
        for user in x.users:
            if user.target is target and user.args == (x, *args) and user.kwargs == kwargs:
                return user
        return self.write.like(like, target, x, *args, **kwargs)

    def _rank_on(self, axis: str, like: fx.Node) -> fx.Node:
        """This rank's coordinate, as a number in the graph."""
        index = self._once(like, axis_index, like, axis=axis, num=self.mesh.size(axis))
        set_value(index, replace(value(index), shape=(), dtype=torch.int64, sharding=REPLICATED))
        return index

    def _indices(self) -> tuple[str, int]:
        """The argument that holds indices and how many rows of the whole they point into."""
        notation, factors = applied(self.rule, whole_call(self.node))
        names = [name for name, _, takes_tensors in parameters(self.node.target) if takes_tensors]
        at = next(i for i, term in enumerate(notation.operands) if term.index_of)
        return names[at], factors.sizes[notation.operands[at].index_of]

    def _mean(self) -> fx.Node:
        """The sum of this piece over the count of the whole: the mean is the sum of these."""
        call = whole_call(self.node)
        reduced = call.dim_list() if "dim" in call.arguments else list(range(call.rank()))
        dtype = call.arguments.get("dtype")
        extra = {} if dtype is None else {"dtype": dtype}
        keep = bool(call.arguments.get("keepdim"))
        total = self.write(aten.sum.dim_IntList, self.args[0], reduced, keep, **extra)
        return self.write(aten.div.Tensor, total, prod(call.shape(0)[d] for d in reduced))


def _scaled(given: Any, whole: int, local: int) -> Any:
    """A size, bound or list of sizes, proportionally smaller; "to the end" stays what it is."""
    if isinstance(given, list | tuple):
        return [_scaled(each, whole, local) for each in given]
    return given if given == sys.maxsize else given * local // whole
