"""Python numbers that a step was traced with, and whether they are others now.

A program holds them as literals. In the process that compiled, a run looks now and then whether the
script has changed one, as by ``model.temperature = 0.5``. Looked at like numbers are arrays, sets,
tensors from outside of the step, the lengths of lists, which function an attribute or a variable
is, and which modules and hooks a model has.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import CellType
from typing import Any, NamedTuple

from torch import Tensor, nn

from partc.trace.contents import memory_of
from partc.trace.frozen_tensors import HeldTensor
from partc.trace.owners import ABSENT, getattr_dict, look
from partc.trace.places import STATELESS, Reach, told
from partc.trace.reachable import Place, Reads, class_keys, is_ours
from partc.trace.states import FIXED, FUNCTIONS, Unknown, shown, state_of
from partc.trace.untouched import hooks_of

NAMED = 3  # numbers of one variable that a note names one by one
AT_ONCE = 100  # numbers that one step looks at, which takes some 50 us
SAME = "the same object"
_NO_TIES = "as compiled"
BYTES = 1 << 12  # of an array that take as long as a number


class Number(NamedTuple):
    """A number as it was, and where it is: the ``keys`` that lead from an object to it.

    ``owner()`` is that object, None once it is gone. ``inside`` is the name of the attribute or
    variable with a list or dict that the number is in, if it is in one. With the ``state`` SAME
    ``value()`` is the object that has to be there.
    """

    name: str
    owner: Callable[[], Any]
    keys: tuple[Any, ...]
    value: Any
    state: Hashable
    text: str
    inside: str
    cost: int  # how many numbers could be looked at instead

    def now(self) -> Any:
        """What is there now: ABSENT if nothing, the number itself if all of it is gone."""
        owner = self.owner()
        return self.value if owner is None else self.inside_of(owner)

    def inside_of(self, owner: Any) -> Any:
        """What is there now in an object that is like the owner."""
        for key in self.keys:
            owner = look(owner, key)
        return owner

    def differs(self, now: Any) -> bool:
        """Whether what is there now is something else."""
        if self.state is SAME:
            return now is not self.value()
        if isinstance(self.state, HeldTensor):
            return self.state.differs(now)
        try:
            return now is ABSENT or state_of(now) != self.state
        except Unknown:
            return True


# What to do where a number has to change between steps; functions such as dropout take no tensor.
CHANGING = (
    "Leave it as it was; or make it an input of the step, or a buffer (dropout by a tensor p is "
    "x * (torch.rand_like(x) >= p) / (1 - p)). Compile again for another: a new model, which takes "
    "the weights by partc.load_checkpoint."
)


@dataclass(eq=False)
class FrozenNumbers:
    """The numbers of a traced step; a copy in another process has none."""

    numbers: tuple[Number, ...] = ()
    trains: Callable[[], bool | None] = field(default=lambda: None)  # the model's mode now
    training: bool | None = None  # and when it was traced
    unseen: tuple[str, ...] = ()  # objects that tell nothing of their state
    first: int = 0  # so many stand ahead, those of the script, at which every look looks
    begun: int = 0  # where the next look at the others begins

    @classmethod
    def of(
        cls, model: nn.Module, reach: Reach, reads: Reads, own: Collection[str],
        outside: Collection[int] = (),
    ) -> FrozenNumbers:  # fmt: skip
        """The numbers that a step reads, of those that it can reach, as they are now.

        ``reads``: class and name of the attributes that the step has read. ``own``: the names of
        those that the step itself sets, as it may do again elsewhere. ``outside``: the memory of
        tensors that it reads and that are constants of the program.
        """
        taken = [p for p in reach.places if _is_read(p, reads, reach) and told(p) not in own]
        root = weakref.ref(model)
        found = [number for place in taken if (number := _number(place)) is not None]
        unseen = (*(_described(place) for place in taken if _is_unseen(place)), *reach.unseen)
        found += _tensors(taken, outside)
        script = [each for each in found if not isinstance(each.owner(), nn.Module)]
        rest = [each for each in found if isinstance(each.owner(), nn.Module)]
        rest += (*_submodules(model), *_hook_sets(model), _ties(model))
        first = len(script) if sum(each.cost for each in script) <= AT_ONCE else 0
        numbers, mode = (*script, *rest), lambda: _mode(root())
        return cls(numbers, mode, model.training, unseen, first, first)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without numbers: no other process has the objects whose numbers these are."""
        return FrozenNumbers, ()

    def notes(self) -> Iterator[str]:
        """Sentences on numbers in lists and dicts that the step reads, and on what none can see."""
        groups: dict[str, list[str]] = {}
        for number in self.numbers:
            if number.inside and type(number.value) in (int, float, complex):
                groups.setdefault(number.inside, []).append(f"{number.name}, {number.value!r}")
        for root, texts in groups.items():
            for text in texts if len(texts) <= NAMED else [f"{len(texts)} numbers in {root}"]:
                yield f"frozen at trace time: {text}"
        for text in dict.fromkeys(self.unseen):
            yield f"frozen at trace time, and no step sees whether it changes: {text}"

    def changes(self) -> list[str]:
        """What has changed, as ``model.temperature was 1.0 when compiled and is 0.5 now``.

        A call looks at the numbers of the script, and at some of the model's after the other, all
        of them in turn.
        """
        begun, cost = self.begun, 0
        while self.begun < len(self.numbers) and cost < AT_ONCE:
            cost += self.numbers[self.begun].cost
            self.begun += 1
        end = self.begun
        self.begun = end if end < len(self.numbers) else self.first
        return [*self._changes(0, self.first), *self._changes(begun, end)]

    def all_changes(self) -> list[str]:
        """The same of all numbers."""
        return list(self._changes(0, len(self.numbers)))

    def _changes(self, first: int, end: int) -> Iterator[str]:
        for number in self.numbers[first:end]:
            now = number.now()
            if now is not number.value and number.differs(now) and self._matters(number.keys[-1]):
                yield _told(number, now)

    def _matters(self, key: Any) -> bool:
        """False for modes of submodules where the whole model has gone to another mode."""
        return key != "training" or self.trains() == self.training


def _told(number: Number, now: Any) -> str:
    text = "absent" if now is ABSENT else shown(now)
    if number.text and text and number.text != text:
        return f"{number.name} was {number.text} when compiled and is {text} now"
    return f"{number.name} is not what it was when compiled"


def _size(state: Hashable) -> int:
    """The bytes that are compared for the state of an array."""
    parts = state if isinstance(state, tuple) else ()
    return sum(len(each) for each in parts if isinstance(each, bytes))


_VARIABLES = (dict, list, tuple, deque, CellType, partial, nn.Module)


def _is_read(place: Place, reads: Reads, reach: Reach) -> bool:
    owner, kind = place.owner, type(place.owner)
    if isinstance(owner, _VARIABLES) or isinstance(place.key, tuple):
        return True
    if (kind, place.key) in reads or (kind, "__dict__") in reads:
        return True
    return kind not in reach.watched and place.key in reach.attributes


def _number(place: Place) -> Number | None:
    """The number of a place; None where it is neither a number nor looked at like one."""
    value: Any = place.value
    state: Hashable = None
    try:
        if isinstance(value, FUNCTIONS) or place.again:
            value, state = _reference(value), SAME
        elif isinstance(value, STATELESS):
            return None
        else:
            state = state_of(value)
    except (Unknown, TypeError):
        return None
    inside = place.root.name if isinstance(place.owner, list | dict) and place.outer else ""
    owner, keys = _way(place)
    text = shown(value) if state is not SAME else ""
    kept = value if state is SAME or isinstance(value, FIXED) else ABSENT
    name, cost = place.name if state is SAME else told(place), 1 + _size(state) // BYTES
    return Number(name, owner, keys, kept, state, text, inside, cost)


def _way(place: Place) -> tuple[Callable[[], Any], tuple[Any, ...]]:
    """The object from which a value is found again, and the keys that lead from there to it."""
    first, keys = place, [place.key]
    while first.outer and not isinstance(first.owner, nn.Module):
        first = first.outer
        keys.insert(0, first.key)
    return _reference(first.owner), tuple(keys)


def _tensors(places: list[Place], outside: Collection[int]) -> Iterator[Number]:
    """The tensors over this memory, looked at like numbers."""
    for place in places:
        if isinstance(place.value, Tensor) and memory_of(place.value) in outside:
            state = HeldTensor(place.value)
            yield Number(place.name, *_way(place), ABSENT, state, "", "", 1)


def _submodules(model: nn.Module) -> Iterator[Number]:
    """Which module each submodule is, looked at like numbers."""
    for path, module in model.named_modules():
        for key, child in module._modules.items():
            if child is not None:
                name = f"model.{path}.{key}" if path else f"model.{key}"
                owner, value = weakref.ref(module), weakref.ref(child)
                yield Number(name, owner, ("_modules", key), value, SAME, "", "", 1)


def _hook_sets(model: nn.Module) -> Iterator[Number]:
    """Which hooks each module and its parameters have, looked at like a set of numbers."""
    for path, module in model.named_modules():
        owner = partial(_hook_set, weakref.ref(module))
        name = f"the set of hooks of {f'model.{path}' if path else 'model'}"
        yield Number(name, owner, (0,), ABSENT, state_of(_hook_set(owner.args[0])[0]), "", "", 1)


def _ties(model: nn.Module) -> Number:
    """Which parameters have become one since, looked at like a text."""
    owner = partial(_new_ties, weakref.ref(model), frozenset(tied_pairs(model)))
    cost = sum(1 for _ in model.parameters())
    name = "the set of tied parameters of model"
    return Number(name, owner, (0,), ABSENT, state_of(_NO_TIES), repr(_NO_TIES), "", cost)


def _new_ties(model: Callable[[], nn.Module | None], before: frozenset[str]) -> Any:
    """A list of the ties that a model had not; None once it is gone."""
    there = model()
    if there is None:
        return None
    new = [each for each in tied_pairs(there) if each not in before]
    return [", ".join(new) or _NO_TIES]


def tied_pairs(model: nn.Module) -> Iterator[str]:
    """The parameters that a model has under several names, as ``head.weight = embed.weight``."""
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(param), name)
        if known != name:
            yield f"{name} = {known}"


def _hook_set(module: Callable[[], nn.Module | None]) -> Any:
    """A list of the set of a module's hooks; None once the module is gone."""
    there = module()
    if there is None:
        return None
    own = there._parameters.items()
    hooks = hooks_of(there) | {
        (f"{name} gradient", i): hook
        for name, param in own
        for i, hook in (getattr(param, "_backward_hooks", None) or {}).items()
    }
    kept = (key for key, hook in hooks.items() if not is_ours(hook))
    return [frozenset(f"{table} {number}" for table, number in kept)]


def _is_unseen(place: Place) -> bool:
    """Whether a value is an object of a C library that tells nothing of its state."""
    value = place.value
    if isinstance(value, STATELESS) or getattr_dict(value) or class_keys(type(value)):
        return False
    try:
        state_of(value)
    except Unknown:
        return not type(value).__module__.startswith(("torch", "_thread", "_weakref"))
    return False


def _described(place: Place) -> str:
    return f"{place.name}, a {type(place.value).__module__}.{type(place.value).__name__}"


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # cells of closures, the variables of a module, lists
        return lambda: value


def _mode(model: nn.Module | None) -> bool | None:
    return None if model is None else model.training
