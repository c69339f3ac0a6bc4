"""Check that no call touches memory that a transfer under way reads or writes (races).

A started transfer runs beside the calls that follow: on a GPU on a stream of its own, on a CPU in
gloo's threads. c10d orders the two at two points only. The transfer begins after all calls before
the start, and calls after the wait begin after the transfer. A program is free of races if, between
start and wait, no call reads a tensor that arrives, and no call writes a tensor that arrives or is
sent. That is checked here call by call, for views of the same memory too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from partc.errors import CheckError
from partc.graph.fake_calls import tensors_in
from partc.graph.writes import write_places


class Span(NamedTuple):
    """The range of bytes in a storage from a tensor's first to its last element."""

    storage: int
    start: int
    end: int

    @classmethod
    def of(cls, tensor: Tensor) -> Span:
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else -1
        start = int(tensor.storage_offset())
        item_bytes = tensor.element_size()
        key = tensor.untyped_storage()._cdata
        return cls(key, start * item_bytes, (start + last + 1) * item_bytes)

    def meets(self, other: Span) -> bool:
        return self.storage == other.storage and self.start < other.end and other.start < self.end


@dataclass(frozen=True, eq=False)
class Transfer:
    """A transfer under way: its kind, the line of its start, and the memory it reads and writes."""

    name: str
    place: str
    sent: tuple[Span, ...]
    arriving: tuple[Span, ...]

    @property
    def storages(self) -> tuple[int, ...]:
        """The addresses of the transfer's storages, each once."""
        return tuple(dict.fromkeys(span.storage for span in (*self.sent, *self.arriving)))


class Streams:
    """The transfers of a running program that nobody has waited for yet."""

    def __init__(self) -> None:
        self.under_way: dict[int, Transfer] = {}
        self.using: dict[int, list[Transfer]] = {}  # by the address of a storage
        self.started = 0

    def start(
        self, name: str, place: str, sent: Sequence[Tensor], arriving: Sequence[Tensor]
    ) -> int:
        """Note the start of a transfer from ``sent`` to ``arriving``; return its number."""
        self._check(name, lambda: place, sent, arriving)
        self.started += 1
        spans = [tuple(map(Span.of, tensors)) for tensors in (sent, arriving)]
        transfer = self.under_way[self.started] = Transfer(name, place, *spans)
        for storage in transfer.storages:
            self.using.setdefault(storage, []).append(transfer)
        return self.started

    def wait(self, number: int) -> None:
        """Note a wait: calls from here on begin after the transfer."""
        transfer = self.under_way.pop(number, None)
        if transfer is not None:
            for storage in transfer.storages:
                self.using[storage].remove(transfer)

    def call(self, func: Any, args: Sequence[Any], kwargs: Any, place: Callable[[], str]) -> None:
        """CheckError if a call touches memory of a transfer under way."""
        reads, writes = touched(func)
        if reads:
            written = [x for w in writes for x in tensors_in(_argument(args, kwargs, *w))]
            self._check(str(func), place, [*tensors_in([*args, *kwargs.values()])], written)

    def end(self) -> None:
        """CheckError if a step ends before all its transfers were waited for."""
        for transfer in self.under_way.values():
            raise CheckError(
                where=transfer.place,
                what=f"nobody waits for {transfer.name}",
                why="what it brings may arrive after it is read, or its memory be gone",
                do="Wait for it before the step ends.",
            )

    def _check(
        self, name: str, place: Callable[[], str], read: Sequence[Tensor], written: Sequence[Tensor]
    ) -> None:
        for verb, tensors in (("writes", written), ("reads", read)):
            for tensor in tensors:
                for transfer in self.using.get(tensor.untyped_storage()._cdata, ()):
                    span = Span.of(tensor)
                    spans = transfer.arriving + (transfer.sent if verb == "writes" else ())
                    if any(span.meets(other) for other in spans):
                        raise CheckError(
                            where=place(),
                            what=f"{name} {verb} memory of {transfer.name} under way",
                            why=f"it was started at {transfer.place} and not waited for",
                            do="Wait for the transfer first.",
                        )


@cache
def touched(func: Any) -> tuple[bool, tuple[tuple[int, str], ...]]:
    """Whether an op reads its operands' memory, and the arguments (position, name) that it writes.

    A view reads no memory, and neither does an op that needs only a shape (``zeros_like``).
    """
    schema = func._schema
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    library, _, name = schema.name.partition("::")
    looks = library == "prim" or name.startswith("new_")  # prim: asks for device, layout ...
    looks = looks or (name.endswith("_like") and not name.startswith("rand"))
    return not (views or looks), write_places(func)


def _argument(args: Sequence[Any], kwargs: Any, place: int, name: str) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)
