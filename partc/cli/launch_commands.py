"""The commands `partc launch` and `partc doctor`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import TYPE_CHECKING

from partc.cli.terminal import tell
from partc.errors import UsageError

if TYPE_CHECKING:
    from partc.launch.job import Wishes


def launch_command(args: argparse.Namespace) -> int:
    """Write the files with which torchrun, Slurm, Kubernetes, SkyPilot or TorchX start a saved
    program; nothing is started.
    """
    from partc.launch.job import job_of
    from partc.launch.targets import files_of, notes_of, start_of
    from partc.launch.writing import check_places, check_run_options, seen_path, write_files
    from partc.program import load
    from partc.program.saved_cost import saved_numbers

    out = seen_path("-o ", args.out)
    check_places(args.folder, args.script, args.out)
    if not args.script:
        check_run_options(args.folder, _arguments(args.args))
    with saved_numbers(args.folder):
        job = job_of(load(args.folder), seen_path("", args.folder), _wishes(args))
    files = files_of(job, args.emit, out)
    write_files(args.out, files, args.force)
    start, notes = start_of(job, args.emit, out), notes_of(job, args.emit)
    told = {
        "out": out, "files": sorted(files), "start": start, "nodes": job.nodes,
        "ranks_per_node": job.ranks, "network": job.network, "roles": list(job.placed),
        "environment": {each.name: each.value for each in job.variables}, "notes": notes,
    }  # fmt: skip
    lines = [*job.about, f"{out}: {', '.join(sorted(files))}", *(f"note: {n}" for n in notes)]
    tell(args, "\n".join([*lines, f"start it: {start}"]), told)
    return 0


def _wishes(args: argparse.Namespace) -> Wishes:
    from partc.launch.job import Wishes
    from partc.launch.writing import seen_path

    return Wishes(
        name=args.name, script=seen_path("--script ", args.script) if args.script else "",
        arguments=_arguments(args.args), checkpoints=args.checkpoints,
        devices_per_node=args.devices_per_node, network=args.network, interface=args.interface,
        image=args.image, restarts=args.restarts, grace_s=args.grace,
        time_limit=args.time_limit, resources=dict(map(_resource, args.resource)),
    )  # fmt: skip


def _arguments(text: str) -> tuple[str, ...]:
    """The words of a command line; UsageError for one whose quotation marks do not close."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            where=f"--args {text}", what="it cannot be read", why=str(error),
            do="Close what you quote.",
        ) from None  # fmt: skip


def _resource(text: str) -> tuple[str, int]:
    name, equals, number = text.partition("=")
    if not equals or not number.isdecimal():
        raise UsageError(
            where=f"--resource {text}", what="that is no resource",
            why="it has a name and a number", do="Write --resource rdma/hca=8.",
        )  # fmt: skip
    return name, int(number)


def doctor_command(args: argparse.Namespace) -> int:
    """Say what is right and wrong here for a run: versions, devices, variables, and under torchrun
    what differs between ranks, clocks and links; exit code 1 if something is wrong.
    """
    from partc.doctor.doctor import examine

    first = os.environ.get("RANK", "0") == "0"  # under torchrun one rank speaks

    def say(line: str) -> None:
        if first:
            print(line, file=sys.stderr, flush=True)

    found = examine(args.folder or "", args.links, say)
    if first:
        tell(args, str(found), found.as_json())
    return 0 if found.ok else 1
