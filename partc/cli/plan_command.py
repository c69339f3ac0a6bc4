"""The command ``partc plan``: a plan from a configuration of another tool."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from partc.cli.said import check_from_one
from partc.errors import visible


def plan_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``partc plan``."""
    parser.add_argument(
        "--from", dest="config", metavar="FILE", required=True,
        help="a config of Accelerate (.yaml), DeepSpeed (.json) or torchtitan (.toml)",
    )  # fmt: skip
    parser.add_argument(
        "--devices", metavar="N", type=int, default=None,
        help="number of ranks, where the file does not say it",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="plan.toml to write; printed if left out"
    )
    parser.set_defaults(written={"out": "toml"})


def plan_command(args: argparse.Namespace) -> int:
    """Write a plan that does what a configuration of Accelerate, DeepSpeed or torchtitan says."""
    from partc.atomic import atomic_write
    from partc.plan.ports import read_config

    check_from_one(args, ["devices"])
    draft = read_config(args.config, args.devices)
    text = str(draft)
    if args.out:
        atomic_write(Path(args.out), text)
    for what, keys in (("no plan says", draft.left_out), ("unknown", draft.unknown)):
        if keys:
            print(visible(f"{what}: {', '.join(keys)}"), file=sys.stderr)
    told = {
        "tool": draft.tool, "plan": text, "keys": draft.told, "left_out": draft.left_out,
        "unknown": draft.unknown,
    }  # fmt: skip
    print(json.dumps(told) if args.json else visible(args.out or text.rstrip()))
    return 0
