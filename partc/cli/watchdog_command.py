"""The command `partc watchdog`, and its options."""

from __future__ import annotations

import argparse
import json

from partc.cli.shared_options import above_zero


def watchdog_command(args: argparse.Namespace) -> int:
    """Run torchrun, and end a rank that stands still, so that all ranks are started again."""
    from partc.failures.watchdog import Watchdog

    watchdog = Watchdog(args.line, args.step_timeout, args.stall)
    code = watchdog.run()
    if args.json:
        print(json.dumps({"code": code, "ended": watchdog.ended}))
    return code


def add_watchdog_options(parser: argparse.ArgumentParser) -> None:
    """Add the time-outs, and the command line that is run."""
    parser.add_argument(
        "--step-timeout", metavar="SECONDS", type=above_zero, default=0.0,
        help="within which a process that is stopped is ended; one that hangs within two of them "
        "(default: ten of the slowest of the last steps, but 5 to 600 s)",
    )  # fmt: skip
    parser.add_argument(
        "--stall", metavar="SECONDS", type=above_zero, default=0.0,
        help="after which a rank is ended where none has come on (default: a hundred steps, but "
        "300 s or more)",
    )  # fmt: skip
    parser.add_argument(
        "line", nargs="+", metavar="-- torchrun ...", help="the launcher's command line"
    )
