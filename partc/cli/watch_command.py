"""``partc watch``: a run that is going on or over, on the terminal or as a page."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from partc.cli.shared_options import MOST_S
from partc.cli.terminal import columns, tell
from partc.errors import UsageError

LEAST_S = 0.2  # between two readings
CLEAR = "\x1b[H\x1b[J"  # the screen anew


def watch_command(args: argparse.Namespace) -> int:
    """Show a run from the files that it writes: pace, slowest rank, loss, memory, checkpoints."""
    if args.every is not None and not LEAST_S <= args.every <= MOST_S:
        raise UsageError(
            where=f"--every {args.every}",
            what="that is too often" if args.every < LEAST_S else "that is no time to wait",
            why=f"files are read again after so many seconds, {LEAST_S} or more",
            do="Write --every 2.",
        )  # fmt: skip
    follows = not (args.once or args.json) and sys.stdout.isatty()
    if not follows:
        _show(args, once=True)
        return 0
    while True:  # Ctrl-C ends it
        try:
            _show_or_wait(args)
            time.sleep(args.every)
        except KeyboardInterrupt:
            return 0


def _show_or_wait(args: argparse.Namespace) -> None:
    """Show the run as it is now, or say that it has written nothing yet."""
    from partc.live.run_files import NotBegun

    try:
        _show(args, once=False)
    except NotBegun as error:
        print(f"{CLEAR}waiting for the first line of a run in {args.run}: {error.why}. {error.do}")


def _show(args: argparse.Namespace, once: bool) -> None:
    """Read the run, write its page if one is asked for, and print it."""
    from partc.atomic import atomic_write
    from partc.live.run_facts import paces, promised, slowest, state
    from partc.live.run_files import read_run
    from partc.live.run_page import run_page
    from partc.live.run_text import run_text

    run, now = read_run(args.run, args.program), time.time()
    if args.out:
        atomic_write(Path(args.out), run_page(run, now, 0 if once else max(round(args.every), 1)))
    if not once:
        print(CLEAR, end="")
    told: dict[str, Any] = {
        "schema": 1, "step": run.step, "written_at": run.written_at, "state": state(run, now),
        "restarts": list(run.leader.restarts), "ranks": [asdict(each) for each in paces(run)],
        "pace": promised(run), "slowest": slowest(paces(run)),
        "checkpoints": [asdict(each) for each in run.checkpoints],
        "predicted": None if run.promise is None
        else {**vars(run.promise), "folder": str(run.promise.folder)},
    }  # fmt: skip
    shown = "" if not args.out else f"\n\n{args.out}"
    tell(args, run_text(run, now, columns()) + shown, told)
