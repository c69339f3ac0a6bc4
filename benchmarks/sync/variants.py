"""What ``benchmarks.sync`` compares: exact sums, DDP, every scheme of ``[compress]``, islands,
late gradients, servers of parameters.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass

from partc.plan.wires import WIRES

EXACT, DDP = "exact", "DDP"
DP, ISLAND = "dp", "island"
LR = 2e-3
RATES = {  # of variants for which another rate is better, with a seed that is not reported
    "sign": 1e-3,
    "majority-sign": 1e-3,
    "random-k": 4e-3,
    "local SGD": 3e-3,
    "post-local SGD, soon": 3e-3,
    "gossip, ring": 3e-3,
    "gossip, pairs": 3e-3,
    "DiLoCo": 3e-3,
    "streaming DiLoCo": 3e-3,
    "streaming DiLoCo, overlapped": 3e-3,
    "DiLoCo, int8": 3e-3,
}
_NESTEROV = 'period = 16\nouter = "nesterov"\nouter_lr = 0.7\nouter_momentum = 0.5'
ISLANDS = {
    "local SGD": "period = 16",
    "post-local SGD": "period = 16\nstart_step = 8",
    "post-local SGD, soon": "period = 16\nstart_step = 4",
    "gossip, ring": 'period = 8\npartners = "ring"',
    "gossip, pairs": 'period = 8\npartners = "pairs"',
    "DiLoCo": _NESTEROV,
    "streaming DiLoCo": f"{_NESTEROV}\nfragments = 2",
    "streaming DiLoCo, overlapped": f"{_NESTEROV}\nfragments = 2\noverlap = 2",
    "DiLoCo, int8": f'{_NESTEROV}\nwire = "int8"',
}
WEIGHTS = {  # of fsdp, gathered for each use
    "fsdp": "",
    "fsdp, weights in int8": '[compress_weights]\nwire = "int8"',
    "fsdp, weights and gradients in int8": '[compress_weights]\nwire = "int8"\n'
    '[compress]\nwire = "int8"\nerror_feedback = false',
}
STALE = {"stale 1": "steps = 1", "stale 1, compensated": "steps = 1\ncompensation = 0.04"}
SERVERS = {  # of four ranks, all of which compute
    "one server": "count = 1\ncompute = true",
    "peers as servers": "count = 4\ncompute = true",
}


@dataclass(frozen=True)
class Variant:
    """One way to train. ``table``: the lines of its table in the plan, [compress] or another, or of
    several.
    """

    name: str
    lr: float
    axis: str = DP
    table: str = ""
    preset: str = "ddp"

    @property
    def plan(self) -> str:
        word = self.table.partition("]")[0].strip("[").removesuffix("_weights")
        allow = f'allow = ["{word}"]\n{self.table}\n' if word else ""
        return f'preset = "{self.preset}"\n{allow}'

    @property
    def meets(self) -> bool:
        """Whether islands become one model now and then."""
        return "[local_steps]" in self.table

    @property
    def is_served(self) -> bool:
        return "[servers]" in self.table

    @property
    def is_peer(self) -> bool:
        return self.name == DDP

    def entry(self, name: str, otherwise: int) -> int:
        """A number of its table."""
        tables = [*tomllib.loads(self.table).values()]
        return int(tables[0].get(name, otherwise)) if tables else otherwise


def variants(lr_scale: float = 1.0) -> dict[str, Variant]:
    """All variants by name; schemes are those that partc knows, with what a plan has if it says no
    more than the name.
    """
    tables = {EXACT: "", DDP: ""}
    tables |= {wire: f'[compress]\nwire = "{wire}"' for wire in WIRES}
    tables |= WEIGHTS
    tables |= {name: f"[local_steps]\n{entries}" for name, entries in ISLANDS.items()}
    tables |= {name: f"[stale]\n{entries}" for name, entries in STALE.items()}
    tables |= {name: f"[servers]\n{entries}" for name, entries in SERVERS.items()}
    apart = {*ISLANDS, *STALE, *SERVERS}
    return {
        name: Variant(
            name, RATES.get(name, LR) * lr_scale, ISLAND if name in apart else DP, table,
            "fsdp" if name in WEIGHTS else "ddp",
        )
        for name, table in tables.items()
    }  # fmt: skip
