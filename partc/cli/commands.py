"""The commands of the command line: each takes the parsed arguments and returns the exit code.

Commands import torch and other rooms when they run, as `partc --help` imports this module.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from partc.cli.said import check_compared, check_explained, check_from_one, sizes_said, tell
from partc.errors import UsageError, explain

if TYPE_CHECKING:
    from partc.cli.models import Target
    from partc.program import Program
    from partc.reports.cost import CostReport
    from partc.verification.report import Report


def compile_command(args: argparse.Namespace) -> int:
    """Compile a model for a mesh of devices and save the program: its plan, and what ranks run."""
    import torch

    from partc import api
    from partc.atomic import check_output
    from partc.cli.models import find_model
    from partc.program.written import written_files

    start = time.monotonic()
    check_from_one(args, ["virtual_stages", "memory_bytes"])
    check_output(args.out, written_files)
    with _progress(f"building {args.model}"):
        target = find_model(args.model, sizes_said(args))
        target = target.for_inference() if args.inference else target
    compiling = f"compiling for {args.mesh}, plan {args.plan}"
    with _progress(compiling), torch.set_grad_enabled(not args.inference):
        program = api.compile(
            target.model, args.mesh, target.inputs, loss=target.loss, plan=args.plan,
            microbatches=args.microbatches, schedule=args.schedule,
            virtual_stages=args.virtual_stages,
            stages=_listed(args.stages) or None, recompute=_recompute(args),
            memory_bytes=args.memory_bytes, objective=args.objective, compile=args.compile,
            backend=args.backend, batch="local" if args.local_batch else None,
            dump=args.dump, disable=_listed(args.disable),
        )  # fmt: skip
    program.save(args.out)
    lines = {name: text.count("\n") for name, text in sorted(program.sources.items())}
    told = {
        "out": args.out, "model": program.model, "mesh": dict(program.mesh.axes),
        "lines": lines, "cost": program.cost.as_json(), "seconds": time.monotonic() - start,
    }  # fmt: skip
    files = ", ".join(f"{name} ({num} lines)" for name, num in lines.items())
    num = program.mesh.num_ranks
    run = f"run it: torchrun --nproc-per-node {num} {args.out.rstrip('/')}/run.py"
    tell(args, f"{program.cost}\n{args.out}: {files}\n{run}", told)
    return 0


def _listed(said: str | None) -> list[str]:
    """The names in an option such as ``A,B``; blanks beside commas do not count."""
    return [each.strip() for each in (said or "").split(",") if each.strip()]


def _recompute(args: argparse.Namespace) -> str | list[str] | None:
    """The value of ``--recompute`` for a plan: one of its words, or a list of module paths."""
    from partc.plan.field_kinds import RECOMPUTES

    said: str | None = args.recompute
    return said if said is None or said in RECOMPUTES else said.split(",")


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


def explain_command(args: argparse.Namespace) -> int:
    """Explain a saved program, an error code, the sharding rule of an op, or list the rules."""
    check_explained(args)
    if args.rules:
        _explain_rules(args)
    elif args.what is None:
        raise UsageError(
            where="partc explain",
            what="there is nothing to explain",
            why="it needs a folder, an error code or --rules",
            do="Try `partc explain build/`, `partc explain PTC030` or `partc explain --rules`.",
        )
    elif args.what.upper().startswith("PTC"):
        tell(args, explain(args.what), {"code": args.what.upper(), "text": explain(args.what)})
    else:
        _explain_program(args)
    return 0


def _explain_rules(args: argparse.Namespace) -> None:
    """The rule of the op that the command names, or a line for every op with a rule."""
    from partc.rules.explain_rule import all_rules, explain_rule

    if args.what:
        known = explain_rule(args.what)
        tell(args, "\n".join(map(str, known)), {"ops": [asdict(each) for each in known]})
        return
    rules = all_rules()
    width = max(map(len, rules), default=0)
    tell(args, "\n".join(f"{n:<{width}}  {text}" for n, text in rules.items()), rules)


def simulate_command(args: argparse.Namespace) -> int:
    """Predict the step of a saved program, on the machines that it was planned for or on others; of
    a pipeline also show the schedule, how long ranks idle, and their peak memory.
    """
    from partc.atomic import atomic_write
    from partc.machines.what_if import Change
    from partc.program import load
    from partc.program.saved_cost import saved_numbers
    from partc.reports.simulate_saved import simulate_saved

    check_from_one(args, ["devices"])
    change = Change.parse(
        bandwidth=args.bandwidth, latency=args.latency, peak=args.peak,
        memory_bandwidth=args.memory_bandwidth, devices=args.devices or 0,
    )  # fmt: skip
    program = load(args.folder)
    with saved_numbers(args.folder):
        shown = simulate_saved(program, change, args.folder)
        files = {"trace": args.trace, "svg": args.svg}
        for kind, path in files.items():
            if path:
                atomic_write(Path(path), shown.file(kind, args.folder))
        tell(args, shown.text, shown.told)
    return 0


def report_command(args: argparse.Namespace) -> int:
    """Write a saved program's predicted step as one HTML file: a time line beside the program."""
    from partc.atomic import atomic_write
    from partc.program import load
    from partc.program.saved_cost import saved_numbers
    from partc.reports.report_data import report_data
    from partc.reports.report_page import report_page

    program = load(args.folder)
    with _progress(f"running {args.folder} on tensors without data"), saved_numbers(args.folder):
        told = report_data(program, args.folder)
    if args.out:
        atomic_write(Path(args.out), report_page(told))
    text = f"{told['verdict']}\n{args.out or 'no file is written: name one with -o report.html'}"
    tell(args, text, told)
    return 0


def bench_command(args: argparse.Namespace) -> int:
    """Run steps of a saved program on all its ranks; show how long ranks compute and wait and what
    transfers are hidden, beside the prediction.
    """
    from partc.atomic import atomic_write
    from partc.measure.bench import bench

    with _progress(f"running {args.steps} steps of {args.folder}"):
        found = bench(
            args.folder, steps=args.steps, warmup=args.warmup, device=args.device,
            timeout=args.timeout,
        )  # fmt: skip
    if os.environ.get("RANK", "0") == "0":  # under torchrun one rank speaks
        if args.trace:
            atomic_write(Path(args.trace), found.trace())
        tell(args, str(found), found.as_json())
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

    if not args.tolerance > 0:
        raise UsageError(
            where=f"--tolerance {args.tolerance}", what="no error is below that",
            why="it is the largest relative error", do="Write a number above 0, such as 1e-9.",
        )  # fmt: skip
    report, right = _verify(
        args, load(args.folder), args.tolerance, args.processes, args.device, args.lossy
    )
    verdict = f"{'equal' if right else 'DIFFERENT'} within {args.tolerance:.1e}"
    tell(args, f"{report}\n{verdict}", {**report.as_json(), "ok": right})
    if not right:
        print(f"worst: {report.worst}", file=sys.stderr)
    return 0 if right else 1


def _verify(
    args: argparse.Namespace, program: Program, tolerance: float, processes: bool,
    device: str = "cpu", lossy: bool = False,
) -> tuple[Report, bool]:  # fmt: skip
    """The comparison of a program with the model that ``--model`` names; whether they agree."""
    from partc.verification.verification import verify

    target = _target(args, args.folder, program, values=True)
    with _progress(f"running {program.mesh.num_ranks} ranks"):
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
    with _progress(f"checking {args.folder}"):
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
    return 0


def diff_command(args: argparse.Namespace) -> int:
    """Say how two saved programs differ, in words, and in the lines of their files; exit code 1 if
    they do.
    """
    from partc.program import edited_files, load_edited
    from partc.program.saved_cost import saved_numbers
    from partc.reports.differences import differences

    folders = (args.old, args.new)
    programs = [load_edited(folder) for folder in folders]
    with saved_numbers(" or ".join(folders)):
        found = differences(programs[0], programs[1], folders)
    edits = {folder: list(edited_files(folder)) for folder in folders}
    lines = [
        f"{folder}: edited since it was saved: {', '.join(n)}" for folder, n in edits.items() if n
    ]
    tell(args, "\n".join([*lines, str(found)]), {**found.as_json(), "edited": edits})
    return 1 if found else 0


def _explain_program(args: argparse.Namespace) -> None:
    """Print plan, cost, roles and explanation of a saved program, or one rank's source."""
    from partc.program import load
    from partc.program.saved_cost import saved_numbers
    from partc.reports.explanation import explain_program

    program = load(args.what)
    if args.source:
        rank = args.rank or 0
        source = program.source(rank)
        tell(args, source, {"rank": rank, "file": program.role_of(rank), "source": source})
        return
    cost = _with_formulas(args, program) if args.model else program.cost
    roles, first = [], 0
    for num, name in program.roles:
        roles.append(f"ranks {first} to {first + num - 1}: {name}")
        first += num
    with saved_numbers(args.what):
        inputs = [_input(program, name) for name in program.inputs]
        text = [f"{program.model} on {program.mesh}", f"inputs {', '.join(inputs)}", *roles]
        why = explain_program(program)
        told = {
            "model": program.model, "mesh": dict(program.mesh.axes), "plan": program.plan,
            "cost": cost.as_json(), "explanation": why.as_json(),
            "roles": [list(run) for run in program.roles],
            "inputs": {name: [list(s), d] for name, (s, d) in program.inputs.items()},
            "batch": "local" if program.dealt else "global",
        }  # fmt: skip
        tell(args, "\n".join([*text, "", program.plan, str(cost), str(why)]), told)


def _input(program: Program, name: str) -> str:
    """Dtype and shape of an input, and of a rank's piece; nothing of the program is run."""
    shape, dtype = program.inputs[name]
    if name not in program.dealt:
        return f"{name} {dtype}{list(shape)}"
    piece = [*shape]
    for axis, dim, _ in program.dealt[name]:
        piece[dim] //= program.mesh.size(axis)
    return f"{name} {dtype}{list(shape)} ({piece} on each rank)"


def _with_formulas(args: argparse.Namespace, program: Program) -> CostReport:
    """The cost of a saved program with formulas, for which its model is traced again."""
    from partc.cli.formulas import cost_with_formulas

    target = _target(args, args.what, program)
    with _progress("compiling at other sizes"):
        return cost_with_formulas(program, target.model, target.inputs, target.loss)


def _target(
    args: argparse.Namespace, folder: str, program: Program, values: bool = False
) -> Target:
    """The model that ``--model`` names; LoadError if the program is of another model."""
    from partc.cli.models import find_model, sizes_of_inputs
    from partc.program import check_model

    shapes = [shape for shape, _ in program.inputs.values()]
    sizes = sizes_of_inputs(shapes, sizes_said(args))
    with _progress(f"building {args.model}"):
        if values and args.model.startswith("hf:"):  # another, larger one is refused without values
            known = find_model(args.model, sizes).model
            check_model(Path(folder), program.fingerprint, known)
        target = find_model(args.model, sizes, values=values)
        target = target.for_inference() if program.role(0).is_inference else target
    check_model(Path(folder), program.fingerprint, target.model)
    return target


# output --------------------------------------------------------------------------------------
@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Print on stderr what runs, and every ten seconds for how long."""
    start, over = time.monotonic(), threading.Event()

    def beat() -> None:
        while not over.wait(10.0):
            print(f"  ... {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    print(f"{what} ...", file=sys.stderr, flush=True)
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
