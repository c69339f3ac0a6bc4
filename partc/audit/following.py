"""Follow the spread of every tensor through a rank's text, call by call."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partc.audit.aten_calls import (
    FILLS,
    functional,
    made_by,
    meet,
    same_entries,
    share_memory,
    split_dim,
    viewed,
    written_by,
)
from partc.audit.flow import Op, Unsound
from partc.audit.flow_ops import flow
from partc.audit.spread import SAME, WINDOW, Known, R, cut
from partc.audit.variation import Varying, flattened, is_silent, run_fake
from partc.errors import CheckError
from partc.rules.call import Call, arguments_of, parameters

Spreads = dict[str, Known]  # by mesh axis


class Following(TorchDispatchMode):
    """Follows spreads while it is open; ``axes`` are those of the mesh without ``pp``."""

    def __init__(self, axes: Mapping[str, int], varying: Varying, place: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes, self.varying, self.place = axes, varying, place
        self.number, self.quiet = -1, False
        self.sharing: dict[int, list[weakref.ref[Tensor]]] = {}

    # what is known of a tensor -------------------------------------------------------------------
    def of(self, tensor: Tensor) -> Spreads:
        known: Spreads | None = getattr(tensor, "spreads_of_audit", None)
        return known if known is not None else dict.fromkeys(self.axes)

    def note(self, tensor: Tensor, spreads: Spreads) -> None:
        """Note spreads of a tensor, which may share memory with others."""
        if not hasattr(tensor, "spreads_of_audit"):
            aliases = self.sharing.setdefault(tensor.untyped_storage()._cdata, [])
            aliases[:] = [each for each in aliases if each() is not None]
            aliases.append(weakref.ref(tensor))
        tensor.spreads_of_audit = spreads  # type: ignore[attr-defined]

    def aliases(self, tensor: Tensor) -> list[Tensor]:
        """The other tensors whose spreads were noted and that share memory with this one."""
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
        result = run_fake(func, args, kwargs)
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
                spreads = self.of(tensor)
                dim = getattr(tensor, "split_of_audit", None)
                piece = None if dim is None else cut(dim)
                known = piece if spreads[axis] in (R, piece) else None
                self.note(tensor, {**spreads, axis: known})

    def _follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        written = written_by(func, args, kwargs)
        if name in FILLS:
            self.write(written, [dict.fromkeys(self.axes, FILLS[name])])
            return
        if name == "copy_":
            self.write(written, [self._broadcast(args[1], args[0])])
            return
        target = functional(func)
        if target is None:
            self.write(written or results, [dict.fromkeys(self.axes) for _ in written or results])
            return
        if written and func._schema.name.endswith("_"):
            results = written[:1]
        found = self._flows(func, target, args, kwargs, result if not written else results)
        if written:
            self.write(written, found)
            return
        self._make(func, name, args, results, found)

    def _make(
        self, func: Any, name: str, args: Sequence[Any], results: Sequence[Tensor],
        found: Sequence[Spreads],
    ) -> None:  # fmt: skip
        """Note new tensors; a view of memory that was written in parts lies as its part."""
        base = next((x for x in args if isinstance(x, Tensor)), None)
        for tensor, spreads in zip(results, found, strict=False):
            if base is not None and tensor is not base and share_memory(tensor, base):
                spreads = self._of_part(tensor, spreads)
            self.note(tensor, spreads)
            if name.startswith(("split", "chunk", "unbind")):
                tensor.split_of_audit = split_dim(args, base)  # type: ignore[attr-defined]
        if name == "cat" and results:
            self._note_parts(results[0], args)

    def _of_part(self, tensor: Tensor, spreads: Spreads) -> Spreads:
        """The spreads of a view, where its base's are unknown and another view of the same entries
        is known.
        """
        unknown = [axis for axis, each in spreads.items() if each is None]
        if not unknown:
            return spreads
        for other in self.aliases(tensor):
            if same_entries(other, tensor):
                known = self.of(other)
                return {
                    **spreads,
                    **{a: viewed(known[a], other, tensor) for a in unknown},
                }
        return spreads

    def _note_parts(self, whole: Tensor, args: Sequence[Any]) -> None:
        """Note the parts that a concatenation consists of, for those who split it again."""
        # torch takes lists of no entries beside tensors of any dims
        tensors = [each for each in args[0] if each.dim() == whole.dim()]
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
    ) -> list[Spreads]:
        """The results' spreads on every axis."""
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
        made = tree_leaves(made) if made and isinstance(made[0], list) else made
        call = Call(
            target=target, arguments=arguments, slots=tuple(slots),  # type: ignore[arg-type]
            shapes=tuple(None if x is None else tuple(x.shape) for x in slots),
            dtypes=tuple(None if x is None else x.dtype for x in slots),
            results=tuple(tuple(x.shape) if isinstance(x, Tensor) else None for x in made),
            result_dtypes=tuple(x.dtype if isinstance(x, Tensor) else None for x in made),
        )  # fmt: skip
        op = Op(target, call)
        found: list[Spreads] = [{} for _ in made]
        for axis in self.axes:
            ins = [None if x is None else self.of(x)[axis] for x in slots]
            try:
                outs = self._on(axis, op, ins)
            except Unsound as error:
                raise Unsound(f"on {axis} {error}") from None
            except (AssertionError, IndexError, KeyError, TypeError, ValueError, AttributeError):
                outs = [None] * len(made)  # a rule that asks what a text does not say
            for spreads, each in zip(found, outs, strict=True):
                spreads[axis] = each
        return [each for each, x in zip(found, made, strict=True) if isinstance(x, Tensor)]

    def _on(self, axis: str, op: Op, ins: Sequence[Known]) -> list[Known]:
        num = len(op.call.results)
        if self.number >= self.varying.known.get(axis, 0):
            return [None] * num
        if axis in self.varying.scaled.get(self.number, ()):
            return self._by_rank(op, ins)
        if not any(x is not None for x in op.call.slots):
            return [made_by(op.name)] * num
        return flow(op, ins)

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

    def _broadcast(self, source: Any, into: Tensor) -> Spreads:
        if not isinstance(source, Tensor):
            return dict.fromkeys(self.axes, SAME)
        missing = into.dim() - source.dim()
        return {
            axis: cut(each.dim + missing, each.outer) if each and each.kind == "cut" else each
            for axis, each in self.of(source).items()
        }

    def write(self, tensors: Sequence[Tensor], spreads: Sequence[Spreads]) -> None:
        """Note what was written into tensors, and what that means for those that share memory."""
        for tensor, new in zip(tensors, spreads, strict=False):
            old = self.of(tensor)
            self.note(tensor, new)
            for other in self.aliases(tensor):
                known = self.of(other)
                changed = {a: self._seen_by(other, tensor, known[a], old[a], new[a]) for a in new}
                self.note(other, changed)

    def _seen_by(
        self, other: Tensor, tensor: Tensor, known: Known, old: Known, new: Known
    ) -> Known:
        """The spread of another view after ``tensor``, which was ``old``, has become ``new``."""
        if same_entries(other, tensor):
            return viewed(new, tensor, other)
        if not meet(other, tensor) or old == new:
            return known
        if other.numel() < tensor.numel() and (new is None or new.kind != "cut"):
            return new
        return new if known == new else None

    def forget(self, *tensors: Tensor) -> None:
        """Nothing is known of what arrives in these tensors."""
        for tensor in tensors:
            for each in (tensor, *self.aliases(tensor)):
                self.note(each, dict.fromkeys(self.axes))
