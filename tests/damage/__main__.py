"""The command of this package: cases of a kind from a seed, a table, a line for each bad one.

The exit code is 1 if a case is bad. A run that is interrupted tells what it has found so far.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: a fork has one thread

import partc.audit.edits
import partc.reports.explanation
import partc.reports.simulate_saved  # noqa: F401  what cases need is imported once, before forks
from tests.damage.artefacts import ARTEFACTS, Make
from tests.damage.built import Built, built_aside
from tests.damage.cases import run_case
from tests.damage.hostile import HOSTILE
from tests.damage.kills import KILLS
from tests.damage.misuses import MISUSES
from tests.damage.ranks import DEATHS, RANKS
from tests.damage.recoveries import RECOVERIES
from tests.damage.verdicts import BAD, Found, table

KINDS: dict[str, dict[str, Make]] = {
    "artefacts": ARTEFACTS, "hostile": HOSTILE, "kills": KILLS, "ranks": RANKS, "deaths": DEATHS,
    "misuses": MISUSES, "recoveries": RECOVERIES,
}  # fmt: skip
LIMITS_S = {"recoveries": 250.0}  # of a case, where it takes longer than others


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.damage", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--only", type=int, help="run this one case again, and tell all of it")
    parser.add_argument("--all", action="store_true", help="tell of good cases too")
    parser.add_argument("--row", metavar="NAME", help="cases of this row of the table alone")
    parser.add_argument("--small", action="store_true", help="of two programs, without pipelines")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folder is deleted
    numbers = range(args.cases) if args.only is None else [args.only]
    start = time.monotonic()
    found: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="partc-damage-") as folder:
        built = built_aside(Path(folder) / "whole", small=args.small)
        gc.freeze()  # a fork shares what the collector leaves alone
        try:
            for each in cases(args.kind, built, Path(folder), args.seed, numbers, args.row):
                found.append(each)
                if each.verdict.word in BAD or args.all or args.only is not None:
                    print(line(each, args.seed, args.only is not None), flush=True)
        finally:
            spent = time.monotonic() - start
            print(f"{args.kind}, seed {args.seed}, {spent:.0f} s\n{table(found)}", flush=True)
    return 1 if any(each.verdict.word in BAD for each in found) else 0


def cases(
    kind: str, built: Built, folder: Path, seed: int, numbers: range | list[int], row: str | None
) -> Iterator[Found]:
    """The verdict of each numbered case of a kind."""
    known = KINDS[kind]
    if "pipeline" not in built.names:
        known = {name: make for name, make in known.items() if "schedule" not in name}
    if row is not None:
        known = {name: make for name, make in known.items() if name == row}
    for number in numbers:
        yield run_case(known, built, folder / f"case-{number}", seed, number, LIMITS_S.get(kind))


def line(found: Found, seed: int, whole: bool) -> str:
    """One case in a line, with what runs it again."""
    why = found.verdict.why if whole else " ".join(found.verdict.why.split())[:400]
    again = f"--seed {seed} --only {found.number}"
    return f"{found.verdict.word.upper()}  {found.artefact}  {again}\n  {found.damage}\n  {why}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
