"""Hosts on one machine, joined by links of a given bandwidth and latency."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from partc.errors import RunError

SOURCE = Path(__file__).with_name("tunswitch.c")
DEVICE = Path("/dev/net/tun")
PORT = 29511  # where rank 0 listens; every network has namespaces, and so ports, of its own
MAX_HOSTS = 64
GRACE_S = 2.0  # for the switch to say what it has done
POLL_S = 0.05


@dataclass(frozen=True)
class Link:
    """What joins a host to the switch: bandwidth in each direction, and latency in one."""

    mbit_per_s: float
    latency_ms: float = 0.5


@dataclass(frozen=True)
class Traffic:
    """What a switch has done: its own processor time, and bytes on the wire per host."""

    cpu_s: float
    lost_packets: int
    sent_bytes: tuple[int, ...]


def missing() -> list[str]:
    """What this machine lacks to make a network, in words; empty if nothing."""
    here = {
        "root's rights": hasattr(os, "geteuid") and os.geteuid() == 0,
        "gcc": shutil.which("gcc") is not None,
        "nsenter": shutil.which("nsenter") is not None,
        str(DEVICE): DEVICE.exists(),
    }
    return [name for name, found in here.items() if not found]


class Network:
    """``num_hosts`` hosts while the ``with`` block runs; ``run`` starts a command on each.

    The switch makes the hosts' namespaces, holds them open, and ends with this process, however
    that ends, so no host outlives it. ``traffic`` is known after the block.
    """

    def __init__(self, num_hosts: int, link: Link) -> None:
        """RunError if the machine cannot do it."""
        _check(num_hosts, link)
        self.num_hosts, self.link = num_hosts, link
        self.traffic: Traffic | None = None

    def __enter__(self) -> Network:
        with tempfile.TemporaryDirectory() as folder:
            switch = _built(Path(folder))
            latency_us = self.link.latency_ms * 1e3
            self._switch = subprocess.Popen(
                [switch, str(self.num_hosts), str(self.link.mbit_per_s), str(latency_us)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert self._switch.stdout is not None
            state, *spaces = self._switch.stdout.readline().split() or [""]
        if state != "ready":
            _, error = self._switch.communicate()
            raise _no_network(error.strip() or f"exit code {self._switch.returncode}")
        self._spaces = [f"/proc/{self._switch.pid}/fd/{space}" for space in spaces]
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            said, _ = self._switch.communicate(timeout=GRACE_S)  # closes its input
            cpu_s, lost, *sent = said.split() or ["0", "0"]
            self.traffic = Traffic(float(cpu_s), int(lost), tuple(map(int, sent)))
        self._switch.kill()
        self._switch.wait()

    def change(self, link: Link) -> None:
        """Give all hosts another link, for the packets that follow."""
        _check(self.num_hosts, link)
        assert self._switch.stdin is not None
        self._switch.stdin.write(f"{link.mbit_per_s} {link.latency_ms * 1e3}\n")
        self._switch.stdin.flush()
        self.link = link

    def run(
        self,
        command: Sequence[str],
        timeout_s: float,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Run a command once on every host, as torchrun would have on machines of one rank each.

        It finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME.
        ``meanwhile`` is called again and again until they end. RunError if one fails, or if not all
        end in time; then all are ended.
        """
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank, space in enumerate(self._spaces):
                started.append(
                    subprocess.Popen(
                        ["nsenter", f"--net={space}", *command],
                        env=os.environ | self._surroundings(rank),
                        start_new_session=True,
                    )
                )
            _wait_for(started, timeout_s, meanwhile)
        finally:
            for process in started:
                _end(process)

    def _surroundings(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.num_hosts),
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "lab0",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns that the hosts have no names
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }


@contextlib.contextmanager
def ended_like_interrupt() -> Iterator[None]:
    """While the block runs, SIGTERM unwinds it as Ctrl-C does, so that what it started ends too."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _built(folder: Path) -> str:
    switch = str(folder / "tunswitch")
    done = subprocess.run(
        ["gcc", "-O2", "-o", switch, str(SOURCE)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise _no_network(done.stderr.strip())
    return switch


def _wait_for(
    processes: list[subprocess.Popen[bytes]], timeout_s: float, meanwhile: Callable[[], object]
) -> None:
    """Return when all have ended well; RunError at the first that has not."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            raise _rank_failed(failed[0], f"exit code {codes[failed[0]]}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise _rank_failed(codes.index(None), f"still running after {timeout_s:g} s")
        meanwhile()
        time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _check(num_hosts: int, link: Link) -> None:
    if lacks := missing():
        raise _no_network(f"there is no {', no '.join(lacks)}")
    if not 2 <= num_hosts <= MAX_HOSTS or link.mbit_per_s <= 0 or link.latency_ms < 0:
        raise _no_network(f"{num_hosts} hosts with {link} mean nothing")


def _no_network(why: str) -> RunError:
    return RunError(
        where="netlab",
        what="no network of limited bandwidth can be made here",
        why=why,
        do=f"It takes root, gcc, nsenter (util-linux), {DEVICE}, and 2 to {MAX_HOSTS} hosts.",
    )


def _rank_failed(rank: int, why: str) -> RunError:
    return RunError(
        where=f"netlab, rank {rank}",
        what="the command did not end well",
        why=why,
        do="Look at what it printed last; the other ranks were ended.",
    )
