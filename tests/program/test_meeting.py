"""Ranks that cannot begin, differ, are missing or stand still: all others are told, in seconds."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from partc.errors import RunError
from partc.program import start as begin
from partc.program.ranks import meeting, missing
from partc.program.ranks.meeting import (
    NotMetError,
    Watch,
    meet,
    open_store,
    start_group,
    tell,
)
from partc.verification.processes import Processes
from tests.example_program import example_program
from tests.forked_scripts import run_ranks
from tests.patience import patience

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.gloo


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store such as torchrun's agent keeps."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def where(port: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def refusal(port: int, comes: Callable[[int], dict[str, str] | str | None], seconds: float) -> str:
    """Let this rank come with what it says, or tell why it does not, or stay away."""
    os.environ.update(where(port))
    said = comes(dist.get_rank())
    if isinstance(said, str):
        tell(said)
        return said
    try:
        if said is not None:
            meet(open_store(seconds, keeps=False), said, seconds)
    except NotMetError as error:
        return str(error)
    return ""


def alike(rank: int) -> dict[str, str]:
    return {"--steps": "3"}


def other_on_2(rank: int) -> dict[str, str]:
    return {"--steps": "3", "--lr": "0.1" if rank == 2 else "0.01"}


def none_on_3(rank: int) -> dict[str, str] | str:
    return "there is no such file." if rank == 3 else {}


def none_on_0(rank: int) -> dict[str, str] | str:
    return "there is no such file." if rank == 0 else {}


def test_ranks_that_are_alike_meet(world: Processes, port: int) -> None:
    assert world.run(refusal, port, alike, patience()) == [""] * 4


def refused_then_met(port: int) -> tuple[bool, str]:
    """Whether a rank is told of an attempt that was refused, and what it hears in the next."""
    first = refusal(port, lambda rank: alike(rank) if rank else "no folder", 5)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    try:
        return "no folder" in first, refusal(port, alike, 5)
    finally:
        del os.environ["TORCHELASTIC_RESTART_COUNT"]


def test_a_restarted_job_does_not_hear_of_the_attempt_before(world: Processes, port: int) -> None:
    assert world.run(refused_then_met, port, num=2) == [(True, "")] * 2


@pytest.mark.parametrize(
    ("comes", "words"),
    [
        (other_on_2, "rank 2 has another --lr 0.1 (rank 0: 0.01). Start all ranks alike."),
        (none_on_3, "rank 3 cannot begin: there is no such file."),
        (none_on_0, "rank 0 cannot begin: there is no such file."),
    ],
)
def test_all_ranks_are_told_why_they_do_not_begin(
    comes: Callable[[int], dict[str, str] | str], words: str, world: Processes, port: int
) -> None:
    started = time.monotonic()
    found = world.run(refusal, port, comes, patience())
    assert time.monotonic() - started < patience(10)
    assert {text for text in found if text != "there is no such file."} == {words}


def test_who_keeps_the_store_waits_no_longer_than_the_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """WORLD_SIZE may count ranks that are not there, which never read why."""
    where_it_is = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in where_it_is.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "LINGER_S", 10 * patience())
    started = time.monotonic()
    tell("it has another number of ranks", 0.5)
    assert time.monotonic() - started < patience()


def weights_on_0(rank: int) -> dict[str, str]:
    return {"--weights": "a.safetensors"} if rank == 0 else {}


def test_what_rank_0_alone_has_is_another_start(world: Processes, port: int) -> None:
    found = world.run(refusal, port, weights_on_0, patience())
    (said,) = set(found)
    assert "has another --weights None (rank 0: a.safetensors)" in said


class Stopped:
    """A store whose process stands still: whoever asks waits."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *of: threading.Event().wait()


def test_a_store_that_stands_still_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "ANSWER_S", 0.2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NotMetError, match="Rank 0, which keeps the list, does not answer"):
        meet(Stopped(), {}, patience())  # type: ignore[arg-type]


class Closed:
    """A store whose process has ended: whoever asks is told of a closed connection."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        def ask(*of: object) -> bool:
            raise dist.DistNetworkError("recvValue failed: Connection was likely closed")

        return ask


def test_a_store_that_ends_while_ranks_meet_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NotMetError, match="Rank 0, which keeps the list, does not answer"):
        meet(Closed(), {}, patience())  # type: ignore[arg-type]


def test_a_rank_that_ends_while_others_connect_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def fail(*of: object, **how: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:553]\nmore")

    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(NotMetError, match=r"cannot connect, one may have ended: Gloo .*553\]$"):
        start_group("gloo", Closed())  # type: ignore[arg-type]


def test_a_watch_ends_where_the_store_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "ANSWER_S", 0.2)
    monkeypatch.setattr(meeting, "open_store", lambda *of, **how: Stopped())
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    watch = Watch(1.0, 1.0)

    def leave(why: str) -> None:
        watch.over.set()

    monkeypatch.setattr(watch, "leave", leave)
    watch.run()
    assert watch.over.is_set()
    assert watch.found() == meeting.SILENT


def not_on_1(rank: int) -> dict[str, str] | None:
    return None if rank == 1 else {}


def test_a_rank_that_never_comes_is_named(world: Processes, port: int) -> None:
    found = world.run(refusal, port, not_on_1, 2.0)
    assert set(found) == {"", "of 4 ranks, [1] did not come within 2 s."}


def answers(port: int, silent: int) -> str:
    """What the first rank hears that asks; the silent one does not listen to the store."""
    os.environ.update(where(port))
    watch = Watch(patience(), patience())
    watch.at(f"step {dist.get_rank() // 2}")
    if dist.get_rank() != silent:
        return watch.found()
    return ""


def test_ranks_that_do_not_answer_are_named(world: Processes, port: int) -> None:
    found = world.run(answers, port, 2)
    assert found == [
        "Ranks [2] do not answer: they have ended or stand still." if rank != 2 else ""
        for rank in range(4)
    ]


def test_where_all_answer_their_places_are_told(world: Processes, port: int) -> None:
    assert world.run(answers, port, -1) == ["ranks [0, 1]: step 0; ranks [2, 3]: step 1."] * 4


STOPS_ITSELF = """
import os, runpy, signal, sys
run = runpy.run_path(sys.argv.pop(1))
train = run["train"]

def stopped(step, batch, args, at):
    def at_or_stop(place, begun):
        at(place, begun)
        if os.environ["RANK"] == "1" and place == "step 2":
            os.kill(os.getpid(), signal.SIGSTOP)

    train(step, batch, args, at_or_stop)

train.__globals__["train"] = stopped
run["main"]()
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
        return number


def test_a_stopped_rank_ends_the_job_and_is_named(tmp_path: Path) -> None:
    example_program(2, 1).save(tmp_path / "build")
    script = tmp_path / "stops.py"
    script.write_text(STOPS_ITSELF)
    limits = ("--device", "cpu", "--timeout", "3", "--steps", "5")
    first, _ = run_ranks(script, str(tmp_path / "build/run.py"), *limits)
    assert "rank 0, step 2: nothing has come for 3 s. Ranks [1] do not answer" in first.text
    assert first.code == 1


LOADS = """
import os, sys, partc
from partc.errors import PartcError

folder = sys.argv[1 + int(os.environ["RANK"])]
try:
    partc.load(folder + "/nothing")
except PartcError:
    pass  # what a script catches is no reason
partc.load(folder).module()
"""


ONE_RANK_ALONE = """
import sys, os, partc

program = partc.load(sys.argv[1])
if os.environ["RANK"] == "0":
    program.module()
"""


def test_a_stage_of_one_rank_alone_does_not_wait(tmp_path: Path) -> None:
    """The other script ends without an error, and has made no stage."""
    example_program(2, 1).save(tmp_path / "build")
    script = tmp_path / "loads.py"
    script.write_text(ONE_RANK_ALONE)
    ranks = run_ranks(script, str(tmp_path / "build"))
    assert [rank.code for rank in ranks] == [1, 0]
    told = ranks[0].text
    assert "rank 0: the ranks do not meet (rank 1 cannot begin: its script has ended" in told
    assert "not behind `if rank == 0`" in told


def test_a_rank_says_that_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(missing, "WAIT_S", 0.05)
    with missing.said_if_waiting("program.module()"):
        time.sleep(0.5)
    assert "rank 0 has waited 0.05 s in program.module() for the other ranks" in caplog.text
    assert "not behind `if rank == 0`" in caplog.text


@pytest.mark.parametrize("launched", [False, True])
def test_numbers_that_a_shell_has_kept_are_named_soon(
    launched: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(missing, "ALONE_S", 0.05)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "gone.example")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with missing.said_if_alone():
        time.sleep(0.5)
    kept = "RANK=0, WORLD_SIZE=2, MASTER_ADDR=gone.example, MASTER_PORT=29500"
    assert (f"has waited 0.05 s for other ranks. It is one of several by its environment alone, "
            f"{kept}" in caplog.text) is not launched  # fmt: skip
    assert ("unset RANK WORLD_SIZE" in caplog.text) is not launched


JOINS = """
import torch
from partc.program.ranks.farewell import tell_at_exit
from partc.program.start import join
tell_at_exit()
join(torch.device("cpu"))
"""


def test_a_rank_that_joins_alone_says_what_its_environment_has(tmp_path: Path) -> None:
    port, script = free_port(), tmp_path / "joins.py"
    quick = "from partc.program import start\nfrom partc.program.ranks import missing\n"
    quick += "missing.ALONE_S, start.JOIN_S = 0.1, 2.0\n"
    script.write_text(without_launcher(port) + quick + JOINS)
    (alone,) = run_ranks(script, num=1)
    assert alone.code == 1
    assert f"RANK=0, WORLD_SIZE=2, MASTER_ADDR=127.0.0.1, MASTER_PORT={port}" in alone.text
    assert "of 2 ranks, [1] did not come within 2 s" in alone.text


def without_launcher(port: int) -> str:
    """Lines of a script that is one of two ranks by its environment alone."""
    given = {"WORLD_SIZE": "2", "MASTER_PORT": f"{port}", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return f"import os\nos.environ.update({given!r})\nos.environ.pop('TORCHELASTIC_RUN_ID')\n"


def test_an_interface_that_is_not_there_is_named(tmp_path: Path) -> None:
    script, names = tmp_path / "joins.py", "('nowhere0', 'lo')[int(os.environ['RANK'])]"
    script.write_text(f"import os\nos.environ['GLOO_SOCKET_IFNAME'] = {names}\n{JOINS}")
    wrong, other = run_ranks(script, ends_all=False)
    assert "GLOO_SOCKET_IFNAME=nowhere0: this host has no network interface nowhere0" in wrong.text
    assert "name one of lo" in wrong.text
    assert "rank 1: the ranks do not meet (rank 0 cannot begin" in other.text


def test_a_script_that_ends_before_it_joins_tells_the_others(tmp_path: Path) -> None:
    """Without torchrun: rank 1 has no folder, and rank 0 keeps the store."""
    example_program(2, 1).save(tmp_path / "build")
    script = tmp_path / "loads.py"
    script.write_text(without_launcher(free_port()) + LOADS)
    ranks = run_ranks(script, str(tmp_path / "build"), str(tmp_path / "none"), ends_all=False)
    assert [rank.code for rank in ranks] == [1, 1]
    assert "rank 0: the ranks do not meet (rank 1 cannot begin: LoadError" in ranks[0].text


@pytest.mark.parametrize(("rank", "why"), [(None, "RANK is not set"), ("2", "RANK is 2 of")])
def test_a_rank_without_its_number_is_told(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, why: str
) -> None:
    for name, text in {**where(1), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(RunError, match=why):
        begin.join(torch.device("cpu"))
