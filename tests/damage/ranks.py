"""Cases of ranks that do not fit together, and of ranks that die or stand still.

Every rank runs ``run.py`` of a saved program in a process of its own. A case is good if all of them
end in time, none as if nothing had been wrong, each with a sentence, and if a rank that differs or
has died is named to the others.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import partc
from tests.damage.artefacts import Made, Make
from tests.damage.built import Built, free_port
from tests.damage.readers import start_rank
from tests.damage.verdicts import Verdict
from tests.patience import patience

WAITS_S = 5.0  # --timeout of the ranks
GRACE_S = 20.0  # beyond it, to ask the others and to end
BUSY_S = 4.0  # within which ranks have met and are at a step
STEPS = "100000"  # more than any case lets them do
PROGRAMS = ("ddp", "zero1", "sharded", "pipeline")


@dataclass
class World:
    """The ranks of one case: what each runs, with which options, in which environment."""

    folders: list[Path]
    steps: str = "2"
    options: dict[int, list[str]] = field(default_factory=dict)
    environ: dict[int, dict[str, str]] = field(default_factory=dict)
    absent: frozenset[int] = frozenset()

    @property
    def num(self) -> int:
        return len(self.folders)

    def start(self) -> dict[int, int]:
        """The process of each rank that comes."""
        port = str(free_port())
        waits = f"{patience(WAITS_S):.1f}"
        always = ["--steps", self.steps, "--timeout", waits, "--join-timeout", waits]
        return {
            rank: start_rank(
                self.folders[rank], rank, self.num, port, Path(f"rank-{rank}.txt"),
                [*always, *self.options.get(rank, [])], self.environ.get(rank, {}),
            )
            for rank in range(self.num) if rank not in self.absent
        }  # fmt: skip

    def judged(self, running: dict[int, int], odd: int, may_be: Sequence[int] = ()) -> Verdict:
        """How the ranks end, of which ``odd`` is the one at fault.

        Args:
            may_be: exit codes of that rank itself, such as that of its signal.
        """
        codes = ended(running, patience(WAITS_S + GRACE_S))
        texts = {rank: _text(rank) for rank in running}
        told = f"{codes} {[text[-300:] for rank, text in texts.items() if rank != odd]}"
        if None in codes.values():
            return Verdict("wait", told)
        others = {rank: text for rank, text in texts.items() if rank != odd or not may_be}
        if any(codes[rank] == 0 for rank in others):
            return Verdict("wrong", f"a rank ends as if all were well: {told}")
        raw = [rank for rank, text in others.items() if "Traceback" in text or not text.strip()]
        raw += [rank for rank in others if codes[rank] not in (1, 2)]
        if raw:
            return Verdict("raw", f"rank {raw[0]}: {codes} {texts[raw[0]][-600:]}")
        if not any(_names(text, odd) for rank, text in texts.items() if rank != odd):
            return Verdict("wrong", f"rank {odd} is not named: {told}")
        return Verdict("refused", texts[min(others)][-600:])


def ended(running: dict[int, int], most_s: float) -> dict[int, int | None]:
    """The exit code of each process; None, and a kill, for one that has not ended in time."""
    codes: dict[int, int | None] = {}
    end = time.monotonic() + most_s
    while len(codes) < len(running) and time.monotonic() < end:
        for rank in running.keys() - codes.keys():
            done, status = os.waitpid(running[rank], os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for rank in running.keys() - codes.keys():
        _kill(running[rank], signal.SIGKILL)
        os.waitpid(running[rank], 0)
        codes[rank] = None
    return dict(sorted(codes.items()))


def _kill(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _text(rank: int) -> str:
    path = Path(f"rank-{rank}.txt")
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _names(text: str, rank: int) -> bool:
    """Whether a text has the number of a rank: ``rank 2``, ``Ranks [1, 2]``."""
    lists = [re.findall(r"\d+", each) for each in re.findall(r"\[[\d, ]+\]", text)]
    return f"rank {rank}" in text.lower() or any(str(rank) in each for each in lists)


def _world(rng: random.Random, built: Built) -> tuple[str, World]:
    name = rng.choice([each for each in PROGRAMS if each in built.names])
    num = partc.load(built.program(name)).mesh.num_ranks
    return name, World([built.program(name)] * num)


# ranks that do not fit together ----------------------------------------------------------------
def _other_option(rng: random.Random, world: World, odd: int, built: Built) -> str:
    given = rng.choice(
        [["--lr", f"{rng.uniform(0.02, 0.9):.3f}"], ["--seed", str(rng.randint(1, 99))],
         ["--steps", str(rng.randint(3, 9))], ["--high", str(rng.randint(2, 9))],
         ["--weights", str(built.folder / "weights.safetensors")]]
    )  # fmt: skip
    world.options[odd] = given
    return " ".join(given)


def _bad_option(rng: random.Random, world: World, odd: int, built: Built) -> str:
    given = rng.choice([["--weights", "nowhere.safetensors"], ["--backend", "nccl"],
                        ["--device", "cuda"], ["--lr", "fast"]])  # fmt: skip
    world.options[odd] = given
    return " ".join(given)


def _other_program(rng: random.Random, world: World, odd: int, built: Built) -> str:
    mine = world.folders[odd]
    names = [each for each in built.names if built.program(each) != mine]
    other = rng.choice([built.folder / "other" / mine.name, *map(built.program, names)])
    world.folders = [other if rank == odd else folder for rank, folder in enumerate(world.folders)]
    return f"{other.parent.name}/{other.name}"


def _damaged_program(rng: random.Random, world: World, odd: int, built: Built) -> str:
    copy = Path.cwd() / "damaged"
    shutil.copytree(world.folders[odd], copy)
    file = rng.choice(sorted(each for each in copy.glob("*") if each.name != "run.py"))
    if rng.random() < 0.5:
        file.unlink()
        what = "without"
    else:
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(7)
        file.write_bytes(bytes(content))
        what = "a bit of"
    world.folders = [copy if rank == odd else folder for rank, folder in enumerate(world.folders)]
    return f"{what} {file.name}"


def _absent(rng: random.Random, world: World, odd: int, built: Built) -> str:
    world.absent = frozenset([odd])
    return "does not come"


def _other_world(rng: random.Random, world: World, odd: int, built: Built) -> str:
    size = rng.choice([1, world.num + 1, 2 * world.num])
    world.environ[odd] = {"WORLD_SIZE": str(size)}
    return f"believes in {size} ranks"


FAULTS = (
    _other_option, _bad_option, _other_program, _damaged_program, _absent, _other_world,
)  # fmt: skip


def _disagreeing(fault: Callable[..., str]) -> Make:
    def make(rng: random.Random, built: Built, place: Path) -> Made:
        name, world = _world(rng, built)
        odd = rng.randrange(world.num)

        def read() -> Verdict:
            return world.judged(world.start(), odd)

        shutil.copytree(built.program(name), place, dirs_exist_ok=True)  # what may not be written
        return Made(f"{name}: rank {odd} {fault(rng, world, odd, built)}", read)

    return make


# ranks that die --------------------------------------------------------------------------------
def _dying(number: signal.Signals) -> Make:
    def make(rng: random.Random, built: Built, place: Path) -> Made:
        name, world = _world(rng, built)
        odd, after = rng.randrange(world.num), rng.uniform(0.0, BUSY_S)
        world.steps = STEPS

        def read() -> Verdict:
            running = world.start()
            time.sleep(after)
            _kill(running[odd], number)
            if number is not signal.SIGSTOP:
                return world.judged(running, odd, [-number])
            others = {rank: each for rank, each in running.items() if rank != odd}
            try:
                return world.judged(others, odd, [-number])
            finally:
                _kill(running[odd], signal.SIGKILL)
                os.waitpid(running[odd], 0)

        shutil.copytree(built.program(name), place, dirs_exist_ok=True)
        return Made(f"{name}: {number.name} of rank {odd} after {after:.1f} s", read)

    return make


RANKS: dict[str, Make] = {each.__name__.strip("_"): _disagreeing(each) for each in FAULTS}
DEATHS: dict[str, Make] = {
    each.name: _dying(each) for each in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
}
