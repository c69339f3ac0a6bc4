"""The commands of the command line: each takes the parsed arguments and returns the exit code.

Commands import torch and other rooms when they run, as `partc --help` imports this module.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partc.cli.said import check_compared
from partc.cli.targets import target_of
from partc.cli.terminal import progress, tell
from partc.errors import UsageError

if TYPE_CHECKING:
    from partc.program import Program
    from partc.program.outcomes import Kind
    from partc.verification.report import Verification


def passes_command(args: argparse.Namespace) -> int:
    """List the compiler's passes in order: who takes each, what it leaves behind, and why."""
    from partc.lowering import described, table

    rows = table()
    told = [
        {"name": each.name, "only": each.when.word, "leaves": each.out, "why": each.why,
         "where": each.where, "optional": each.optional}
        for each in rows.passes
    ]  # fmt: skip
    tell(args, "\n".join(described(rows)), {"passes": told})
    return 0


def bench_command(args: argparse.Namespace) -> int:
    """Run steps of a saved program on all its ranks; show how long ranks compute and wait and what
    transfers are hidden, beside the prediction.
    """
    from partc.atomic import atomic_write
    from partc.measure.bench import bench
    from partc.measure.bench_outcome import bench_outcome

    with progress(f"running {args.steps} steps of {args.folder}"):
        found = bench(
            args.folder, steps=args.steps, warmup=args.warmup, device=args.device,
            timeout=args.timeout,
        )  # fmt: skip
    if os.environ.get("RANK", "0") == "0":  # under torchrun one rank speaks
        if args.trace:
            atomic_write(Path(args.trace), found.trace())
        tell(args, str(found), found.as_json())
        _keep(found.program, "measured", bench_outcome(found, args.device))
    return 0


def calibrate_command(args: argparse.Namespace) -> int:
    """Measure this machine's devices and links, and write them as a mesh.toml to compile for."""
    from partc.atomic import atomic_write
    from partc.measure.calibrate import calibrate

    first = os.environ.get("RANK", "0") == "0"  # under torchrun one rank speaks

    def say(line: str) -> None:
        if first:
            print(line, file=sys.stderr, flush=True)

    found = calibrate(args.ranks, args.backend, keep_noisy=args.keep_noisy, tell=say)
    if first and args.out:
        atomic_write(Path(args.out), str(found))
    if first:
        told = {"out": args.out, "toml": str(found.topology), "measured": list(found.comments)}
        tell(args, args.out or str(found), told)
    return 0


def verify_command(args: argparse.Namespace) -> int:
    """Run a saved program on all its ranks and compare it with the model; exit code 1 if they
    differ.
    """
    from partc.program import load

    if not 0 < args.tolerance < 1:
        what = "no error is below that"
        raise UsageError(
            where=f"--tolerance {args.tolerance}",
            what="any gradient would pass" if args.tolerance >= 1 else what,
            why="it is the largest relative error, and 1 is that of a gradient of zeros",
            do="Write a number above 0 and below 1, such as 1e-9.",
        )  # fmt: skip
    program = load(args.folder)
    report, right = _verify(args, program, args.tolerance, args.processes, args.device, args.lossy)
    verdict = f"{'equal' if right else 'DIFFERENT'} within {args.tolerance:.1e}"
    tell(args, f"{report}\n{verdict}", {**report.as_json(), "ok": right})
    if not right:
        print(f"worst: {report.worst}", file=sys.stderr)
    _keep(program, "verified", report.outcome(args.tolerance))
    return 0 if right else 1


def _keep(program: Program, kind: Kind, told: dict[str, Any]) -> None:
    """Save what was found beside the program, whose report shows it; a folder that cannot be
    written is told, and changes nothing of the result.
    """
    from partc.program.outcomes import write_outcome

    try:
        write_outcome(program, kind, told)
    except UsageError as error:
        print(f"the report will not show this: {error}", file=sys.stderr)


def _verify(
    args: argparse.Namespace, program: Program, tolerance: float, processes: bool,
    device: str = "cpu", lossy: bool = False,
) -> tuple[Verification, bool]:  # fmt: skip
    """The comparison of a program with the model that ``--model`` names; whether they agree."""
    from partc.verification.verification import verify

    target = target_of(args, args.folder, program, values=True)
    with progress(f"running {program.mesh.num_ranks} ranks"):
        report = verify(
            program, target.model, target.inputs, target.loss, processes=processes,
            timeout=args.timeout, device=device, lossy=lossy,
        )  # fmt: skip
    return report, report.ok(tolerance)


def check_command(args: argparse.Namespace) -> int:
    """Check the text of a saved program as it stands: that all ranks run it, that their transfers
    meet, and what it computes.
    """
    from partc.audit.audit import audit
    from partc.audit.edits import audit_edits
    from partc.program import edited_files, load, load_edited, write_digests
    from partc.program.written import refuse_code_beside
    from partc.verification.report import TOLERANCE

    check_compared(args)
    program = load_edited(args.folder) if args.accept_edits else load(args.folder)
    refuse_code_beside(Path(args.folder))
    with progress(f"checking {args.folder}"):
        if args.accept_edits:
            found = audit_edits(args.folder, program, verified=bool(args.model))
        else:
            found = audit(program)
    files = sorted(program.sources)
    told = {
        "folder": args.folder, "mesh": dict(program.mesh.axes), "sources": files,
        **found.as_json(),
    }  # fmt: skip
    text = str(found)
    if args.model:
        report, _ = _verify(args, program, TOLERANCE, processes=False)
        report.check(TOLERANCE)
        text += f"\n{report}"
        told["verified"] = report.as_json()
    if args.accept_edits:
        told["accepted"] = edited_files(args.folder)
        text += f"\naccepted: {', '.join(told['accepted']) or 'no file was edited'}"
        write_digests(args.folder)
    whole = f"{args.folder}: {program.model} on {program.mesh}, {', '.join(files)}: whole"
    tell(args, f"{text}\n{whole}", told)
    _keep(program, "checked", found.as_json())
    if args.model:
        _keep(program, "verified", report.outcome(TOLERANCE))
    return 0
