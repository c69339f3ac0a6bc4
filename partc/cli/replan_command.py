"""``partc replan``: a saved program for another number of ranks."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace

from partc.cli.said import check_from_one, take_target, target_said
from partc.cli.shared_options import add_folder, add_sizes
from partc.cli.targets import target_of
from partc.cli.terminal import progress, tell
from partc.errors import UsageError


def replan_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``partc replan``."""
    add_folder(parser)
    parser.add_argument(
        "--model",
        help="model from which it was compiled, as for `partc compile`; left out, as that was told",
    )
    parser.add_argument(
        "--devices", metavar="N", type=int,
        help="number of ranks; data axes change first, and others only become smaller",
    )  # fmt: skip
    parser.add_argument(
        "--mesh", metavar="AXES",
        help="sizes of the program's axes, as dp=3, in place of --devices; 1 for those left out",
    )  # fmt: skip
    parser.add_argument("-o", "--out", metavar="DIR", required=True, help="folder to write")
    add_sizes(parser)


def replan_command(args: argparse.Namespace) -> int:
    """Compile a saved program's model for another number of ranks, with the same global batch, and
    with what its plan decided, as far as that can stay.
    """
    _check_one(args)
    from partc.atomic import check_output
    from partc.plan import Plan
    from partc.program import load
    from partc.program.written import written_files
    from partc.recipe import with_model
    from partc.replanned import replan
    from partc.reports.summary import Summary, launch_line

    check_output(args.out, written_files)
    program = load(args.folder)
    take_target(args, program.target)
    target = target_of(args, args.folder, program)
    to = args.devices or args.mesh
    with progress(f"compiling for {args.mesh or f'{args.devices} ranks'}"):
        made = replan(with_model(program, target.model, target.loss), to)
    made = replace(made, target=target_said(args))
    made.save(args.out)
    summed, run = Summary.of(made), launch_line(made, args.out)
    note = Plan.parse(made.plan).notes[0]
    told = {
        "out": args.out, "model": made.model, "mesh": dict(made.mesh.axes),
        "before": dict(program.mesh.axes), "note": note, "summary": summed.as_json(), "run": run,
    }  # fmt: skip
    text = [
        f"{args.out}: {made.model} on {made.mesh}", note, f"before  {Summary.of(program)}",
        f"now     {summed}", "", f"run     {run}",
        f"next    partc diff {shlex.quote(args.folder)} {shlex.quote(args.out)}",
    ]  # fmt: skip
    tell(args, "\n".join(text), told)
    return 0


def _check_one(args: argparse.Namespace) -> None:
    """UsageError unless a number of ranks or a mesh is given, and one of them alone."""
    check_from_one(args, ["devices"])
    if (args.devices is None) == (args.mesh is None):
        raise UsageError(
            where="partc replan", what="there is neither --devices nor --mesh"
            if args.devices is None else "--devices and --mesh are both given",
            why="one of them says for how many ranks it compiles",
            do=f"Write --devices {args.devices or 3}, or --mesh {args.mesh or 'dp=3'}.",
        )  # fmt: skip
