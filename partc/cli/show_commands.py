"""Commands that show a saved program's step: simulate, report, diff."""

from __future__ import annotations

import argparse
from pathlib import Path

from partc.cli.early import check_saved
from partc.cli.said import check_from_one, listed, whole_numbers
from partc.cli.terminal import coloured, columns, progress, tell


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
        shown = simulate_saved(program, change, args.folder, columns())
        files = {"trace": args.trace, "svg": args.svg}
        for kind, path in files.items():
            if path:
                atomic_write(Path(path), shown.file(kind, args.folder))
        tell(args, shown.text, shown.told)
    return 0 if shown.fits else 1


def report_command(args: argparse.Namespace) -> int:
    """Write a saved program's predicted step as one HTML file: a time line beside the program."""
    from partc.atomic import atomic_write
    from partc.program import load
    from partc.program.saved_cost import saved_numbers
    from partc.reports.report_data import report_data
    from partc.reports.report_page import report_page

    program = load(args.folder)
    with progress(f"running {args.folder} on tensors without data"), saved_numbers(args.folder):
        told = report_data(program, args.folder)
    if args.out:
        atomic_write(Path(args.out), report_page(told))
    text = f"{told['verdict']}\n{args.out or 'no file is written: name one with -o report.html'}"
    tell(args, text, told)
    return 0


def picture_command(args: argparse.Namespace) -> int:
    """Draw a saved program's step, memory, mesh or schedule as an SVG picture."""
    from partc.atomic import atomic_write
    from partc.pictures.picture import picture
    from partc.program import load
    from partc.program.saved_cost import saved_numbers

    program = load(args.folder)
    with progress(f"drawing the {args.of} of {args.folder}"), saved_numbers(args.folder):
        made = picture(program, args.of, args.folder)
    if args.out:
        atomic_write(Path(args.out), made.svg)
    told = {"of": args.of, "shows": made.words, "out": args.out, "svg": made.svg}
    tell(args, args.out or made.svg.rstrip(), told)
    return 0


def compare_command(args: argparse.Namespace) -> int:
    """Compare saved programs by time, devices, memory and cost, here or on other machines."""
    from partc.atomic import atomic_write
    from partc.pictures.compare_svg import compare_svg
    from partc.pictures.comparison import comparison
    from partc.program import load
    from partc.program.saved_cost import saved_numbers

    devices, machines = whole_numbers("--devices", args.devices), listed(args.machines)
    for folder in args.folders:
        check_saved(folder)
    programs = {folder: load(folder) for folder in args.folders}
    with progress("estimating"), saved_numbers(" or ".join(args.folders)):
        found = comparison(programs, devices, machines)
    if args.out:
        atomic_write(Path(args.out), compare_svg(found))
    tell(args, f"{found}" + (f"\n\n{args.out}" if args.out else ""), found.as_json())
    return 0


def diff_command(args: argparse.Namespace) -> int:
    """Say how two saved programs differ, in words, and in the lines of their files; exit code 1 if
    they do.
    """
    from partc.program import edited_files, load_edited
    from partc.program.saved_cost import saved_numbers
    from partc.reports.difference_lines import difference_lines
    from partc.reports.differences import differences

    folders = (args.old, args.new)
    programs = [load_edited(folder) for folder in folders]
    with saved_numbers(" or ".join(folders)):
        found = differences(programs[0], programs[1], folders)
        shown = difference_lines(found, programs[0], programs[1], args.source, columns())
    edits = {folder: list(edited_files(folder)) for folder in folders}
    lines = [
        f"{folder}: edited since it was saved: {', '.join(n)}" for folder, n in edits.items() if n
    ]
    tell(args, "\n".join([*lines, *shown]), {**found.as_json(), "edited": edits}, _painted)
    return 1 if found else 0


def _painted(line: str) -> str:
    """A line of a unified diff in red or green; other lines as they are."""
    colours = {"-": "red", "+": "green", "@": "faint"}
    return coloured(line, colours[line[0]]) if line[:1] in colours else line
