"""Compile the styles under several plans, and print what becomes of each.

``python -m tests.styles [NAME ...]``; the exit code is 1 if there is a raw error.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from typing import Any

import torch

import partc
from partc.errors import CheckError, PartcError
from tests.patience import patience
from tests.styles import STYLES

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("dp=2", {"plan": "ddp"}),
    "ddp, microbatches": ("dp=2", {"plan": "ddp", "microbatches": 2}),
    "fsdp": ("dp=2", {"plan": "fsdp"}),
    "megatron": ("tp=2", {"plan": "megatron"}),
    "pipeline": ("pp=2", {"plan": "ddp", "microbatches": 2}),
    "auto": ("dp=2,tp=2", {"plan": "auto"}),
}


def outcome(name: str, layout: str) -> tuple[str, str]:
    """ "right", "refused" or "RAW", and the message."""
    torch.manual_seed(0)
    one, (mesh, given) = STYLES[name](), LAYOUTS[layout]
    try:
        program = partc.compile(one.model, mesh, one.inputs, loss=one.loss, **given)
        partc.verify(program, one.model, one.inputs, loss=one.loss, timeout=patience()).check()
    except CheckError as error:
        return "WRONG", str(error)
    except PartcError as error:
        return "refused", str(error)
    except Exception as error:
        return "RAW", f"{type(error).__name__}: {error}"
    return "right", ""


def main(names: list[str]) -> int:
    """Print a row for each style and layout that is not right, then the counts."""
    warnings.simplefilter("ignore")
    counts = Counter[str]()
    for name in names or STYLES:
        for layout in LAYOUTS:
            word, text = outcome(name, layout)
            counts[word] += 1
            if word != "right":
                told = " ".join(text.split())[:400]
                print(f"{name:<28} {layout:<18} {word:<8} {told}", flush=True)
    print(", ".join(f"{word} {num}" for word, num in sorted(counts.items())))
    return 1 if counts.keys() - {"right", "refused"} else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
