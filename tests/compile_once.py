"""Ranks that compile the same step compile it once: the first makes it, the others are handed it.

A test starts four ranks on few cores, and what it holds is mostly what they run. So the first rank
that comes to a compile makes the program and gives it to the others through the store of their
group, pickled, as between processes of a script. They are handed it only if all that a compile
reads and that can be told is the same: mesh, plan, inputs, the model's modules, their numbers and
small buffers. What a pickle leaves out (the numbers of the model's Python) the others do not have.
A test that is about compiling on each rank says ``with each_compiles():`` in what its ranks run.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partc import api
from partc.compile_cache import _plan_text
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.program.origin import Origin
from partc.traced import Traced
from partc.whole_batch import first_step

SMALL = 4096  # numbers of a buffer that are looked at
DEEP = 4  # containers in one another that are looked at


class Compiles:
    """The compiles of one process: how often each was asked for in its group, and whether it is to
    make them all itself.
    """

    def __init__(self) -> None:
        self.store: Any = None
        self.asked: Counter[str] = Counter()
        self.own = False

    def once(self, what: Callable[[], object], make: Callable[[], Program]) -> Program:
        """The program that another rank of this group has made; or it is made here, and handed to
        the others.
        """
        if self.own or not dist.is_initialized() or dist.get_world_size() == 1:
            return make()
        store = dist.distributed_c10d._get_default_store()
        if store is not self.store:
            self.store, self.asked = store, Counter()
        digest = sha256(repr(what()).encode()).hexdigest()
        self.asked[digest] += 1
        key = f"{digest} {self.asked[digest]}"
        if store.add(f"{key} asked", 1) == 1:
            return self._handed_over(store, key, make)
        made = store.get(key)
        return pickle.loads(made) if made else make()

    def _handed_over(self, store: Any, key: str, make: Callable[[], Program]) -> Program:
        made = b""  # where it fails, it fails on each rank
        try:
            with self.each():
                program = make()
            made = pickle.dumps(program)
            return program
        finally:
            store.set(key, made)

    @contextmanager
    def each(self) -> Iterator[None]:
        """Inside, this process makes what it compiles."""
        before, self.own = self.own, True
        try:
            yield
        finally:
            self.own = before


COMPILES = Compiles()
each_compiles = COMPILES.each


def share_programs() -> None:
    """Let the ranks of this process, and of those that it forks, compile once."""
    api._made = _shared_compile(api._made)
    setattr(api.Job, "with_plan", _shared_plan(api.Job.with_plan))  # noqa: B010


def _shared_compile(compiled: Callable[..., tuple[Traced, Program]]) -> Callable[..., Any]:
    """``compile`` behind its checks: the step that was traced first, and the program."""

    def made(
        model: Any, inputs: Any, loss: Any, mesh: Mesh, plan: Plan, rows: Any, *others: Any
    ) -> tuple[Traced, Program]:
        steps: list[Traced] = []

        def make() -> Program:
            step, program = compiled(model, inputs, loss, mesh, plan, rows, *others)
            steps.append(step)
            return program

        if isinstance(model, Traced) or others[-1] is not None:  # a dump is of this process
            return compiled(model, inputs, loss, mesh, plan, rows, *others)
        at = (str(mesh), str(mesh.hardware), _plan_text(plan), sorted(rows.left_out), others)
        program = COMPILES.once(lambda: (at, told(model, inputs, loss)), make)
        if steps:
            return steps[0], program
        step = first_step(model, inputs, loss, mesh, plan, rows)
        return step, replace(program, origin=Origin(model))

    return made


def _shared_plan(compiled: Callable[..., Program]) -> Callable[..., Program]:
    """The compile of a further program of a model, for a shape or mode."""

    def with_plan(job: api.Job, mesh: Mesh, plan: Plan, *others: Any) -> Program:
        def make() -> Program:
            return compiled(job, mesh, plan, *others)

        if others:  # a search, which has a graph already
            return make()
        at = (str(mesh), str(mesh.hardware), _plan_text(plan), sorted(job.table.left_out))
        step = job.step
        made = COMPILES.once(
            lambda: (at, job.strict, step.kind, told(step.model, step.inputs, step.loss)), make
        )
        return replace(made, origin=Origin(step.model))

    return with_plan


# what a compile reads ----------------------------------------------------------------------------
def told(model: nn.Module, inputs: Any, loss: Any) -> tuple[Any, ...]:
    """All that can be told of a step: equal on two ranks that compile the same one."""
    modules = [
        (n, type(m).__qualname__, _text_of(type(m).forward), _numbers(vars(m)))
        for n, m in model.named_modules()
    ]  # fmt: skip
    tensors = [*model.named_parameters(), *model.named_buffers()]
    small = [_values(x) for x in model.buffers()]
    leaves = [_shown(each) for each in tree_leaves(inputs)]
    return modules, [(n, _shown(x)) for n, x in tensors], small, leaves, _code(loss), _modes()


def _shown(value: Any) -> Any:
    """A tensor without its values, or a number."""
    if not isinstance(value, Tensor):
        return _number(value)
    x = value
    return [*x.shape], [*x.stride()], str(x.dtype), str(x.device), x.requires_grad


def _values(buffer: Tensor) -> object:
    if buffer.device.type != "cpu" or buffer.numel() > SMALL or type(buffer) is not Tensor:
        return None
    return buffer.tolist()


def _numbers(names: Mapping[str, Any]) -> list[tuple[str, object]]:
    return [(name, _number(value)) for name, value in sorted(names.items())]


def _number(value: Any, deep: int = DEEP) -> object:
    """A number or text, one by one where they are in containers; of anything else its type."""
    if isinstance(value, bool | int | float | complex | str | bytes | None | torch.dtype):
        return value
    if isinstance(value, dict) and deep:
        return [(_number(n, 0), _number(x, deep - 1)) for n, x in value.items()]
    if isinstance(value, list | tuple) and deep:
        return [_number(x, deep - 1) for x in value]
    return getattr(value, "__qualname__", type(value).__qualname__)


def _code(loss: Any) -> object:
    """A function's name and code, and the numbers that it closes over."""
    cells = getattr(loss, "__closure__", None) or ()
    return _number(loss), _text_of(loss), [_number(cell.cell_contents) for cell in cells]


def _text_of(function: Any) -> object:
    """What a function's code says; of a function inside of it that there is one."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    return code.co_code, code.co_names, [_number(each) for each in code.co_consts]


def _modes() -> tuple[object, ...]:
    """What the process has switched on."""
    casts = torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))
    exact = torch.are_deterministic_algorithms_enabled()
    return torch.is_grad_enabled(), str(torch.get_default_dtype()), casts, exact
