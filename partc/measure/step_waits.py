"""How long a rank waits for others in a step, as numbers that a training loop tells its loggers.

A step takes as long on every rank, since ranks wait for each other; who is slow waits least. So a
loop that is to say which rank is slow measures this on each rank, and each writes its own file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from partc.measure.timed_calls import Clock, CudaClock, HostClock, Transfer, TransferTimes
from partc.measure.timed_step import moved_boxes, shares
from partc.program.stage.runtime import Stage

WAITS_S = "time_metrics/waiting(s)"


class StepWaits:
    """Measures the waits of a stage's steps.

    Timers around transfers take time themselves, and messages become collectives, so measure some
    steps and not all.

    Args:
        stage: from ``program.module()``.

    Example::

        waits = StepWaits(stage)
        with waits.step():
            loss = stage.step(*batch)
        meter.log(step, {"loss_metrics/global_avg_loss": loss, **waits.numbers})
    """

    def __init__(self, stage: Stage) -> None:
        self.axes = {group.group_name: axis for axis, group in stage.groups.items()}
        self.clock: Clock = CudaClock() if stage.device.type == "cuda" else HostClock()
        self.numbers: dict[str, float] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step; ``numbers`` then has the seconds that this rank waited: in all, and for
        the transfers of each axis, ``time_metrics/waiting_dp(s)``.
        """
        transfers = list[Transfer]()
        with TransferTimes(self.clock, self.axes, transfers).on():
            first = self.clock.now()
            yield
        boxes = moved_boxes(transfers, lambda moment: self.clock.seconds(first, moment))
        exposed, _ = shares(boxes)
        each = {axis: exposed.get(axis, 0.0) for axis in dict.fromkeys(self.axes.values())}
        self.numbers = {
            WAITS_S: sum(exposed.values()),  # also for what ranks compare now and then
            **{f"time_metrics/waiting_{axis}(s)": waited for axis, waited in each.items()},
        }
