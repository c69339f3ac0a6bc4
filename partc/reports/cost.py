"""The cost of one rank's program as a table: memory, FLOPs, memory traffic, transfers, time."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import sympy

from partc.amounts import Row, amount, table
from partc.cost.bytes import Traffic, total_moved_bytes, traffic
from partc.cost.flops import total_flops
from partc.cost.memory import MemoryCurve, StateBytes, memory_curve, state_bytes
from partc.cost.memory_limit import Peak
from partc.cost.prediction import Prediction, Work, predict
from partc.cost.storage import replay
from partc.cost.symbolic import SymbolicCosts
from partc.dryrun.run import dry_run
from partc.graph import Graph
from partc.plan.mesh import Mesh
from partc.program.role import Role
from partc.program.saved_cost import SeveralNumbers

TOP = 5  # holders of memory that a report names


@dataclass(frozen=True)
class CostReport(SeveralNumbers):
    """The costs of one training step on one rank.

    ``live_bytes``: live at the peak, without parameters, optimizer states, buffers and inputs.
    """

    model: str
    mesh: str
    optimizer: str
    state: StateBytes
    saved_bytes: int
    live_bytes: int
    live_at: str  # the call, or the program's line, of the peak
    holders: tuple[tuple[str, int], ...]  # what is live at the peak, with bytes, largest first
    flops: int
    moved_bytes: int
    traffic: tuple[Traffic, ...]
    symbolic: SymbolicCosts = field(default_factory=SymbolicCosts)
    prediction: Prediction | None = None

    @property
    def peak_bytes(self) -> int:
        """The peak of a rank's memory: state, optimizer states included, and live bytes."""
        state = self.state
        return state.params + state.optimizer + state.buffers + state.inputs + self.live_bytes

    def peaks(self) -> list[Peak]:
        """The peaks as ``check_memory`` takes them: one, since all ranks run the same program."""
        state = self.state
        kept = {
            "parameters": state.params,
            f"optimizer {self.optimizer}": state.optimizer,
            "buffers and inputs": state.buffers + state.inputs,
        }
        return [Peak("every rank", self.peak_bytes, tuple(kept.items()), self.holders)]

    def __str__(self) -> str:
        title = f"cost of {self.model}, per rank and step"
        lines = [title + (f"    mesh {self.mesh}" if self.mesh else "")]
        step = self.prediction.rows() if self.prediction else []
        for rows in (self._memory(), self._work(), self._sent(), step, self._formulas()):
            lines += ["", *table(rows)] if rows else []
        return "\n".join(lines) + "\n"

    def _memory(self) -> list[Row]:
        state = self.state
        rows = [
            ("parameters", amount(state.params, "B"), ""),
            ("gradients", amount(state.grads, "B"), ""),
            (f"optimizer {self.optimizer}", amount(state.optimizer, "B"), ""),
            ("buffers and inputs", amount(state.buffers + state.inputs, "B"), ""),
            ("saved for backward", amount(self.saved_bytes, "B"), ""),
            ("live at peak", amount(self.live_bytes, "B"), f"during {self.live_at}, held by"),
        ]
        rows += [("", amount(num_bytes, "B"), f"  {who}") for who, num_bytes in self.holders]
        return [
            *rows,
            (
                "memory at peak",
                amount(self.peak_bytes, "B"),
                "parameters, optimizer, inputs, live",
            ),
        ]

    def _work(self) -> list[Row]:
        return [
            ("compute", amount(self.flops, "FLOP"), "matrix products, convolutions, attention"),
            ("memory traffic", amount(self.moved_bytes, "B"), "operands and results of all calls"),
        ]

    def _sent(self) -> list[Row]:
        rows = [(f"{t.axis} {t.kind} x{t.count}", t.sent_bytes) for t in self.traffic]
        return [(what, amount(sent, "B"), "sent") for what, sent in rows]

    def _formulas(self) -> list[Row]:
        found = self.symbolic
        if found.flops is None:
            return [("formulas", "none", found.why)] if found.why else []
        sent = {(t.axis, t.kind): t.sent_bytes for t in self.traffic}
        rows = [
            ("parameters", amount(self.state.params, "B"), found.param_bytes),
            ("saved for backward", amount(self.saved_bytes, "B"), found.saved_bytes),
            ("compute", amount(self.flops, "FLOP"), found.flops),
            ("memory traffic", amount(self.moved_bytes, "B"), found.moved_bytes),
        ]
        rows += [(" ".join(k), amount(sent[k], "B"), e) for k, e in found.sent_bytes.items()]
        sizes = ", ".join(f"{name}={size}" for name, size in found.at.items())
        written = [(what, much, f"= {_short(e)}") for what, much, e in rows if e is not None]
        return [("formulas", "at", sizes), *written]

    def as_json(self) -> dict[str, Any]:
        """The numbers and formulas as plain data."""
        found = self.symbolic
        texts = {
            "flops": found.flops,
            "moved_bytes": found.moved_bytes,
            "param_bytes": found.param_bytes,
            "saved_bytes": found.saved_bytes,
        }
        return {
            "model": self.model,
            "mesh": self.mesh,
            "optimizer": self.optimizer,
            "state_bytes": vars(self.state).copy(),
            "saved_bytes": self.saved_bytes,
            "live_bytes": self.live_bytes,
            "live_at": self.live_at,
            "holders": dict(self.holders),
            "peak_bytes": self.peak_bytes,
            "flops": self.flops,
            "moved_bytes": self.moved_bytes,
            "traffic": [vars(t).copy() for t in self.traffic],
            "prediction": self.prediction.as_json() if self.prediction else None,
            "formulas": {name: str(expr) for name, expr in texts.items() if expr is not None}
            | {f"sent_bytes {axis} {kind}": str(e) for (axis, kind), e in found.sent_bytes.items()},
        }


def cost_report(
    graph: Graph,
    optimizer: str = "adamw",
    symbolic: SymbolicCosts | None = None,
    role: Role | None = None,
    work: Work | None = None,
    mesh: Mesh | None = None,
    prefetch: int = 1,
) -> CostReport:
    """The costs of a graph: of one rank for a scheduled local graph, of the model for a joint one.

    With a role, live memory is found by a dry run of the role's program, otherwise by running the
    graph in node order. With ``work``, the step's time on the machines under ``mesh`` is predicted;
    the program then gathers the parameters of ``prefetch`` blocks ahead.
    """
    ran = replay(graph)
    over = mesh or graph.mesh
    curve = memory_curve(graph, ran)
    step = partial(predict, optimizer=optimizer, prefetch=prefetch)
    library = over.hardware.library
    live, at, holders = _live_of_program(role, library) if role else _live_of_graph(curve)
    return CostReport(
        model=graph.model,
        mesh=str(graph.mesh),
        optimizer=optimizer,
        state=state_bytes(graph, optimizer),
        saved_bytes=curve.saved_bytes,
        live_bytes=live,
        live_at=at,
        holders=tuple(holders[:TOP]),
        flops=total_flops(graph),
        moved_bytes=total_moved_bytes(graph, ran),
        traffic=tuple(traffic(graph)),
        symbolic=symbolic or SymbolicCosts(),
        prediction=step(graph, ran, work, over) if work else None,
    )


Live = tuple[int, str, list[tuple[str, int]]]  # peak bytes, its call or line, what is live


def _live_of_graph(curve: MemoryCurve) -> Live:
    at = curve.calls[curve.peak_at] if curve.calls else ""
    return curve.peak_bytes, at, [(str(b), b.num_bytes) for b in curve.holders(TOP)]


def _live_of_program(role: Role, library: str) -> Live:
    ran = dry_run(role, library=library)
    return ran.peak_bytes, f"line {ran.line}", [(str(h), h.num_bytes) for h in ran.holders]


def _short(expr: sympy.Expr) -> str:
    """The text of an expression, expanded or factored, whichever is shorter."""
    return min(str(expr), str(sympy.factor(expr)), key=len)
