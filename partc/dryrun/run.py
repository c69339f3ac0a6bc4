"""Run a rank's program line by line on fake tensors, and find its peak of memory.

The program itself runs, so function boundaries, ``del``, in-place sums and handles of transfers
free and keep memory as they do in training. A dry run needs no process group, no other rank and no
memory for tensors. CheckError where a call touches memory of a transfer under way (``streams.py``).
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from partc.dryrun.alone import alone
from partc.dryrun.layers import deep_stacks, most_of_all, shorten
from partc.dryrun.lines import SourceLines
from partc.dryrun.live_memory import Lines, LiveMemory
from partc.dryrun.turns import KnownTurns, NotSteady, Turns
from partc.graph.fake_calls import RememberingMode
from partc.program.role import Role
from partc.program.step.given_out import whole_step


@dataclass(frozen=True)
class Holder:
    """The bytes that are live at the peak and were allocated by one source line."""

    line: int
    text: str
    num_bytes: int

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclass(frozen=True)
class DryRun:
    """The peak of live bytes, without parameters, buffers and inputs, and the line of the peak."""

    peak_bytes: int
    line: int
    holders: tuple[Holder, ...]  # largest first


Known = dict[int, KnownTurns]  # by the number of layers left out of each stack


@dataclass(frozen=True)
class Built:
    """A role's Step on fakes, which takes longer to build than a short run of it takes."""

    step: Any
    mode: FakeTensorMode

    @classmethod
    def of(cls, role: Role, rank: int) -> Built:
        mode = RememberingMode()
        with alone(role, rank) as here, torch.no_grad(), mode:
            return cls(role.build(here), mode)

    @property
    def depth(self) -> int:
        """The number of layers of the shortest deep stack; 0 if there is none."""
        return min(map(len, deep_stacks(self.step)), default=0)

    @contextmanager
    def as_built(self) -> Iterator[None]:
        """For one whole run: its layers, methods and gradients are then as they were before."""
        before = [(m, dict(vars(m)), dict(m._modules)) for m in self.step.modules()]
        try:
            yield
        finally:
            for module, attributes, children in before:
                vars(module).clear()
                vars(module).update(attributes)
                module._modules.clear()
                module._modules.update(children)
                for param in module._parameters.values():
                    if param is not None:
                        param.grad = None


def dry_run(role: Role, rank: int = 0, known: Known | None = None, library: str = "gloo") -> DryRun:
    """Execute one step of a role on fakes; its gradients are new, as after ``zero_grad()``.

    Microbatches that repeat earlier ones are not executed (``turns.py``), and neither are most
    layers of deep stacks (``layers.py``). ``known`` keeps what turns did, for further pipeline
    ranks. ``library``: the library of collectives (``topology.LIBRARIES``).
    """
    turns: Known = {} if known is None else known
    built = Built.of(role, rank)

    def shortened(left_out: int) -> LiveMemory:
        steady = turns.setdefault(left_out, KnownTurns())
        try:
            return execute(role, rank, steady, left_out, library, built)
        except NotSteady:  # in the middle of a step, whose parts are not as they were built
            return execute(role, rank, None, left_out, library)

    peak_bytes, line, lines = most_of_all(shortened, built.depth)
    return report(role, peak_bytes, line, lines)


def execute(
    role: Role, rank: int, known: KnownTurns | None, left_out: int, library: str = "gloo",
    built: Built | None = None,
) -> LiveMemory:  # fmt: skip
    """Run a step on fakes without ``left_out`` layers of every deep stack.

    With ``known``, microbatches that repeat earlier ones are not executed; NotSteady if one that
    was left out has a turn that cannot be. ``built``: the role's Step, if it is built already.
    """
    built = built or Built.of(role, rank)
    step, live = built.step, LiveMemory(_file(role))

    def begin() -> None:
        if left_out:
            shorten(step, left_out, live)
        stages = getattr(step, "stages", None)  # of a pipeline; the model may have a list so named
        if known is not None and isinstance(stages, dict) and not role.is_inference:
            Turns(live, known, SourceLines.of(_file(role))).take_over([*stages.values()])

    run_step(role, built, live, alone(role, rank, library, live), begin)
    return live


def run_step(
    role: Role, built: Built, live: LiveMemory, dist: AbstractContextManager[Any],
    begin: Callable[[], None],
) -> None:  # fmt: skip
    """Run a step on fakes while ``live`` counts what it holds, inside of ``dist``, which stands in
    for collectives. ``begin`` changes the step before.
    """
    step = built.step
    eager = torch.compiler.set_stance("force_eager") if role.compiles else nullcontext()
    with dist, torch.no_grad(), built.mode, eager, built.as_built():
        inputs = [torch.empty(shape, dtype=dtype) for shape, dtype in role.inputs.values()]
        begin()
        live.leave_out([*step.parameters(), *step.buffers(), *inputs])
        with live:
            role.take_one_microbatch(step)
            kept = step(*inputs) if role.is_inference else whole_step(step, step.step, inputs)
            role.drain(step)
    del kept
    live.streams.end()


def _file(role: Role) -> str:
    return str(role.module.Step.__init__.__code__.co_filename)


def report(role: Role, peak_bytes: int, line: int, lines: Lines) -> DryRun:
    """A DryRun of a peak; its holders have the text of the lines that allocated the memory."""
    file = _file(role)
    holders = [Holder(line, _text(file, line), size) for line, size in lines.items()]
    return DryRun(peak_bytes, line, tuple(sorted(holders, key=lambda h: (-h.num_bytes, h.line))))


def _text(file: str, line: int) -> str:
    """A line of a loaded role, without the comment."""
    return linecache.getline(file, line).partition("  #")[0].strip()
