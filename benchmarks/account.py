"""What is counted before a program is printed against what the printed program is found to hold.

Run ``python -m benchmarks.account``; needs transformers. Each entry is the account's peak of live
memory over that of the dry run, of the pipeline rank where they differ most. The last line says how
many accounts were made and how many programs were printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import partc
from benchmarks.lines import LAYOUTS, MODELS
from partc import accounts, printing
from partc.cost.memory_limit import Peak
from partc.errors import PartcError
from partc.passes import runner

MUCH = 10**15  # bytes: a limit, so that there is an account, and room for everything


class Noted:
    """The peaks that the account had, and how often programs were printed."""

    def __init__(self) -> None:
        self.peaks: list[list[Peak]] = []
        self.prints = 0

    @contextmanager
    def noting(self) -> Iterator[None]:
        real = runner._run_one

        def one(state: Any, row: int, each: Any) -> None:
            real(state, row, each)
            if each.run in (accounts.account_step, accounts.account_pipeline):
                self.peaks.append(state.made["peaks"])
            self.prints += each.run in (printing.print_step, printing.print_pipeline)

        with patch.object(runner, "_run_one", one):
            yield


def compiled(model: str, layout: str, layers: int, memory_bytes: int, noted: Noted) -> Any:
    mesh, plan, options = LAYOUTS[layout]
    made, batch = MODELS[model](layers)
    with noted.noting():
        return partc.compile(
            made, mesh, batch, loss=lambda m, **given: m(**given).loss, plan=plan,
            memory_bytes=memory_bytes, **options,
        )  # fmt: skip


def ratio(model: str, layout: str, layers: int, noted: Noted) -> str:
    """The ratio of the peaks, ``0.998``, or the first words of a refusal."""
    try:
        program = compiled(model, layout, layers, MUCH, noted)
    except PartcError as error:
        return f"refused: {str(error)[:40]}"
    found = zip(noted.peaks[-1], program.cost.peaks(), strict=True)
    ratios = [_live(account) / _live(dry) for account, dry in found]
    return f"{max(ratios, key=lambda each: abs(each - 1)):.3f}"


def _live(peak: Peak) -> int:
    return peak.num_bytes - sum(size for _, size in peak.state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--layouts", nargs="*", default=[*LAYOUTS], choices=[*LAYOUTS])
    parser.add_argument("--layers", type=int, default=2)
    chosen = parser.parse_args()
    noted = Noted()
    print("|".join(["| ", *chosen.layouts, ""]))
    print("|".join(["|---", *["---"] * len(chosen.layouts), ""]))
    for model in chosen.models:
        row = [ratio(model, layout, chosen.layers, noted) for layout in chosen.layouts]
        print("|".join([f"| {model} ", *row, ""]), flush=True)
    print(f"{len(noted.peaks)} accounts, {noted.prints} prints")


if __name__ == "__main__":
    main()
