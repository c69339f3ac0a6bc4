"""The checkpoints of a run, saved beside its steps: ``partc.Checkpoints``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from partc.data.loader import Loader
from partc.data.sampler import RowSampler
from partc.errors import PartcError, RunError, UsageError
from partc.program.checkpoints.checkpoint import read_step, ready
from partc.program.checkpoints.checkpoint_call import (
    check_arguments,
    folder_of_run,
    no_attribute,
    stage_of,
)
from partc.program.checkpoints.notices import Notices
from partc.program.checkpoints.one_folder import of_one_folder
from partc.program.checkpoints.run_folder import Retention, committed
from partc.program.checkpoints.saves_under_way import THREAD, finish_before_groups_go
from partc.program.checkpoints.script_states import check_states
from partc.program.checkpoints.snapshot import Snapshot, snapshot_of
from partc.program.checkpoints.staging import Staging
from partc.program.checkpoints.writing import Writer
from partc.program.model.habits import LOG
from partc.program.ranks.other_ranks import of_other_ranks
from partc.program.ranks.together import Together
from partc.wrong_calls import check_flag, check_whole_number, known_arguments

Optimizer = torch.optim.Optimizer
CPU = torch.device("cpu")


class Checkpoints:
    """The checkpoints of one run in one folder: saved now and then, beside the steps that follow.

    All ranks make one, and call its methods together. A save waits for the save before it, copies
    buffers, and returns; parameters and optimizer states are copied to host memory while the next
    forward and backward run, and written while training goes on. A step of an optimizer waits until
    they are copied. What cannot be written is logged at once, and raised by the next ``save`` or
    by ``close``. A script that ends without ``close`` ends when the last save is done.

    Args:
        folder: of this run alone; each step is a directory in it, as ``save_checkpoint`` writes.
        interval: ``save`` saves each so manieth step, and does nothing at the others.
        keep_latest_k: keep so many of the newest steps; None keeps all.
        keep_time: delete steps that are older, but never the newest.
        async_save: write beside the steps that follow; False makes ``save`` wait until it is done.
        notices: signals behind which this process has so many seconds left, as
            ``{signal.SIGTERM: 30}``. Once any rank has got one, all save at the next ``save``,
            whatever the interval, if there is time; then ``must_end`` is true. Another signal of
            the same number does what it did before.

    Example::

        with partc.Checkpoints("run", interval=100, keep_latest_k=3) as checkpoints:
            start = checkpoints.load_latest(stage, optimizer, loader=loader)
            for step, batch in enumerate(loader, start + 1):
                stage.step(*batch)
                optimizer.step()
                optimizer.zero_grad()
                checkpoints.save(step, stage, optimizer, loader=loader)
    """

    @known_arguments
    def __init__(
        self, folder: str | Path, *, interval: int = 1, keep_latest_k: int | None = None,
        keep_time: timedelta | None = None, async_save: bool = True,
        notices: Mapping[int, float] | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder_of_run("Checkpoints", folder)
        self.interval = check_whole_number(interval, "Checkpoints(interval=...)", 1)
        check_flag(async_save, "Checkpoints(async_save=...)")
        self._async = async_save
        retention = Retention(keep_latest_k, keep_time)
        retention.check()
        self._writer, self._staging = Writer(self.folder, retention), Staging()
        self._is_closed = False
        self.must_end = False  # a notice has come: what could be saved is saved
        self._took_s = 0.0  # the last save, from its begin to its commit
        self._notices = None if notices is None else Notices(notices)
        self._notice_group: Any = None  # at the end of a step, beside a save under way
        self._group: Any = None  # for saves alone: the default group is the step's
        self._thread = ThreadPoolExecutor(1, THREAD)
        self._running: Future[None] | None = None
        self._hook = register_optimizer_step_pre_hook(lambda *_: self._staging.wait())

    if not TYPE_CHECKING:  # else every name would be one of its attributes

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name)

    @known_arguments
    @of_other_ranks("Checkpoints.save")
    def save(
        self, step: int, stage: nn.Module, optimizer: Optimizer | None = None, *,
        loader: Loader | RowSampler | None = None, states: Mapping[str, Any] | None = None,
        last_step: bool = False,
    ) -> bool:  # fmt: skip
        """Save a step, if it is time; all ranks call this together, behind ``optimizer.step()``.

        Args:
            step: its number; the first save of a folder has the smallest.
            stage: what ``Program.module()`` gave, or ``parallelize`` behind its first step.
            optimizer: the optimizer over ``stage.parameters()``; None saves the model alone.
            loader: its position in the data is saved too.
            states: of learning rate schedulers and alike, by names: their ``state_dict()``.
            last_step: save it whatever the interval.

        Returns:
            Whether the step is being saved.

        Raises:
            RunError: the save before this one has failed, or this step exists already, or the
                optimizer has parameters that are none of the stage's. On all ranks.
            UsageError: the step is no whole number from 0 on.
        """
        of = stage_of("Checkpoints.save", stage)
        check_arguments("Checkpoints.save", of, optimizer, loader)
        states = check_states("Checkpoints.save", states)
        check_whole_number(step, "Checkpoints.save(step)")
        self._check_open("save")
        ends = self._ends(step)
        if ends is False or not (ends or last_step or step % self.interval == 0):
            return False
        self._wait_before(is_last=bool(ends))
        of.writes.check()
        of.check_together("Checkpoints.save")
        of.meet_owners()
        ranks = self._ranks()
        target, told = ranks.do(lambda: ready(self.folder, of, optimizer, step, states))
        snapshot = self._staging.begin(snapshot_of(of, optimizer, loader, step, told))
        self._running = self._thread.submit(self._write, snapshot, target, ranks)
        finish_before_groups_go(self._running)
        if ends or not self._async:
            self.wait()
        return True

    @known_arguments
    @of_other_ranks("Checkpoints.load_latest")
    def load_latest(
        self, stage: nn.Module, optimizer: Optimizer | None = None, *,
        loader: Loader | RowSampler | None = None, states: Mapping[str, Any] | None = None,
    ) -> int:  # fmt: skip
        """Load the newest step of the folder, whatever mesh it was saved under.

        All ranks call this together, and a save that is under way is waited for. The run goes on
        as if it had not ended: on the same mesh the global generators of torch, numpy and Python
        draw what they would have drawn, too.

        Args:
            stage: takes the parameters and buffers.
            optimizer: takes the states that were saved; None reads the model alone.
            loader: goes on behind the batch that the saved one had taken last.
            states: schedulers and alike, which take the states saved under their names.

        Returns:
            The number of the step; 0 where the folder has none yet, and nothing is loaded.

        Raises:
            LoadError: as of ``load_checkpoint``.
        """
        return self._load("load_latest", stage, optimizer, loader, states, resumes=True) or 0

    @known_arguments
    @of_other_ranks("Checkpoints.roll_back")
    def roll_back(
        self, stage: nn.Module, optimizer: Optimizer | None = None, *,
        states: Mapping[str, Any] | None = None,
    ) -> int | None:  # fmt: skip
        """Load the newest step, and go on with the data that come next; all ranks call this
        together.

        As ``load_latest``; a loader's place in the data and the generators stay as they are.

        Returns:
            The number of the step; None where the folder has none, and nothing is loaded.
        """
        return self._load("roll_back", stage, optimizer, None, states, resumes=False)

    def wait_for_staging(self) -> None:
        """Wait until a save reads no tensor of the stage any more.

        Steps of optimizers do so by themselves; call this before you write to parameters or
        optimizer states in another way.
        """
        self._staging.wait()

    def wait(self) -> None:
        """Wait until the save under way is done; RunError on all ranks if it failed."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait until the last save is done; RunError on all ranks if it failed."""
        self._is_closed = True
        self._hook.remove()
        if self._notices is not None:
            self._notices.close()
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            self.close()
            return
        try:  # what ended the run is what is raised; a save that failed was logged
            self.close()
        except (PartcError, RuntimeError) as failed:
            LOG.debug("partc: the save under way: %s", failed)

    # inside ----------------------------------------------------------------------------------
    def _load(
        self, name: str, stage: nn.Module, optimizer: Optimizer | None,
        loader: Loader | RowSampler | None, states: Mapping[str, Any] | None, *, resumes: bool,
    ) -> int | None:  # fmt: skip
        """The number of the newest step, which is loaded; None where there is none."""
        call = f"Checkpoints.{name}"
        of = stage_of(call, stage)
        check_arguments(call, of, optimizer, loader)
        given = check_states(call, states)
        self.wait()
        found = [path.name for path in committed(self.folder)[-1:]]
        with of_one_folder(ranks := self._ranks(), self.folder):
            ranks.check_alike({"newest step": found})
        if not found:
            return None
        step = self.folder / found[0]
        return read_step(step, of, optimizer, loader, given, resumes=resumes, stays=not resumes)

    def _ends(self, step: int) -> bool | None:
        """Whether a notice has come to any rank, and this step can be saved before the run is
        ended; None without a notice. All ranks answer alike.
        """
        if self._notices is None:
            return None
        self._ranks()
        turns = 2 if self._running is not None and not self._running.done() else 1
        left_s, takes_s = self._notices.left_s(turns * self._took_s, self._notice_group)
        if left_s is None:
            return None
        self.must_end, fits = True, takes_s < left_s
        if dist.get_rank() == 0:
            told = "is being saved" if fits else "is not saved: what was saved before stays"
            LOG.warning(
                "partc: this run is ended in %.1f s (%s), and a save takes %.1f s. Step %d %s.",
                left_s, self._notices.came or "a signal to another rank", takes_s, step, told,
            )  # fmt: skip
        return fits

    def _wait_before(self, *, is_last: bool) -> None:
        """Wait for the save before this one; that it failed is no reason against the last one."""
        try:
            self.wait()
        except (PartcError, RuntimeError):
            if not is_last:
                raise

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise UsageError(
                where=f"Checkpoints.{call}", what="these checkpoints were closed",
                why="no step of an optimizer waits for their copies any more",
                do="Close them behind the last save, or make new ones of the same folder.",
            )  # fmt: skip

    def _ranks(self) -> Together:
        """All ranks, by a group of their own, which gloo carries whatever the step's backend."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
            if self._notices is not None:
                self._notice_group = dist.new_group(backend="gloo")
        return Together("Checkpoints", CPU, RunError, self._group)

    def _write(self, snapshot: Snapshot, target: Path, ranks: Together) -> None:
        """In the thread: copy, then write; what fails is said at once."""
        begun = time.monotonic()
        try:
            ranks.do(self._staging.finish)
            self._writer.write(snapshot, target, ranks)
            self._took_s = time.monotonic() - begun
        except Exception as error:
            LOG.warning("partc: step %d was not saved: %s", snapshot.step, error)
            raise
