"""The options of commands that run, measure or check a program."""

from __future__ import annotations

import argparse

from partc.cli.shared_options import add_folder, add_sizes, add_timeout


def passes_options(parser: argparse.ArgumentParser) -> None:
    """``partc passes`` has no options of its own."""


def bench_options(parser: argparse.ArgumentParser) -> None:
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
    parser.set_defaults(written={"trace": "json"})


def calibrate_options(parser: argparse.ArgumentParser) -> None:
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
    parser.set_defaults(written={"out": "toml"})
    parser.add_argument(
        "--keep-noisy", action="store_true",
        help="write what varies much from one measurement to the next, too; else it is refused",
    )  # fmt: skip


def verify_options(parser: argparse.ArgumentParser) -> None:
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


def check_options(parser: argparse.ArgumentParser) -> None:
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


def completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="the shell that completes")
