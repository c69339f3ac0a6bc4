"""Compile the styles under several plans, and print what becomes of each.

``python -m tests.styles [NAME ...]``; the exit code is 1 if there is a raw error.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from functools import partial

import torch

import partc
from tests.patience import patience
from tests.styles import LAYOUTS, STYLES, outcome


def run(name: str, layout: str) -> None:
    """Compile a style under a layout, and compare its program with the model."""
    torch.manual_seed(0)
    one, (mesh, given) = STYLES[name](), LAYOUTS[layout]
    program = partc.compile(one.model, mesh, one.inputs, loss=one.loss, **given)
    partc.verify(program, one.model, one.inputs, loss=one.loss, timeout=patience()).check()


def main(names: list[str]) -> int:
    """Print a row for each style and layout that is not right, then the counts."""
    warnings.simplefilter("ignore")
    counts = Counter[str]()
    for name in names or STYLES:
        for layout in LAYOUTS:
            word, text = outcome(partial(run, name, layout))
            counts[word] += 1
            if word != "right":
                told = " ".join(text.split())[:400]
                print(f"{name:<28} {layout:<18} {word:<8} {told}", flush=True)
    print(", ".join(f"{word} {num}" for word, num in sorted(counts.items())))
    return 1 if counts.keys() - {"right", "refused"} else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
