"""A rank that stands still is named and ended, and no other one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from partc.cli.main import main
from partc.failures.rank_processes import RankProcess, is_runnable, rank_processes
from partc.failures.standing import Limits, Seen, standing, told
from partc.failures.watchdog import Watchdog
from partc.heartbeats import Heartbeat, read, write
from tests.patience import patience

LIMITS = Limits(5.0, 300.0)
BEAT = Heartbeat(0, 100, 7, "step 3", True, 6, 90.0, "stage0.py:9 y.wait() for h.1 at net.py:4")


def seen(rank: int, spoke_at: float = 99.9, **beat: object) -> Seen:
    process = RankProcess(100 + rank, rank, "S", 1)
    given = {"rank": rank, "pid": process.pid, "waits": True, **beat}
    return Seen(process, spoke_at, replace(BEAT, **given))  # type: ignore[arg-type]


def of(*each: Seen) -> dict[int, Seen]:
    return {one.process.pid: one for one in each}


def test_the_limits_follow_from_the_steps() -> None:
    assert Limits.of(0.01) == Limits(5.0, 300.0)
    assert Limits.of(2.0) == Limits(20.0, 300.0)
    assert Limits.of(60.0) == Limits(600.0, 6000.0)
    assert Limits.of(100.0) == Limits(600.0, 10000.0)
    assert Limits.of(60.0, 3.0, 4.0) == Limits(3.0, 4.0)


def test_nobody_stands_still_who_speaks() -> None:
    assert standing(of(seen(0), seen(1)), LIMITS, 100.0) == []
    late = seen(1, 91.0)
    assert standing(of(seen(0), late), LIMITS, 100.0) == []
    assert [each.seen for each in standing(of(seen(0), late), LIMITS, 101.1)] == [late]


def test_a_stopped_process_is_found_within_a_step_timeout() -> None:
    one, other = seen(0), seen(1)
    for at, found in ((100.0, []), (104.9, []), (105.1, [one])):
        one.look(one.process._replace(state="T"), None, at)
        assert [each.seen for each in standing(of(one, other), LIMITS, at)] == found
    one.look(one.process._replace(state="S"), None, 106.0)
    one.look(one.process._replace(state="T"), None, 107.0)  # it was let go on meanwhile
    assert standing(of(one, other), LIMITS, 109.0) == []


def test_a_process_in_a_debugger_may_be_silent() -> None:
    one = seen(0, 10.0)
    one.look(one.process._replace(state="t"), None, 100.0)
    assert standing(of(one), LIMITS, 100.0) == []


def test_of_ranks_that_come_no_further_the_one_that_does_not_wait_is_meant() -> None:
    """It may have moved last: it is in the script, and the others wait for it in a step."""
    stuck = seen(1, 500.0, waits=False, inside=False, moved_at=95.0)
    ranks = of(seen(0, 500.0), stuck, seen(2, 500.0, moved_at=91.0))
    assert standing(ranks, LIMITS, 394.0) == []
    [found] = standing(ranks, LIMITS, 396.0)
    assert found.seen is stuck
    text = told(found, ranks, 396.0)
    assert text.startswith("rank 1 (process 101) stands still: no rank has come on for 301.0 s.")
    assert "rank 0: since 306.0 s in step 3, at stage0.py:9 y.wait() for h.1 at net.py:4" in text
    assert "rank 1: since 301.0 s behind step 3" in text
    assert text.count("the first to go silent") == 1
    all_wait = of(seen(0, 500.0, moved_at=92.0), seen(1, 500.0, moved_at=91.0))
    assert standing(all_wait, LIMITS, 500.0)[0].seen.process.rank == 1


def test_nobody_is_stalled_before_all_have_begun() -> None:
    ranks = of(seen(0, 900.0), seen(1, 900.0, moves=0, call=""))
    assert standing(ranks, LIMITS, 900.0) == []


def test_a_process_that_would_run_on_a_quieter_host_is_not_silent() -> None:
    busy = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    idle = subprocess.Popen(["sleep", "600"])
    said: list[str] = []
    watchdog = Watchdog(["true"], 5.0, say=said.append)
    processes = [RankProcess(each.pid, rank, "S", 0) for rank, each in enumerate((busy, idle))]
    beats = {each.pid: Heartbeat(each.rank, each.pid, 3) for each in processes}
    try:
        rests = 0
        while rests < 5:  # a process that has still to begin is about to run
            time.sleep(0.05)
            rests = 0 if is_runnable(idle.pid) else rests + 1
        for now in (100.0, 106.0, 111.0):
            watchdog.look(processes, beats, now)
    finally:
        busy.kill()
        idle.kill()
        busy.wait()
        idle.wait()
    assert [each["rank"] for each in watchdog.ended] == [1]
    assert "rank 1" in said[0]


def test_time_in_which_the_host_slept_counts_for_nobody() -> None:
    watchdog = Watchdog(["true"])
    watchdog.known = of(seen(0, 100.0))
    watchdog._forgive(50.0)
    assert watchdog.known[100].spoke_at == 150.0


def test_heartbeats_come_back_as_they_were(tmp_path: Path) -> None:
    write(tmp_path, BEAT)
    write(tmp_path, replace(BEAT, rank=1, pid=101))
    (tmp_path / "rank-00002.json").write_text('{"rank": 2')
    (tmp_path / "rank-00003.json").write_text('{"rank": 3, "name": 1}')
    assert read(tmp_path) == {100: BEAT, 101: replace(BEAT, rank=1, pid=101)}
    assert len([*tmp_path.iterdir()]) == 4


# processes -----------------------------------------------------------------------------------
LAUNCHER = """
    import os, signal, subprocess, sys, time

    def start(attempt):
        ranks = []
        for rank in "01":
            given = {**os.environ, "RANK": rank, "ATTEMPT": str(attempt)}
            ranks.append(subprocess.Popen([sys.executable, sys.argv[1]], env=given))
        return ranks

    attempt, ranks = 0, start(0)
    while any(each.poll() is None for each in ranks):
        if any(each.poll() for each in ranks):
            for each in ranks:
                each.kill()
            attempt, ranks = attempt + 1, start(attempt + 1)
        time.sleep(0.01)
"""
RANK = """
    import os, signal, subprocess, sys, time
    from pathlib import Path

    if os.environ["RANK"] == "1":  # a worker, which has the rank's environment
        worker = subprocess.Popen(["sleep", "100"])
    if os.environ["RANK"] + os.environ["ATTEMPT"] == "10":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.3 if os.environ["ATTEMPT"] == "1" else 600)
    if os.environ["RANK"] == "1":
        worker.kill()
"""


def scripts(folder: Path, rank: str = RANK) -> list[str]:
    for name, text in (("launcher.py", LAUNCHER), ("rank.py", rank)):
        (folder / name).write_text(textwrap.dedent(text))
    return [sys.executable, str(folder / "launcher.py"), str(folder / "rank.py")]


def test_a_launcher_starts_again_behind_a_stopped_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of any script; a rank without a program of partc's has no site."""
    line = ["watchdog", "--json", "--step-timeout", "0.5", "--", *scripts(tmp_path)]
    assert main(line) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert found["code"] == 0
    assert [each["rank"] for each in found["ended"]] == [1]
    assert "stands still: it is stopped, for " in err
    assert "rank 0: it has told nothing yet" in err
    assert "A step's time-out is 0.5 s. Rank 1 is ended by SIGKILL" in err


NOTED = """
    import os, signal, time
    from pathlib import Path

    def note(number, frame):
        Path(f"noted-{os.environ['RANK']}").write_text(str(number))
        raise SystemExit

    signal.signal(signal.SIGUSR1, note)
    Path(f"ready-{os.environ['RANK']}").touch()
    time.sleep(600)
"""


def test_notices_reach_the_ranks_and_no_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGUSR1 would end torchrun."""
    monkeypatch.chdir(tmp_path)
    watchdog = Watchdog(scripts(tmp_path, NOTED))
    before = signal.getsignal(signal.SIGUSR1)

    def tell() -> None:
        end = time.monotonic() + patience(60.0)
        while not all(Path(f"ready-{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=tell)
    thread.start()
    assert watchdog.run() == 0
    thread.join()
    assert [Path(f"noted-{rank}").read_text() for rank in (0, 1)] == [f"{int(signal.SIGUSR1)}"] * 2
    assert signal.getsignal(signal.SIGUSR1) == before


def test_the_exit_code_is_the_launchers() -> None:
    for line, code in (("exit 3", 3), ("kill -9 $$", 137)):
        assert Watchdog(["sh", "-c", line]).run() == code
    assert main(["watchdog", "--", "no such command"]) == 2


def test_workers_of_a_rank_are_no_ranks(tmp_path: Path) -> None:
    text = RANK.replace("os.kill(os.getpid(), signal.SIGSTOP)", 'Path("ready").touch()')
    launcher = subprocess.Popen(scripts(tmp_path, text), cwd=tmp_path)
    try:
        end = time.monotonic() + patience(60.0)
        while not (tmp_path / "ready").exists() or len(rank_processes(launcher.pid)) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        found = rank_processes(launcher.pid)
        assert sorted(each.rank for each in found) == [0, 1]
        assert {each.state for each in found} <= {*"RSD"}
    finally:
        for each in rank_processes(launcher.pid):
            for child in Path(f"/proc/{each.pid}/task/{each.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
        launcher.kill()
        for each in found:
            os.kill(each.pid, signal.SIGKILL)
        launcher.wait()
