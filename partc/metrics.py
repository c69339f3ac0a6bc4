"""What a training loop reports: torchtitan's names, to files of JSON lines and to any logger.

A logger is any object with ``.log(numbers, step)``: a `JsonLines`, a run of Weights & Biases, one
of your own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from partc.atomic import what_helps
from partc.errors import UsageError
from partc.file_endings import check_ending
from partc.users_line import failed_at
from partc.wrong_calls import as_path, check_whole_number, known_arguments, quoted

GIB = 1 << 30
Batch = TypeVar("Batch")
Number = float | int | Tensor


class Logger(Protocol):
    """Takes the numbers of a step."""

    def log(self, numbers: dict[str, float], step: int, /) -> object:
        """Keep or show the numbers."""
        ...


class JsonLines:
    """A file with a JSON object per line: ``{"step": 10, "loss_metrics/global_avg_loss": 2.5}``.

    After a resume steps come again: of two lines of a step the later one holds.

    Args:
        path: of the file; the file and its folder are made. Give each rank that logs a file of its
            own.

    Raises:
        UsageError: it is no path, a folder, ends as files of another kind do (``.csv``), or
            nothing can be written there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path(path, "JsonLines")
        check_ending(self.path, "jsonl", f"JsonLines({quoted(str(path))})")
        if self.path.is_dir():
            raise UsageError(
                where=str(path), what="it is a folder", why="lines are added to one file",
                do=f"Name a file in it: {self.path / 'metrics.jsonl'}.",
            )  # fmt: skip
        self._add("")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Add a line, which is in the file when this returns; UsageError if it cannot be."""
        try:
            line = json.dumps({"step": step, **numbers})
        except TypeError as error:
            raise UsageError(
                where="JsonLines.log", what=f"{quoted(numbers)} is no line of JSON", why=str(error),
                do='Pass numbers by name, then the step: log({"loss": loss.item()}, step).',
            ) from None  # fmt: skip
        self._add(f"{line}\n")

    def _add(self, text: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise UsageError(
                where=str(self.path), what="no line can be added to this file",
                why=error.strerror or str(error),
                do=what_helps(error),
            ) from None  # fmt: skip


class Meter:
    """Times a training loop, and tells loggers of it under the names that torchtitan uses.

    Args:
        loggers: objects with ``.log(numbers, step)``; none on ranks that are not to tell.
        tokens: of a step, or samples, of all ranks together.
        devices: that share them, since throughput is told per device.
        start: steps that were done before, where a run goes on.

    Example::

        meter = Meter([JsonLines("metrics.jsonl")], tokens=8 * 512, devices=world_size)
        for step, batch in enumerate(meter.waiting(loader), start=1):
            loss = stage.step(*batch)
            optimizer.step()
            meter.log(step, {"loss_metrics/global_avg_loss": loss})
    """

    @known_arguments
    def __init__(
        self, loggers: Iterable[Logger], *, tokens: int = 0, devices: int = 1, start: int = 0
    ) -> None:
        _check_loggers(loggers)
        for name, given, least in (
            ("tokens", tokens, 0),
            ("devices", devices, 1),
            ("start", start, 0),
        ):
            check_whole_number(given, f"Meter({name}=...)", least)
        self.loggers, self.tokens, self.devices = list(loggers), tokens, devices
        self._begun, self._waited_s, self._since = perf_counter(), 0.0, start

    def waiting(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; how long the loop waits for each is counted.

        UsageError for what gives no batches.
        """
        if not isinstance(batches, Iterable) or isinstance(batches, str):
            raise UsageError(
                where="Meter.waiting", what=f"the batches are {quoted(batches)}",
                why="a loader gives one batch after the other",
                do="Pass what your loop goes over: for batch in meter.waiting(loader).",
            )  # fmt: skip
        return self._timed(iter(batches))

    def _timed(self, left: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            begun = perf_counter()
            try:
                batch = next(left)
            except StopIteration:
                return
            self._waited_s += perf_counter() - begun
            yield batch

    def log(self, step: int, numbers: Mapping[str, Number]) -> dict[str, float]:
        """Tell the loggers these numbers, and the times of a step since the last call.

        Args:
            step: how many steps are done.
            numbers: by name; tensors of one number are read, which waits for the device.

        Returns:
            What the loggers were told.
        """
        check_whole_number(step, "Meter.log, step")
        told = _floats(numbers)
        now, steps = perf_counter(), max(step - self._since, 1)
        seconds = max((now - self._begun) / steps, 1e-9)
        waited = self._waited_s / steps
        if self.tokens:
            told["ntokens_seen"] = float(self.tokens * step)
            told["throughput(tps)"] = self.tokens / seconds / self.devices
        told["time_metrics/end_to_end(s)"] = seconds
        told["time_metrics/data_loading(s)"] = waited
        told["time_metrics/data_loading(%)"] = 100 * waited / seconds
        told |= _memory()
        self._begun, self._waited_s, self._since = now, 0.0, step
        for logger in self.loggers:
            _tell(logger, told, step)
        return told


def _tell(logger: Logger, told: dict[str, float], step: int) -> None:
    """Call a logger; UsageError names one that fails."""
    try:
        logger.log(told, step)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            where=f"Meter, {type(logger).__name__}.log", what="the logger failed",
            why=failed_at(error, logger.log), do="Mend it: it is called as log(numbers, step).",
        ) from error  # fmt: skip


def _floats(numbers: Any) -> dict[str, float]:
    """The numbers of a step by name; UsageError for what is no table of numbers."""
    if not isinstance(numbers, Mapping):
        raise UsageError(
            where="Meter.log, numbers", what=f"it is {quoted(numbers)}",
            why="it has numbers by name", do='Write meter.log(step, {"loss": loss}).',
        )  # fmt: skip
    told = {}
    for name, each in numbers.items():
        try:
            told[name] = float(each)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                where=f"Meter.log, {name}", what=f"{quoted(each)} is not one number",
                why="a logger is told numbers", do="Pass a number, or a tensor of one: x.mean().",
            ) from None  # fmt: skip
    return told


def _check_loggers(given: object) -> None:
    """UsageError for a path in the place of a list, and for what has no ``log``."""
    each = given if isinstance(given, list | tuple) else []
    wrong = next((one for one in each if not callable(getattr(one, "log", None))), None)
    if wrong is not None or isinstance(given, str | Path) or not isinstance(given, Iterable):
        named = quoted(given if wrong is None else wrong)
        raise UsageError(
            where="Meter(loggers)", what=f"{named} is no logger",
            why="a logger has .log(numbers, step), and they stand in a list",
            do='Pass a list: Meter([JsonLines("metrics.jsonl")]).',
        )  # fmt: skip


def _memory() -> dict[str, float]:
    """The most memory that torch has held on this GPU; nothing without one."""
    if not torch.cuda.is_initialized():
        return {}
    return {
        "memory/max_active(GiB)": torch.cuda.memory_stats()["active_bytes.all.peak"] / GIB,
        "memory/max_reserved(GiB)": torch.cuda.max_memory_reserved() / GIB,
    }
