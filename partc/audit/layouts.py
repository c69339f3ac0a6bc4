"""Follow layouts and unfinished sums through a rank's text, call by call.

Parameters and buffers lie as the tables say, inputs are whole. Each call gives its results' layouts
by the op's rule (``flow.py``), each collective changes them as its kind says. CheckError where an
unfinished sum is read by a call that is not linear in it, where a sum is finished twice, over
another axis or not at all, and where a gradient does not lie as its parameter. What no rule follows
is unknown, and nothing is said of what depends on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partc.audit.flow import (
    PIECES, ROWS, SAME, STACK, WINDOW, ZERO, Known, Op, Unsound, reshaped, special,
)  # fmt: skip
from partc.audit.variation import Varying, flattened, is_silent
from partc.errors import CheckError
from partc.plan.sharding import Layout, M, R, U, cut
from partc.rules.call import Call, arguments_of, parameters

Layouts = dict[str, Known]  # by mesh axis


class Following(TorchDispatchMode):
    """Follows layouts while it is open; ``axes`` are those of the mesh without ``pp``."""

    def __init__(self, axes: Mapping[str, int], varying: Varying, place: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes, self.varying, self.place = axes, varying, place
        self.number, self.quiet = -1, False
        self.sharing: dict[int, list[weakref.ref[Tensor]]] = {}

    # what is known of a tensor -------------------------------------------------------------------
    def of(self, tensor: Tensor) -> Layouts:
        known: Layouts | None = getattr(tensor, "layouts_of_audit", None)
        return known if known is not None else dict.fromkeys(self.axes)

    def note(self, tensor: Tensor, layouts: Layouts) -> None:
        """Note layouts of a tensor, which may share memory with others."""
        if not hasattr(tensor, "layouts_of_audit"):
            aliases = self.sharing.setdefault(tensor.untyped_storage()._cdata, [])
            aliases[:] = [each for each in aliases if each() is not None]
            aliases.append(weakref.ref(tensor))
        tensor.layouts_of_audit = layouts  # type: ignore[attr-defined]

    def aliases(self, tensor: Tensor) -> list[Tensor]:
        """The other tensors whose layouts were noted and that share memory with this one."""
        found = [each() for each in self.sharing.get(tensor.untyped_storage()._cdata, ())]
        key = tensor.untyped_storage()._cdata
        return [
            x for x in found
            if x is not None and x is not tensor and x.untyped_storage()._cdata == key
        ]  # fmt: skip

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Calls inside are not followed."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    # calls ---------------------------------------------------------------------------------------
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self.quiet:
            return func(*args, **kwargs)
        if is_silent(func):
            return self._handed_over(args, func(*args, **kwargs))
        self.number += 1
        self._pick(args, kwargs)
        result = func(*args, **kwargs)
        try:
            self._follow(func, args, kwargs, result)
        except Unsound as error:
            raise self.wrong(str(func), str(error)) from None
        return result

    def _handed_over(self, args: Sequence[Any], result: Any) -> Any:
        if isinstance(result, Tensor):
            self.note(result, dict(self.of(args[0])))
        return result

    def wrong(self, what: str, why: str) -> CheckError:
        return CheckError(
            where=self.place(),
            what=what,
            why=why,
            do="Finish each sum over ranks once, over its own axis, before what needs it whole.",
        )

    def _pick(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note operands that are this rank's piece among the results of a split."""
        for place, tensor in enumerate(flattened((args, kwargs))[0]):
            for axis in self.varying.picked.get((self.number, place), ()):
                layouts = self.of(tensor)
                dim = getattr(tensor, "split_of_audit", None)
                known = dim is not None and layouts[axis] in (R, cut(dim))
                self.note(tensor, {**layouts, axis: cut(dim) if known else None})

    def _follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        written = _written(func, args, kwargs)
        if name in FILLS:
            self._write(written, [dict.fromkeys(self.axes, FILLS[name])])
            return
        if name == "copy_":
            self._write(written, [self._broadcast(args[1], args[0])])
            return
        target = functional(func)
        if target is None:
            self._write(written or results, [dict.fromkeys(self.axes) for _ in written or results])
            return
        if written and func._schema.name.endswith("_"):
            results = written[:1]
        found = self._flows(func, target, args, kwargs, result if not written else results)
        if written:
            self._write(written, found)
            return
        self._make(func, name, args, results, found)

    def _make(
        self, func: Any, name: str, args: Sequence[Any], results: Sequence[Tensor],
        found: Sequence[Layouts],
    ) -> None:  # fmt: skip
        """Note new tensors; a view of memory that was written in parts lies as its part."""
        base = next((x for x in args if isinstance(x, Tensor)), None)
        for tensor, layouts in zip(results, found, strict=False):
            if base is not None and tensor is not base and _shares(tensor, base):
                layouts = self._of_part(tensor, layouts)
            self.note(tensor, layouts)
            if name.startswith(("split", "chunk", "unbind")):
                tensor.split_of_audit = _split_dim(args, base)  # type: ignore[attr-defined]
        if name == "cat" and results:
            self._note_parts(results[0], args)

    def _of_part(self, tensor: Tensor, layouts: Layouts) -> Layouts:
        """The layouts of a view, where its base's are unknown and another view of the same entries
        is known.
        """
        unknown = [axis for axis, each in layouts.items() if each is None]
        if not unknown:
            return layouts
        for other in self.aliases(tensor):
            if _same_entries(other, tensor):
                known = self.of(other)
                return {
                    **layouts,
                    **{a: _viewed(known[a], other, tensor) for a in unknown},
                }
        return layouts

    def _note_parts(self, whole: Tensor, args: Sequence[Any]) -> None:
        """Note the parts that a concatenation consists of, for those who split it again."""
        tensors = args[0]
        dim = (args[1] if len(args) > 1 else 0) % max(whole.dim(), 1)
        at, parts = 0, []
        with self.quietly():
            for each in tensors:
                size = each.shape[dim]
                part = whole.narrow(dim, at, size)
                parts.append(part)
                at += size
        for part, each in zip(parts, tensors, strict=True):
            self.note(part, dict(self.of(each)))
        whole.parts_of_audit = parts  # type: ignore[attr-defined]  # so that they live as long

    def _flows(
        self, func: Any, target: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> list[Layouts]:
        """The results' layouts on every axis."""
        names = [n for n, _, _ in parameters(target)]
        named = {n: x for n, x in kwargs.items() if n in names}
        arguments = arguments_of(target, args, named)
        slots: list[Tensor | None] = []
        for name, _, takes in parameters(target):
            given = arguments[name]
            if takes:
                slots += given if isinstance(given, list | tuple) else [given]
        slots = [x if isinstance(x, Tensor) else None for x in slots]
        made = list(result) if isinstance(result, list | tuple) else [result]
        made = [x for x in tree_leaves(made)] if made and isinstance(made[0], list) else made
        call = Call(
            target=target, arguments=arguments, slots=tuple(slots),  # type: ignore[arg-type]
            shapes=tuple(None if x is None else tuple(x.shape) for x in slots),
            dtypes=tuple(None if x is None else x.dtype for x in slots),
            results=tuple(tuple(x.shape) if isinstance(x, Tensor) else None for x in made),
            result_dtypes=tuple(x.dtype if isinstance(x, Tensor) else None for x in made),
        )  # fmt: skip
        op = Op(target, call)
        found: list[Layouts] = [{} for _ in made]
        for axis in self.axes:
            ins = [None if x is None else self.of(x)[axis] for x in slots]
            try:
                outs = self._on(axis, op, ins)
            except Unsound as error:
                raise Unsound(f"on {axis} {error}") from None
            except (AssertionError, IndexError, KeyError, TypeError, ValueError, AttributeError):
                outs = [None] * len(made)  # a rule that asks what a text does not say
            for layouts, each in zip(found, outs, strict=True):
                layouts[axis] = each
        return [each for each, x in zip(found, made, strict=True) if isinstance(x, Tensor)]

    def _on(self, axis: str, op: Op, ins: Sequence[Known]) -> list[Known]:
        num = len(op.call.results)
        if self.number >= self.varying.known.get(axis, 0):
            return [None] * num
        if axis in self.varying.scaled.get(self.number, ()):
            return self._by_rank(op, ins)
        if not any(x is not None for x in op.call.slots):
            return [_made(op.name)] * num
        return op.flow(ins)

    def _by_rank(self, op: Op, ins: Sequence[Known]) -> list[Known]:
        """A call with a number that differs from rank to rank."""
        num, name = len(op.call.results), op.name.split(".")[0]
        if name in ("sub", "ge", "lt") and ins[0] in (R, WINDOW):
            return [WINDOW] * num
        if name == "select" and ins[0] == R and op.call.rank() > op.call.dim() + 1:
            return [cut(op.call.dim())] * num
        if name in ("slice", "narrow") and ins[0] == R:
            return [cut(op.call.dim())] * num
        return [None] * num

    def _broadcast(self, source: Any, into: Tensor) -> Layouts:
        if not isinstance(source, Tensor):
            return dict.fromkeys(self.axes, SAME)
        missing = into.dim() - source.dim()
        return {
            axis: cut(each.dim + missing, each.outer) if each and each.kind == "cut" else each
            for axis, each in self.of(source).items()
        }

    def _write(self, tensors: Sequence[Tensor], layouts: Sequence[Layouts]) -> None:
        """Note what was written into tensors, and what that means for those that share memory."""
        for tensor, new in zip(tensors, layouts, strict=False):
            old = self.of(tensor)
            self.note(tensor, new)
            for other in self.aliases(tensor):
                known = self.of(other)
                changed = {a: self._seen_by(other, tensor, known[a], old[a], new[a]) for a in new}
                self.note(other, changed)

    def _seen_by(self, other: Tensor, tensor: Tensor, known: Known, old: Known, new: Known) -> Known:
        """The layout of another view after ``tensor``, which was ``old``, has become ``new``."""
        if _same_entries(other, tensor):
            return _viewed(new, tensor, other)
        if not _meet(other, tensor) or old == new:
            return known
        if other.numel() < tensor.numel() and (new is None or new.kind != "cut"):
            return new
        return new if known == new else None

    # transfers -----------------------------------------------------------------------------------
    def all_reduce(self, tensor: Tensor, op: Any, axis: str) -> None:
        """A sum over an axis is finished, in every tensor that lies in this memory."""
        largest = op == c10d.ReduceOp.MAX
        before = M if largest else U
        views = [tensor, *(x for x in self.aliases(tensor) if _meet(x, tensor))]
        for view in views:
            layouts = self.of(view)
            each = layouts[axis]
            if each is not None and each not in (before, ZERO) and each.kind in ("R", "cut", "U", "M"):
                raise self.wrong("all_reduce", f"on {axis} its operand is {in_words(each)}, not {in_words(before)}")
            self.note(view, {**layouts, axis: R if each == before else each if each == ZERO else None})

    def gather(self, output: Tensor, input: Tensor, axis: str) -> None:
        """Pieces are joined: the pieces of all ranks lie one after the other."""
        num = self.axes[axis]
        self._check_piece("all_gather", input, axis)
        self.forget(output)
        rows = output.shape[1:] == input.shape[1:]
        if rows:
            self._write([output], [self._gathered(self.of(input), axis)])
        with self.quietly():
            table = output.view(num, input.numel()) if input.is_contiguous() else None
            parts = []
            for part in getattr(input, "parts_of_audit", [input]):
                if table is not None and part.dim() == 1:
                    at = part.storage_offset() - input.storage_offset()
                    parts.append((table.narrow(1, at, part.numel()), part))
        for seen, part in parts:
            self._check_piece("all_gather", part, axis)
            self._write([seen], [self._stacked(self.of(part), axis)])
        output.parts_of_audit = [seen for seen, _ in parts]  # type: ignore[attr-defined]

    def _check_piece(self, what: str, tensor: Tensor, axis: str) -> None:
        each = self.of(tensor)[axis]
        if each in (U, M, R):
            raise self.wrong(what, f"on {axis} its operand is {in_words(each)}, no piece")

    def _gathered(self, layouts: Layouts, axis: str) -> Layouts:
        """The layouts of pieces that lie one after the other on dim 0."""
        each = layouts[axis]
        if each == cut(0):
            return {**layouts, axis: R}
        if each is not None and each.kind == "cut":
            return {**layouts, axis: special(ROWS, each)}
        return {**layouts, axis: None}

    def _stacked(self, layouts: Layouts, axis: str) -> Layouts:
        """The layouts of a table with a row of flat entries from each rank."""
        moved = {
            a: cut(each.dim + 1, each.outer) if each and each.kind == "cut" else each
            for a, each in layouts.items()
        }
        each = layouts[axis]
        # a row for each rank: the axis is a dim of memory, in front of what it cuts
        return {**moved, axis: special(STACK, each) if each and each.kind == "cut" else None}

    def scatter(self, output: Tensor, input: Tensor, axis: str) -> None:
        """A sum is finished, and each rank keeps its piece."""
        each = self.of(input)[axis]
        num = self.axes[axis]
        self._check_sum("reduce_scatter", input, axis)
        self.forget(output)
        if input.shape[1:] == output.shape[1:] and each is not None:
            after = cut(0) if each == U else cut(each.dim, each.outer)
            known = after if each.kind in ("U", PIECES) else None
            self._write([output], [{**self.of(input), axis: known}])
        if input.dim() == 2 and input.shape[0] == num and output.dim() == 1:
            parts = []
            with self.quietly():
                for part in getattr(input, "parts_of_audit", [input]):
                    at = part.storage_offset() - input.storage_offset()
                    parts.append((output.narrow(0, at, part.shape[1]), part))
            for seen, part in parts:
                self._check_sum("reduce_scatter", part, axis)
                self._write([seen], [self._scattered(self.of(part), axis)])
            output.parts_of_audit = [seen for seen, _ in parts]  # type: ignore[attr-defined]

    def _check_sum(self, what: str, tensor: Tensor, axis: str) -> None:
        each = self.of(tensor)[axis]
        if each is not None and each.kind in ("R", "cut", "M"):
            raise self.wrong(what, f"on {axis} its operand is {in_words(each)}, not {in_words(U)}")

    def _scattered(self, layouts: Layouts, axis: str) -> Layouts:
        """The layouts of this rank's row of a table."""
        found: Layouts = {}
        for a, each in layouts.items():
            if a == axis:
                found[a] = cut(0) if each == U else None
            elif each is not None and each.kind == "cut":
                found[a] = cut(0, each.outer) if each.dim == 1 else None
            else:
                found[a] = each
        return found

    def forget(self, *tensors: Tensor) -> None:
        """Nothing is known of what arrives in these tensors."""
        for tensor in tensors:
            for each in (tensor, *self.aliases(tensor)):
                self.note(each, dict.fromkeys(self.axes))


FILLS: dict[str, Known] = {"zero_": ZERO, "fill_": SAME}


def _made(name: str) -> Known:
    """The layout of a tensor that is made from no other."""
    word = name.split(".")[0]
    if word in ("zeros", "empty", "empty_strided"):
        return ZERO
    return SAME if word in ("ones", "full", "scalar_tensor") else R


def functional(func: Any) -> Any:
    """The op that computes what an in-place op or one with ``out`` writes; None if there is none."""
    name = func._schema.name.removeprefix("aten::")
    if func.namespace != "aten":
        return func
    packet = func.overloadpacket
    if name.endswith("_") and not name.endswith("__"):
        packet = getattr(torch.ops.aten, name[:-1], None)
        return getattr(packet, func._overloadname, None) if packet is not None else None
    outs = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
    if not outs:
        return func
    wanted = [a.name for a in func._schema.arguments if a.name not in outs]
    for overload in packet.overloads():
        other = getattr(packet, overload)
        if [a.name for a in other._schema.arguments] == wanted:
            return other
    return None


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call writes."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(given) if isinstance(x, Tensor)]
    return found


def _split_dim(args: Sequence[Any], base: Tensor | None) -> int:
    rank = base.dim() if base is not None else 1
    dim = args[2] if len(args) > 2 else 0
    return int(dim) % max(rank, 1)


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _span(tensor: Tensor) -> tuple[int, int]:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    start = int(tensor.storage_offset())
    return start, start + sum((n - 1) * s for n, s in sizes) + 1


def _meet(one: Tensor, other: Tensor) -> bool:
    (a, b), (c, d) = _span(one), _span(other)
    return a < d and c < b


def _same_entries(one: Tensor, other: Tensor) -> bool:
    """Whether two views have the same entries in the same order."""
    if one.storage_offset() != other.storage_offset() or one.numel() != other.numel():
        return False
    if one.shape == other.shape:
        return one.stride() == other.stride()
    return one.is_contiguous() and other.is_contiguous()


def _viewed(layout: Known, one: Tensor, other: Tensor) -> Known:
    return reshaped(layout, tuple(one.shape), tuple(other.shape))


def in_words(layout: Known) -> str:
    """A layout in words, for messages."""
    if layout is None:
        return "unknown"
    words = {"R": "whole on every rank", "U": "an unfinished sum", "M": "an unfinished maximum"}
    return words.get(layout.kind, f"cut at dim {layout.dim}")
