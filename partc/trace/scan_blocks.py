"""Find the equal blocks of a model before it is traced, by running its forward alone.

Recording a step op by op costs far more than running the step on fake tensors. So the forward runs
once, and the calls of all members of a list of modules are compared. In a span of equal members,
the first, and the last two, are recorded; the middle ones are left out: inside of ``skipping`` each
returns the result of the member before it. A second run without the middle members has to make the
same calls as the first run, but for theirs. Nothing is left out where hooks or an autograd Function
of the user's take part, as their backward does not follow from the forward. The pass
``dedupe_layers`` later compares the recorded blocks, backward included.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from partc.graph.fake_calls import call_on_fakes, quiet_log, storage_of
from partc.graph.folds import RepeatedBlocks, list_member
from partc.graph.writes import written_to
from partc.trace.capture import (
    Objective,
    named_results,
    names_of,
)
from partc.trace.contents import Contents
from partc.trace.cuda_autocast import cuda_autocast_on_cpu
from partc.trace.dense import as_fake
from partc.trace.distribution_checks import unchecked_distributions
from partc.trace.kept_fakes import passing_mode
from partc.trace.known_values import (
    SMALL_BYTES,
    KnownValues,
    UnknownValueError,
    computed,
    needs_values,
)
from partc.trace.odd_constants import odd_constants
from partc.trace.param_hooks import has_hooks
from partc.trace.places import Reach, restored
from partc.trace.portable_kernels import portable_kernels
from partc.trace.quiet_run import converted_to_themselves, quiet_generator
from partc.trace.unknown_masks import masks_read
from partc.trace.unseen_backward import NoHooks, Unequal, check_backward
from partc.trace.untouched import untouched
from partc.trace.watched_calls import WatchedCalls

Owner = tuple[str, int]  # a member of a list of modules: its path and index
OUTSIDE: Owner = ("", 0)
FEWEST = 5  # blocks of a span that skipping is worth it for


def spare_blocks(
    model: nn.Module, inputs: Sequence[Tensor], objective: Objective, train: bool
) -> tuple[RepeatedBlocks, ...]:
    """The members of lists that need not be recorded, as they equal the member before them.

    Empty where that is not certain.
    """
    if max(Counter(path for (path, _), _ in members(model)).values(), default=0) < FEWEST:
        return ()  # no list is so long that blocks of it are left out: the forward need not run
    if any(module._backward_hooks or module._backward_pre_hooks for module in model.modules()):
        return ()
    if has_hooks(names_of(model).params):
        return ()
    try:
        whole = _run(model, inputs, objective, train, ())
        folds = tuple(fold for path in whole.paths() for fold in _folds(whole, path))
        if folds:
            short = _run(model, inputs, objective, train, folds)
            if short.texts(folds, joined=True) != whole.texts(folds, joined=False):
                return ()
    except Exception:  # the recording meets the same failure, and says where it came from
        return ()
    return folds


@contextmanager
def skipping(model: nn.Module, folds: Sequence[RepeatedBlocks]) -> Iterator[None]:
    """Let every block of ``folds`` return the result of the last block before it that runs."""
    latest: dict[str, Any] = {}

    def keep(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            latest[path] = result

        return hook

    def again(path: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: latest[path]

    left_out = {(fold.path, i) for fold in folds for i in range(fold.first, fold.last + 1)}
    with ExitStack() as stack:
        stack.enter_context(untouched(model))
        for (path, index), module in members(model):
            if (path, index) in left_out:
                module.forward = again(path)
            elif any(path == fold.path for fold in folds):
                stack.callback(module.register_forward_hook(keep(path)).remove)
        yield


def no_calls(model: nn.Module, folds: Sequence[RepeatedBlocks]) -> str:
    """The path of a block in ``folds`` that has no forward, so that skipping it has no effect.

    Such a block is a container whose parts the model calls itself. "" if there is none.
    """
    walked = (
        f"{path}.{index}"
        for (path, index), module in members(model)
        if type(module).forward is nn.Module.forward
        and any(fold.covers(f"{path}.{index}") for fold in folds)
    )
    return next(walked, "")


def members(model: nn.Module) -> Iterator[tuple[Owner, nn.Module]]:
    """Every member of an outermost list of modules, as (list, index) and module."""
    for name, module in model.named_modules():
        path, index = list_member(name)
        if path and name == f"{path}.{index}":
            yield (path, index), module


# what a forward computes --------------------------------------------------------------------------
@dataclass
class _Forward:
    """What a run of the forward computes, by owner: a member of a list, or ``OUTSIDE``.

    ``calls``: an owner's calls, with operands as ``_At``. ``own``: the owner's parameters, buffers
    and inputs. ``given``: the owner's result. ``readers``: who reads a value of the owner.
    ``unsafe``: owners that write into memory of another.
    """

    calls: dict[Owner, list[Any]] = field(default_factory=lambda: defaultdict(list))
    own: dict[Owner, list[Any]] = field(default_factory=lambda: defaultdict(list))
    given: dict[Owner, Any] = field(default_factory=dict)
    readers: dict[Owner, set[Owner]] = field(default_factory=lambda: defaultdict(set))
    unsafe: set[Owner] = field(default_factory=set)

    def paths(self) -> list[str]:
        return list(dict.fromkeys(path for path, _ in self.given))

    def members(self, path: str) -> list[int]:
        return sorted(index for of, index in self.given if of == path)

    def text(self, owner: Owner, before: Owner) -> Any:
        """What a member computes, without its index: equal for equal members."""
        near = {owner: "own", before: "before"}

        def spelled(arg: Any) -> Any:
            if isinstance(arg, _At):
                return near.get(arg.owner, arg.owner), arg.which
            if isinstance(arg, tuple):
                return tuple(map(spelled, arg))
            return arg

        return tuple(
            spelled(tuple(x)) for x in (self.calls[owner], self.own[owner], self.given[owner])
        )

    def texts(self, without: Sequence[RepeatedBlocks], joined: bool) -> dict[Owner, Any]:
        """What each member outside of ``without`` computes.

        ``joined``: the run skipped the members of ``without``, so the member after them read the
        result of the member before them.
        """
        gone = {(fold.path, i) for fold in without for i in range(fold.first, fold.last + 1)}
        found: dict[Owner, Any] = {OUTSIDE: self.calls[OUTSIDE]}
        for path in self.paths():
            kept = [index for index in self.members(path) if (path, index) not in gone]
            for before, index in pairwise([-1, *kept]):
                near = (path, before if joined else index - 1)
                found[path, index] = self.text((path, index), near)
        return found


@dataclass(frozen=True)
class _At:
    """An operand, named by the owner that made it and its number or name there."""

    owner: Owner
    which: Any


def _folds(forward: _Forward, path: str) -> Iterator[RepeatedBlocks]:
    """The middle of every span of equal members of a list.

    Only where nothing but the next member reads the results of those in the middle.
    """
    texts = {i: forward.text((path, i), (path, i - 1)) for i in forward.members(path)}
    span: list[int] = []
    for index in [*texts, -2]:  # -2 follows no member, so it ends the last span
        if span and index == span[-1] + 1 and texts[index] == texts[span[-1]]:
            span.append(index)
            continue
        inner = span[1:-2]
        if len(span) >= FEWEST and all(_is_closed(forward, (path, i)) for i in inner):
            yield RepeatedBlocks(path, inner[0], inner[-1])
        span = [index]


def _is_closed(forward: _Forward, owner: Owner) -> bool:
    path, index = owner
    return owner not in forward.unsafe and forward.readers[owner] <= {owner, (path, index + 1)}


# running ------------------------------------------------------------------------------------------
def _run(
    model: nn.Module, inputs: Sequence[Tensor], objective: Objective, train: bool,
    folds: Sequence[RepeatedBlocks],
) -> _Forward:  # fmt: skip
    """Run the forward on fake tensors, with the blocks of ``folds`` skipped, and note its calls."""
    mode, names = passing_mode(), names_of(model).without(folds)
    watch, reach = _Watch(_Forward()), Reach.of(model, objective)
    own = {n: as_fake(t, mode) for n, t in (*names.params.items(), *names.buffers.items())}
    for name, tensor in (names.params | names.buffers).items():
        watch.name(own[name], name, tensor)
        watch.known.add(name, own[name], tensor)
    held = own | {alias: own[name] for alias, name in names.aliases.items() if name in own}
    fakes = [as_fake(tensor, mode) for tensor in inputs]
    for i, fake in enumerate(fakes):
        watch.name(fake, f"input {i}", fake)
    with ExitStack() as stack:
        for entered in (
            quiet_generator(), quiet_log(), converted_to_themselves(), cuda_autocast_on_cpu(),
            portable_kernels(), unchecked_distributions(), masks_read(), untouched(model),
            restored(reach), skipping(model, folds),
        ):  # fmt: skip
            stack.enter_context(entered)
        stack.enter_context(watch.members(model))  # once what is there before is known
        stack.enter_context(_reparametrize_module(model, held))
        odd = odd_constants(reach.places, Contents())
        for mode_of in (torch.set_grad_enabled(train), NoHooks(), mode, watch, odd):
            stack.enter_context(mode_of)
        results = named_results(objective(model, *fakes))
    watch.close(results)
    check_backward(results.values())
    return watch.forward


class _Watch(WatchedCalls):
    """Notes every call of a run under the list member whose forward is running."""

    def __init__(self, forward: _Forward) -> None:
        super().__init__()
        self.forward, self.running, self.known = forward, OUTSIDE, KnownValues()
        self.at: dict[int, _At] = {}
        self.storage: dict[int, Owner] = {}
        self.alive: list[Any] = []  # so that no other tensor gets the same id

    def name(self, fake: Tensor, name: str, tensor: Tensor) -> None:
        """Note a parameter, buffer or input under the list member in whose path it stands."""
        owner = list_member(name)
        owner = owner if owner[0] else OUTSIDE
        which = name.removeprefix("{}.{}.".format(*owner)) if owner != OUTSIDE else name
        self._put(fake, _At(owner, which))
        self.forward.own[owner].append((which, _kind(fake), _values(tensor)))

    def members(self, model: nn.Module) -> Any:
        """Register hooks by which calls inside of a list member count as the member's."""

        def enter(owner: Owner) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any) -> None:
                self._begin(owner)

            return hook

        def leave(owner: Owner) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, result: Any) -> None:
                self._end(owner, result)

            return hook

        stack = ExitStack()
        for owner, module in members(model):
            stack.callback(module.register_forward_pre_hook(enter(owner), prepend=True).remove)
            stack.callback(module.register_forward_hook(leave(owner)).remove)
        return stack

    def _begin(self, owner: Owner) -> None:
        if self.running != OUTSIDE or owner in self.forward.given:
            raise Unequal  # a member that runs inside of another, or a second time
        self.running = owner

    def _end(self, owner: Owner, result: Any) -> None:
        leaves, spec = tree_flatten(result)
        self.running = OUTSIDE
        self.forward.given[owner] = (tuple(map(self._spelled, leaves)), str(spec))

    def close(self, results: dict[str, Tensor]) -> None:
        """Note that the results of the forward are read outside of all blocks."""
        self.forward.calls[OUTSIDE].append(tuple(self._read(x) for x in results.values()))

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if needs_values(func, args):
            with suppress(UnknownValueError):
                found = computed(self.known, func, args, kwargs, self._run)
                self.forward.calls[self.running].append((func, *self._read((args, kwargs.items()))))
                return found
        if func._schema.is_mutable:
            self._check_written(func, args, kwargs)
        operands = self._read(args), self._read(tuple(sorted(kwargs.items())))
        result = call_on_fakes(func, args, kwargs)
        calls = self.forward.calls[self.running]
        self._made(result, len(calls))
        calls.append((func, *operands, _kind(result), torch.is_grad_enabled()))
        self.known.note(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.call(func, args, kwargs)

    def _read(self, arg: Any) -> Any:
        """An argument with its tensors as ``_At``; the running member becomes their reader."""
        spelled = self._spelled(arg)
        if isinstance(spelled, _At):
            self.forward.readers[spelled.owner].add(self.running)
        elif isinstance(arg, list | tuple):
            return tuple(map(self._read, arg))
        return spelled

    def _spelled(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            if isinstance(arg, nn.Parameter) and id(arg) not in self.at:
                raise Unequal  # one that is in a variable: whose it is does not show
            return self.at.get(id(arg)) or _values(arg)
        if isinstance(arg, list | tuple):
            return tuple(map(self._spelled, arg))
        return type(arg).__name__, repr(arg)

    def _check_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark the running member as unsafe if a call writes into memory of another owner."""
        for arg in written_to(func, args, kwargs):
            if isinstance(arg, Tensor):
                owner = self.storage.get(storage_of(arg))
                if owner != self.running and self.running != OUTSIDE:
                    self.forward.unsafe.add(self.running)

    def _made(self, result: Any, number: int, *path: int) -> None:
        if isinstance(result, list | tuple):
            for i, part in enumerate(result):
                self._made(part, number, *path, i)
        elif isinstance(result, Tensor) and id(result) not in self.at:
            self._put(result, _At(self.running, (number, *path)))

    def _put(self, tensor: Tensor, at: _At) -> None:
        self.at[id(tensor)] = at
        self.alive.append(tensor)
        self.storage.setdefault(storage_of(tensor), at.owner)


def _kind(fake: Any) -> Any:
    if isinstance(fake, Tensor):
        return tuple(fake.shape), fake.dtype, fake.stride(), fake.requires_grad
    if isinstance(fake, list | tuple):
        return tuple(map(_kind, fake))
    return type(fake)


def _values(tensor: Tensor) -> Any:
    """Shape, dtype and, of a small tensor with known values, a digest of these.

    Blocks may differ in their constants alone.
    """
    kind = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
    if isinstance(tensor, FakeTensor | nn.Parameter) or tensor.is_meta or not small:
        return kind
    with _disable_current_modes():
        numbers = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    return *kind, hashlib.sha256(numbers.tobytes()).hexdigest()
