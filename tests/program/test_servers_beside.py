"""A server beside programs that join and leave: threads, and processes that are killed."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore

from partc.api import compile
from partc.errors import CheckError, RunError, UsageError
from partc.program import Program
from partc.program.servers import messages
from partc.program.servers.flats import Flats, flat
from partc.program.servers.lead import Mean
from partc.program.servers.log import Update, check_log, line_of, read_log
from partc.program.servers.messages import Served, asked, pair_name
from partc.program.servers.pairs import Message, Pair, PairBrokenError
from partc.program.servers.server import Server, _as_message
from partc.program.servers.worker import IslandWorker, Worker
from partc.verification.processes import Processes
from partc.verification.verification import verify
from tests.patience import patience
from tests.program import served_runs
from tests.program.island_runs import Deep, batch, loss, made

pytestmark = pytest.mark.gloo
STEPS = 6
MAKING = threading.Lock()
TABLE = "[servers]\ncount = 1\nmax_steps_late = 1\nreplicas = 1\n"
PLAN = f'preset = "{{}}"\nallow = ["servers"]\n{TABLE}'


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Threads:
    """Runs functions in threads; raises what they raise."""

    def __init__(self) -> None:
        self.each: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def start(self, work: Callable[..., object], *arguments: Any) -> None:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self.errors.append(error)

        self.each.append(threading.Thread(target=run, daemon=True))
        self.each[-1].start()

    def end(self) -> None:
        for thread in self.each:
            thread.join(patience())
            assert not thread.is_alive()
        if self.errors:
            raise self.errors[0]


def model_alone() -> nn.Module:
    """The model, made by one thread at a time: all draw from one generator."""
    with MAKING:
        return made(Deep)


def serve(store: Any, late: int, into: list[Any], **options: Any) -> None:
    model = options.pop("model", None) or model_alone()
    optimizer = options.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), lr=1e-2)
    server = Server(model, store, max_steps_late=late, deadline_s=patience(20), **options)
    for _ in server:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    into += [server, model, optimizer]


def work(store: Any, late: int, steps: int, accumulate: bool = False) -> None:
    model = model_alone()
    worker = Worker(model, store, max_steps_late=late, deadline_s=patience(20))
    while (step := worker.pull()) < steps:
        rows = [x.chunk(2) for x in batch(step, worker.number)] if accumulate else None
        for x, y in zip(*rows, strict=True) if rows else [batch(step, worker.number)]:
            (loss(model, x, y) / (2 if accumulate else 1)).backward()
        worker.push()
    worker.leave()
    assert worker.acknowledged[-1] == steps - 1


def trained(store: Any, late: int, num: int, *, accumulate: bool = False) -> list[Any]:
    threads, served = Threads(), list[Any]()
    threads.start(serve, store, late, served)
    for _ in range(num):
        threads.start(work, store, late, STEPS, accumulate)
    threads.end()
    return served


def same(model: nn.Module, log: list[Update]) -> None:
    for name, wanted in served_runs.replayed(log).items():
        torch.testing.assert_close(model.state_dict()[name], wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("late", "num", "accumulate"), [(0, 1, True), (2, 3, False)])
def test_training_is_its_definition(store: Any, late: int, num: int, accumulate: bool) -> None:
    server, model, _ = trained(store, late, num, accumulate=accumulate)
    assert check_log(server.log, late) <= late
    assert server.version == STEPS
    same(model, server.log)


def test_bytes_are_those_of_the_log(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    plain = Pair.send

    def send(self: Pair, message: Message) -> None:
        sent.append((self.here, sum(x.nbytes for x in message.tensors)))
        plain(self, message)

    monkeypatch.setattr(Pair, "send", send)
    server, model, _ = trained(store, 1, 2)
    size = sum(p.nbytes for p in model.parameters())
    by_server = sum(num for here, num in sent if here == 0)
    by_workers = sum(num for here, num in sent if here == 1)
    assert by_server == size * sum(update.given for update in server.log)
    assert by_workers == size * sum(len(update.read) for update in server.log)


def test_training_goes_on_from_a_checkpoint(store: Any) -> None:
    first, model, optimizer = trained(store, 0, 1)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = made(Deep)
    again.load_state_dict(state[0])
    restored = torch.optim.AdamW(again.parameters(), lr=1e-2)
    restored.load_state_dict(state[1])
    other = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads, served = Threads(), list[Any]()
    options = {"model": again, "optimizer": restored, "version": first.version}
    threads.start(lambda: serve(other, 0, served, **options))
    threads.start(work, other, 0, 2 * STEPS)
    threads.end()
    same(again, [*first.log[:-1], *served[0].log])


# kills and joins ----------------------------------------------------------------------------------
def test_kills_and_joins_lose_nothing(tmp_path: Path) -> None:
    done = served_runs.run(tmp_path, events=5, late=2, seed=3)
    assert "server" in done.killed
    assert "acknowledged" in served_runs.check(tmp_path, 2)


@pytest.mark.parametrize("answers", [False, True])
def test_a_worker_may_join_while_the_server_dies(store: Any, answers: bool) -> None:
    threads, served = Threads(), list[Any]()
    threads.start(lambda: dying(store, answers))
    threads.start(lambda: serve(store, 0, served, replicas=1, is_replica=True))
    threads.start(work, store, 0, STEPS)
    threads.end()
    server, model, _ = served[0:3]
    assert server.version == STEPS
    same(model, server.log)


def dying(
    store: Any, answers: bool = False, hears: bool = False, sends: Mean | None = None
) -> None:
    """A server that dies as a worker asks to join, as it meets the worker, once it has its
    gradients, or once it has sent an update to its replica.
    """
    named = dict(model_alone().named_parameters())
    Served.of(named, 0).tell(store)
    replica = Pair.meet(store, "replica", 0, patience())
    while not asked(store, 0, []):
        time.sleep(0.01)
    if answers:
        messages.answers(store, 0, 0)
        worker = Pair.meet(store, pair_name(0, 0), 0, patience())
        if hears:
            flats = flat([*named.values()])
            worker.send(Message(messages.PARAMS, (0,), flats))
            worker.receive(flats)
    if sends is not None:
        replica.send(_as_message(0, sends))
    del replica  # which ends the links of this process


def test_what_died_with_a_server_is_not_acknowledged(store: Any) -> None:
    threads, served = Threads(), list[Any]()
    threads.start(lambda: dying(store, answers=True, hears=True))
    threads.start(lambda: serve(store, 0, served, replicas=1, is_replica=True))
    first = Worker(model_alone(), store, deadline_s=patience(20))
    trains(first)
    second = Worker(model_alone(), store, deadline_s=patience(20))
    for _ in range(3):
        trains(second)
    second.pull()
    first.pull()  # behind three updates that the replica has made without it
    trains(first, second)
    for worker in (first, second):
        worker.leave()
    threads.end()
    server, model, _ = served
    assert (first.acknowledged, second.acknowledged) == ([3], [0, 1, 2, 3])
    each = [(worker.number, step) for worker in (first, second) for step in worker.acknowledged]
    check_log(server.log, 0, each)
    same(model, server.log)


def trains(*workers: Worker) -> None:
    for worker in workers:
        step = worker.pull()
        model = made(Deep)
        model.load_state_dict(worker.params)
        loss(model, *batch(step, worker.number)).backward()
        for name, param in model.named_parameters():
            worker.params[name].grad = param.grad
        worker.push()


@pytest.mark.exhaustive
def test_an_update_that_the_replica_was_sent_stands(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Pair.send

    def send(self: Pair, message: Message) -> None:
        if message.kind == messages.HELD:
            raise PairBrokenError(RuntimeError("the server was killed as it heard"))
        plain(self, message)

    monkeypatch.setattr(Pair, "send", send)
    threads, served = Threads(), list[Any]()
    threads.start(lambda: dying(store, sends=Mean(flats_of_zeros(), ((7, 0),))))
    threads.start(lambda: serve(store, 0, served, replicas=1, is_replica=True))
    threads.start(work, store, 0, STEPS)
    threads.end()
    assert [update.read for update in served[0].log[:2]] == [{7: 0}, {0: 1}]


def flats_of_zeros() -> Flats:
    return tuple(torch.zeros_like(x) for x in flat([*model_alone().parameters()]))


def test_a_worker_without_a_server_is_told(store: Any) -> None:
    threads, served = Threads(), list[Any]()
    with pytest.raises(RunError, match=r"there was no server .*Server\(model"):
        Worker(model_alone(), store, deadline_s=0.1)
    threads.start(serve, store, 0, served)
    model = model_alone()
    worker = Worker(model, store, deadline_s=patience(20))
    worker.pull()
    worker.leave()
    threads.end()


@pytest.mark.parametrize(
    ("change", "late", "said"),
    [
        (lambda m: m, 1, "max_steps_late = 0, and this worker 1"),
        (lambda m: m.float(), 0, "first.weight is torch.float32"),
        (lambda m: m.first.bias.requires_grad_(False), 0, "first.bias is none here"),
    ],
)
def test_other_parameters_are_refused(
    store: Any, change: Callable[[Any], object], late: int, said: str
) -> None:
    threads, served = Threads(), list[Any]()
    threads.start(serve, store, 0, served)
    model = model_alone()
    change(model)
    with pytest.raises(RunError, match=said):
        Worker(model, store, max_steps_late=late, deadline_s=patience(20))
    work(store, 0, 1)
    threads.end()


@pytest.mark.parametrize(
    ("made", "options", "said"),
    [
        (Server, {"max_steps_late": -1}, "Server(max_steps_late=...): -1 is no whole number"),
        (Worker, {"max_steps_late": -1}, "Worker(max_steps_late=...): -1 is no whole number"),
        (Worker, {"max_steps_late": 65}, "from 0 to 64"),
        (Worker, {"max_steps_late": 0.5}, "0.5 is no whole number"),
        (Server, {"replicas": 2}, "Server(replicas=...): 2 is above 1"),
        (Server, {"replicas": -1}, "-1 is no whole number, 0 or more"),
        (Server, {"version": -1}, "Server(version=...)"),
        (Server, {"deadline_s": 0}, "Server(deadline_s=...): it is 0"),
        (Worker, {"deadline_s": float("inf")}, "Give a number above 0"),
        (Worker, {"deadline_s": "60"}, "Worker(deadline_s=...): it is '60'"),
        (IslandWorker, {"deadline_s": -1}, "IslandWorker(deadline_s=...): it is -1"),
        (IslandWorker, {"seed": 0.5}, "IslandWorker(seed=...)"),
    ],
)
def test_numbers_out_of_their_range_are_refused(
    store: Any, made: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as refused:
        made(model_alone(), store, **options)
    assert said in str(refused.value)


def test_a_push_without_gradients_is_refused(store: Any) -> None:
    threads, served = Threads(), list[Any]()
    threads.start(serve, store, 0, served)
    worker = Worker(model_alone(), store, deadline_s=patience(20))
    worker.pull()
    with pytest.raises(RunError, match=r"first\.weight.*no gradient"):
        worker.push()
    worker.leave()
    threads.end()


def test_a_bound_that_is_broken_is_refused(store: Any) -> None:
    """A worker that does not wait for newer parameters: the server looks, too."""
    threads, served = Threads(), list[Any]()
    threads.start(serve, store, 0, served)
    model = model_alone()
    worker = Worker(model, store, deadline_s=patience(20))
    worker.pull()
    for _ in range(2):
        loss(model, *batch(0, 0)).backward()
        worker.push()
    with pytest.raises(RunError, match="step 1 read version 0"):
        threads.end()


# logs ---------------------------------------------------------------------------------------------
LOG = [Update(0, {0: 0, 1: 0}, 2), Update(1, {0: 0, 1: 1}, 2), Update(2, {1: 1}, 1)]


@pytest.mark.parametrize(
    ("log", "late", "acknowledged", "said"),
    [
        (LOG, 0, [], "a gradient 1 versions late"),  # without a check of versions
        ([LOG[0], LOG[2]], 1, [], "version 2 follows 0"),  # an old replica was promoted
        ([*LOG[:2], LOG[1]], 1, [], "version 1 follows 1"),
        (LOG, 1, [(0, 1), (0, 2)], "worker 0 for step 2 is in no update"),
    ],
)
def test_a_log_that_breaks_a_promise_is_refused(
    log: list[Update], late: int, acknowledged: list[tuple[int, int]], said: str
) -> None:
    with pytest.raises(CheckError, match=said):
        check_log(log, late, acknowledged)


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("".join(map(line_of, LOG)))
    assert read_log(file) == LOG
    assert check_log(LOG, 1, [(0, 0), (1, 2)]) == 1


# programs -----------------------------------------------------------------------------------------
def compiled(mesh: str, preset: str) -> Program:
    head, _, more = preset.partition(";")
    plan = f"{more}\n{PLAN.format(head)}"
    return compile(made(Deep), mesh, batch(0, 0), loss=loss, plan=plan)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "preset"), [("dp=2", "ddp"), ("tp=2", "megatron")])
def test_the_program_is_one_without_a_server(mesh: str, preset: str, tmp_path: Path) -> None:
    program = compiled(mesh, preset)
    alone = compile(made(Deep), mesh, batch(0, 0), loss=loss, plan=f'preset = "{preset}"')
    assert program.sources == alone.sources
    verify(program, made(Deep), batch(0, 0), loss=loss).check()
    program.save(tmp_path / "build")
    assert "the plan has [servers] beside the program" in (tmp_path / "build/run.py").read_text()


def of_islands(port: int, mesh: str, preset: str) -> None:
    """An island of two ranks, whose server is a thread of the first one."""
    stage = compiled(mesh, preset).module()
    stage.load_full(made(Deep))
    with pytest.raises(RunError, match="this stage has no worker"):
        stage.step(*batch(0, 0))
    rank, threads, served = torch.distributed.get_rank(), Threads(), list[Any]()
    store: Any = TCPStore("127.0.0.1", port) if rank == 0 else None
    if store is not None:
        threads.start(serve, store, 1, served)
    worker = IslandWorker(stage, store, deadline_s=patience(20))
    while (step := worker.pull()) < STEPS:
        stage.step(*batch(step, worker.number))
        worker.push()
    worker.leave()
    threads.end()
    if served:
        assert served[0].version == STEPS
        same(served[1], served[0].log)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "preset"), [("dp=2", "ddp"), ("dp=2", "fsdp"), ("tp=2", "megatron"),
                         ("dp=2", "zero1;microbatches = 2")],
)  # fmt: skip
def test_islands_of_several_ranks_have_one_worker(
    world: Processes, store: Any, mesh: str, preset: str
) -> None:
    world.run(of_islands, store.port, mesh, preset, num=2)


@pytest.mark.exhaustive
def test_a_program_without_a_server_has_no_worker(world: Processes) -> None:
    world.run(alone, num=2)


def alone() -> None:
    program = compile(made(Deep), "dp=2", batch(0, 0), loss=loss, plan="ddp")
    with pytest.raises(UsageError, match="no server beside its islands"):
        IslandWorker(program.module(), None)
