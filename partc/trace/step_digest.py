"""Name a step by what it computes: a digest that changes whenever the recorded graph could.

In: the ``Source`` of a step. Out: its digest, and the Python numbers that the step reads. The step
runs twice on fake tensors, as when it is recorded, but nothing is kept of it except a hash of every
call: op, operands, numbers, values of constants, line, module. Whatever decides what a step
computes (code, arguments, globals, files, the environment) decides it through these calls, so that
no code has to be looked at. Two steps of equal digests have the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as provenance
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from partc.graph.folds import RepeatedBlocks
from partc.trace.capture import (
    Origins,
    TracedStep,
    as_graph,
    names_of,
    run_of,
)
from partc.trace.contents import Contents, form_of, memory_of
from partc.trace.dense import not_dense
from partc.trace.draw_sites import Sites
from partc.trace.fingerprint import Fingerprint
from partc.trace.frozen_numbers import FrozenNumbers
from partc.trace.known_values import SMALL_BYTES
from partc.trace.ran import not_noting_code
from partc.trace.record import Source
from partc.trace.scan_blocks import members, skipping

OWN = (
    "aten",
    "prims",
    "prim",
    "partc",
)  # ops that torch implements; other ops run code of somebody's
MANY = 16  # members of a list from which on equal ones are left out, as finding them takes time
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None),
    torch.dtype, torch.layout, torch.device, torch.memory_format,
)  # fmt: skip


class NoDigest(Exception):
    """A step does something that its calls do not show; the message says what."""


class Seen(NamedTuple):
    """A step's digest, and the numbers that it read in this process."""

    digest: str
    numbers: FrozenNumbers


def seen(source: Source, *, fold: bool) -> Seen:
    """Run a step on fakes and name it by its calls; ``fold``: equal blocks may be left out.

    Raises:
        NoDigest: the step calls an op whose code its calls do not show, such as a custom one.
        PartcError, or what the model's code raises: the step cannot be traced.
    """
    deep = any(index >= MANY for (_, index), _ in members(source.model))
    folds = source.spare_blocks() if fold and deep else ()
    try:
        return _seen(source, folds, lambda first, *fakes: first(*fakes))
    except NoDigest:
        raise
    except Exception:  # such as a number of a constant, which only a recorded graph knows
        return _seen(source, folds, as_graph)


def _seen(source: Source, folds: Sequence[RepeatedBlocks], through: Callable[..., Any]) -> Seen:
    log = CallLog()

    def noted(first: Callable[..., Any], *fakes: list[Tensor]) -> Any:
        def run(*fakes: list[Tensor]) -> Any:
            outcome = first(*fakes)
            log.add("outcome", *(log.told(tensors) for tensors in outcome))
            return outcome

        return through(run, *fakes)

    def run(step: TracedStep) -> FrozenNumbers:
        log.clear()
        for name in not_dense(step.given()):
            raise NoDigest(f"{name} is not contiguous, which no call shows")
        _, numbers, notes = step.twice(noted, partial(_Noted, log))
        log.add("notes", *notes, step.with_own)
        log.add("results", *step.results)
        return numbers

    with skipping(source.model, folds) if folds else nullcontext():
        given = source.model, source.given.tensors, source.objective, source.train
        numbers = run_of(*given, run, folds)
    log.add("returns", source.kind, source.returns.tree and source.returns.tree.as_json())
    log.add("arguments", source.given.arguments.as_json(), tuple(folds))
    _add_model(log, source)
    return Seen(log.digest(), numbers)


@dataclass
class CallLog:
    """A hash of the calls of a run.

    Memory is named by what it held when it was first met: a parameter's name, the call that made
    it. What it holds later follows from the calls that wrote into it.
    """

    parts: Any = field(default_factory=sha256)
    contents: Contents = field(default_factory=Contents)
    memory: dict[int, Any] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)  # so that no other memory gets the same id

    def clear(self) -> None:
        """Begin anew."""
        self.parts, self.memory, self.alive = sha256(), {}, []

    def add(self, *parts: Any) -> None:
        """Add plain data, whose text is the same in every process."""
        self.parts.update(repr(parts).encode() + b"\n")

    def digest(self) -> str:
        return str(self.parts.hexdigest())

    def told(self, arg: Any) -> Any:
        """An operand or a result as plain data; NoDigest for what has none."""
        if isinstance(arg, Tensor):
            return self._tensor(arg)
        if isinstance(arg, list | tuple):
            return type(arg).__name__, tuple([self.told(each) for each in arg])
        if isinstance(arg, Mapping):
            return tuple([(key, self.told(each)) for key, each in arg.items()])
        if isinstance(arg, _PLAIN):
            return type(arg).__name__, repr(arg)
        raise NoDigest(f"an op is given a {type(arg).__module__}.{type(arg).__name__}")

    def _tensor(self, tensor: Tensor) -> Any:
        memory = memory_of(tensor)
        if memory not in self.memory:
            self.alive.append(tensor)
            known = self.contents.at.get(memory)
            self.memory[memory] = len(self.memory), known.digest if known else ""
        label = self.memory[memory]
        told = label, form_of(tensor), str(tensor.layout), str(tensor.device), tensor.requires_grad
        return told if isinstance(tensor, FakeTensor) else (*told, value_of(tensor))


def value_of(tensor: Tensor) -> str:
    """A digest of all values of a tensor; "" where it has none. NoDigest if it is sparse."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return ""
    if tensor.layout is not torch.strided:
        raise NoDigest("a constant is a sparse tensor")
    with _disable_current_modes():
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().flatten().contiguous()
        return sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


class _Noted(Origins):
    """Runs calls as they are when a step is recorded, and adds each to a log."""

    def __init__(self, log: CallLog, contents: Contents, sites: Sites) -> None:
        super().__init__(contents, sites)
        self.log, log.contents = log, contents

    @not_noting_code
    def call(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if getattr(func, "namespace", "") not in OWN:
            raise NoDigest(f"the op {func} runs code that is not torch's own")
        operands = self.log.told(args), self.log.told(kwargs)
        self.origin = {}
        result = super().call(func, args, kwargs)
        noted = provenance.current_meta.get("custom", {})
        where = noted.get("module", ""), noted.get("phase", ""), torch.is_grad_enabled()
        origin = sorted(self.origin.items())
        self.log.add(str(func), operands, self.log.told(result), where, origin)
        return result


# what is read of a model beside its calls ----------------------------------------------------
def _add_model(log: CallLog, source: Source) -> None:
    """Names, kinds and forms of a model's tensors, values of small buffers, classes of modules."""
    model, names = source.model, names_of(source.model)
    log.add(type(model).__name__, model.training, sorted(names.aliases.items()))
    for name, spec in Fingerprint.of(model).tensors.items():
        log.add(name, str(spec))
    for name, tensor in (*names.params.items(), *names.buffers.items()):
        log.add(name, form_of(tensor), tensor.requires_grad, _kept_value(tensor))
    for name, tensor in zip(source.given.names, source.given.tensors, strict=True):
        log.add(name, form_of(tensor), tensor.requires_grad)
    for path, module in model.named_modules(remove_duplicate=False):
        of_torch = type(module).__module__.startswith("torch.nn.")
        log.add(path, type(module).__name__, of_torch and type(module).__module__)


def _kept_value(tensor: Tensor) -> str:
    """The digest of a buffer that a program may have as a constant."""
    small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
    if isinstance(tensor, nn.Parameter) or not small or type(tensor) is not Tensor:
        return type(tensor).__name__
    return "meta" if tensor.is_meta else value_of(tensor)
