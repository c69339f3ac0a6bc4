"""Which model computes the same under which pipeline schedule, in float64.

``python -m benchmarks.parity_pipeline`` runs every schedule on 2 and on 4 pipeline ranks, a thread
each; with ``--processes`` three schedules on pp=2 x dp=2 x tp=2, eight gloo processes. It prints a
markdown table; ``--write`` puts it into docs/parity_pipeline.md. A cell holds the worst relative
error of the loss, any gradient (accumulated over two steps too), any parameter after SGD and AdamW,
and any buffer. The rows of a batch differ in how many tokens count, so that the microbatches do.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

import partc
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.schedules import NAMES
from partc.verification.report import TOLERANCE
from tests.zoo import FAMILIES, Case

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "parity_pipeline.md"
BEGIN, END = "<!-- {} -->\n", "<!-- end of {} -->\n"
ON_PROCESSES = ("1f1b", "interleaved-1f1b", "zb-v")
TRAINING = tuple(name for name in NAMES if name != "forward-only")
MICROBATCHES = (1, 3, 4, 8)
LISTS = {  # where a family's layers stand, and what its configuration calls their number
    "gpt2": (["transformer.h"], "n_layer"),
    "llama": (["model.layers"], "num_hidden_layers"),
    "t5": (["encoder.block", "decoder.block"], "num_layers"),
    "vit": (["vit.layers"], "num_hidden_layers"),
}


@dataclass(frozen=True)
class Setting:
    """One run."""

    model: str
    mesh: str
    plan: str
    schedule: str
    microbatches: int

    @property
    def stages(self) -> int:
        return Mesh.parse(self.mesh).size("pp") * NAMES[self.schedule].usual_chunks

    @property
    def layers(self) -> int:
        """Layers in each of the model's lists."""
        return max(2, self.stages // len(LISTS[self.model][0]))

    @property
    def points(self) -> tuple[str, ...]:
        """Where stages 1.. begin: layers are dealt out evenly."""
        lists, _ = LISTS[self.model]
        layers = [f"{name}.{i}" for name in lists for i in range(self.layers)]
        return tuple(layers[i * len(layers) // self.stages] for i in range(1, self.stages))

    @property
    def batch(self) -> int:
        """Two rows for every rank along dp in every microbatch."""
        sizes = dict(Mesh.parse(self.mesh).axes)
        return 2 * self.microbatches * sizes.get("dp", 1)


@dataclass(frozen=True)
class Cell:
    """One run's worst error, or what stopped it."""

    error: float
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure and self.error <= TOLERANCE

    def __str__(self) -> str:
        text = self.failure.partition(":")[0] or f"{self.error:.0e}"
        return text if self.ok else f"**{text}**"


@cache
def case(model: str, layers: int, batch: int) -> Case:
    """A model of the zoo with so many layers; its rows ignore different numbers of labels."""
    family = FAMILIES[model]
    config = {**family.config, LISTS[model][1]: layers}
    made = replace(family, config=config).case(model, batch)
    labels = made.inputs[-1].clone()
    for row in range(batch if labels.dim() == 2 else 0):
        labels[row, : row % 5] = -100
    return replace(made, inputs=(*made.inputs[:-1], labels))


def cell(setting: Setting, processes: bool, timeout: float) -> Cell:
    """Compile and verify; what fails is printed with its traceback."""
    here = case(setting.model, setting.layers, setting.batch)
    plan = Plan(preset=setting.plan, stages=setting.points)
    try:
        program = partc.compile(
            here.model, setting.mesh, here.inputs, loss=here.loss, plan=plan,
            microbatches=setting.microbatches, schedule=setting.schedule,
        )  # fmt: skip
        report = partc.verify(
            program, here.model, here.inputs, here.loss, processes=processes, timeout=timeout
        )
    except Exception as error:  # a table of what works says of everything else why not
        print(f"{setting}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        text = " ".join(str(error).split()) or "no message"
        return Cell(float("inf"), f"{type(error).__name__}: {text[:300]}")
    return Cell(report.worst.error)


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    """Every run that was asked for, one table after the other."""
    for mesh in options.meshes:
        for num in options.microbatches:
            for model in options.models:
                for schedule in options.schedules:
                    yield Setting(model, mesh, options.plan, schedule, num)


def tables(cells: dict[Setting, Cell]) -> str:
    """One markdown table per mesh; the reasons of failures below."""
    lines = []
    for mesh in dict.fromkeys(s.mesh for s in cells):
        mine = {s: c for s, c in cells.items() if s.mesh == mesh}
        columns = sorted({s.microbatches for s in mine})
        plan = next(iter(mine)).plan
        lines += [f"{mesh.replace(',', ' x ')}, plan {plan}; microbatches:", ""]
        lines += ["| model | schedule | stages | " + " | ".join(map(str, columns)) + " |"]
        lines += ["|---" * (3 + len(columns)) + "|"]
        for model, schedule, num in dict.fromkeys((s.model, s.schedule, s.stages) for s in mine):
            row = {
                s.microbatches: str(c) for s, c in mine.items()
                if (s.model, s.schedule) == (model, schedule)
            }  # fmt: skip
            found = " | ".join(row.get(column, "not run") for column in columns)
            lines.append(f"| {model} | {schedule} | {num} | {found} |")
        lines += [""]
    lines += [f"- {s}: `{c.failure}`" for s, c in cells.items() if c.failure]
    return "\n".join(lines).rstrip() + "\n"


def write(name: str, text: str) -> None:
    """Put a section into the document in place of its earlier self."""
    known = DOCUMENT.read_text() if DOCUMENT.is_file() else document()
    before, begin, rest = known.partition(BEGIN.format(name))
    _, end, after = rest.partition(END.format(name))
    assert begin, name
    assert end, name
    DOCUMENT.write_text(f"{before}{begin}{text}{end}{after}")


def document() -> str:
    """The page without its tables."""
    sections = "\n".join(
        f"## In {name}\n\n{BEGIN.format(name)}{END.format(name)}"
        for name in ("processes", "threads")
    )
    return (
        "# Parity of pipelines\n\n"
        "Made by `python -m benchmarks.parity_pipeline --write`, then with `--processes`. Models\n"
        "of tests/zoo.py in float64 with a layer or more per stage, against eager autograd on one\n"
        "device: the worst relative error of the loss, of any gradient (of two steps added up\n"
        "too), and of any parameter after SGD or AdamW, over all ranks. Rows of a batch differ in\n"
        f"how many labels count. Bold is not equal (over {TOLERANCE:.0e}).\n\n" + sections
    )


def main() -> int:
    """Print or write the tables; 1 if a cell is not equal."""
    options = _options()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cells: dict[Setting, Cell] = {}
    for setting in settings(options):
        start = time.monotonic()
        cells[setting] = cell(setting, options.processes, options.timeout)
        took = time.monotonic() - start
        print(setting, cells[setting], f"{took:.1f} s", file=sys.stderr, flush=True)
        if options.write:
            write("processes" if options.processes else "threads", tables(cells))
    print(tables(cells))
    return 0 if all(cell.ok for cell in cells.values()) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=LISTS, default=list(LISTS))
    parser.add_argument("--schedules", nargs="+", choices=TRAINING)
    parser.add_argument("--microbatches", nargs="+", type=int, default=list(MICROBATCHES))
    parser.add_argument("--meshes", nargs="+")
    parser.add_argument("--plan")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds per run")
    parser.add_argument("--processes", action="store_true", help="real gloo processes")
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name}")
    options = parser.parse_args()
    usual = ("pp=2,dp=2,tp=2", "fsdp+megatron-sp") if options.processes else ("pp=2 pp=4", "ddp")
    options.meshes = options.meshes or usual[0].split()
    options.plan = options.plan or usual[1]
    options.schedules = options.schedules or list(ON_PROCESSES if options.processes else TRAINING)
    return options


if __name__ == "__main__":
    sys.exit(main())
