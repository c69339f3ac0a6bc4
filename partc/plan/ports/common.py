"""Entries that several tools have: what a plan says of precision, accumulation, recomputing."""

from __future__ import annotations

from typing import Any

from partc.plan.ports.draft import Draft, flag, whole

OPTIMIZER = "no line: an optimizer over stage.parameters(), which steps behind stage.step(...)"
SCHEDULER = "no line: a scheduler is made over the optimizer, in your script"
LAUNCH = "no line: torchrun starts the ranks"
OUTPUT = "no line: your script says what it prints and writes"
DATA = "no line: the example inputs and the loader of your script"
CHECKPOINT = "no line: partc.Checkpoints, in your script"
CLIPPING = "no line: stage.clip_grad_norm_(...) behind a step"
NEVER_CHANGES = "no line: it changes neither numbers nor text"
ALWAYS = "no line: partc always overlaps transfers with computing where it can"
OFFLOAD = "partc keeps all states on the device; shard further, or recompute"


def microbatches(value: Any, draft: Draft) -> str:
    """The batch of an update is computed in as many pieces."""
    number = whole(value)
    return draft.set("microbatches", number) if number > 1 else "no line: the batch is one piece"


def precision(value: Any, draft: Draft) -> str:
    """``"bf16"`` and its like."""
    word = str(value).strip().lower()
    if word in ("no", "none", "false", "float32", "fp32"):
        return "no line: the model's own dtypes count"
    why = f"compute the loss inside of torch.autocast, for {word}; partc records the casts"
    return draft.leave(f"precision {word}", why)


def recompute(value: Any, draft: Draft) -> str:
    """A flag for checkpointing of activations."""
    return draft.set("recompute", "block") if flag(value) else draft.set("recompute", "none")


def offload(value: Any, draft: Draft) -> str:
    """A device, or a flag, for what is kept elsewhere."""
    if str(value).strip().lower() in ("none", "false", "no", "0"):
        return "no line: nothing is offloaded"
    return draft.leave("offload", OFFLOAD)


def compiler(value: Any, draft: Draft) -> str:
    """A backend of torch.compile, or a flag."""
    word = str(value).strip().lower()
    if word in ("no", "false", "0", "none"):
        return draft.set("compile", "none")
    if word in ("inductor", "true", "1"):
        return draft.set("compile", "inductor")
    return draft.leave(f"backend {word} of torch.compile", "partc knows inductor alone")
