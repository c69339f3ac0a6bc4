"""Compile the styles under several plans, and print what becomes of each.

``python -m tests.styles [NAME ...]``; or, for models that are put together at random,
``python -m tests.styles --made SEED --cases NUMBER``. The exit code is 1 if one is raw or wrong.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import partc
from tests.patience import patience
from tests.styles import LAYOUTS, STYLES, Ill, Style, outcome
from tests.styles.made import made
from tests.styles.rounding import only_rounding

Case = tuple[str, str, Callable[[], object]]  # two names, and what is run


def run(one: Style, mesh: str, how: dict[str, Any]) -> None:
    """Compile a style for a mesh, and compare its program with the model."""
    program = partc.compile(one.model, mesh, one.inputs, loss=one.loss, **how)
    partc.verify(program, one.model, one.inputs, loss=one.loss, timeout=patience()).check()


def run_style(name: str, layout: str) -> None:
    """Run a style under a layout, both by name."""
    torch.manual_seed(0)
    run(STYLES[name](), *LAYOUTS[layout])


def run_made(seed: int) -> None:
    """Run the model of a seed under its own layout; Ill if its gradients are rounding alone."""
    one, mesh, how = made(seed)
    program = partc.compile(one.model, mesh, one.inputs, loss=one.loss, **how)
    report = partc.verify(program, one.model, one.inputs, loss=one.loss, timeout=patience())
    if not report.ok() and only_rounding(report, one):
        raise Ill(f"{report.worst}: one rounding of its numbers moves the model's own as far")
    report.check()


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """What is run."""
    if options.made is not None:
        for seed in range(options.made, options.made + options.cases):
            _, mesh, how = made(seed)
            yield str(seed), " ".join([mesh, *map(str, how.values())]), partial(run_made, seed)
        return
    for name in options.names or STYLES:
        for layout in LAYOUTS:
            yield name, layout, partial(run_style, name, layout)


def main() -> int:
    """Print a row for each case that is not right, then the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.styles", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--made", type=int, metavar="SEED")
    parser.add_argument("--cases", type=int, default=100, metavar="NUMBER")
    warnings.simplefilter("ignore")
    counts = Counter[str]()
    for name, layout, case in cases(parser.parse_args()):
        word, text = outcome(case)
        counts[word] += 1
        if word != "right":
            told = " ".join(text.split())[:400]
            print(f"{name:<28} {layout:<18} {word:<8} {told}", flush=True)
    print(", ".join(f"{word} {num}" for word, num in sorted(counts.items())))
    return 1 if counts.keys() - {"right", "refused", "ill"} else 0


if __name__ == "__main__":
    sys.exit(main())
