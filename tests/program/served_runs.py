"""A server, its replica and workers that are killed and join, as processes of one machine.

    python -m tests.program.served_runs --events 20 --seed 0

The kills and joins follow from the seed, how far the processes have got meanwhile does not. What is
left is compared with an independent reference, which replays the log of the server that is left.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from partc.program.servers.log import Update, check_log, read_log
from partc.program.servers.server import Server
from partc.program.servers.worker import Worker
from tests.patience import patience
from tests.program.island_runs import Deep, batch, loss, made

STARTS = get_context("forkserver")  # this process has threads, of its store
STARTS.set_forkserver_preload([__name__])
DEADLINE_S = patience(10.0)
WORKERS = 3


@dataclass
class Run:
    """Processes around one store, and what was done to them."""

    folder: Path
    late: int
    seed: int
    store: Any
    processes: dict[str, Any] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)
    started: int = 0

    def start(self, name: str, work: Any) -> None:
        arguments = (name, self.store.port, str(self.folder), self.late, self.seed)
        process = STARTS.Process(target=work, args=arguments, name=name)
        process.start()
        self.processes[name] = process

    def join(self) -> None:
        self.start(f"worker{self.started}", work_of_worker)
        self.started += 1

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        self.killed.append(name)

    @property
    def workers(self) -> list[str]:
        return [name for name in self.processes if name.startswith("worker")]

    def version(self) -> int:
        """How many updates any of both servers has."""
        logs = list(self.folder.glob("log-*"))
        return max((len(each.read_text().splitlines()) for each in logs), default=0)

    def wait_for(self, version: int) -> None:
        self._wait(lambda: self.version() >= version, f"version {version}")

    def wait_for_workers(self) -> None:
        """Until those that are not killed have joined."""
        told = [self.folder / f"acknowledged-{name}" for name in self.workers]
        self._wait(lambda: all(file.exists() for file in told), "all workers")

    def _wait(self, is_so: Callable[[], bool], wanted: str) -> None:
        end = time.monotonic() + patience()
        while not is_so():
            assert time.monotonic() < end, f"version {self.version()}; wanted: {wanted}"
            for name, process in self.processes.items():
                assert process.exitcode in (None, 0), f"{name} ended with {process.exitcode}"
            time.sleep(0.01)


def work_of_server(name: str, port: int, folder: str, late: int, seed: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port)
    model = made(Deep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    server = Server(
        model, store, max_steps_late=late, replicas=1, is_replica=name == "replica",
        deadline_s=DEADLINE_S, log_file=Path(folder) / f"log-{name}",
    )  # fmt: skip
    for _ in server:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), Path(folder) / f"weights-{name}")


def work_of_worker(name: str, port: int, folder: str, late: int, seed: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port)
    model = made(Deep)
    worker = Worker(model, store, max_steps_late=late, deadline_s=DEADLINE_S)
    tell(folder, name, worker)
    pauses = random.Random(f"{seed} {name}")
    while not store.check(["enough"]):
        step = worker.pull()
        loss(model, *batch(step, worker.number)).backward()
        time.sleep(pauses.choice((0, 0, 0.01, 0.04)))
        worker.push()
        tell(folder, name, worker)
    worker.leave()
    tell(folder, name, worker)


def tell(folder: str, name: str, worker: Worker) -> None:
    """Write down what a worker knows to be acknowledged, so that it outlives the worker."""
    known = {"worker": worker.number, "acknowledged": worker.acknowledged}
    partial = Path(folder) / f".acknowledged-{name}"
    partial.write_text(json.dumps(known))
    partial.rename(Path(folder) / f"acknowledged-{name}")


def run(folder: Path, *, events: int, late: int, seed: int) -> Run:
    """Kills and joins of workers, and one kill of the server, drawn from a seed."""
    draw = random.Random(seed)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made_run = Run(folder, late, seed, store)
    made_run.start("server", work_of_server)
    made_run.start("replica", work_of_server)
    for _ in range(WORKERS):
        made_run.join()
    fatal = draw.randrange(events)
    for number in range(events):
        made_run.wait_for(made_run.version() + draw.randint(1, 5))
        if number == fatal:
            made_run.kill("server")
        elif len(made_run.workers) > 1 and (draw.random() < 0.5 or len(made_run.workers) > 4):
            made_run.kill(draw.choice(made_run.workers))
        else:
            made_run.join()
    made_run.wait_for_workers()
    made_run.wait_for(made_run.version() + 5)
    store.set("enough", "")
    for name, process in made_run.processes.items():
        process.join(patience())
        assert process.exitcode == 0, f"{name} ended with {process.exitcode}"
    return made_run


# what has to hold ---------------------------------------------------------------------------------
def check(folder: Path, late: int) -> str:
    """AssertionError or CheckError unless the log keeps the bound, has all that was acknowledged,
    and is that of an independent training in float64.
    """
    log = read_log(folder / "log-replica")
    told = [json.loads(file.read_text()) for file in folder.glob("acknowledged-*")]
    pushes = [(each["worker"], step) for each in told for step in each["acknowledged"]]
    most = check_log(log, late, pushes)
    found, wanted = torch.load(folder / "weights-replica"), replayed(log)
    error = max(float((found[n] - x).abs().max()) for n, x in wanted.items())
    assert error < 1e-12, f"{error:.1e} from the reference"
    return (
        f"{len(log) - 1} updates, {len(pushes)} acknowledged pushes, {most} versions late at most, "
        f"{error:.1e} from the reference"
    )


def replayed(log: list[Update], clip: float = 0.5) -> dict[str, torch.Tensor]:
    """The weights of one device that takes the updates of a log, from its own gradients."""
    model = made(Deep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    versions = [copy.deepcopy(model)]
    for update in log:
        if not update.read:  # the last version, which nobody computed with
            continue
        grads = []
        for worker, read in update.read.items():
            other = copy.deepcopy(versions[read])
            loss(other, *batch(update.version, worker)).backward()
            grads.append([p.grad for p in other.parameters()])
        for param, *same in zip(model.parameters(), *grads, strict=True):
            param.grad = torch.stack(same).mean(0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        versions.append(copy.deepcopy(model))
    return dict(model.state_dict())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--late", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        done = run(Path(folder), events=args.events, late=args.late, seed=args.seed)
        print(f"killed {', '.join(done.killed)}; {done.started} workers joined")
        print(check(Path(folder), args.late))


if __name__ == "__main__":
    main()
