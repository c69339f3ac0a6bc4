"""The options of the command line and their help texts; nothing here imports torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from partc.cli.parser import Parser

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
  partc replan build/ --devices 3 -o build-3/    the same batch on other ranks
  partc export run/ -o weights/ --config model/config.json     for from_pretrained
  partc launch build/ --emit slurm --script train.py      files for a cluster; nothing is started
  partc watchdog -- torchrun --nproc-per-node 4 --max-restarts 3 train.py
  torchrun --nproc-per-node 4 -m partc doctor build/      what is wrong on these ranks, and between
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``partc``; its result has ``command``, the function to call with the result."""
    parser = Parser(
        prog="partc",
        description="Compile a single-device PyTorch model into readable distributed programs;\n"
        "explain, predict, measure and verify them.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the versions of partc, torch and Python"
    )
    parser.set_defaults(command=lambda args: _without_command(parser))
    commands = parser.add_subparsers(metavar="command", parser_class=_CommandParser)
    for name, each in COMMANDS.items():
        commands.add_parser(name, help=each.help, command=each)
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


class Command(NamedTuple):
    """A command by its file: ``run`` and ``options`` name functions of modules beside this one,
    ``module:function``. Only the command that is asked for is imported, since the list of all of
    them needs no more than ``help``, the docstring of ``run``.
    """

    help: str
    run: str
    options: str

    def function(self) -> Callable[[argparse.Namespace], int]:
        """What runs the command: takes what was parsed, returns the exit code."""
        found: Callable[[argparse.Namespace], int] = _named(self.run)
        return found

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments and options to its parser."""
        _named(self.options)(parser)


def _named(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"partc.cli.{module}"), name)
    return found


class _CommandParser(Parser):
    """The parser of one command, which gets its options when it is first used."""

    def __init__(self, *, command: Command, **more: Any) -> None:
        super().__init__(description=command.help, **more)
        self.unread: Command | None = command

    def fill(self) -> None:
        """Add the options, once."""
        if (command := self.unread) is not None:
            self.unread = None
            self.add_argument(
                "--json", action="store_true", help="print the result as a JSON object"
            )
            self.set_defaults(command=command.function())
            command.add_options(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.fill()
        found, unknown = super().parse_known_args(args, namespace)
        for each in self._actions:
            given = getattr(found, each.dest, None) if each.metavar == "FILE" else None
            if given and os.path.isdir(given):
                said = f"{'/'.join(each.option_strings)} is a file, and {given!r} is a folder"
                self.error(f"{said}. Name a file in it")
        return found, unknown


# by name, in the order of `--help`
COMMANDS: dict[str, Command] = {
    "compile": Command(
        "Compile a model for a mesh of devices and save the program: its plan, and what ranks "
        "run.",
        "compile_command:compile_command", "compile_options:compile_options",
    ),
    "passes": Command(
        "List the compiler's passes in order: who takes each, what it leaves behind, and why.",
        "commands:passes_command", "run_options:passes_options",
    ),
    "explain": Command(
        "Explain a saved program, an error code, the sharding rule of an op, or list the rules.",
        "explain_command:explain_command", "show_options:explain_options",
    ),
    "simulate": Command(
        "Predict the step of a saved program, on the machines that it was planned for or on "
        "others; of a pipeline also show the schedule, how long ranks idle, and their peak "
        "memory.",
        "show_commands:simulate_command", "show_options:simulate_options",
    ),
    "report": Command(
        "Write a saved program's predicted step as one HTML file: a time line beside the "
        "program.",
        "show_commands:report_command", "show_options:report_options",
    ),
    "picture": Command(
        "Draw a saved program's step, memory, mesh or schedule as an SVG picture.",
        "show_commands:picture_command", "show_options:picture_options",
    ),
    "compare": Command(
        "Compare saved programs by time, devices, memory and cost, here or on other machines.",
        "show_commands:compare_command", "show_options:compare_options",
    ),
    "bench": Command(
        "Run steps of a saved program on all its ranks; show how long ranks compute and wait "
        "and what transfers are hidden, beside the prediction.",
        "commands:bench_command", "run_options:bench_options",
    ),
    "watch": Command(
        "Show a run from the files that it writes: pace, slowest rank, loss, memory, "
        "checkpoints.",
        "watch_command:watch_command", "show_options:watch_options",
    ),
    "calibrate": Command(
        "Measure this machine's devices and links, and write them as a mesh.toml to compile "
        "for.",
        "commands:calibrate_command", "run_options:calibrate_options",
    ),
    "verify": Command(
        "Run a saved program on all its ranks and compare it with the model; exit code 1 if "
        "they differ.",
        "commands:verify_command", "run_options:verify_options",
    ),
    "check": Command(
        "Check the text of a saved program as it stands: that all ranks run it, that their "
        "transfers meet, and what it computes.",
        "commands:check_command", "run_options:check_options",
    ),
    "diff": Command(
        "Say how two saved programs differ, in words, and in the lines of their files; exit "
        "code 1 if they do.",
        "show_commands:diff_command", "show_options:diff_options",
    ),
    "launch": Command(
        "Write the files with which torchrun, Slurm, Kubernetes, SkyPilot or TorchX start a "
        "saved program; nothing is started.",
        "launch_commands:launch_command", "launch_options:launch_options",
    ),
    "replan": Command(
        "Compile a saved program's model for another number of ranks, with the same global "
        "batch, and with what its plan decided, as far as that can stay.",
        "replan_command:replan_command", "replan_command:replan_options",
    ),
    "export": Command(
        "Write the model of a checkpoint as safetensors files, as Hugging Face's loaders read "
        "them.",
        "export_command:export_command", "export_command:export_options",
    ),
    "completion": Command(
        "Print a script that lets a shell complete partc's commands, options, folders and "
        "files.",
        "completion:completion_command", "run_options:completion_options",
    ),
    "watchdog": Command(
        "Run torchrun, and end a rank that stands still, so that all ranks are started again.",
        "watchdog_command:watchdog_command", "watchdog_command:add_watchdog_options",
    ),
    "plan": Command(
        "Write a plan that does what a configuration of Accelerate, DeepSpeed or torchtitan "
        "says.",
        "plan_command:plan_command", "plan_command:plan_options",
    ),
    "doctor": Command(
        "Say what is right and wrong here for a run: versions, devices, variables, and under "
        "torchrun what differs between ranks, clocks and links; exit code 1 if something is "
        "wrong.",
        "launch_commands:doctor_command", "launch_options:doctor_options",
    ),
}  # fmt: skip
