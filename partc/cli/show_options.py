"""The options of the commands that show something: of a program, of several, or of a run."""

from __future__ import annotations

import argparse

from partc.cli.shared_options import add_folder, add_sizes


def explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        help="folder of a saved program, an error code such as PTC030, or with --rules an op",
    )
    parser.add_argument(
        "--rules",
        action="store_true",
        help="list the ops that have a sharding rule; with an op (aten.mm) say how it is cut",
    )
    parser.add_argument(
        "--all", action="store_true",
        help="the plan, all costs, the phases of the step and other machines too",
    )  # fmt: skip
    parser.add_argument(
        "--source", action="store_true", help="print the Python text that the rank --rank runs"
    )
    parser.add_argument(
        "--rank", metavar="N", type=int, help="whose text --source prints (default: 0)"
    )
    parser.add_argument(
        "--model",
        help="the model that was compiled, named as for partc compile: costs are then shown as "
        "formulas of batch, sequence and mesh too",
    )
    add_sizes(parser)


def simulate_options(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
    parser.add_argument(
        "--trace", metavar="FILE", help="write the time line as a Chrome trace (JSON)"
    )
    parser.add_argument("--svg", metavar="FILE", help="write the time line as a picture")
    parser.set_defaults(written={"trace": "json", "svg": "svg"})
    what_if = parser.add_argument_group(
        "on other machines", "X is a factor: 2 (or x2) for twice as much, 0.5 for half."
    )
    for name, what in (("bandwidth", "bytes/s"), ("latency", "latency")):
        what_if.add_argument(
            f"--{name}", metavar="[LEVEL=]X", action="append", default=[],
            help=f"multiplies the {what} of all links, or of one level of links (nvlink=x2); may "
            "be given several times",
        )  # fmt: skip
    what_if.add_argument("--peak", metavar="X", default="1", help="multiplies FLOP/s of devices")
    what_if.add_argument(
        "--memory-bandwidth", metavar="X", default="1",
        help="multiplies the bytes/s of their memory",
    )  # fmt: skip
    what_if.add_argument(
        "--devices", metavar="N", type=int, default=None,
        help="number of devices, in place of the program's; its step is then estimated, since it "
        "would be another program",
    )  # fmt: skip


def report_options(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
    parser.add_argument(
        "-o", "--out", metavar="FILE",
        help="the HTML file; it holds all that it shows and fetches nothing",
    )  # fmt: skip
    parser.set_defaults(written={"out": "html"})


def picture_options(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
    parser.add_argument(
        "--of", default="timeline", choices=["timeline", "memory", "mesh", "grid"],
        help="timeline: what ranks compute and send in a step; memory: bytes over the step, and "
        "who holds them; mesh: ranks on machines; grid: a pipeline's schedule (default: timeline)",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="the SVG file; left out, its text is printed"
    )
    parser.set_defaults(written={"out": "svg"})


def compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", help="folders of saved programs")
    parser.add_argument(
        "--devices", metavar="N,M",
        help="numbers of devices, as 8,16,32: estimates each program's plan for them",
    )  # fmt: skip
    parser.add_argument(
        "--machines", metavar="A,B",
        help="machines that come with partc, as dgx-h100,dgx-a100: estimates each plan on them",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--out", metavar="FILE",
        help="an SVG file: speed-up against devices, and cost against time",
    )  # fmt: skip
    parser.set_defaults(written={"out": "svg"})


def watch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", help="folder in which a run writes lines of JSON and checkpoints, or such a file"
    )
    parser.add_argument(
        "--program", metavar="DIR",
        help="folder of the program that runs, for its predictions (default: the newest one in the "
        "run's folder)",
    )  # fmt: skip
    parser.add_argument(
        "--every", metavar="SECONDS", type=float, default=2.0,
        help="seconds after which a terminal is shown the run anew (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--once", action="store_true", help="show it once; so does output that is no terminal"
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="write it as an HTML page with curves, too"
    )
    parser.set_defaults(written={"out": "html"})


def diff_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", help="folder of a saved program")
    parser.add_argument("new", help="folder of another one")
    parser.add_argument(
        "--source", action="store_true", help="print the lines of the files that differ, too"
    )
