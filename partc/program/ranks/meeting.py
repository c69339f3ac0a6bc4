"""How the ranks of a job find each other, and what they say where one cannot come or stands still.

They speak through torch's store, which the launcher keeps, or else rank 0: before there is a
process group, and beside one whose collectives wait. ``run.py`` contains the text of the functions
and the class below, so they need torch and the standard library alone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

T = TypeVar("T")
LINGER_S = 30.0  # rank 0, which keeps the store, waits for others to read why it ends
LOOK_S = 0.25  # between two looks at the store
ANSWER_S = 5.0  # a rank that is there answers in less
OF_OTHERS = ("gloo", "NCCL", "onnection")  # words of errors that others have caused


SILENT = "Rank 0, which keeps the list, does not answer: it has ended or stands still."


class NotMetError(Exception):
    """Why the ranks do not begin: one cannot run, is missing, or runs something else."""


class Beat:
    """When the store has answered last, of those who ask it again and again."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def rest(self, seconds: float) -> None:
        self.at = time.monotonic()
        time.sleep(seconds)


def answered(ask: Callable[[], T], seconds: float, beat: Beat | None = None) -> T:
    """What a question to the store gives; NotMetError if it has not answered for some seconds.

    A store whose process stands still lets those who ask wait for ever.
    """
    found: list[T | Exception] = []
    last = beat or Beat()

    def work() -> None:
        try:
            found.append(ask())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive() and (left_s := last.at + seconds - time.monotonic()) > 0:
        thread.join(left_s)
    if not found:
        raise NotMetError(SILENT)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def number_of(name: str, otherwise: str = "") -> int:
    """A number that the launcher sets; NotMetError for another text."""
    text = os.environ.get(name, otherwise)
    if not text:
        raise NotMetError(f"{name} is not set, which every rank needs. torchrun sets it.")
    if not text.isdecimal():
        raise NotMetError(f"{name} is {text!r}, which is no whole number. torchrun sets it.")
    return int(text)


def is_alone() -> bool:
    """Whether this process was started without a launcher, or as the only rank."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def keeps_store() -> bool:
    """Whether this rank serves the store; under torchrun its agent does."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("RANK") == "0" and not agent


def open_store(seconds: float, keeps: bool, number: int = 0) -> PrefixStore:
    """A connection to the store that all ranks share; `keeps`: this process serves it.

    `number`: how many groups of all ranks there were before.
    """
    if not os.environ.get("MASTER_ADDR"):
        raise NotMetError("MASTER_ADDR is not set, which every rank needs. torchrun sets it.")
    rank, world, number_of_port = map(number_of, ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if number_of_port > 65535:
        raise NotMetError(f"MASTER_PORT is {number_of_port}: ports are numbers from 1 to 65535.")
    if rank >= world:
        raise NotMetError(f"RANK is {rank} of WORLD_SIZE {world}: ranks are counted from 0.")
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    def opened() -> PrefixStore:
        store = TCPStore(
            address, int(port), is_master=keeps, timeout=timedelta(seconds=seconds),
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the agent's store stays
        return PrefixStore(f"partc {attempt}.{number}", store)

    try:
        return answered(opened, seconds + ANSWER_S)
    except (RuntimeError, ValueError) as error:
        what = "rank 0 cannot listen" if keeps else f"rank 0 has not come within {seconds:g} s"
        why = str(error).partition("\n")[0]
        do = "Is MASTER_ADDR its host, and MASTER_PORT a free port?"
        raise NotMetError(f"{what} at {address}:{port}: {why} {do}") from None


def tell(why: str, seconds: float = LINGER_S) -> None:
    """Tell the other ranks, which wait for so long at most, that this one does not come."""

    def told() -> None:
        store.compare_set("refused", "", f"rank {os.environ['RANK']} cannot begin: {why}")
        linger(store, seconds, beat)

    try:
        store, beat = open_store(LINGER_S, keeps_store()), Beat()
        answered(told, ANSWER_S, beat)
    except (NotMetError, RuntimeError):
        pass  # nobody waits any more


def linger(store: PrefixStore, seconds: float, beat: Beat) -> None:
    """Say that this rank knows why; who keeps the store waits until all others do.

    Not for those that have not come in time: they do not come to read. Nor for longer than a rank
    waits for others, as WORLD_SIZE may count ranks that are not there.
    """
    deadline = time.monotonic() + min(seconds, LINGER_S)
    others = store.add("here", 0) if store.check(["late"]) else int(os.environ["WORLD_SIZE"])
    known = store.add("read", 1)
    while keeps_store() and known < others and time.monotonic() < deadline:
        beat.rest(LOOK_S)
        known = store.add("read", 0)


def meet(store: PrefixStore, said: dict[str, str], seconds: float) -> None:
    """Wait until all ranks are there and say the same; NotMetError on all ranks otherwise.

    `said`: what has to be alike, in words, by name.
    """
    beat = Beat()
    try:
        answered(lambda: compare(store, said, seconds, beat), ANSWER_S, beat)
    except RuntimeError:  # torch's, of a connection that was closed
        raise NotMetError(SILENT) from None


def compare(store: PrefixStore, said: dict[str, str], seconds: float, beat: Beat) -> None:
    """As `meet`, for as long as the store lets a rank wait."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        store.set("said", json.dumps(said))
    wait_for_all(store, "here", seconds, beat)
    first = json.loads(store.get("said"))
    other = [
        f"{name} {said.get(name)} (rank 0: {first.get(name)})"
        for name in {**first, **said}
        if first.get(name) != said.get(name)
    ]
    if other:
        why = f"rank {rank} has another {', '.join(other)}. Start all ranks alike."
        store.compare_set("refused", "", why)
    wait_for_all(store, "agreed", seconds, beat, counts=not other)


def wait_for_all(
    store: PrefixStore, what: str, seconds: float, beat: Beat, counts: bool = True
) -> None:
    """Wait until all ranks have come so far; NotMetError if one refuses or is missing."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if counts:
        store.set(f"{what} {rank}", "")
        store.add(what, 1)
    deadline = time.monotonic() + seconds
    while store.add(what, 0) < world and not store.check(["refused"]):
        if time.monotonic() > deadline:
            lacking = [each for each in range(world) if not store.check([f"{what} {each}"])]
            why = f"of {world} ranks, {lacking} did not come within {seconds:g} s."
            store.set("late", "")
            store.compare_set("refused", "", why)
        beat.rest(LOOK_S / 10)
    if store.check(["refused"]):
        refusal = store.get("refused").decode()
        linger(store, seconds, beat)
        raise NotMetError(refusal)


def start_group(backend: str, store: PrefixStore) -> None:
    """Start the process group of all ranks; NotMetError where one ends while they connect."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise NotMetError(f"the ranks cannot connect, one may have ended: {why}") from None


class Watch(threading.Thread):
    """Answers ranks that wait in vain; ends this process if it comes no further for too long.

    A rank that waits for longer than `limit_s` asks where the others are: who does not answer has
    ended, or stands still. Until it has taken a step it waits for `begins_s`, as ranks load and
    compile for different times. The main thread says by `at` what it does.
    """

    def __init__(self, limit_s: float, begins_s: float) -> None:
        super().__init__(daemon=True)
        self.limits_s = begins_s, limit_s
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store = open_store(ANSWER_S, keeps=False)  # of its own: another may be busy waiting
        self.over = threading.Event()
        self.hears_s = ANSWER_S  # so long it listens to the store; longer, if that is silent
        self.at("before its first step")

    def at(self, place: str, begun: bool = False) -> None:
        self.place, self.since, self.limit_s = place, time.monotonic(), self.limits_s[begun]

    def run(self) -> None:
        while not self.over.wait(LOOK_S):
            if time.monotonic() - self.since > self.limit_s:
                self.leave(f"nothing has come for {self.limit_s:g} s")
            elif self.is_asked():
                self.leave("another rank waits in vain")

    def end(self) -> None:
        self.over.set()
        self.join()

    def leave(self, why: str) -> None:
        try:
            self.say(why)
        finally:  # also where nobody reads what it says
            os._exit(1)  # the main thread may never come back

    def tell_of(self, error: Exception) -> None:
        """Tell the others of this rank's error, and say where they are.

        Where a rank has ended, the others only see that a connection was closed: they end here.
        """
        self.end()
        text = str(error).partition("\n")[0]
        if is_of_others := any(word in text for word in OF_OTHERS):
            text = "a connection was closed"
        self.at(f"{self.place}, failed ({type(error).__name__}: {text})")
        self.say("the others are asked")
        if is_of_others:
            sys.exit(1)

    def say(self, why: str) -> None:
        text = f"rank {self.rank}, {self.place}: {why}. {self.found()}"
        print(text, file=sys.stderr, flush=True)

    def is_asked(self) -> bool:
        left_s = self.limit_s - (time.monotonic() - self.since)
        try:
            asked = answered(lambda: self.store.check(["asked"]), min(self.hears_s, left_s))
        except (RuntimeError, NotMetError):
            self.hears_s *= 2
            return False  # who keeps the store may be done already
        self.hears_s = ANSWER_S
        return asked

    def found(self) -> str:
        """Ask all ranks where they are; say in words who does not answer, or where they are."""
        try:
            return answered(self.answers, 2 * ANSWER_S)
        except (RuntimeError, NotMetError):
            return SILENT

    def answers(self) -> str:
        self.store.set(f"at {self.rank}", self.place)
        self.store.set("asked", "")
        deadline = time.monotonic() + ANSWER_S
        lacking, places = [*range(self.world)], dict[str, list[int]]()
        while lacking and time.monotonic() < deadline:
            for rank in [rank for rank in lacking if self.store.check([f"at {rank}"])]:
                lacking.remove(rank)
                places.setdefault(self.store.get(f"at {rank}").decode(), []).append(rank)
            time.sleep(LOOK_S / 5)
        if lacking:
            return f"Ranks {lacking} do not answer: they have ended or stand still."
        each = sorted((sorted(ranks), place) for place, ranks in places.items())
        return "; ".join(f"ranks {ranks}: {place}" for ranks, place in each) + "."
