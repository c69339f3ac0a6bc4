"""Which model of the zoo computes the same under which layout, in float64.

Run ``python -m benchmarks.parity``; it prints a markdown table, ``--write`` puts it into
docs/parity.md. A cell holds the worst relative error of the loss, of any gradient and of any
parameter after an optimizer step, over all ranks, with the model's own casts to float32 raised to
float64; in brackets the worst of loss and gradients as the model stands. A layout that cannot be
compiled says why below.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

import partc
from partc.verification.report import TOLERANCE, Report
from tests.zoo import FAMILIES, Case

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "parity.md"
TOLERANCE_F32 = 1e-5  # where the model computes in float32 itself
TOLERANCE_F32_STEP = 1e-4  # AdamW divides each gradient by its own size, noise included
LAYOUTS = {
    "ddp": "dp=2",
    "zero1": "dp=2",
    "fsdp": "dp=2",
    "megatron": "tp=2",
    "megatron-sp": "tp=2",
    "fsdp+megatron": "dp=2,tp=2",
}


@dataclass(frozen=True)
class Cell:
    """One model under one layout: its errors, or what stopped it."""

    loss: float = 0.0
    gradient: float = 0.0
    step: float = 0.0
    as_it_stands: float = 0.0
    failure: str = ""
    tolerance: float = TOLERANCE

    @property
    def ok(self) -> bool:
        single = self.tolerance == TOLERANCE_F32
        step = TOLERANCE_F32_STEP if single else self.tolerance
        exact = max(self.loss, self.gradient) <= self.tolerance and self.step <= step
        return not self.failure and exact and self.as_it_stands <= TOLERANCE_F32

    def __str__(self) -> str:
        if self.failure:
            return "**" + self.failure.partition(":")[0] + "**"
        errors = f"{self.loss:.0e} {self.gradient:.0e} {self.step:.0e}"
        if self.tolerance < TOLERANCE_F32:
            errors += f" ({self.as_it_stands:.0e})"
        return errors if self.ok else f"**{errors}**"


def cell(case: Case, plan: str, mesh: str, processes: bool) -> Cell:
    """Compile one model for one layout and verify it, in float32 if the zoo builds it so."""
    single = next(case.model.parameters()).dtype == torch.float32
    try:
        program = partc.compile(case.model, mesh, case.inputs, loss=case.loss, plan=plan)
        own = _verified(program, case, None, processes)
        exact = own if single else _verified(program, case, torch.float64, processes)
    except Exception as error:  # a table of what works says of everything else why not
        text = " ".join(str(error).split()) or "no message"
        return Cell(failure=f"{type(error).__name__}: {text[:300]}")
    loss, gradient, step = (_worst(exact, kind) for kind in ("loss", "gradient", "after"))
    as_it_stands = max(_worst(own, "loss"), _worst(own, "gradient"))
    tolerance = TOLERANCE_F32 if single else TOLERANCE
    return Cell(loss, gradient, step, as_it_stands, tolerance=tolerance)


def _verified(
    program: partc.Program, case: Case, dtype: torch.dtype | None, processes: bool
) -> Report:
    return partc.verify(
        program, case.model, case.inputs, case.loss, processes=processes, dtype=dtype,
        timeout=100.0,
    )  # fmt: skip


def _worst(report: Report, kind: str) -> float:
    """The worst error of the kinds whose name holds this word."""
    return max((row.error for row in report.rows if kind in row.kind), default=0.0)


@dataclass
class Table:
    """The cells so far, by model and layout."""

    layouts: list[str]
    rows: dict[str, list[Cell]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(cell.ok for row in self.rows.values() for cell in row)

    def __str__(self) -> str:
        """Markdown, with the reasons of the failures below."""
        head = [f"{name}<br>{LAYOUTS[name]}" for name in self.layouts]
        lines = ["| model | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
        lines += [f"| {m} | " + " | ".join(map(str, row)) + " |" for m, row in self.rows.items()]
        failures = [
            f"- {model}, {layout}: `{cell.failure}`"
            for model, row in self.rows.items()
            for layout, cell in zip(self.layouts, row, strict=True)
            if cell.failure
        ]
        lines += ["", "What stopped the others:", "", *failures] if failures else []
        return "\n".join(lines) + "\n"


def document(text: str, how: str) -> str:
    """The page around the table."""
    return (
        "# Parity\n\n"
        "Made by `python -m benchmarks.parity --write`. The models of tests/zoo.py in float64,\n"
        f"every rank in {how}, against eager autograd on one device: the worst relative error of\n"
        "the loss, of any gradient, and of any parameter after SGD or AdamW, with the casts to\n"
        "float32 inside the model raised to float64; in brackets the worst of loss and gradients\n"
        f"with those casts as they stand. Bold is not equal (over {TOLERANCE:.0e}, in brackets\n"
        f"over {TOLERANCE_F32:.0e}, which is also the limit for mixtral and deepseek_v3, whose\n"
        f"grouped products torch has in float32 only, {TOLERANCE_F32_STEP:.0e} after their step)\n"
        "or not compiled.\n\n" + text
    )


def main() -> int:
    """Print or write the table; 1 if a cell is not equal."""
    options = _options()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = Table(options.layouts)
    for model in options.models:
        case = FAMILIES[model].case(model)
        found.rows[model] = [
            cell(case, layout, LAYOUTS[layout], options.processes) for layout in options.layouts
        ]
        print(model, *found.rows[model], sep="  ", file=sys.stderr, flush=True)
        if options.write:
            how = "a gloo process" if options.processes else "a thread"
            DOCUMENT.write_text(document(str(found), how))
    print(found)
    return 0 if found.ok else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--processes", action="store_true", help="real gloo processes")
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name}")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
