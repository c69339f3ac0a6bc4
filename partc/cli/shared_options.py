"""The options that several commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

MOST_S = 1e8  # three years: more is a slip, and threads cannot wait for ever


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Add ``folder``, the saved program that a command reads."""
    parser.add_argument("folder", help="folder of a saved program")


def add_timeout(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Add ``--timeout``, the seconds after which ranks that do not answer are given up."""
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=above_zero, default=seconds,
        help=f"seconds after which ranks that are not done are given up (default: {seconds:.0f})",
    )  # fmt: skip


def above_zero(text: str) -> float:
    """A number of seconds above 0; argparse tells of another."""
    if not (found := _seconds(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return found


def from_zero(text: str) -> float:
    """A number of seconds, or 0; argparse tells of another."""
    if not (found := _seconds(text)) >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 on")
    return found


def _seconds(text: str) -> float:
    """The number of a text, NaN for none; what no clock of Python waits for is refused."""
    try:
        found = float(text)
    except ValueError:
        return math.nan
    if found > MOST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is more seconds than the most, {MOST_S:,.0f}")
    return found


def whole(least: int) -> Callable[[str], int]:
    """What reads a whole number from ``least`` on; argparse tells of another."""

    def read(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if found < least:
            raise argparse.ArgumentTypeError(f"{text!r} is too few: {least} is the least")
        return found

    return read


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options for the sizes of a Hugging Face model."""
    sizes = parser.add_argument_group(
        "for hf: models",
        "Left out, batch and sequence are those of the saved program, or 8 and 128.",
    )
    sizes.add_argument(
        "--batch", metavar="N", type=int, help="number of samples that all ranks share in a step"
    )
    sizes.add_argument(
        "--seq", metavar="N", type=int, help="tokens of a sequence, or pixels of an image's side"
    )
    sizes.add_argument(
        "--layers", metavar="N", type=int, help="number of layers, not the configuration's"
    )
    sizes.add_argument(
        "--dtype", default="float32", choices=["float64", "float32", "bfloat16"],
        help="dtype of the weights (default: float32)",
    )  # fmt: skip
    sizes.add_argument(
        "--no-dropout", action="store_true", help="set every dropout's rate to 0, in any model"
    )
