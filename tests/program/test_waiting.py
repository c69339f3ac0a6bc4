"""A rank that leaves its loop a batch earlier is named by the ranks that wait for it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from partc.api import compile
from partc.program.ranks import waiting
from partc.program.ranks.places import Place, apart, elsewhere, stand
from partc.verification.processes import Processes
from tests.forked_scripts import run_ranks
from tests.patience import patience

UNEVEN = """
import torch, torch.distributed as dist
from torch import nn
import partc
from partc.program.ranks import waiting

waiting.WAIT_S, waiting.END_S, waiting.LOOK_S = 1.0, 2.0, 0.2
model = partc.parallelize(
    nn.Linear(4, 4), "dp=2", plan="ddp", loss=lambda model, x: model(x).square().mean()
)
dist.init_process_group("gloo")
for _ in range(4 - dist.get_rank()):
    model.step(torch.ones(2, 4) + dist.get_rank())
dist.barrier()
"""
ALONE = """
import sys, torch, torch.distributed as dist
from torch import nn
import partc
from partc.program.ranks import waiting

waiting.WAIT_S, waiting.END_S, waiting.LOOK_S = 1.0, 3.0, 0.2
dist.init_process_group("gloo")
model = partc.parallelize(nn.Linear(4, 4), "dp=2", plan="fsdp")
optimizer = torch.optim.Adam(model.parameters())
calls = {
    "first": lambda: model(torch.ones(2, 4)),
    "states": lambda: model.state_dict(),
    "norm": lambda: [p.norm() for p in model.parameters()],
    "clips": lambda: model.clip_grad_norm_(1.0),
    "optimizer": lambda: model.full_optim_state_dict(optimizer),
}
if sys.argv[1] != "first":
    model(torch.ones(2, 4) + dist.get_rank()).mean().backward()
    optimizer.step()
if dist.get_rank() == 0:
    calls[sys.argv[1]]()
dist.barrier()
"""
IN_ALONE = {  # what is said of each of its calls, and the last one of the other rank
    "first": ("a call of the model, at train.py:12 (", "none"),
    "states": ("full_state_dict, at train.py:13 (", "backward 1"),
    "norm": ("train.py:14 (", "backward 1"),
    "clips": ("clip_grad_norm_, at train.py:15 (", "backward 1"),
    "optimizer": ("full_optim_state_dict, at train.py:16 (", "backward 1"),
}
AT = "has not begun it: its last was step 3, and it is at train.py:14 ({})"
STANDS = Place("step 3", inside=False, line="train.py:9", waits=True, moves=6, beat=2)


@pytest.mark.gloo
def test_a_rank_with_fewer_batches_is_named_and_the_job_ends(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNEVEN)
    first, _ = run_ranks(script)
    assert first.code
    place = (
        "rank 1 has not begun it: its last was step 3, and it is at train.py:14 (dist.barrier())"
    )
    assert f"rank 0, step 4: it has waited 1 s; {place}" in first.text
    assert f"rank 0 ends: rank 0, step 4: it has waited 2 s; {place}" in first.text
    assert "drop_last=True" in first.text


@pytest.mark.gloo
def test_what_a_script_sends_is_not_taken_for_a_comparison(tmp_path: Path) -> None:
    """Three numbers, where those that compare send others: gloo would abort the process."""
    sends = "dist.all_reduce(torch.zeros(3))"
    script = tmp_path / "train.py"
    script.write_text(UNEVEN.replace("dist.barrier()", sends))
    ended = run_ranks(script)
    said = f"rank 0 ends: rank 0, step 4: it has waited 2 s; rank 1 {AT.format(sends)}"
    assert said in ended[0].text
    assert not any("terminate called" in each.text for each in ended)


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize("call", IN_ALONE)
def test_a_call_behind_if_rank_0_is_named_on_both_sides(tmp_path: Path, call: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(ALONE)
    ended = run_ranks(script, call)
    assert ended[0].code
    at, last = IN_ALONE[call]
    lines = [line for line in ended[0].text.splitlines() if "has waited 1 s" in line]
    told = f"rank 0, {at}"
    place = f"its last was {last}, and it is at train.py:23 (dist.barrier())"
    assert any(line.startswith(f"partc: {told}") and place in line for line in lines), ended
    others = ended[1].text.splitlines()
    assert any(line.startswith(f"partc: rank 1 is waited for: {told}") for line in others), ended
    assert f"partc, rank 0 ends: {told}" in ended[0].text
    assert "not behind `if rank == 0`" in lines[0]


LEAVES = """
import os
import torch
from torch import nn
import partc

rank = int(os.environ["RANK"])
model = partc.parallelize(
    nn.Linear(4, 4), "dp=2", plan="ddp", loss=lambda model, x: model(x).square().mean()
)
for step in range(3):
    model.step(torch.ones(2, 4) + rank)
if rank == 0:
    model.step(torch.ones(2, 4))
"""


@pytest.mark.gloo
def test_a_rank_that_has_left_is_named_where_another_fails(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LEAVES)
    first, _ = run_ranks(script)
    assert first.code
    lines = [line for line in first.text.splitlines() if "TransferError" in line]
    assert lines, first.text
    assert "rank 0, step 4: a transfer failed: rank 1 has ended: its script came" in lines[0]
    assert "to its end, behind step 3" in lines[0]
    assert "drop_last=True" in lines[0]


def ended(folder: Path, **streams: Any) -> Any:
    """The two ranks of ``UNEVEN``, the first of which kills their launcher, once both have ended:
    they hold a file's lock till then.
    """
    kills = (  # once both have joined and made stages, for which they need the launcher's store
        "model.compile_for(torch.ones(2, 4))\n"
        "dist.barrier()\nif dist.get_rank() == 0:\n    os.kill(os.getppid(), 9)\nfor _ in range(4 -"
    )
    holds = (
        f"import fcntl, os\nheld = open({str(folder / 'lock')!r}, 'w')\n"
        "fcntl.flock(held, fcntl.LOCK_SH)\n"
    )
    script = holds + UNEVEN.replace("for _ in range(4 -", kills)
    (folder / "train.py").write_text(
        script.replace("END_S, ", "END_S, waiting._ANSWER_S, ").replace(
            "1.0, 2.0, ", "1.0, 2.0, 2.0, "
        )
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    args = [*torchrun, "--nproc-per-node", "2", str(folder / "train.py")]
    done = subprocess.run(args, timeout=patience(), check=False, text=True, **streams)
    subprocess.run(["flock", str(folder / "lock"), "true"], timeout=patience(), check=True)
    return done


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_ranks_that_wait_end_behind_their_launcher(tmp_path: Path) -> None:
    done = ended(tmp_path, capture_output=True)  # the other may end of the first one's connection
    assert any(f"ends: rank {rank}, train.py:" in done.stderr for rank in (0, 1))
    assert "it has waited for other ranks for 2 s; its last call was step 4" in done.stderr
    assert "torch's store is gone: the launcher has ended" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_ranks_end_too_where_nobody_reads_what_they_say(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended(tmp_path, stdout=writing, stderr=writing)
    os.close(writing)


def slow(seconds: float) -> list[str]:
    """What each rank tells where the second one comes to its second step late."""
    waiting.WAIT_S, waiting.LOOK_S = seconds, seconds / 10
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("partc").addHandler(handler)
    x = torch.ones(4, 8)
    model = nn.Linear(8, 4)
    stage = compile(model, "dp=2", (x,), loss=lambda m, x: m(x).mean(), plan="ddp").module()
    stage.step(x)
    time.sleep(4 * seconds * dist.get_rank())
    stage.step(x)
    stage.step(x)
    return [text for text in told if "has waited" in text]


@pytest.mark.gloo
def test_a_rank_that_is_late_is_named_once_and_nothing_ends(world: Processes) -> None:
    first, second = world.run(slow, 1.5, num=2)  # no other wait is as long on a loaded machine
    assert len(first) == 1
    assert (
        "rank 0, step 2: it has waited 1.5 s; rank 1 has not begun it: its last was step 1"
        in (first[0])
    )
    assert second == []


@pytest.mark.parametrize(
    ("now", "stands"),
    [
        (replace(STANDS, beat=3), True),
        (replace(STANDS, beat=3, waits=False, inside=True), True),
        (replace(STANDS, beat=3, waits=False), False),
        (replace(STANDS, beat=3, moves=7), False),
        (STANDS, False),
    ],
    ids=["in a barrier", "in a step", "it computes", "it came on", "it says nothing new"],
)
def test_ranks_end_only_where_all_of_them_wait(now: Place, stands: bool) -> None:
    assert stand({1: STANDS}, {1: now}, 1) == stands
    assert not stand({1: STANDS}, {1: now}, 2)


def test_a_rank_that_has_ended_the_step_is_not_named() -> None:
    assert apart("step 7", {1: replace(STANDS, call="step 7")}) == {}
    assert [*apart("step 7", {1: replace(STANDS, call="step 6")})] == [1]
    assert apart("step 7", {1: replace(STANDS, call="step 6", inside=True)}) == {}


def test_a_rank_that_has_begun_as_many_calls_is_not_named() -> None:
    far = replace(STANDS, call="save_checkpoint 2", begun={"step": 7})
    assert apart("step 7", {1: far}) == {}
    assert [*apart("step 8", {1: far})] == [1]


def test_ranks_at_one_line_wait_together() -> None:
    there = {1: STANDS, 2: replace(STANDS, line="train.py:3"), 3: replace(STANDS, waits=False)}
    assert [*elsewhere("train.py:9", there)] == [2, 3]
