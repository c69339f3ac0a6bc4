"""Seconds that the search's solver takes beside HiGHS, on graphs of the shapes that models have.

Run ``python -m benchmarks.solver``; HiGHS stops after ``--highs-seconds`` (wall), 0 leaves it out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.machine import machine
from partc.passes.search.solver.milp import milp
from partc.passes.search.solver.problem import Costs, Factor, Problem, Variable
from partc.passes.search.solver.solve import solve

# One layer of a decoder: values, and what each is made of. A gradient also reads the operands of
# its op, unless the op is linear in them all ("+"). w_* are weights.
LAYER = """
square1: x | mean1: + square1 | root1: mean1 | scaled1: x root1 | norm1: scaled1 w_norm1
query: norm1 w_q | key: norm1 w_k | value: norm1 w_v
queries: + query | keys: + key | values: + value
query_a: + queries | query_b: + queries | turned_query: + query_a query_b
key_a: + keys | key_b: + keys | turned_key: + key_a key_b
attention: turned_query turned_key values | merged: + attention | out: merged w_o
middle: + x out | square2: middle | mean2: + square2 | root2: mean2 | scaled2: middle root2
norm2: scaled2 w_norm2 | gate: norm2 w_gate | up: norm2 w_up | silu: gate | product: silu up
down: product w_down | y: + middle down
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--highs-seconds", type=float, default=60.0)
    seconds: float = parser.parse_args().highs_seconds
    print(machine())
    print("processor seconds of each; gap: what is not proven, in percent of the cost")
    header = f"{'graph':30}{'variables':>10}{'width':>7}{'cells':>10}"
    print(header + f"{'partc':>8}{'gap %':>8}{'HiGHS':>8}{'gap %':>8}{'partc - HiGHS':>16}")
    compare("chain", chain(2000, 10), seconds)
    compare("residual", chain(2000, 10, skips=(1, 2)), seconds)
    compare("ladder", ladder(2000, 6), seconds)
    compare("16 decoder layers", layers(16, 6), seconds)
    compare("grid, 20 x 20", grid(20, 4), seconds)


def compare(name: str, problem: Problem, seconds: float) -> None:
    """Print one row."""
    began = time.process_time()
    found = solve(problem)
    spent, stats = time.process_time() - began, found.stats
    row = f"{name:30}{len(problem.variables):10}{stats.width:7}{stats.cells:10.1e}"
    row += f"{spent:8.2f}{100 * found.gap:8.3f}"
    if seconds:
        began = time.process_time()
        other = milp(problem, seconds=seconds)
        row += f"{time.process_time() - began:8.1f}"
        if other.assignment is None:
            row += "  nothing found"
        else:
            row += f"{100 * (other.cost - other.bound) / abs(other.cost):8.3f}"
            row += f"{found.cost - other.cost:16.2e}"
    print(row, flush=True)


def chain(num: int, choices: int, skips: Sequence[int] = (1,)) -> Problem:
    """Every variable shares a table with those so many places behind it; all tables differ."""
    pairs = [(v, v + skip) for v in range(num) for skip in skips if v + skip < num]
    return _uniform(num, choices, pairs)


def ladder(num: int, choices: int) -> Problem:
    """A forward chain with skips, a backward chain, and a rung from each value to its gradient."""
    half = num // 2
    pairs = [(v, v + half) for v in range(half)]
    pairs += [(v, v + 1) for v in range(num - 1) if v + 1 != half]
    pairs += [(v, v + 3) for v in range(0, half - 3, 3)]
    return _uniform(num, choices, pairs)


def grid(side: int, choices: int) -> Problem:
    """As wide as its side: too wide to be eliminated."""
    num = side * side
    pairs = [(v, v + 1) for v in range(num) if (v + 1) % side]
    return _uniform(num, choices, pairs + [(v, v + side) for v in range(num - side)])


def _uniform(num: int, choices: int, pairs: Sequence[tuple[int, int]]) -> Problem:
    random = np.random.default_rng(0)
    names = tuple(f"choice {c}" for c in range(choices))
    variables = tuple(Variable(f"v{v}", names, random.random(choices)) for v in range(num))
    tables = random.random((len(pairs), choices, choices))
    return Problem(variables, tuple(map(Factor, pairs, tables)))


def layers(num_layers: int, choices: int) -> Problem:
    """A decoder's forward and backward: a variable per value, weight and gradient, and a hub
    between a value and its readers in either phase where these are several.
    """
    step = Step(choices)
    for layer in range(num_layers):
        step.add_layer(layer)
    return step.problem()


class Step:
    """Collects the reads of a training step; layers have equal costs."""

    def __init__(self, choices: int) -> None:
        self.choices = choices
        self.names: dict[str, int] = {}
        self.reads: dict[tuple[str, str], list[str]] = {}  # value and phase: its readers
        self._random = np.random.default_rng(0)
        self._drawn: dict[tuple[str, ...], Costs] = {}

    def add_layer(self, layer: int) -> None:
        partial: dict[str, list[str]] = {}  # a value's gradients, one from each reader
        ops = [_parsed(op) for op in LAYER.replace("|", "\n").strip().splitlines()]
        for name, inputs, _ in ops:
            for source in inputs:
                self._read(self._named(source, layer), self._named(name, layer), "forward")
        for name, inputs, linear in reversed(ops):
            gradient = self._gradient(name, layer, partial)
            joint = len(inputs) > 2  # attention has one backward op for all its operands
            for source in inputs:
                part = f"{layer}.d_{name}" + ("_all" if joint else f"_{source}")
                partial.setdefault(source, []).append(part)
                others = [other for other in inputs if other != source] or inputs
                if not (joint and source != inputs[0]):
                    self._read(gradient, part, "backward")
                    for other in () if linear else inputs if joint else others:
                        self._read(self._named(other, layer), part, "backward")
        for part in partial["x"]:
            self._read(part, f"{layer - 1}.d_y", "backward")

    def _gradient(self, name: str, layer: int, partial: dict[str, list[str]]) -> str:
        parts = partial.get(name, [])
        if len(parts) == 1:
            return parts[0]
        for part in parts:
            self._read(part, f"{layer}.d_{name}", "backward")
        return f"{layer}.d_{name}"

    def _named(self, name: str, layer: int) -> str:
        return f"{layer - 1}.y" if name == "x" else f"{layer}.{name}"

    def _read(self, source: str, reader: str, phase: str) -> None:
        for name in (source, reader):
            self.names.setdefault(name, len(self.names))
        self.reads.setdefault((source, phase), []).append(reader)

    def problem(self) -> Problem:
        pairs: list[tuple[str, str]] = []
        for (source, phase), readers in self.reads.items():
            if len(readers) > 1:
                hub = f"{source}_{phase}"
                self.names.setdefault(hub, len(self.names))
                pairs.append((source, hub))
                source = hub
            pairs += [(source, reader) for reader in readers]
        labels = tuple(f"choice {c}" for c in range(self.choices))
        variables = []
        for name in self.names:
            variables.append(Variable(name, labels, self._draw(_op(name))))
        factors = [
            Factor((self.names[a], self.names[b]), self._draw(_op(a), _op(b), dims=2))
            for a, b in pairs
        ]
        return Problem(tuple(variables), tuple(factors))

    def _draw(self, *key: str, dims: int = 1) -> Costs:
        """Random costs; the same for the same key. To keep a layout costs nothing."""
        if key not in self._drawn:
            drawn = self._random.random((self.choices,) * dims)
            if dims == 2:
                np.fill_diagonal(drawn, 0.0)
            self._drawn[key] = drawn
        return self._drawn[key]


def _parsed(op: str) -> tuple[str, list[str], bool]:
    """The value's name, its operands, and whether it is linear in them all."""
    name, operands = op.strip().split(": ")
    return name, operands.removeprefix("+").split(), operands.startswith("+")


def _op(name: str) -> str:
    """The name without its layer."""
    return name.split(".", 1)[1]


if __name__ == "__main__":
    main()
