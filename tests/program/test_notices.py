"""A signal that announces the end of a run: all ranks save at the next step, if there is time."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import partc
from partc.errors import UsageError
from partc.program.checkpoints.run_folder import committed
from partc.verification.processes import Processes
from tests.program.trained import begin, train

pytestmark = pytest.mark.gloo
NOTICE = signal.SIGUSR1


@contextmanager
def heard() -> Iterator[list[str]]:
    """What partc logs inside."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("partc").addHandler(handler)
    yield told
    logging.getLogger("partc").removeHandler(handler)


def told_of(folder: Path, seconds: float, took_s: float) -> tuple[list[bool], int, list[str]]:
    """Whether each of six steps is saved, of which rank 1 is told in the third."""
    stage, optimizer = begin(1, 2, seed=0)
    saved: list[bool] = []
    with heard() as told, partc.Checkpoints(
        folder, interval=2, notices={NOTICE: seconds}
    ) as checkpoints:  # fmt: skip
        for step in range(1, 7):
            train(stage, optimizer, 1)
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), NOTICE)
            if step == 3 and dist.get_rank() == 0:
                checkpoints.wait()
                checkpoints._took_s = took_s  # what it predicts for the next one
            saved.append(checkpoints.save(step, stage, optimizer))
            if checkpoints.must_end:
                assert not saved[-1] or checkpoints._running is None  # it is on the disk
                break
    return saved, len(committed(folder)), told


def test_all_ranks_save_the_step_at_which_one_is_told(world: Processes, tmp_path: Path) -> None:
    first, second = world.run(told_of, tmp_path, 6000.0, 0.1, num=2)
    assert first[:2] == second[:2] == ([False, True, True], 2)
    [text] = first[2]
    assert "a signal to another rank" in text
    assert "a save takes" in text
    assert "Step 3 is being saved" in text
    assert second[2] == []


def test_without_time_for_a_save_none_is_begun(world: Processes, tmp_path: Path) -> None:
    first, second = world.run(told_of, tmp_path, 6000.0, 9000.0, num=2)
    assert first[:2] == second[:2] == ([False, True, False], 1)
    assert "a save takes 9000.0 s. Step 3 is not saved" in first[2][0]


def handlers(folder: Path) -> list[int]:
    """A second signal, and one behind the end, do what they did before."""
    came: list[int] = []
    signal.signal(NOTICE, lambda number, frame: came.append(number))
    stage, optimizer = begin(1, 1, seed=0)
    with partc.Checkpoints(folder, interval=9, notices={NOTICE: 6000}) as checkpoints:
        os.kill(os.getpid(), NOTICE)
        assert not came
        os.kill(os.getpid(), NOTICE)
        assert came == [NOTICE]
        assert checkpoints.save(1, stage, optimizer)
        assert checkpoints.must_end
    with partc.Checkpoints(folder, notices={NOTICE: 6000}):
        pass
    os.kill(os.getpid(), NOTICE)
    signal.signal(NOTICE, signal.SIG_DFL)
    wrong: list[tuple[Any, str]] = [
        (NOTICE, r"Pass {signal.SIGTERM: 30}"),
        ({NOTICE: 0}, r"signal.SIGUSR1: 0 .* signal.SIGUSR1: 30"),
        ({signal.SIGKILL: 3}, "no process can catch it.* Write signal.SIGTERM: 30"),
        ({NOTICE: "soon"}, r"signal.SIGUSR1: 'soon'"),
        ({"USR1": 3}, r"'USR1': 3 .* Write signal.SIGUSR1: 3, behind import signal"),
        ({"SIGTERM": 30}, r"'SIGTERM': 30 .* Write signal.SIGTERM: 30, behind import signal"),
        ({30: signal.SIGTERM}, r"30: signal.SIGTERM .* Write signal.SIGTERM: 30\."),
        ({45: "SIGTERM"}, r"45: 'SIGTERM' .* Write signal.SIGTERM: 45\."),
    ]
    for each, words in wrong:
        with pytest.raises(UsageError, match=words):
            partc.Checkpoints(folder, notices=each)
    refused: list[str] = []
    thread = threading.Thread(target=lambda: refused.append(_refusal(folder)))
    thread.start()
    thread.join()
    assert "not the main thread" in refused[0]
    return came


def _refusal(folder: Path) -> str:
    with pytest.raises(UsageError) as error:
        partc.Checkpoints(folder, notices={NOTICE: 6000})
    return str(error.value)


def test_signals_do_again_what_they_did(world: Processes, tmp_path: Path) -> None:
    assert world.run(handlers, tmp_path, num=1) == [[NOTICE, NOTICE]]
