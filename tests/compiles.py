"""Counts what a process compiles, for tests of what has to be compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from partc.api import Job
from tests.compile_once import each_compiles


@contextmanager
def counted() -> Iterator[list[str]]:
    """The steps that this process compiles, whoever asks for them: it is handed none."""
    seen: list[str] = []
    compiled = Job.with_plan

    def with_plan(self: Job, *args: Any, **named: Any) -> Any:
        seen.append(f"{self.step.kind} in {'train' if self.step.model.training else 'eval'} mode")
        return compiled(self, *args, **named)

    with each_compiles(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(Job, "with_plan", with_plan)
        yield seen
