"""Cases of SIGKILL at a random moment of what writes files or starts processes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

import partc
from partc.cli.main import main
from tests.damage import readers
from tests.damage.alone import GRACE_S
from tests.damage.artefacts import Made, Make, copied
from tests.damage.built import Built, ranks, trained
from tests.damage.verdicts import Verdict

BENCH_S = 8.0  # within which a bench has started its ranks, or is done
WRITES = "build/"
MARK = "PARTC_DAMAGE_CASE"  # in the environment of whatever a case starts


def killed(work: Callable[[], object], rng: random.Random, most_s: float) -> str:
    """Run ``work`` in a fork, and kill it within ``most_s`` seconds; when it was."""
    after = rng.uniform(0.0, most_s)
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"{1e3 * after:.0f} ms"


# programs ------------------------------------------------------------------------------------
def _saving(rng: random.Random, built: Built, place: Path) -> Made:
    name, folder = copied(rng, built, place, "ddp", "modes", "pipeline")
    new = partc.load(built.program(rng.choice(("one", "modes"))))
    if rng.random() < 0.3:
        _remove(folder)  # a first save
    return Made(
        f"{name} replaced", lambda: _whole(folder, lambda: new.save(folder), rng, 0.06), WRITES
    )


def _compiling(rng: random.Random, built: Built, place: Path) -> Made:
    name, folder = copied(rng, built, place, "ddp", "modes")
    if rng.random() < 0.3:
        _remove(folder)
    arguments = ["compile", readers.MODEL, "--mesh", "dp=2", "--plan", "zero1", "--out"]
    arguments.append(str(folder))
    read = partial(_whole, folder, lambda: main(arguments), rng, 2.0)
    return Made(f"{name} replaced", read, WRITES)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def _whole(
    folder: Path, write: Callable[[], object], rng: random.Random, most_s: float
) -> Verdict | None:
    """Kill a writer; the old or the new program is whole, and the next writer leaves no more."""
    (mine := folder.parent / "mine.txt").write_text("a user's file beside it")
    before = _content(folder)
    when = killed(write, rng, most_s)
    cut = _content(folder)
    if before and not cut:
        return Verdict("lost", f"nothing stands there after {when}")
    if cut:
        partc.load(folder)  # all digests
    write()
    after = _content(folder)
    if cut not in (before, after):
        return Verdict("wrong", f"neither the old nor the new stands there after {when}")
    if not mine.exists():
        return Verdict("lost", f"{mine.name} after {when}")
    odd = [each.name for each in folder.parent.iterdir() if each not in (folder, mine)]
    return Verdict("left", f"{odd} after {when} and the next write") if odd else None


def _content(folder: Path) -> str:
    path = folder / "program.json"
    return sha256(path.read_bytes()).hexdigest() if path.exists() else ""


# checkpoints ---------------------------------------------------------------------------------
def _checkpointing(rng: random.Random, built: Built, place: Path) -> Made:
    folder, program = place / "checkpoint", built.program("zero1")

    def save(step: int) -> None:
        stage, optimizer = trained(program, 1)
        partc.save_checkpoint(folder, stage, optimizer, step=step)

    def load() -> None:
        stage, optimizer = trained(program, 0)
        step = partc.load_checkpoint(folder, stage, optimizer)
        (Path.cwd() / "step").write_text(str(step))

    def both(step: int) -> None:
        place.mkdir(exist_ok=True)
        ranks(2, lambda: save(step), Path.cwd() / f"ranks-{time.monotonic_ns()}")

    def read() -> Verdict | None:
        both(1)
        when = _killed_with_ranks(lambda: both(2), rng, 0.6)
        ranks(2, load, Path.cwd() / "loading")
        if (Path.cwd() / "step").read_text() == "1":
            both(2)
        odd = sorted({each.name for each in folder.iterdir()} - {f"step-{i:08d}" for i in (1, 2)})
        return Verdict("left", f"{odd} after {when}") if odd else None

    return Made("step 2 after step 1", read)


def _killed_with_ranks(work: Callable[[], object], rng: random.Random, most_s: float) -> str:
    """As ``killed``, with all that the fork has started, which is in a group of its own."""
    after = rng.uniform(0.0, most_s)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        work()
        os._exit(0)
    time.sleep(after)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:  # it has no group of its own yet
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"{1e3 * after:.0f} ms"


# processes -----------------------------------------------------------------------------------
def _benching(rng: random.Random, built: Built, place: Path) -> Made:
    _, folder = copied(rng, built, place, "ddp")
    number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
    after = rng.uniform(0.0, BENCH_S)

    def read() -> Verdict | None:
        mark = f"{MARK}={os.getpid()}-{time.monotonic_ns()}"
        name, _, value = mark.partition("=")
        bench = subprocess.Popen(
            [sys.executable, "-m", "partc", "bench", str(folder), "--steps", "2"],
            env={**os.environ, name: value}, start_new_session=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        time.sleep(after)
        bench.send_signal(number)
        bench.wait()
        left = _marked(mark)
        return Verdict("left", f"{left} after {after:.1f} s") if left else None

    return Made(f"{number.name} after {after:.1f} s", read)


def _marked(mark: str) -> list[str]:
    """The processes with a mark that stay for longer than a while; they are ended."""
    end = time.monotonic() + 2 * GRACE_S
    while (found := _with_mark(mark.encode())) and time.monotonic() < end:
        time.sleep(0.1)
    for each in found:
        os.kill(each, signal.SIGKILL)
    return [str(each) for each in found]


def _with_mark(mark: bytes) -> list[int]:
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            running = (each / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            if running and mark in (each / "environ").read_bytes().split(b"\0"):
                found.append(int(each.name))
        except OSError:
            continue
    return found


KILLS: dict[str, Make] = {
    "save": _saving, "compile --out": _compiling, "save_checkpoint": _checkpointing,
    "save again": _saving, "bench": _benching,
}  # fmt: skip
