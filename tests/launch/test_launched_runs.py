"""Runs that are started by the files of `partc launch`, on two nodes: compared with one process,
interrupted, gone on with.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

import partc
from benchmarks.netlab import network
from benchmarks.netlab.network import Link, Network
from partc.cli.main import main
from tests.docs.pages import ROOT, blocks
from tests.forked_scripts import run_script
from tests.launch.saved import saved_program
from tests.patience import patience

PAGE = ROOT / "docs" / "how-to" / "launch-on-a-cluster.md"
MORE = 30  # steps of a run that goes on
STEP = re.compile(r"step (\d+) +loss (\d+\.\d+)")
FEW = 1e-5  # of the first loss: float32, and ranks sum in another order

pytestmark = pytest.mark.gloo


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's script, its program, and the files for two nodes of one rank."""
    monkeypatch.chdir(tmp_path)
    script = next(block for block in blocks(PAGE) if block.told == "train.py")
    (tmp_path / "train.py").write_text(script.text, encoding="utf-8")
    model, batch, loss = script_of(tmp_path).setup()
    partc.compile(model, "dp=2", batch, loss=loss, plan="fsdp").save("build")
    assert main([
        "launch", "build", "--emit", "torchrun", "--script", "train.py",
        "--devices-per-node", "1", "--grace", "20", "--restarts", "2",
    ]) == 0  # fmt: skip
    return tmp_path


def script_of(folder: Path) -> Any:
    spec = spec_from_file_location("launched_train", folder / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def two_nodes(folder: Path, steps: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Both nodes of a job on this host; all that they have started ends with the block."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    port = 29500 + os.getpid() % 400 * 8  # attempts take the next ones
    more = {
        "PATH": path, "PYTHONPATH": str(ROOT), "MASTER_PORT": str(port), "LOOK_S": "1",
        "STEPS": str(steps), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    nodes = []
    try:
        for number in range(2):
            name, _, sign = sign_of(number).partition("=")
            with (folder / f"node-{number}.log").open("ab") as log:
                nodes.append(
                    subprocess.Popen(
                        ["launch/torchrun.sh", str(number), "127.0.0.1"], cwd=folder,
                        env={**os.environ, **more, name: sign}, stdout=log, stderr=log,
                    )
                )  # fmt: skip
        yield nodes
    finally:
        for number, node in enumerate(nodes):
            for process, _ in processes_of(number):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            node.wait()


def processes_of(node: int) -> Iterator[tuple[int, list[bytes]]]:
    """All that a node has started: numbers, and environments. Ranks have sessions of their own."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "environ").read_bytes().split(b"\0")
            if sign_of(node).encode() in words:
                yield int(process.name), words


def sign_of(node: int) -> str:
    return f"LAUNCHED_NODE={os.getpid()}-{node}"


def ranks_of(node: int) -> list[int]:
    """The processes of a node's ranks."""
    return [
        process for process, words in processes_of(node)
        if any(word.startswith(b"LOCAL_RANK=") for word in words)
    ]  # fmt: skip


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step that rank 0 has printed; of a step that was done twice the last."""
    return {int(n): float(loss) for n, loss in STEP.findall(log_of(folder, 0))}


def log_of(folder: Path, node: int) -> str:
    return (folder / f"node-{node}.log").read_text(encoding="utf-8", errors="replace")


def wait_until(holds: Callable[[], bool], folder: Path) -> None:
    until = time.monotonic() + patience()
    while not holds():
        assert time.monotonic() < until, log_of(folder, 0) + log_of(folder, 1)
        time.sleep(0.05)


def alone(folder: Path, steps: int) -> dict[int, float]:
    """The losses of the undistributed model, in this process."""
    model, batch, loss_of = script_of(folder).setup()
    optimizer, found = torch.optim.AdamW(model.parameters(), 1e-2), {}
    for step in range(1, steps + 1):
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[step] = loss.item()
    return found


@pytest.mark.exhaustive
def test_a_run_that_is_stopped_and_ended_comes_to_the_same_losses(folder: Path) -> None:
    with two_nodes(folder, 10**9) as nodes:
        wait_until(lambda: len(losses(folder)) > 25, folder)  # behind the first checkpoint
        (rank,) = ranks_of(1)
        os.kill(rank, signal.SIGSTOP)  # it hears nothing any more
        wait_until(lambda: "attempt 1 of build" in log_of(folder, 1), folder)
        assert f"process {rank}, of a rank, is stopped" in log_of(folder, 1)
        before = len(STEP.findall(log_of(folder, 0)))
        wait_until(lambda: len(STEP.findall(log_of(folder, 0))) > before + 5, folder)
        nodes[1].terminate()  # the notice reaches one node; its rank tells the other
        assert nodes[1].wait(patience()) == 143
        nodes[0].terminate()
        assert nodes[0].wait(patience()) == 143
    done = max(losses(folder))
    assert (folder / "checkpoints" / f"step-{done:08d}" / "checkpoint.json").is_file()
    with two_nodes(folder, done + MORE) as nodes:
        assert [node.wait(patience()) for node in nodes] == [0, 0]
    compare(losses(folder), alone(folder, done + MORE))
    logs = sorted((folder / "logs" / "build").glob("node-*/*/attempt_0/0/stdout.log"))
    assert len(logs) == 2 * 3  # of two nodes and three attempts


def compare(found: Mapping[int, float], expected: Mapping[int, float]) -> None:
    assert found.keys() == expected.keys()
    most = FEW * expected[min(expected)]
    assert {n: (found[n], e) for n, e in expected.items() if abs(found[n] - e) > most} == {}


@pytest.mark.exhaustive
def test_a_node_says_why_it_cannot_begin(folder: Path) -> None:
    (folder / "train.py").unlink()
    blocked = folder / "checkpoints"
    blocked.write_text("a file in its place")
    for said in ("checkpoints cannot be written", "there is no train.py here"):
        done = subprocess.run(
            ["launch/torchrun.sh", "0", "127.0.0.1"], cwd=folder, capture_output=True, text=True,
            check=False, timeout=patience(),
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        )  # fmt: skip
        assert done.returncode == 1
        assert said in done.stderr
        if blocked.is_file():
            blocked.unlink()
    done = subprocess.run(["launch/torchrun.sh"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2
    assert "NODE from 0 to 1" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(network.missing()), reason=f"no {network.missing()}")
def test_two_hosts_of_a_network_compute_what_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved_program("dp=2").save("build")
    saved_program("dp=1").save("one")
    words = ["launch", "build", "--emit", "torchrun", "--devices-per-node", "1"]
    assert main([*words, "--interface", "lab0", "--args=--steps 4"]) == 0
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    with Network(2, Link(mbit_per_s=1000)) as net:
        start = 'launch/torchrun.sh "$RANK" 10.77.0.1 > "host-$RANK" 2>&1'
        net.run(["bash", "-c", f"unset MASTER_PORT; {start}"], timeout_s=patience())
    told = run_script(tmp_path / "one/run.py", "--steps", "4", "--device", "cpu").text
    found, expected = (
        {int(n): float(loss) for n, loss in STEP.findall(text)}
        for text in ((tmp_path / "host-0").read_text(), told)
    )
    assert len(expected) == 4
    compare(found, expected)
