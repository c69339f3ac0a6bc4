"""Refuse to leave fake tensors behind: a cache that still holds one would break the model."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakSet

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from partc.collecting import made_inside
from partc.errors import TraceError
from partc.frames import none_held
from partc.graph.fake_calls import RememberingMode, tensors_in
from partc.trace.owners import getattr_dict
from partc.trace.tensor_caches import of_type

_PASSING = WeakSet[FakeTensorMode]()
_RECORDED = "val", "eager_input_vals"  # a node's result, and what a custom op was given
_DEEP = 4  # lists and dicts around a tensor, up to the object or variable that has them


def passing_mode() -> FakeTensorMode:
    """A mode for a run of which nothing is kept, neither by partc."""
    mode = RememberingMode(allow_non_fake_inputs=True)
    _PASSING.add(mode)
    return mode


@none_held()
def check_none_kept(graph: fx.Graph | None = None) -> None:
    """TraceError if anything but the recorded ``graph`` holds a fake of a past run."""
    nodes = graph.nodes if graph else ()
    meta = ([node.meta.get(key) for key in _RECORDED] for node in nodes)
    own = {id(each): each for held in meta for each in tensors_in(held)}
    mode = next((each.fake_mode for each in own.values() if isinstance(each, FakeTensor)), None)
    if mode is None and not _PASSING:
        return
    left = _left(mode, own)
    if left:
        del left
        gc.collect(*_young())  # what only refers to itself
        left = _left(mode, own)
    _PASSING.clear()  # they are told once
    if left and (holders := sorted(_holders(left), key=lambda each: each[:2])):
        _, name, fake = holders[0]
        raise _refusal(fake, name)


def _young() -> tuple[int, ...]:
    """The generation of what was made since the collector was switched off, as compiles do: it is
    a small part of all objects. None where it is on, and may have moved things on.
    """
    return () if gc.isenabled() else (0,)


def _left(mode: FakeTensorMode | None, own: Mapping[int, Tensor]) -> list[Tensor]:
    fakes = [each for each in of_type(FakeTensor, made_inside()) if id(each) not in own]
    return [each for each in fakes if each.fake_mode is mode or each.fake_mode in _PASSING]


def _holders(fakes: Sequence[Tensor]) -> Iterator[tuple[int, str, Tensor]]:
    """The names of what holds one of some fakes, ``ropes.CACHE`` or ``an attribute of a Rope``.

    Before each stands how little it says. Frames, as those of a kept error, are none. All are
    looked for at once: to ask who refers to something takes a look at every object there is.
    """
    level = {id(fake): (fake, fake) for fake in fakes}  # what is looked for, and the fake in it
    for _ in range(_DEEP + 1):
        around = {id(each): each for each in _referrers([held for held, _ in level.values()])}
        owners = _owners([each for each in around.values() if type(each) is dict])
        containers: dict[int, tuple[Any, Tensor]] = {}
        for key, each in around.items():
            found = (level[id(x)] for x in gc.get_referents(each) if id(x) in level)
            held, fake = next(found, (None, fakes[0]))
            owner = owners.get(key)
            if isinstance(owner, ModuleType):
                name = next(k for k, v in vars(owner).items() if v is held)
                yield 0, f"{owner.__name__}.{name}", fake
            elif owner is not None or any(v is held for v in getattr_dict(each).values()):
                of = type(each if owner is None else owner).__qualname__
                yield 1, f"an attribute of a {of}", fake
            elif isinstance(each, dict | list | tuple):
                containers[key] = each, fake
        level = containers


def _referrers(objects: list[Any]) -> list[Any]:
    """What refers to one of some objects, but for frames and what is here alone."""
    if not objects:
        return []
    found = gc.get_referrers(*objects)
    return [each for each in found if each is not objects and not isinstance(each, FrameType)]


def _owners(tables: list[dict[Any, Any]]) -> dict[int, Any]:
    """By the id of a table the object whose attributes it has, for those that are such tables."""
    known = {id(table) for table in tables}
    around = _referrers(tables)
    return {key: each for each in around if (key := id(getattr_dict(each))) in known}


def _refusal(fake: Tensor, holder: str) -> TraceError:
    return TraceError(
        where=holder,
        what=f"the step keeps a tensor of shape {tuple(fake.shape)} there",
        why="while tracing, tensors have no values, and the model would find this one later",
        do="Clear it, and run the model once before you compile, so that a real tensor is there; "
        "or keep it as an attribute or buffer of the model.",
    )
