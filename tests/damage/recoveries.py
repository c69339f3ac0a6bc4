"""Cases of a run under torchrun that loses a rank, and has to end as one that lost none.

Four ranks train a small GPT (`recovered.py`): one is killed at a random moment, saves included;
or stopped, under ``partc watchdog``; or ended before a certain thing that a save does to the disk;
or its disk is full. A case is good if the job ends by itself with the parameters, moments, learning
rate and random numbers of the run that met nothing, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_model
from torch import nn

import partc
from partc.failures.rank_processes import rank_processes
from tests.damage.artefacts import Made, Make
from tests.damage.built import Built
from tests.damage.recovered import EVERY
from tests.damage.verdicts import Verdict
from tests.patience import patience

RANKS, STEPS, RESTARTS = 4, 24, 4
JOB_S = 50.0  # on a quiet machine a job with two attempts takes a fifth of it
MOST_DEEDS = 16  # of a rank in a save
ROOT = Path(__file__).parents[2]


def gpt() -> nn.Module:
    """Two layers with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, use_cache=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(config)
    return model.train()


def program_of(folder: Path) -> Path:
    """The folder with the program and its weights, and with what a whole run ends with."""
    from examples.gpt import loss_of

    if not (folder / "final.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        model, ids = gpt(), torch.zeros(8, 16, dtype=torch.long)
        partc.compile(
            model, "dp=2,tp=2", (ids,), loss=loss_of, plan="fsdp+megatron"
        ).save(folder / "build")  # fmt: skip
        save_model(model, str(folder / "weights.safetensors"))
        with job(folder, folder / "run", forks=True) as (launcher, said):
            code = launcher.wait(patience(JOB_S))
        assert code == 0, said.read_text()[-3000:]
        shutil.copy(folder / "run/final.json", folder / "final.json")
    return folder


@contextmanager
def job(
    program: Path,
    run: Path,
    *,
    watched: bool = False,
    failure: dict[str, Any] | None = None,
    forks: bool = False,
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A launcher with four ranks, and the file of what all of them say; all are ended behind it.

    ``forks``: ranks are forks of the launcher, which begin in a tenth of the time.
    """
    run.mkdir(parents=True, exist_ok=True)
    script = [str(ROOT / "tests/damage/recovered.py"), str(program), str(run), f"{STEPS}"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{RANKS}"]
    line = [sys.executable, *torchrun, "--max-restarts", f"{RESTARTS}", *script]
    if forks:
        line = [sys.executable, *script, f"{RANKS}", f"{RESTARTS}"]
    if watched:
        line = [sys.executable, "-m", "partc", "watchdog", "--", *line]
    said = run.with_suffix(".txt")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["TMPDIR"] = str(run.parent)  # torchrun leaves its logs there
    environment["RECOVERY"] = json.dumps(failure or {})
    with said.open("wb") as out:
        launcher = subprocess.Popen(line, env=environment, stdout=out, stderr=out)
    try:
        yield launcher, said
    finally:
        for each in ranks_of(launcher, run).values():
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(patience(10.0))
        launcher.kill()
        launcher.wait()


@dataclass(frozen=True)
class Progress:
    """A line of a rank: it is behind ``step`` in an attempt, since ``at``."""

    step: int
    attempt: int
    at: float

    @classmethod
    def of(cls, run: Path, rank: int) -> list[Progress]:
        path = run / f"progress-{rank}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        each = [line.split() for line in lines if line.endswith("\n") and line.count(" ") == 2]
        return [cls(int(step), int(attempt), float(at)) for step, attempt, at in each]


def ranks_of(launcher: subprocess.Popen[bytes], run: Path) -> dict[int, int]:
    """The last process of each rank; forks tell of themselves as they begin."""
    found = {each.rank: each.pid for each in rank_processes(launcher.pid)}
    for path in run.glob("began-*") if not found else ():
        pids = path.read_text().split()
        found |= {int(path.name.removeprefix("began-")): int(pids[-1])} if pids else {}
    return found


def began(run: Path, rank: int, attempt: int) -> bool:
    """Whether a rank has begun its script in an attempt."""
    path = run / f"began-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return any(line.split()[:1] == [f"{attempt}"] for line in lines)


def await_step(
    launcher: subprocess.Popen[bytes], run: Path, rank: int, attempt: int, share: float
) -> int:
    """The process of a rank at a random moment of an attempt.

    ``share``: of the steps that are left; a fraction of a step is waited behind the last of them.
    """
    end = time.monotonic() + patience(JOB_S)
    while time.monotonic() < end and launcher.poll() is None:
        mine = [line for line in Progress.of(run, rank) if line.attempt == attempt]
        wanted = mine[0].step + share * (STEPS - mine[0].step - 1) if mine else 0.0
        if mine and mine[-1].step >= int(wanted):
            time.sleep(wanted % 1.0 * _step_s(run, attempt))
            return ranks_of(launcher, run)[rank]
        time.sleep(0.002)
    raise TimeoutError(f"rank {rank} has not come so far in attempt {attempt}")


def judged(
    program: Path, run: Path, launcher: subprocess.Popen[bytes], said: Path, hits: int = 1
) -> Verdict | None:
    """How the job ends, of which ``hits`` attempts fail: as the whole run, or a bad verdict."""
    try:
        code = launcher.wait(patience(JOB_S))
    except subprocess.TimeoutExpired:
        return Verdict("wait", said.read_text(errors="replace")[-1500:])
    if code:
        return Verdict("raw", f"exit code {code}: {said.read_text(errors='replace')[-1500:]}")
    found, whole = ((each / "final.json").read_text() for each in (run, program))
    if found != whole:
        return Verdict("wrong", f"{found} is not {whole}")
    if not any(line.attempt >= hits for rank in range(RANKS) for line in Progress.of(run, rank)):
        return Verdict("raw", f"ranks were not started again {hits} times: nothing was tried")
    return None


def back(run: Path, attempt: int, failed_at: float) -> str:
    """How long it took until rank 0 was behind a step that it had not done before an attempt."""
    lines = Progress.of(run, 0)
    done = max((x.step for x in lines if x.attempt < attempt), default=0)
    again = [x for x in lines if x.attempt == attempt]
    if not again:
        return f"attempt {attempt} did not begin"
    new = next((x.at for x in again if x.step > done), again[-1].at)
    return (
        f"{done - again[0].step} steps lost, began {again[0].at - failed_at:.1f} s later, first "
        f"new step {new - failed_at:.1f} s later"
    )


# cases ---------------------------------------------------------------------------------------
def _struck(number: signal.Signals, times: int, *, forks: bool = False) -> Make:
    """A signal to a random rank at a random moment of each of the first attempts of one job."""
    watched = number is signal.SIGSTOP

    def make(rng: random.Random, built: Built, place: Path) -> Made:
        hits = [(rng.randrange(RANKS), rng.random(), rng.random() < 0.2) for _ in range(times)]

        def read() -> Verdict | None:
            program, run = program_of(built.folder / "recovery"), Path("run").resolve()
            done: list[Hit] = []
            with job(program, run, watched=watched, forks=forks) as (launcher, said):
                for attempt, (rank, share, begins) in enumerate(hits):
                    if begins:
                        pid = _began(launcher, run, rank, attempt, share)
                    else:
                        pid = await_step(launcher, run, rank, attempt, share)
                    os.kill(pid, number)
                    done.append(Hit(rank, pid, time.time()))
                bad = judged(program, run, launcher, said, len(hits))
                text = said.read_text(errors="replace")
            return bad or _told(run, done, text if watched else None)

        return Made(f"ranks {[rank for rank, *_ in hits]}", read)

    return make


class Hit(NamedTuple):
    """A process that was sent a signal, and when."""

    rank: int
    pid: int
    at: float


def _told(run: Path, done: list[Hit], said: str | None) -> Verdict:
    """What became of each signal; ``said`` has to name each process that was stopped."""
    told = []
    for attempt, found in enumerate(done):
        why = back(run, attempt + 1, found.at)
        if said is not None:
            named = re.search(
                rf"rank {found.rank} \(process {found.pid}\) stands still: (.*)\.", said
            )
            if named is None:
                return Verdict("wrong", f"rank {found.rank} is not named: {said[-1500:]}")
            why = f"{named[1]}; {why}"
        told.append(f"rank {found.rank}: {why}")
    return Verdict("harmless", " | ".join(told))


def _began(
    launcher: subprocess.Popen[bytes], run: Path, rank: int, attempt: int, share: float
) -> int:
    """A rank's process at some moment of the first seconds of its script, while it loads."""
    end = time.monotonic() + patience(JOB_S)
    while time.monotonic() < end and launcher.poll() is None:
        if began(run, rank, attempt):
            time.sleep(share)
            return ranks_of(launcher, run)[rank]
        time.sleep(0.01)
    raise TimeoutError(f"rank {rank} did not begin attempt {attempt}")


def _step_s(run: Path, attempt: int) -> float:
    """How long a step with its save takes now."""
    lines = [line for line in Progress.of(run, 0) if line.attempt == attempt]
    return (lines[-1].at - lines[0].at) / (len(lines) - 1) if len(lines) > 1 else 0.05


def _in_save(rng: random.Random, built: Built, place: Path) -> Made:
    """A rank that ends before a thing that its save does to the disk."""
    deed = rng.randrange(1, MOST_DEEDS)
    rank = 0 if deed > 6 else rng.randrange(RANKS)  # the first rank makes and commits
    step = EVERY * rng.randrange(1, STEPS // EVERY)
    failure = {"rank": rank, "step": step, "deed": deed}
    return Made(f"rank {rank}, before deed {deed} of step {step}", _failing(built, failure))


def _full(rng: random.Random, built: Built, place: Path) -> Made:
    """A rank whose files can take no more than so many bytes."""
    step = EVERY * rng.randrange(1, STEPS // EVERY)
    failure = {"rank": rng.randrange(RANKS), "step": step, "bytes": rng.randrange(20_000)}
    return Made(f"{failure}", _failing(built, failure))


def _failing(built: Built, failure: dict[str, Any]) -> Any:
    def read() -> Verdict | None:
        program, run = program_of(built.folder / "recovery"), Path("run").resolve()
        with job(program, run, failure=failure, forks=True) as (launcher, said):
            bad = judged(program, run, launcher, said)
        if bad is not None:
            return bad
        left = [each.name for each in run.glob(".*")]
        return Verdict("left", f"{left}") if left else None

    return read


RECOVERIES: dict[str, Make] = {
    "kill": _struck(signal.SIGKILL, 4, forks=True), "kill in a save": _in_save,
    "stop": _struck(signal.SIGSTOP, 2, forks=True), "full disk": _full,
    "kill of torchrun's": _struck(signal.SIGKILL, 1),
    "stop of torchrun's": _struck(signal.SIGSTOP, 1),
}  # fmt: skip
