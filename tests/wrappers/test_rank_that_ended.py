"""Each call of a prepared model and its Accelerator says by what another rank has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked_scripts import run_ranks

SCRIPT = """
import sys, torch
from torch import nn
from partc.errors import TransferError
from partc.wrappers.accelerate import Accelerator

class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x):
        return {"loss": self.body(x).square().mean()}

model, x = Tower(), torch.ones(4, 8)
accelerator = Accelerator(mesh="pp=2", plan="ddp", cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
calls = {"a call of the model": lambda: model(x)}  # the first one compiles it
places = {}
if sys.argv[1] == "trained":
    places = {"a call of the model": "step 2"}
    loss = model(x)["loss"]
    calls |= {
        "loss.backward()": lambda: accelerator.backward(loss),
        "full_optim_state_dict": optimizer.state_dict,
        "gather": lambda: accelerator.gather(loss.detach()),
        "reduce": lambda: accelerator.reduce(loss.detach()),
        "gather_for_metrics": lambda: accelerator.gather_for_metrics("text"),
        "wait_for_everyone": accelerator.wait_for_everyone,
    }
for name, call in calls.items() if accelerator.process_index else ():
    try:
        call()
    except TransferError as error:
        print(f"rank 1, {name}: {'rank 0 has ended: its script came' in str(error)}", flush=True)
        where = places.get(name, name)
        assert str(error).startswith(f"rank 1, {where}: a transfer failed"), str(error)
"""
NAMES = ["a call of the model", "loss.backward()", "full_optim_state_dict", "gather", "reduce",
         "gather_for_metrics", "wait_for_everyone"]  # fmt: skip


FIRST = """
import sys, torch, torch.distributed as dist
from torch import nn
import partc
from partc.errors import TransferError

dist.init_process_group("gloo")
x, loss = torch.ones(2, 4), lambda model, x: model(x).mean()
made = lambda **named: partc.parallelize(nn.Linear(4, 4), "dp=2", plan="fsdp", **named)
calls = {
    "step": lambda: made(loss=loss).step(x),
    "eval_step": lambda: made(loss=loss).eval_step(x),
    "compile_for": lambda: made(loss=loss).compile_for(x),
    "another loss": lambda: made(loss=loss).also(loss).step(x),
    "forward": lambda: made()(x),
    "evaluation": lambda: made().eval()(x),
}
model = made()
if dist.get_rank() == 0:
    exec({"fails": "1 / 0", "exits": "sys.exit(0)"}[sys.argv[1]])
for name, call in calls.items():
    try:
        call()
    except TransferError as error:
        print("rank 1,", name, error, flush=True)
"""
ENDS = {
    "fails": "has failed: ZeroDivisionError", "exits": "has ended: its script came to its end",
}  # fmt: skip


@pytest.mark.gloo
@pytest.mark.parametrize("how", ENDS)
def test_a_first_call_names_the_rank_that_has_ended(tmp_path: Path, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(FIRST)
    told = run_ranks(script, how, ends_all=False)[1].text  # a launcher may let the others go on
    named = [line for line in told.splitlines() if f"failed: rank 0 {ENDS[how]}" in line]
    assert len(named) == 6, told


@pytest.mark.rows(1)
@pytest.mark.gloo
@pytest.mark.parametrize("when", ["trained", "new"])
def test_every_call_of_all_ranks_names_the_one_that_has_ended(tmp_path: Path, when: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    told = run_ranks(script, when)[1].text
    said = [line for line in told.splitlines() if line.startswith("rank 1")]
    names = NAMES if when == "trained" else NAMES[:1]
    assert said == [f"rank 1, {name}: True" for name in names], told
