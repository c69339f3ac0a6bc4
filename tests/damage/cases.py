"""Run one numbered case, and judge it by what it tells and by what it leaves behind."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.damage.alone import SAID, Ended, alone, staying
from tests.damage.artefacts import Make
from tests.damage.built import Built
from tests.damage.verdicts import Found, Verdict, told
from tests.patience import patience

LIMIT_S = 60.0  # on a quiet machine the slowest case takes a tenth of it
RAN = "ran"  # a file that code of the damaged thing would write, were it run


def run_case(
    kinds: Mapping[str, Make], built: Built, place: Path, seed: int, number: int,
    limit_s: float | None = None,
) -> Found:  # fmt: skip
    """Make a case, read it in a process of its own, and delete its folder."""
    name = [*kinds][number % len(kinds)]
    rng = random.Random(f"{name} {seed} {number}")

    def work(tell: Callable[[Any], None]) -> None:
        made = kinds[name](rng, built, Path("in").resolve())
        tell([made.damage, made.writes, snapshot(Path("in"))])
        tell([*told(made.read), snapshot(Path("in"))])

    (place / "work/in").mkdir(parents=True)
    try:
        ended = alone(work, place, patience(limit_s or LIMIT_S))
        damage = ended.lines[0][0] if ended.lines else "while it was made"
        return Found(number, name, damage, _judged(ended, place))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _judged(ended: Ended, place: Path) -> Verdict:
    """What the case told, or what is worse: something was run, is gone, or is left."""
    left = staying(ended.session, 0.0 if ended.late else 5.0)
    if [*place.rglob(RAN)]:
        return Verdict("ran", "the file that its code writes is there")
    if ended.late:
        return Verdict("wait", "beyond its time")
    if len(ended.lines) < 2:
        return Verdict("raw", f"the process died: {_last(place / SAID)}")
    (_, writes, before), (word, why, after) = ended.lines
    gone = [name for name, digest in before.items() if after.get(name) != digest]
    gone = [name for name in gone if not writes or not name.startswith(writes)]
    if gone:
        return Verdict("lost", f"{gone[0]} is gone or changed")
    kept = [each.name for each in (place / "tmp").iterdir()]
    return Verdict("left", f"{left}{kept}") if left or kept else Verdict(word, why)


def _last(said: Path) -> str:
    return said.read_text(encoding="utf-8", errors="replace")[-600:] if said.exists() else ""


def snapshot(folder: Path) -> dict[str, str]:
    """The plain files of a folder, with a digest of each; without what Python compiled."""
    return {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 10_000_000
        if "__pycache__" not in path.parts
    }
