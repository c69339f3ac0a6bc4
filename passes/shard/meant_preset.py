"""What somebody may have meant by a preset that there is not: another name, a file, a folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from partc.wrong_calls import did_you_mean

_OTHER_NAMES = {"zero3": "fsdp", "fsdp1": "fsdp", "fsdp2": "fsdp", "dp": "ddp", "tp": "megatron",
                "sp": "megatron-sp", "zero": "zero1", "tensor": "megatron",
                "tensor_parallel": "megatron", "sequence_parallel": "megatron-sp",
                "data_parallel": "ddp", "fully_shard": "fsdp", "full_shard": "fsdp",
                "hybrid_shard": "hsdp"}  # fmt: skip


def meant(preset: str, word: str, known: Collection[str]) -> str:
    """What to write in place of ``preset``, of whose words ``word`` is not ``known``."""
    joined = "+".join(preset.replace(",", " ").replace("+", " ").lower().split())
    if joined != preset and joined and {*joined.split("+")} <= {*known}:
        return f"Write {joined!r}."
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
    if (other := word.lower().replace("-", "_")) in _OTHER_NAMES:
        return f"Write {_OTHER_NAMES[other]!r}, as partc calls it."
    near = did_you_mean(word, (*known, "auto"))
    return near or "Name one of these, several joined by '+', or 'auto'."


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
