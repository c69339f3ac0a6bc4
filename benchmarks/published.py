"""Predicted beside published: steps of training runs that others measured on real machines.

Run ``python -m benchmarks.published`` (two minutes, no GPU); ``--write`` puts the table into
docs/published.md, ``--compile`` compiles the rows of one stage instead of estimating our program.
What devices and links reach is what partc's machine files say of them: nothing is fitted to a row.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import partc
from benchmarks.published_models import build, example, loss_of
from benchmarks.published_peer import Peer, laws
from benchmarks.published_rows import GIB, Row, rows
from partc.machines.devices import Device
from partc.machines.topology import Topology
from partc.passes.search.plans.candidate import Candidate
from partc.passes.search.plans.estimate import Estimator
from partc.plan import Plan
from partc.program import Program

GOAL_TIME, GOAL_MEMORY = 0.10, 0.05
DOCUMENT = Path(__file__).parents[1] / "docs" / "published.md"
TEXT = """\
# Published steps

Made by `python -m benchmarks.published --write`: training steps that others measured, beside what
partc predicts. Efficiencies are those of `partc/machines/*.toml`, each from a data sheet or a
measurement of single kernels; none was fitted to a row.

*predicted* is the step as the published system runs it, *our program* that of partc's program for
the same plan, whose kernels are eager PyTorch's. They differ in what `benchmarks/published_rows.py`
says of each row and `benchmarks/published_peer.py` does with it:

- Megatron-LM has kernels for bias and GELU, for bias, dropout and sum, and for scale, mask and
  softmax; attention is not flash attention. Full recomputation runs all of a block again, where
  our program leaves out what nothing reads. Ranks wait for every message between stages, but tensor
  ranks send a share each, where our program's send the whole.
- SC21 ran before collectives over tensor ranks were put beside gradients of weights.
- torchtitan without torch.compile is eager like our program. It keeps every other product of a
  block; our plan computes the one of these that is large again. With torch.compile element-wise
  calls are fused as far as can be.
- torchtitan's H100 has 96 GB at 2.4 TB/s and 500 W instead of 700 W. Its clock is taken to be lower
  by the cube root of that, as power goes with the cube of the clock.

Only torchtitan published memory. Its steps are eager PyTorch's, where the gradient of the loss is
several calls and nothing is written over what it is made of.

Sources: SC21 is table 1 of Narayanan et al. 2021 (arXiv 2104.04473), in the configurations of
examples/sc21/run_table_1.sh of Megatron-LM; K22 is table 5 of Korthikanti et al. 2022
(arXiv 2205.05198); titan is benchmarks/llama3_h100_202412_torchtitan.md of torchtitan. Steps of
SC21 are its FLOP/s per device by its equation 3, those of titan its tokens per second.

"""


@dataclass(frozen=True)
class Found:
    """What is predicted for a row: step and memory of the peer, and of partc's program."""

    row: Row
    peer_s: float
    peer_bytes: float
    own_s: float
    own_bytes: float

    @property
    def time_error(self) -> float:
        return self.peer_s / self.row.seconds - 1

    @property
    def memory_error(self) -> float | None:
        published = self.row.memory_bytes
        return self.peer_bytes / published - 1 if published else None


def predict(row: Row, *, compiles: bool = False) -> Found:
    """The peer's step, and that of partc's program for the same plan.

    The program is compiled, if asked for and the row has one stage, and estimated otherwise.
    """
    machine, candidate = topology(row.machine, row.devices), candidate_of(row)
    peer = Peer(row, machine).estimate(candidate)
    if compiles and row.pp == row.microbatches == 1:
        cost = compiled(row).cost.as_json()
        own_s, own_bytes = cost["prediction"]["seconds"], cost["peak_bytes"]
    else:
        own = Estimator(laws(ours(row), "eager", plain=False), machine).estimate(candidate)
        own_s, own_bytes = own.step_s, own.peak_bytes
    return Found(row, peer.step_s, peer.peak_bytes, own_s, own_bytes)


def ours(row: Row) -> Row:
    """The row as a plan of partc's says it."""
    return replace(row, recompute="block") if row.whole_blocks else row


def candidate_of(row: Row) -> Candidate:
    """The row as the search says it."""
    return Candidate(
        shard=row.data_ranks if row.data == "fsdp" else 1,
        replicate=row.data_ranks if row.data == "ddp" else 1,
        tp=row.tp, pp=row.pp, microbatches=row.microbatches, data=row.data, word=row.word,
        schedule="1f1b" if row.chunks == 1 else "interleaved-1f1b", chunks=row.chunks,
    )  # fmt: skip


def compiled(row: Row) -> Program:
    """partc's program for a row of one stage."""
    one = candidate_of(row)
    return partc.compile(
        build(row.dims), one.mesh(topology(row.machine, row.devices)),
        example(row.dims, row.batch), loss=loss_of,
        plan=Plan(preset=one.preset, recompute=ours(row).recompute),
    )  # fmt: skip


def topology(name: str, devices: int) -> Topology:
    """A machine that comes with partc, or a variant of one."""
    if name != "h100-96gb":
        return Topology.load(name, devices)
    whole = Topology.load("dgx-h100", devices)
    return replace(whole, name=name, groups=((h100_96gb(whole.device), devices),))


def h100_96gb(device: Device) -> Device:
    """An H100 SXM with slower memory, limited to 500 of its 700 W (torchtitan's own words).

    Power rises with the cube of the clock, as voltage rises with it.
    """
    clock = (500 / device.watts) ** (1 / 3)
    return replace(
        device, name="H100 SXM 96GB", memory_bytes=96 * GIB, memory_bytes_per_s=2.4e12, watts=500,
        flops_per_s={dtype: clock * peak for dtype, peak in device.flops_per_s.items()},
    )  # fmt: skip


def table(found: Sequence[Found]) -> str:
    """All rows, and how far off they are."""
    heads = ("run", "source", "published s", "predicted s", "error", "our program s",
             "published GiB", "predicted GiB", "error", "our program GiB")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for each in found:
        row, memory = each.row, each.memory_error
        cells = (
            row.name, row.source, f"{row.seconds:.2f}", f"{each.peer_s:.2f}",
            f"{each.time_error:+.0%}", f"{each.own_s:.2f}",
            f"{row.memory_bytes / GIB:.1f}" if row.memory_bytes else "-",
            f"{each.peer_bytes / GIB:.1f}", "-" if memory is None else f"{memory:+.0%}",
            f"{each.own_bytes / GIB:.1f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *summary(found)])


def summary(found: Sequence[Found]) -> list[str]:
    """The errors of all rows in few numbers."""
    times = [abs(each.time_error) for each in found]
    held = [abs(error) for each in found if (error := each.memory_error) is not None]
    lines = [f"Time is off by {median(times):.0%} in the median, {max(times):.0%} at most."]
    if held:
        lines += [f"Memory is off by {median(held):.0%} in the median, {max(held):.0%} at most."]
    good = median(times) <= GOAL_TIME and (not held or median(held) <= GOAL_MEMORY)
    goal = f"Goal, medians of {GOAL_TIME:.0%} and {GOAL_MEMORY:.0%}: {'met' if good else 'NOT met'}"
    return [*lines, f"{goal}."]


def main() -> int:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--compile", action="store_true", help="compile the rows of one stage")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    options = parser.parse_args()
    start = time.perf_counter()
    chosen = (row for row in rows() if options.only in row.name)
    found = [predict(row, compiles=options.compile) for row in chosen]
    print(table(found))
    if options.write:
        DOCUMENT.write_text(TEXT + table(found) + "\n", encoding="ascii")
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
