"""Time to a fixed loss for ways to train that send less, on links of limited bandwidth.

``python -m benchmarks.sync --mbit 100`` trains a small language model on four hosts
(``benchmarks.netlab``, which needs root) once per variant and seed, in turns, and says when each
came to a loss that exact sums reach. ``--mbit 0``: without such links, to try learning rates.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.netlab.network import Link, Network, ended_like_interrupt
from benchmarks.sync.picture import picture
from benchmarks.sync.predicted import compile_to
from benchmarks.sync.rank import TIMEOUT_S, Job, Run, train
from benchmarks.sync.rows import Row, rows, table, target_loss
from benchmarks.sync.variants import variants
from partc.errors import PartcError
from partc.verification.processes import Processes

RANKS = 4
BYTES_OFF = 0.02  # of the predicted bytes, beyond which the command fails
FASTEST = 1e5  # Mbit/s that programs are compiled for where no link limits


def main() -> int:
    options = parsed(sys.argv[1:])
    try:
        with ended_like_interrupt():
            return report(options)
    except PartcError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def report(options: argparse.Namespace) -> int:
    """Measure what the command line asks for, and print it."""
    every = variants(options.lr_scale)
    chosen = tuple(every[name] for name in options.variants)
    seeds = tuple(range(options.first_seed, options.first_seed + options.seeds))
    link = Link(options.mbit or FASTEST, options.latency)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, chosen, seeds, options.steps, options.every)
        predicted = compile_to(job, RANKS, link)
        found = on_network(job, link) if options.mbit else apart(job, RANKS)
    runs = [Run(**each) for each in found["runs"]]
    target = target_loss(runs, int(options.steps * options.part))
    result = rows(runs, predicted, target)
    print(f"{machine()}; links of {options.mbit:g} Mbit/s with {options.latency:g} ms\n")
    print(f"{table(result)}\n\n{parts_text(found['parts'], target)}")
    write(options, found, result, runs, target)
    return int(any(abs(each.bytes_off) > BYTES_OFF for each in result))


def write(
    options: argparse.Namespace, found: dict[str, Any], result: Sequence[Row], runs: Sequence[Run],
    target: float,
) -> None:  # fmt: skip
    """The files that the command line asks for."""
    if options.json:
        told = {"machine": machine(), "mbit": options.mbit, "latency_ms": options.latency}
        told |= {"target_loss": target, "rows": [each.as_json() for each in result]}
        Path(options.json).write_text(json.dumps(told | found, indent=1))
    if options.svg:
        title = f"Held-out loss over time, {RANKS} hosts, links of {options.mbit:g} Mbit/s"
        Path(options.svg).write_text(picture(runs, target, title))


def on_network(job: Job, link: Link) -> dict[str, Any]:
    """Train on hosts that such links join. Interrupted, it gives the seeds that all have run."""
    told, result = Path(job.folder, "job.json"), Path(job.folder, "result.json")
    told.write_text(json.dumps(asdict(job)))
    command = [sys.executable, "-m", "benchmarks.sync.rank", str(told), str(result)]
    try:
        with Network(RANKS, link) as network:
            network.run(command, TIMEOUT_S)
    except KeyboardInterrupt:
        if not result.exists():
            raise
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def apart(job: Job, num: int, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Train in processes of this machine, without links that limit anything."""
    with Processes(num, timeout=timeout_s) as world:
        found: dict[str, Any] = world.run(train, job)[0]
    return found


def parts_text(parts: Sequence[dict[str, float]], target: float) -> str:
    """What an exact step consists of, and the ceiling that follows: of all samples the least, to
    which other programs of the machine have added least.
    """
    compute, wire = (min(each[name] for each in parts) for name in ("compute_s", "wire_s"))
    return (
        f"The fixed loss is {target:.3f}. An exact step computes for {compute * 1e3:.1f} ms, and "
        f"its transfers alone take {wire * 1e3:.1f} ms,\n{wire / compute:.1f} times as long: at "
        "most so many times can a variant be faster whose steps lower the loss as much."
    )


def parsed(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync", description=__doc__)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--latency", type=float, default=0.5, help="ms, one way")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument(
        "--part", type=float, default=0.5, help="of the steps, in which exact comes to the loss"
    )
    parser.add_argument("--every", type=int, default=8, help="steps from one look to the next")
    parser.add_argument("--variants", nargs="+", choices=variants(), default=list(variants()))
    parser.add_argument("--lr-scale", type=float, default=1.0, help="of all learning rates")
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--svg", help="also draw loss over seconds to this file")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
