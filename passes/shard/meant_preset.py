"""What somebody may have meant by a preset that there is not: another name, a file, a folder."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from partc.wrong_calls import did_you_mean

_OTHER_NAMES = {"zero3": "fsdp", "fsdp1": "fsdp", "fsdp2": "fsdp", "dp": "ddp", "tp": "megatron",
                "sp": "megatron-sp", "zero": "zero1", "tensor": "megatron",
                "tensor_parallel": "megatron", "sequence_parallel": "megatron-sp",
                "data_parallel": "ddp", "fully_shard": "fsdp", "full_shard": "fsdp",
                "hybrid_shard": "hsdp", "0": "ddp", "1": "zero1", "2": "zero2",
                "3": "fsdp"}  # fmt: skip


def meant(preset: str, word: str, known: Collection[str]) -> str:
    """What to write in place of ``preset``, of whose words ``word`` is not ``known``."""
    words = [_name(each) for each in re.split(r"[\s,+:;&|]+", preset) if each]
    if words and "+".join(words) != preset and {*words} <= {*known} and not _is_alone(preset):
        return f"Write {'+'.join(words)!r}."
    if "auto" in preset.split("+"):
        return "'auto' stands alone: it chooses among all presets."
    if folder := _folder(preset):
        return folder
    if preset.endswith((".json", ".yaml", ".yml")):
        return (
            "A configuration of DeepSpeed or Accelerate becomes a plan by: partc plan --from "
            f"{preset} --out plan.toml. Then write 'plan.toml'."
        )
    if any(sign in preset for sign in "./\\"):
        return "A plan in a file is named by a path that ends in .toml: 'build/plan.toml'."
    if _is_alone(word):
        return f"Write {_name(word)!r}, as partc calls it."
    near = did_you_mean(word, (*known, "auto"))
    return near or "Name one of these, several joined by '+', or 'auto'."


def _name(word: str) -> str:
    """A word as partc calls it; others in lower case."""
    return _OTHER_NAMES.get(word.lower().replace("-", "_"), word.lower())


def _is_alone(word: str) -> bool:
    """Whether it is one word, and another tool's."""
    return word.lower().replace("-", "_") in _OTHER_NAMES


def _folder(preset: str) -> str:
    """What to write in place of a folder that there is; "" where there is none."""
    try:
        if not Path(preset).is_dir():
            return ""
    except (OSError, ValueError):  # too long for a path
        return ""
    plan = Path(preset, "plan.toml")
    name = str(plan) if plan.is_file() else "build/plan.toml"
    return f"This is a folder, and a path of a plan names a file in it: {name!r}."
