"""What ``benchmarks.sync`` compares: exact sums, DDP, every scheme of ``[compress]``, islands."""

from __future__ import annotations

from dataclasses import dataclass

from partc.plan.wires import WIRES

EXACT, DDP = "exact", "DDP"
DP, ISLAND = "dp", "island"
PERIOD = 8  # steps from one meeting of islands to the next


@dataclass(frozen=True)
class Variant:
    """One way to train. ``table``: the lines of its table in the plan, [compress] or another.

    ``exact_first``: the steps at first that sum whole gradients.
    """

    name: str
    lr: float
    axis: str = DP
    table: str = ""
    exact_first: int = 0

    @property
    def plan(self) -> str:
        word = self.table.partition("]")[0].strip("[")
        return f'preset = "ddp"\nallow = ["{word}"]\n{self.table}\n' if word else 'preset = "ddp"\n'

    @property
    def is_peer(self) -> bool:
        return self.name == DDP


LR = 2e-3
RATES: dict[str, float] = {}  # of variants for which another rate is better
ENTRIES: dict[str, str] = {}  # of [compress], for schemes that need more than their name
ISLANDS = {
    "local SGD": f"period = {PERIOD}",
    "post-local SGD": f"period = {PERIOD}\nstart_step = 16",
    "DiLoCo": f'period = {PERIOD}\nouter = "nesterov"',
    "streaming DiLoCo": f'period = {PERIOD}\nouter = "nesterov"\nfragments = 2',
}


def variants(lr_scale: float = 1.0) -> dict[str, Variant]:
    """All variants by name; schemes are those that partc knows."""
    tables = {EXACT: "", DDP: ""}
    tables |= {w: f'[compress]\nwire = "{w}"\n{ENTRIES.get(w, "")}'.rstrip() for w in WIRES}
    tables |= {name: f"[local_steps]\n{entries}" for name, entries in ISLANDS.items()}
    return {
        name: Variant(
            name, RATES.get(name, LR) * lr_scale, ISLAND if name in ISLANDS else DP, table,
            _start_step(table),
        )
        for name, table in tables.items()
    }  # fmt: skip


def _start_step(table: str) -> int:
    lines = [line for line in table.splitlines() if line.startswith("start_step")]
    return int(lines[0].split("=")[1]) if lines else 0
