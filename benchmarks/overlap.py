"""How much communication is hidden behind computing, on a network of limited bandwidth.

Run ``python -m benchmarks.overlap`` as root, where the processor has a core for every rank and one
for the network. Each rank is a host of its own (``benchmarks.netlab``). In every round a step of
partc's program is timed (forward and backward, no optimizer), the same program with transfers that
take no time, its transfers alone, and a step of PyTorch's own way; all in the same processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks import partc_side
from benchmarks.machine import machine
from benchmarks.netlab.network import Link, Network, ended_like_interrupt
from benchmarks.overlap_layouts import LAYOUTS, NUM_CHECKED, TIMEOUT_S
from benchmarks.overlap_table import Round, Row, table
from benchmarks.peers import TOLERANCE
from benchmarks.workload import SIZES, Reference, Size, reference
from partc.errors import PartcError
from partc.machines.topology import Topology
from partc.plan import Plan
from partc.plan.mesh import Mesh

EFFICIENCY = 0.94  # of a link: what TCP leaves of it


def measure(
    name: str, size: Size, links: list[Link], num_rounds: int, bucket_mb: float = Plan.bucket_mb
) -> list[tuple[Row, float]]:
    """A row for each link, and how far losses and gradients are from one process at worst."""
    layout = LAYOUTS[name]
    expected = reference(size, NUM_CHECKED)
    found = []
    for link in links:
        with tempfile.TemporaryDirectory() as folder:
            program = str(Path(folder, "program"))
            mesh = Mesh(Mesh.of(layout.mesh).axes, machines(layout.num_ranks, link))
            partc_side.compile_to(program, size, mesh, layout.plan, layout.cut, bucket_mb)
            found.append(_on(name, size, link, num_rounds, program, expected))
    return found


def machines(num: int, link: Link) -> Topology:
    """What a program is compiled for: hosts that such links join."""
    cpu = Topology.load("cpu", num)
    (level,) = cpu.levels
    latency_s = level.latency_s + link.latency_ms / 1e3
    network = replace(
        level, name="network", bytes_per_s=link.mbit_per_s * 1e6 / 8, latency_s=latency_s,
        efficiency=EFFICIENCY,
    )  # fmt: skip
    return replace(cpu, name="hosts", levels=(network,))


def _on(
    name: str, size: Size, link: Link, num_rounds: int, program: str, expected: Reference
) -> tuple[Row, float]:
    result = Path(program).with_name("result.json")
    ranks = [sys.executable, "-m", "benchmarks.overlap_rank"]
    with Network(LAYOUTS[name].num_ranks, link) as network:
        network.run([*ranks, name, size.name, str(num_rounds), program, str(result)], TIMEOUT_S)
    found = json.loads(result.read_text())
    row = Row(
        layout=name,
        mbit_per_s=link.mbit_per_s,
        peer=found["peer"],
        rounds=tuple(Round(**each) for each in found["rounds"]),
        switch_cpu_s=network.traffic.cpu_s if network.traffic else 0.0,
    )
    return row, max(_error(losses, norm, expected) for losses, norm in found["checks"])


def _error(losses: list[float], grad_norm: float, expected: Reference) -> float:
    """The worst relative difference of a side's losses and gradient norm."""
    pairs = [*zip(losses, expected.losses, strict=True), (grad_norm, expected.grad_norm)]
    return max(abs(got - want) / abs(want) for got, want in pairs)


def main() -> int:
    """Measure what the command line asks for; 1 if a side's numbers are wrong."""
    options = parsed(sys.argv[1:])
    links = [Link(mbit, options.latency) for mbit in options.mbit]
    size, rows, worst = SIZES[options.size], list[Row](), 0.0
    try:
        with ended_like_interrupt():
            for name in options.layouts:
                for row, error in measure(name, size, links, options.rounds, options.bucket_mb):
                    rows.append(row)
                    worst = max(worst, error)
                    print(row, file=sys.stderr, flush=True)
    except PartcError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{machine()}; links with {options.latency:g} ms\n\n{table(rows)}\n")
    print(f"losses and gradient norms are within {worst:.1e} of one process")
    if options.json:
        found = {"machine": machine(), "rows": [dataclasses.asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(found, indent=1))
    return int(worst > TOLERANCE)


def parsed(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--mbit", nargs="+", type=float, default=[250.0, 500.0, 1000.0])
    parser.add_argument("--latency", type=float, default=0.5, help="ms, one way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--join-mb", type=float, default=Plan.bucket_mb, help="of partc's plan")
    parser.add_argument("--json", help="also write every figure to this file")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
