"""``partc bench``: the clock's arithmetic on a step of known times, and real ranks."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import partc
from partc.cli.main import main
from partc.cost.roofline import BLOCKS, WAIT
from partc.errors import UsageError
from partc.measure.bench import bench
from partc.measure.timed_calls import TransferTimes
from partc.measure.timed_step import time_step
from tests.patience import patience

COLLECTIVES = partc.Plan(preset="fsdp", messages=False)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def save(folder: Path, mesh: str, plan: str | partc.Plan, **options: Any) -> None:
    partc.compile(Tower(), mesh, (torch.zeros(8, 32),), plan=plan, **options).save(folder)


class ToldClock:
    """A clock that is put forward by hand."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def note_end(self, work: Any, note: Any) -> None:
        if work.end is not None:
            note(work.end)

    def seconds(self, start: float, moment: float) -> float:
        return moment - start


class ToldWork:
    def __init__(self, clock: ToldClock, begin: float, end: float | None) -> None:
        self.clock, self.end, self.until = clock, end, begin if end is None else end

    def wait(self) -> None:
        self.clock.time = max(self.clock.time, self.until)


class Group:
    group_name = "7"


class Member(nn.Module):
    def __init__(self, clock: ToldClock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self) -> None:
        self.clock.time += 3.0

    def backward(self) -> None:
        self.clock.time += 5.0


def test_what_is_hidden_and_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ToldClock()
    program = nn.Module()
    program.layers = nn.ModuleList([Member(clock)])
    block: Any = program.layers[0]

    def start(x: Any, group: Any, async_op: bool = False) -> ToldWork | None:
        if async_op:
            return ToldWork(clock, clock.time, clock.time + 4.0)
        clock.time += 1.5
        return None

    monkeypatch.setattr(dist, "all_reduce", start)
    monkeypatch.setattr(
        dist, "isend", lambda x, to, group, tag=0: ToldWork(clock, clock.time + 6.0, None)
    )

    def run() -> None:
        first = dist.all_reduce(None, group=Group(), async_op=True)  # 10 to 14
        second = dist.all_reduce(None, group=Group(), async_op=True)  # and beside it
        block()  # until 13
        first.wait()  # one second of four
        second.wait()
        dist.all_reduce(None, group=Group())  # until 15.5
        block.backward()  # until 20.5

    def update() -> None:
        clock.time += 2.0

    def begin() -> None:
        clock.time = 10.0

    times, boxes = time_step(program, {"layers.0": "model.layers.0"}, {"7": "dp"}, clock,  # type: ignore[arg-type]
                             begin, run, update)  # fmt: skip
    assert (times.step_s, times.optimizer_s) == (10.5, 2.0)
    assert times.exposed == {"dp": 2.5}
    assert times.hidden == {"dp": 3.0}
    assert times.computing_s == 8.0
    titles = {box.title: (box.begin_s, box.seconds) for box in boxes if box.stream == BLOCKS}
    assert titles == {
        "partc::forward::model.layers.0": (0.0, 3.0),
        "partc::backward::model.layers.0": (5.5, 5.0),
    }
    assert vars(dist)["all_reduce"] is start
    assert program.layers[0].__dict__.keys() == Member(clock).__dict__.keys()


def test_an_action_does_not_take_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ToldClock()

    class Pipeline(nn.Module):
        stages = ()

        def F(self, stage: int, i: int) -> None:
            irecv: Any = dist.irecv
            irecv(None, 0, group=Group()).wait()
            clock.time += 1.0

    class Message(ToldWork):
        def wait(self) -> None:
            self.clock.time += 4.0

    monkeypatch.setattr(dist, "irecv", lambda x, source, group: Message(clock, 0.0, None))
    program: Any = Pipeline()
    times, boxes = time_step(program, {}, {"7": "pp"}, clock, lambda: None,  # type: ignore[arg-type]
                             lambda: program.F(1, 2), lambda: None)  # fmt: skip
    (action,) = [box for box in boxes if box.stream == BLOCKS]
    assert (action.title, action.begin_s, action.seconds) == ("partc::F::1F2", 4.0, 1.0)
    assert [box.seconds for box in boxes if box.stream == WAIT] == [4.0]
    assert times.exposed == {"pp": 4.0}
    assert times.hidden == {}  # messages do not tell


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "plan", "options", "regions"),
    [
        ("dp=2", COLLECTIVES, {}, {"forward of layers", "backward of layers"}),
        ("dp=2", COLLECTIVES.changed(messages=True), {}, {"forward of layers"}),
        ("pp=2", "ddp", {"microbatches": 2}, {"forward of stage 0", "backward of stage 1"}),
    ],
)
def test_two_ranks_beside_their_prediction(
    mesh: str, plan: str | partc.Plan, options: dict[str, Any], regions: set[str], tmp_path: Path
) -> None:
    folder = tmp_path / "b"
    save(folder, mesh, plan, **options)
    found = bench(str(folder), steps=3, warmup=1, timeout=patience())
    figures = found.figures() | found.regions()
    assert regions <= set(figures)
    assert all(figures[name].predicted_s for name in ("step", "computing", *regions))
    assert all(min(figures[name].measured_s) > 0 for name in ("step", "computing", *regions))
    for rank in found.ranks:
        for times in rank.timed:
            assert 0 < times.computing_s <= times.step_s
    shared = (
        {"partc::F::0F1"} if options else {"partc::dp::all_gather", "partc::dp::reduce_scatter"}
    )
    named: dict[int, set[str]] = {}
    for event in json.loads(found.trace())["traceEvents"]:
        named.setdefault(event["pid"], set()).add(event["name"])
    assert sum(shared <= names for names in named.values()) == (2 if options else 3)
    assert any("partc::wait::recv" in names for names in named.values()) == bool(options)
    assert "predicted / measured" in str(found)
    assert "were not measured here: `partc calibrate`" in str(found)
    json.dumps(found.as_json())


def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "b")
    save(tmp_path / "b", "dp=2", "fsdp")
    for there, said in (
        (True, "torchrun --nproc-per-node"),
        (False, "sees no GPU.*Leave --device"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        with pytest.raises(UsageError, match=said):
            bench(folder, device="cuda")
    assert main(["bench", folder, "--steps", "1"]) == 2


def test_a_transfer_holds_its_tensors_until_computing_has_waited() -> None:
    """On a GPU the clock's stream waits first, at which torch lets go of what is sent."""

    class Noted:
        """A tensor, as far as memory is concerned."""

    work: Any = ToldWork(ToldClock(), 0.0, None)
    times, sent = TransferTimes(ToldClock(), {"7": "dp"}), Noted()  # type: ignore[arg-type]
    start = times._timed("isend", lambda x, group: work)
    handle, alive = start(sent, group=Group()), weakref.ref(sent)
    del sent
    assert alive() is not None
    handle.wait()
    assert alive() is None
