"""Hidden communication: its formula and table, a step's recorded calls, and two hosts' network."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.call_tape import Event, Handle, Tape, compute_alone, record
from benchmarks.netlab import network
from benchmarks.netlab.network import Link, Network
from benchmarks.overlap import parsed
from benchmarks.overlap_table import Round, Row, hidden_share, own_order, table
from partc.errors import RunError
from partc.verification.processes import Processes
from tests.patience import patience


@pytest.mark.parametrize(("step", "share"), [(300.0, 1.0), (550.0, 0.0), (400.0, 0.6)])
def test_hidden_share_is_of_the_shorter(step: float, share: float) -> None:
    assert hidden_share(step, compute=300.0, communication=250.0) == pytest.approx(share)
    assert hidden_share(step, compute=250.0, communication=300.0) == pytest.approx(share)


def test_own_order_waits_for_transfers_that_run_one_after_the_other() -> None:
    """Two transfers of 4 s start at 1 and 2; the first is waited for at 3, the other at the end.

    Computing stops from 3 to 5; the second ends at 9, when 6 s of computing have ended at 8.
    """
    events = [
        Event(0, waits=False, at_s=1.0),
        Event(1, waits=False, at_s=2.0),
        Event(0, waits=True, at_s=3.0),
        Event(1, waits=True, at_s=6.0),
    ]
    assert own_order(events, 6.0, [4.0, 4.0]) == pytest.approx(9.0)
    assert own_order(events, 6.0, [0.0, 0.0]) == pytest.approx(6.0)


def test_table_has_medians_and_says_nothing_of_what_was_not_found() -> None:
    rounds = tuple(
        Round(step=step, compute=0.3, communication=0.2, own_order=None, peer=0.5)
        for step in (0.36, 0.40, 0.38)
    )
    lines = table([Row("pp=2,dp=2", 250.0, "Schedule1F1B", rounds)]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells[:3] == ["pp=2,dp=2", "250", "380 (370-390)"]
    assert cells[6:9] == ["0.60 (0.55-0.65)", "-", "-"]
    assert cells[-1] == "0.76 (0.74-0.78)"


def test_command_line() -> None:
    options = parsed(["--layouts", "ddp=2", "--mbit", "250", "1000"])
    assert (options.layouts, options.mbit, options.rounds) == (["ddp=2"], [250.0, 1000.0], 3)
    with pytest.raises(SystemExit):
        parsed(["--layouts", "ddp=3"])


@pytest.mark.gloo
def test_recorded_calls_can_be_left_out_and_repeated() -> None:
    """The step without transfers has the same result; the transfers alone are all there are."""
    with Processes(2, timeout=patience(), quiet=True) as world:
        for whole, alone, order in world.run(_taped_rank):
            assert torch.equal(whole, alone)
            assert order == [(0, False), (1, False), (1, True), (0, True), (2, False), (2, True)]


def _taped_rank() -> tuple[Tensor, Tensor, list[tuple[int, bool]]]:
    rank = dist.get_rank()
    results: list[Tensor] = []

    def step() -> None:
        x, gathered = torch.full((4,), rank + 1.0), torch.empty(8)
        done = dist.all_gather_single(gathered, x.clone(), async_op=True)
        dist.all_reduce(x)
        done.wait()
        got = torch.empty(4)
        message = dist.isend(x, 1) if rank == 0 else dist.irecv(got, 0)
        assert message is not None
        message.wait()
        results.append(torch.cat([x, gathered, x if rank == 0 else got]))

    tape = record(step)
    seconds, events = compute_alone(tape, step)
    assert seconds >= max(event.at_s for event in events)
    order = [(event.call, event.waits) for event in events]
    assert order == [(event.call, event.waits) for event in tape.events]
    sent = tape.calls[1].arguments[0].fill_(rank + 1.0)  # the stand-in for the reduced x
    assert tape.replay() > 0
    assert sent.tolist() == [3.0] * 4
    assert len(Tape(tape.calls[:2]).replay_each()) == 2
    return results[0], results[1], order


def test_a_handle_acts_once() -> None:
    acted: list[int] = []
    handle = Handle(lambda: acted.append(1))
    assert handle.wait()
    assert handle.wait()
    assert acted == [1]


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "missing", lambda: ["gcc", "/dev/net/tun"])
    with pytest.raises(RunError, match=r"there is no gcc, no /dev/net/tun"):
        Network(2, Link(1000.0))


on_netlab = pytest.mark.skipif(bool(network.missing()), reason=f"no {network.missing()}")


@pytest.mark.exhaustive
@on_netlab
def test_a_tensor_takes_as_long_as_its_link_allows(tmp_path: Path) -> None:
    """1 MB at 40 Mbit/s are 0.2 s, were the network without limit it would be milliseconds."""
    script = tmp_path / "send.py"
    script.write_text(
        textwrap.dedent("""
            import sys, time
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            x = torch.full((250_000,), float(dist.get_rank()))
            dist.barrier()
            start = time.perf_counter()
            dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
            seconds = time.perf_counter() - start
            if dist.get_rank() == 1:
                open(sys.argv[1], "w").write(f"{x.sum().item()} {seconds}")
            dist.barrier()
            dist.destroy_process_group()
        """)
    )
    with Network(2, Link(mbit_per_s=40.0)) as lab:
        lab.run([sys.executable, str(script), str(tmp_path / "got")], timeout_s=patience())
    total, seconds = map(float, (tmp_path / "got").read_text().split())
    assert total == 0.0
    assert 0.19 < seconds < patience(2.0)
    assert lab.traffic is not None
    assert 1_000_000 < lab.traffic.sent_bytes[0] < 1_200_000


@on_netlab
@pytest.mark.parametrize(
    ("command", "why"), [(["false"], "exit code 1"), (["sleep", "3600"], "still running after")]
)
def test_a_rank_that_fails_or_hangs_ends_all(command: list[str], why: str) -> None:
    with pytest.raises(RunError, match=why), Network(2, Link(1000.0)) as lab:
        lab.run(command, timeout_s=patience(1.0))  # not to the end of the hour that one would sleep
