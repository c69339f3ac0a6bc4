"""The options of the command line and their help texts; nothing here imports torch."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from partc.cli import commands, launch_commands, show_commands
from partc.cli.compile_command import compile_command
from partc.cli.compile_options import compile_options
from partc.cli.completion import completion_command
from partc.cli.explain_command import explain_command
from partc.cli.launch_options import doctor_options, launch_options
from partc.cli.plan_command import plan_command, plan_options
from partc.cli.shared_options import add_folder, add_sizes, add_timeout
from partc.cli.show_options import (
    compare_options,
    diff_options,
    explain_options,
    picture_options,
    report_options,
    simulate_options,
    watch_options,
)
from partc.cli.watch_command import watch_command
from partc.cli.watchdog_command import add_watchdog_options, watchdog_command
from partc.errors import visible
from partc.wrong_calls import did_you_mean

_OF_OTHERS = {  # options that other tools have: what says the same here
    "--preset": "A preset is a plan: --plan ddp.",
    "--strategy": "It is called --plan here: --plan fsdp.",
    "--output": "It is called --out here.",
    "--output-dir": "It is called --out here.",
    "--num-layers": "It is called --layers here.",
    "--nproc-per-node": "Ranks are those of the mesh: --mesh dp=4; torchrun starts them.",
    "--tp": "Axes stand in the mesh: --mesh dp=2,tp=2.",
    "--dp": "Axes stand in the mesh: --mesh dp=2,tp=2.",
    "--pp": "Axes stand in the mesh: --mesh dp=2,pp=2.",
}
Command = Callable[[argparse.Namespace], int]
EPILOG = """\
`partc COMMAND --help` shows the options of one command. Exit codes: 0 done, 1 a verification
failed, a diff is not empty, no plan fits or the doctor found something wrong, 2 an error, 130
interrupted.

examples:
  partc compile hf:llama --layers 2 --batch 8 --mesh dp=2,tp=2 --plan megatron --out build/
  partc compile mypackage.train:setup --mesh dp=4 --plan fsdp --out build/ --dump dump/
  partc explain build/                 partc explain --rules             partc explain PTC030
  partc explain build/ --model mypackage.train:setup    costs as formulas of batch and mesh too
  partc compile hf:llama --layers 8 --batch 16 --mesh pp=2,dp=2 --microbatches 8 --out build/
  partc report build/ -o report.html             time line, memory and program in a browser
  partc picture build/ --of memory -o memory.svg
  partc compare build/ other/ -o compare.svg     partc compare build/ --devices 8,16,32
  partc diff build/ other/ --source
  partc watch run/                               a run that is going on, or over
  partc simulate build/ --svg step.svg --trace step.json
  partc simulate build/ --bandwidth nvlink=x2 --peak x1.5     the same program on other machines
  partc verify build/ --model mypackage.train:setup
  partc plan --from ds_config.json --devices 8 -o plan.toml    or of Accelerate or torchtitan
  partc calibrate --ranks 4 -o mesh.toml         or on several machines
  torchrun --nnodes 2 --nproc-per-node 8 -m partc calibrate --backend nccl -o mesh.toml
  torchrun --nproc-per-node 4 build/run.py
  partc launch build/ --emit slurm --script train.py      files for a cluster; nothing is started
  partc watchdog -- torchrun --nproc-per-node 4 --max-restarts 3 train.py
  torchrun --nproc-per-node 4 -m partc doctor build/      what is wrong on these ranks, and between
"""


class _Parser(argparse.ArgumentParser):
    """Answers what it does not know with what may be meant, in one line, and not with all options.

    ``partc compile m:f --plans ddp`` asks whether ``--plan`` is meant.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"there is no option or argument {unknown[0]!r}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        for kind, words in (("int", "whole number"), ("float", "number")):
            message = re.sub(rf"invalid {kind} value: (.*)", rf"\1 is no {words}", message)
        given, _, choices = message.partition(" (choose from ")
        known = re.findall(r"'([^']+)'", choices) or re.findall(r"--[\w-]+", self.format_usage())
        word = re.findall(r"'([^']*)'", given)
        meant = _meant(word[-1].partition("=")[0], known) if word else ""
        if word and re.fullmatch(r"[a-z]\w*=[0-9]+", word[-1]):
            meant = f"Axes are joined by commas in one word: --mesh dp=2,{word[-1]}."
        if word == ["run"]:
            meant = "A program runs by torchrun: torchrun --nproc-per-node 2 FOLDER/run.py."
        if word and (size := re.fullmatch(r"([0-9]+) ?([KMGT])i?B?", word[-1])):
            meant = f"Write {int(size[1]) * 1000 ** ('KMGT'.index(size[2]) + 1)}."
        said = f"{self.prog}: {message}. {meant}".strip()
        self.exit(2, f"PTC080 {visible(said)} See `{self.prog} --help`.\n")


def _meant(word: str, known: list[str]) -> str:
    return _OF_OTHERS.get(word) or did_you_mean(word, known)


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``partc``; its result has ``command``, the function to call with the result."""
    parser = _Parser(
        prog="partc",
        description="Compile a single-device PyTorch model into readable distributed programs;\n"
        "explain, predict, measure and verify them.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the versions of partc, torch and Python"
    )
    parser.set_defaults(command=lambda args: _without_command(parser))
    subparsers = parser.add_subparsers(metavar="command")
    for name, (run, add_options) in COMMANDS.items():
        added = subparsers.add_parser(name, help=run.__doc__, description=run.__doc__)
        added.add_argument("--json", action="store_true", help="print the result as a JSON object")
        added.set_defaults(command=run)
        add_options(added)
    return parser


class _Version(argparse.Action):
    """``--version``: looked up when asked for, and torch's without importing torch."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        from partc import __version__

        try:
            torch = f"torch {version('torch')}"
        except PackageNotFoundError:
            torch = "no torch"
        python = ".".join(map(str, sys.version_info[:3]))
        print(f"partc {__version__}, {torch}, Python {python}")
        parser.exit()


def _without_command(parser: argparse.ArgumentParser) -> int:
    """Print the help for a bare ``partc``; exit code 2, so that a script with no command fails."""
    parser.print_help(sys.stderr)
    return 2


def _passes_options(parser: argparse.ArgumentParser) -> None:
    """``partc passes`` has no options of its own."""


def _bench_options(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
    parser.add_argument(
        "--steps", metavar="N", type=int, default=10,
        help="number of measured steps with timers, and of those without (default: 10)",
    )  # fmt: skip
    parser.add_argument(
        "--warmup", metavar="N", type=int, default=3,
        help="number of steps before the measured ones (default: 3)",
    )  # fmt: skip
    parser.add_argument(
        "--device", default="cpu", help="cpu, or cuda under torchrun (default: cpu)"
    )
    add_timeout(parser, 600.0)
    parser.add_argument(
        "--trace", metavar="FILE",
        help="write the predicted and the measured step as a Chrome trace (JSON)",
    )  # fmt: skip


def _calibrate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", metavar="N", type=int,
        help="number of processes to start (default: 2); under torchrun leave it out",
    )  # fmt: skip
    parser.add_argument(
        "--backend", default="gloo", choices=["gloo", "nccl"],
        help="library whose collectives are measured (default: gloo)",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="mesh.toml to write; printed if left out"
    )
    parser.add_argument(
        "--keep-noisy", action="store_true",
        help="write what varies much from one measurement to the next, too; else it is refused",
    )  # fmt: skip


def _verify_options(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
    parser.add_argument(
        "--model", required=True, help="the model that was compiled, named as for partc compile"
    )
    parser.add_argument(
        "--tolerance", metavar="X", type=float, default=1e-9,
        help="largest relative error that passes (default: 1e-9)",
    )  # fmt: skip
    parser.add_argument(
        "--processes", action="store_true",
        help="run ranks as processes that talk over gloo, not as threads of one process",
    )  # fmt: skip
    parser.add_argument(
        "--lossy", action="store_true",
        help="also tell how far gradients that are sent in fewer bytes are from exact ones",
    )  # fmt: skip
    parser.add_argument(
        "--device", default="cpu", help="cuda: all ranks share one GPU (default: cpu)"
    )
    add_timeout(parser, 300.0)
    add_sizes(parser)


def _check_options(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
    parser.add_argument(
        "--accept-edits", action="store_true",
        help="make files that you edited part of the program, if their text passes; without it "
        "they are refused. The text is read first: only one that does nothing but compute with "
        "torch is run",
    )  # fmt: skip
    parser.add_argument(
        "--model", help="also compare with this model, named as for partc compile, as verify does"
    )
    add_timeout(parser, 300.0)
    add_sizes(parser)


def _completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="the shell that completes")


# name -> the command's function, and the function that adds its options; in `--help`'s order
COMMANDS: dict[str, tuple[Command, Callable[[argparse.ArgumentParser], None]]] = {
    "compile": (compile_command, compile_options),
    "passes": (commands.passes_command, _passes_options),
    "explain": (explain_command, explain_options),
    "simulate": (show_commands.simulate_command, simulate_options),
    "report": (show_commands.report_command, report_options),
    "picture": (show_commands.picture_command, picture_options),
    "compare": (show_commands.compare_command, compare_options),
    "bench": (commands.bench_command, _bench_options),
    "watch": (watch_command, watch_options),
    "calibrate": (commands.calibrate_command, _calibrate_options),
    "verify": (commands.verify_command, _verify_options),
    "check": (commands.check_command, _check_options),
    "diff": (show_commands.diff_command, diff_options),
    "launch": (launch_commands.launch_command, launch_options),
    "completion": (completion_command, _completion_options),
    "watchdog": (watchdog_command, add_watchdog_options),
    "plan": (plan_command, plan_options),
    "doctor": (launch_commands.doctor_command, doctor_options),
}
