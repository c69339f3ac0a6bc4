"""What the words of a plan's fields say, and which of them words of other tools mean."""

from __future__ import annotations

from typing import Any

MEANT: dict[str, dict[Any, str]] = {  # words of other tools, and what says the same here
    "recompute": {
        True: "block", "true": "block", "full": "block", "all": "block",
        "layer": "block", "layers": "block", "uniform": "block", False: "none", "false": "none",
        "off": "none", "no": "none", "selective": "attention", "auto": "cheap", "default": "cheap",
    },
    "batch": {
        **dict.fromkeys(
            ("per-rank", "per_rank", "rank", "ddp", "own", "sharded", "shard", "split"), "local"
        ),
        **dict.fromkeys(("whole", "full", "all", "replicated", "replicate"), "global"),
    },
    "gather": {
        **dict.fromkeys(("full_shard", "zero3", "fsdp", "block", "layer"), "use"),
        **dict.fromkeys(("shard_grad_op", "zero2", "once"), "step"),
    },
    "compile": {True: "inductor", "true": "inductor", False: "none", "false": "none"},
    "batch_norm": {
        True: "global", "sync": "global", "synced": "global", "syncbn": "global", False: "local",
    },
}  # fmt: skip
SAYS = {  # what words of a field say
    "recompute": {
        "block": "each block is computed again in the backward",
        "attention": "attention alone is computed again",
    },
    "batch": {
        "global": "every rank is given the whole batch",
        "local": "each rank is given rows of its own, as under DDP",
    },
    "batch_norm": {
        "global": "statistics over the whole batch",
        "local": "over each rank's own rows, as under DDP",
    },
    "random": {
        "pieces": "each rank draws the pieces that it holds",
        "single-device": "ranks draw the whole value, so that layouts can be compared",
    },
    "reduce": {
        "step": "gradients are summed over ranks once per step",
        "microbatch": "once per microbatch, and kept in pieces",
    },
    "gather": {
        "use": "a weight is gathered before each use, for the backward again, and freed behind it",
        "step": "it is gathered once in a step, and kept whole until the backward has read it",
    },
}
