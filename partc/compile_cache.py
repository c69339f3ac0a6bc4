"""Compile a step only where no program of the very same step is kept in a folder.

In: a model, a plan, and what compiles them. Out: a Program, from the folder or made now. The key is
what the step computes (``partc/trace/step_digest.py``), together with all else that a compile
reads: mesh and machines, plan, options, versions, partc's own source. Code is no part of the key,
so nothing that decides what a step computes can be forgotten.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from platform import python_version
from time import perf_counter
from typing import Any

import torch

from partc.cache_folder import CacheFolder, Found, note
from partc.collecting import no_collecting
from partc.errors import UsageError
from partc.passes.runner import Table
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.program.origin import Origin
from partc.program.role import dtype_of
from partc.rules.table import RULES
from partc.schedules.named import NAMES
from partc.trace.arguments import Given
from partc.trace.default_dtype import default_of_script
from partc.trace.frozen_numbers import FrozenNumbers
from partc.trace.record import Source
from partc.trace.step_digest import NoDigest, Seen, seen
from partc.traced import Traced
from partc.version import __version__

FORMAT = 1  # of keys and entries
FAILS = "fails"  # the digest of a step that cannot be run
LOCAL, FINAL = "local", "final"  # notes of an entry: digests of the step with other inputs


@dataclass(frozen=True)
class Request:
    """What is to be compiled, apart from what the step computes.

    ``first``: the step that the compile traces first. ``given``: the step with the inputs as the
    script gives them, where these are one rank's piece.
    """

    first: Traced
    given: Traced | None
    mesh: Mesh
    plan: Plan
    rows: Table
    options: tuple[Any, ...] = ()

    def text(self) -> str:
        """All of it as text: equal for two compiles that differ in the step alone."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        parts = (
            FORMAT, __version__, _source_digest(), torch.__version__, torch.version.git_version,
            python_version(), str(self.mesh), str(self.mesh.hardware), _plan_text(self.plan),
            sorted(self.rows.left_out), self.options, self.given is None, deterministic,
        )  # fmt: skip
        return repr(parts)


class CompileCache:
    """Programs of a folder by what they compute."""

    def __init__(self, path: str | Path) -> None:
        self.folder = CacheFolder(path)

    def program(self, request: Request, make: Callable[[], Program]) -> Program:
        """The program of a request: kept, or made by ``make`` and kept."""
        begun, look = perf_counter(), _Look(request)
        why = _not_keyed(request.rows)
        try:
            key = "" if why else look.key
        except NoDigest as error:
            why = str(error)
        except Exception:  # the compile meets the same, and says what it is
            return make()
        if why:
            note("compiled without the cache: %s", why)
            return make()
        found = look.kept(self.folder.read(key))
        if found is None:
            with self.folder.alone(key):
                self.folder.clear_way(key, lambda each: look.kept(each) is not None)
                found = look.kept(self.folder.read(key)) or self._made(key, look, make)
        spent = perf_counter() - begun
        note("a program in %.1f s, by the cache %s", spent, self.folder.path, level=logging.INFO)
        return found

    def _made(self, key: str, look: _Look, make: Callable[[], Program]) -> Program:
        program = make()
        self.folder.write(key, program, look.notes(program))
        return program


@dataclass(frozen=True)
class _Look:
    """One look for a program; every step is run once on fakes."""

    request: Request

    @cached_property
    def first(self) -> Seen:
        """The step that is traced first. FAILS where all ranks' samples do not run along dim 0."""
        if self.request.given is None:
            return self._seen(self.request.first)
        return self._or_fails(self.request.first)

    @property
    def key(self) -> str:
        """``LlamaForCausalLM-`` and a digest."""
        name = re.sub(r"\W", "_", type(self.request.first.model).__name__)[:60]
        text = f"{self.request.text()}\n{default_of_script()}\n{self.first.digest}"
        return f"{name}-{sha256(text.encode()).hexdigest()[:40]}"

    def notes(self, program: Program) -> dict[str, str]:
        """What an entry says of the other inputs with which the step was traced."""
        if self.request.given is None or self._has_first_inputs(program):
            return {}
        return {
            LOCAL: self._or_fails(self.request.given).digest,
            FINAL: self._final(program).digest,
        }

    def kept(self, found: Found | None) -> Program | None:
        """The program that was found, with what this process knows of its model; None if the step
        is another one with other inputs.
        """
        if found is None:
            return None
        program, noted = found
        last = self.first
        if noted or not self._has_first_inputs(program):
            if noted != self.notes(program):
                return None
            last = self._final(program)
        mesh = replace(self.request.mesh, axes=program.mesh.axes)
        origin = Origin(self.request.first.model)
        return replace(program, mesh=mesh, numbers=last.numbers, origin=origin)

    def _has_first_inputs(self, program: Program) -> bool:
        given = _source(self.request.first).given
        shapes = [tuple(each.shape) for each in given.tensors]
        return shapes == [shape for shape, _ in program.inputs.values()]

    def _final(self, program: Program) -> Seen:
        """The step with the inputs of a program."""
        assert self.request.given is not None
        given: Given = _source(self.request.given).given
        whole = [
            torch.empty(shape, dtype=dtype_of(dtype), device="meta")
            for shape, dtype in program.inputs.values()
        ]
        step = self.request.given
        return self._or_fails(Traced(step.model, given.with_tensors(whole), step.loss, step.kind))

    def _or_fails(self, step: Traced) -> Seen:
        try:
            return self._seen(step)
        except NoDigest:
            raise
        except Exception:
            return Seen(FAILS, FrozenNumbers())

    def _seen(self, step: Traced) -> Seen:
        with no_collecting():
            return seen(_source(step), fold=not self.request.plan.names_blocks)


def cache_of(path: str | Path | None, model: Any) -> CompileCache | None:
    """The cache in a folder; None without one.

    UsageError for a Traced step, as its model may have changed since it was traced.
    """
    if path is not None and isinstance(model, Traced):
        raise UsageError(
            where="cache",
            what="a Traced step takes no cache",
            why="the cache runs the step to know it, and it was traced earlier",
            do="Pass the model, its inputs and its loss, or leave cache= out.",
        )
    return None if path is None else CompileCache(path)


def _source(step: Traced) -> Source:
    return Source.of(step.model, step.inputs, step.loss, step.kind)


def _not_keyed(rows: Table) -> str:
    """What a compile reads that is no text of partc's: passes, rules, schedules of others."""
    passes = (f"the pass {each.name}" for each in rows.passes if not each.own)
    rules = (f"the rule of {n}" for n, rule in RULES.items() if not _is_ours(rule.module))
    named = NAMES.items()
    schedules = (f"the schedule {n}" for n, each in named if not _is_ours(each.orders.__module__))
    first = next(_chained(passes, rules, schedules), "")
    return first and f"{first} is code of another package, which may change"


def _chained(*parts: Iterator[str]) -> Iterator[str]:
    for part in parts:
        yield from part


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "partc"


def _plan_text(plan: Plan) -> str:
    """Every field of a plan, sets in order."""
    values: Mapping[str, Any] = {each.name: getattr(plan, each.name) for each in fields(plan)}
    return repr({n: sorted(x) if isinstance(x, frozenset) else x for n, x in values.items()})


@cache
def _source_digest() -> str:
    """The digest of partc's own files: a checkout changes without its version."""
    found = sha256()
    for folder, below, files in os.walk(Path(__file__).parent, followlinks=True):
        below[:] = sorted(each for each in below if each != "__pycache__")
        for name in sorted(files):
            path = Path(folder, name)
            found.update(f"{path.relative_to(Path(__file__).parent)}\n".encode())
            found.update(path.read_bytes())
    return found.hexdigest()
