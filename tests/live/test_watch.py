"""``partc watch``: what is read of a run's files, judged and shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import partc
from partc.cli.main import main
from partc.errors import UsageError
from partc.live.run_facts import losses, paces, promised, restarts, slowest, state
from partc.live.run_files import DATA_S, STEP_S, WAITS_S, read_run
from partc.live.run_page import run_page
from partc.live.run_text import curve, run_text
from partc.metrics import JsonLines, Meter
from partc.verification.processes import Processes
from tests.patience import patience
from tests.reports.report_programs import Net, compiled

LOSS = "loss_metrics/global_avg_loss"


def write(folder: Path, rank: int, steps: int = 10, **numbers: float) -> JsonLines:
    """Lines as a loop writes them: step time, wait for data, and the wait for other ranks."""
    file = JsonLines(folder / ("metrics.jsonl" if rank == 0 else f"ranks/metrics-{rank}.jsonl"))
    told = {STEP_S: 0.1, DATA_S: 0.001, WAITS_S: 0.03}
    told |= {name: numbers[key] for key, name in _KEYS.items() if key in numbers}
    for step in range(1, steps + 1):
        file.log({**told, LOSS: 1 / step}, step)
    return file


_KEYS = {"step_s": STEP_S, "data_s": DATA_S, "waits_s": WAITS_S}


def test_lines_and_ranks_are_read(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, rank)
    run = read_run(tmp_path)
    assert [each.rank for each in run.ranks] == [0, 1, 2]
    assert run.step == 10
    assert [each.step_s for each in paces(run)] == [0.1] * 3
    assert losses(run)[-1] == (10, 0.1)
    one = read_run(tmp_path / "metrics.jsonl")
    assert [each.rank for each in one.ranks] == [0]


def test_steps_that_come_again_are_a_restart(tmp_path: Path) -> None:
    file = write(tmp_path, 0, steps=7)
    for step in (5, 6):
        file.log({LOSS: 100.0 + step}, step)
    run = read_run(tmp_path)
    assert run.leader.restarts == (4,)
    assert restarts(run) == "1 restart, from step 4"
    assert losses(run)[-3:] == [(4, 0.25), (5, 105.0), (6, 106.0)]  # step 7 does not hold


def test_half_a_line_counts_as_none(tmp_path: Path) -> None:
    write(tmp_path, 0, steps=2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss_met')
    run = read_run(tmp_path)
    assert (run.step, run.leader.unread) == (2, 1)
    assert "1 line is no JSON with a step, and left out: metrics.jsonl:3" in run_text(
        run, time.time()
    )
    (tmp_path / "table.csv").write_text("\nstep,loss\n1,2.5\n")
    with pytest.raises(UsageError, match=r"no run to watch .table\.csv:2 is no line .*: step,loss"):
        read_run(tmp_path / "table.csv")


@pytest.mark.parametrize("text", ["", "[]\n", '{"step": "3"}\n', '{"step": true}\n', "[" * 10**5])
def test_a_folder_without_steps_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UsageError, match="there is no run to watch"):
        read_run(tmp_path)


def test_the_slowest_rank_is_the_one_that_waits_least(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, waits_s=0.002 if rank == 2 else 0.03)
    said = slowest(paces(read_run(tmp_path)))
    assert said.startswith("Rank 2 is the slowest: it takes 28 ms of a step longer than others")
    assert said.endswith("in computing, as its data come no later.")


def test_a_rank_that_waits_for_data_is_told_as_that(tmp_path: Path) -> None:
    for rank in range(4):
        late = rank == 1
        write(tmp_path, rank, waits_s=0.002 if late else 0.03, data_s=0.025 if late else 0.001)
    said = slowest(paces(read_run(tmp_path)))
    assert said.startswith("Rank 1 is the slowest")
    assert said.endswith("and waits 25 ms for data.")


def test_equal_ranks_and_unknown_ones_are_not_blamed(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, waits_s=0.03 + 0.001 * rank)
    assert slowest(paces(read_run(tmp_path))) == "No rank is notably slower than the others."
    (tmp_path / "ranks" / "metrics-1.jsonl").unlink()
    assert "is not known" in slowest(paces(read_run(tmp_path)))


@pytest.mark.exhaustive
def test_the_prediction_is_that_of_the_program_beside_the_run(tmp_path: Path) -> None:
    write(tmp_path, 0)
    assert "nothing was predicted" in promised(read_run(tmp_path))
    program = compiled("fsdp")
    program.save(tmp_path / "cache" / "abc" / "program")
    with torch.no_grad():  # a newer one, of an evaluation, says nothing of the training
        ids = torch.zeros(8, 16, dtype=torch.long)
        partc.compile(Net(), "dp=2", (ids,), plan="fsdp").save(tmp_path / "cache" / "eval")
    run = read_run(tmp_path)
    cost = program.cost.as_json()
    assert run.promise is not None
    assert cost is not None
    assert run.promise.step_s == cost["prediction"]["seconds"]
    assert run.promise.peak_bytes == cost["peak_bytes"]
    assert run.promise.sent_bytes == sum(each["sent_bytes"] for each in cost["traffic"])
    assert f"{0.1 / run.promise.step_s:.2f} times the predicted" in promised(run)
    with pytest.raises(UsageError, match="no prediction of a step"):
        read_run(tmp_path, tmp_path / "none")


def test_checkpoints_have_their_bytes(tmp_path: Path) -> None:
    write(tmp_path, 0)
    for step, name in ((4, "step-00000004"), (8, "step-00000008"), (9, ".step-00000009.partial")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.json").write_text("x" * step)
    run = read_run(tmp_path)
    assert [(each.step, each.num_bytes) for each in run.checkpoints] == [(4, 4), (8, 8)]
    assert "checkpoints of steps 4, 8; the last has 8 B" in run_text(run, time.time())


def test_a_quiet_run_is_over_or_stuck(tmp_path: Path) -> None:
    write(tmp_path, 0)
    run = read_run(tmp_path)
    assert "over, or stuck" not in state(run, run.written_at + 50)
    assert "over, or stuck" in state(run, run.written_at + 70)
    slow = tmp_path / "slow"
    write(slow, 0, step_s=100.0)  # five lines would take 500 s
    run = read_run(slow)
    assert "over, or stuck" not in state(run, run.written_at + 400)
    assert "over, or stuck" in state(run, run.written_at + 600)


def test_the_text_fits_the_window(tmp_path: Path) -> None:
    for rank in range(40):
        write(tmp_path, rank, steps=300)
    for width in (60, 100):
        lines = run_text(read_run(tmp_path), time.time(), width).splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) < 40
    assert any("and 24 ranks that are faster" in line for line in lines)


def test_a_loss_that_is_no_number_is_shown_and_stops_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, 0)
    file.log({LOSS: float("nan"), STEP_S: 0.1}, 11)
    run = read_run(tmp_path)
    assert "loss nan at step 11" in run_text(run, time.time())
    assert "NaN" not in run_page(run, time.time()).replace("nan at step", "")
    assert curve([1.0, float("nan"), 2.0], 3) == " !#"


@pytest.mark.exhaustive
def test_the_page_fetches_nothing_and_runs_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "<b>"
    write(folder, 0)
    compiled("ddp").save(folder / "program")
    page = run_page(read_run(folder), time.time(), refresh_s=2)
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "&lt;b&gt;" in page
    assert "<b>" not in page.replace("<b>Checkpoints</b>", "")
    assert 'content="2"' in page
    assert page.count("<polyline") >= 2


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0)
    out = tmp_path / "page.html"
    assert main(["watch", str(tmp_path), "-o", str(out)]) == 0  # no terminal: once
    assert "step 10" in capsys.readouterr().out
    assert "refresh" not in out.read_text()
    assert main(["watch", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["step"], told["ranks"][0]["step_s"]) == (1, 10, 0.1)
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert main(["watch", str(tmp_path), "--every", "0"]) == 2


def test_on_a_terminal_it_waits_for_the_first_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder that is not there yet, of an empty file, then of a run."""
    run, shown = tmp_path / "run", list[str]()

    def later(_: float) -> None:
        shown.append(capsys.readouterr().out)
        if len(shown) == 1:
            run.mkdir()
            (run / "metrics.jsonl").touch()
        elif len(shown) == 2:
            write(run, 0)
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("partc.cli.watch_command.time.sleep", later)
    assert main(["watch", str(run)]) == 0
    assert f"waiting for the first line of a run in {run}: it does not exist" in shown[0]
    assert "waiting for the first line" in shown[1]
    assert "step 10" in shown[2]
    (run / "metrics.jsonl").write_text("no JSON\n")
    assert main(["watch", str(run)]) == 2  # which no waiting helps


def test_watching_does_not_wait_for_torch(tmp_path: Path) -> None:
    write(tmp_path, 0)
    asked = f"""
import sys
from partc.cli.main import main
code = main(["watch", {str(tmp_path)!r}, "-o", {str(tmp_path / "page.html")!r}])
print(code, "torch" in sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, timeout=patience()
    )
    assert ran.stdout.splitlines()[-1:] == ["0 False"], ran.stderr


# what a rank measures ----------------------------------------------------------------------------
def slow_rank(folder: str, out: str) -> None:
    """Two ranks train; rank 1 computes longer, so that rank 0 waits for it."""
    import torch.distributed as dist

    from partc.measure.step_waits import StepWaits

    rank = int(os.environ["RANK"])
    stage = partc.load(folder).module()
    stage.load_full(Net())
    stage.seed(0)
    name = "metrics.jsonl" if rank == 0 else "ranks/metrics-1.jsonl"
    meter, waits = Meter([JsonLines(Path(out) / name)]), StepWaits(stage)
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    for step in range(1, 5):
        dist.barrier()
        with waits.step():
            if rank == 1:
                time.sleep(1.0)
            loss = stage.step(ids)
        told: dict[str, Any] = {LOSS: loss, **waits.numbers}
        meter.log(step, told)


@pytest.mark.gloo
def test_waits_tell_which_rank_is_slow(tmp_path: Path) -> None:
    compiled("ddp").save(tmp_path / "build")
    with Processes(2, timeout=patience()) as ranks:
        ranks.run(slow_rank, str(tmp_path / "build"), str(tmp_path / "run"))
    run = read_run(tmp_path / "run")
    found = paces(run)
    assert found[0].waits_s is not None
    assert found[0].waits_s > 0.5  # of the second that it waits; the machine may be busy
    assert slowest(found).startswith("Rank 1 is the slowest")
    assert "time_metrics/waiting_dp(s)" in run.leader.steps[4]
