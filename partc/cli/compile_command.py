"""``partc compile``: from the words of a command line to a saved program."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from partc.cli.early import check_compile
from partc.cli.said import check_from_one, listed, sizes_said, target_said
from partc.cli.terminal import progress, tell

if TYPE_CHECKING:
    from partc.program import Program


def compile_command(args: argparse.Namespace) -> int:
    """Compile a model for a mesh of devices and save the program: its plan, and what ranks run."""
    check_from_one(args, ["virtual_stages", "memory_bytes"])
    check_compile(args)
    import torch

    from partc import api
    from partc.atomic import check_output
    from partc.cli.models import find_model
    from partc.program.written import written_files

    start = time.monotonic()
    check_output(args.out, written_files)
    with progress(f"building {args.model}"):
        target = find_model(args.model, sizes_said(args))
        if target.note:
            print(f"  {args.model}: {target.note}", file=sys.stderr, flush=True)
        target = target.for_inference() if args.inference else target
    compiling = f"compiling for {args.mesh}, plan {args.plan}"
    with progress(compiling), torch.set_grad_enabled(not args.inference):
        program = api.compile(
            target.model, args.mesh, target.inputs, loss=target.loss, plan=args.plan,
            microbatches=args.microbatches, schedule=args.schedule,
            virtual_stages=args.virtual_stages,
            stages=listed(args.stages) or None, recompute=_recompute(args),
            memory_bytes=args.memory_bytes, objective=args.objective, compile=args.compile,
            backend=args.backend, batch="local" if args.local_batch else None,
            dump=args.dump, disable=listed(args.disable),
        )  # fmt: skip
    program = replace(program, target=target_said(args))
    program.save(args.out)
    _tell(args, program, time.monotonic() - start)
    return 0


def _tell(args: argparse.Namespace, program: Program, seconds: float) -> None:
    """Sum the program up, and say how it is run and what may be typed next."""
    from partc.reports.summary import Summary, launch_line, ranks_per_machine, uncalibrated

    summed, launch = Summary.of(program), launch_line(program, args.out)
    lines = {name: text.count("\n") for name, text in sorted(program.sources.items())}
    told = {
        "out": args.out, "model": program.model, "mesh": dict(program.mesh.axes),
        "lines": lines, "cost": program.cost.as_json(), "seconds": seconds,
        "summary": summed.as_json(), "run": launch,
    }  # fmt: skip
    machines = program.mesh.num_ranks // ranks_per_machine(program)
    on_each = f"   on each of {machines} machines; HOST is the first" if machines > 1 else ""
    out = shlex.quote(args.out)
    text = [
        f"{args.out}: {program.model} on {program.mesh}", str(summed), "",
        f"run     {launch}{on_each}",
        f"next    partc explain {out}", f"        partc report {out} -o report.html",
        f"        partc verify {out} --model {_model_said(args)}",
    ]  # fmt: skip
    known = program.basis.topology() if program.basis.machine else None
    if not args.json and (warning := uncalibrated(known)):
        text += ["", warning]
    tell(args, "\n".join(text), told)


def _model_said(args: argparse.Namespace) -> str:
    """The model as ``partc verify`` is told of it; batch and sequence follow from the program."""
    said = [shlex.quote(args.model)]
    if args.layers is not None:
        said.append(f"--layers {args.layers}")
    if args.dtype != "float32":
        said.append(f"--dtype {args.dtype}")
    return " ".join([*said, *(["--no-dropout"] if args.no_dropout else [])])


def _recompute(args: argparse.Namespace) -> str | list[str] | None:
    """The value of ``--recompute`` for a plan: one of its words, or a list of module paths."""
    from partc.plan.field_kinds import RECOMPUTES

    said: str | None = args.recompute
    return said if said is None or said in RECOMPUTES else said.split(",")
