"""Folders that partc writes, taken for one another: of a program, of checkpoints, of weights."""

from __future__ import annotations

from pathlib import Path

PROGRAM, CHECKPOINT = "program.json", "checkpoint.json"  # the file that each has
DCP = ".metadata"  # the file that torch.distributed.checkpoint writes
CONSTANTS = "constants.safetensors"  # of a program


def if_checkpoints(folder: Path) -> str:
    """What to do with a folder of ``save_checkpoint``, or one step of it; "" for another one."""
    if not (folder / CHECKPOINT).is_file() and next(folder.glob("step-*"), None) is None:
        return ""
    return (
        "It has checkpoints: partc.load_checkpoint(folder, stage) loads them into a stage, "
        "partc.load(program_folder).module()."
    )


def if_program(folder: Path) -> str:
    """What to do with a folder of ``Program.save``; "" for another one."""
    if not (folder / PROGRAM).is_file():
        return ""
    return (
        "It has a program, without weights: partc.load(folder) reads it. Name the weights, or "
        "what save_checkpoint wrote."
    )


def if_weights(folder: Path) -> str:
    """What to do with a folder of safetensors files alone, as of Hugging Face; "" for another."""
    if next(folder.glob("*.safetensors"), None) is None:
        return ""
    return f"It has weights alone: stage.load_full({str(folder)!r}) takes them."


def if_of_torch(folder: Path) -> str:
    """What to do with a folder of torch.distributed.checkpoint, or above some; "" for another."""
    saved = next((p for p in (folder, *sorted(folder.glob("*"))) if (p / DCP).is_file()), None)
    if saved is None:
        return ""
    return (
        f"{saved} is of torch.distributed.checkpoint. Load it by that: state = stage.state_dict(), "
        f'dcp.load({{"model": state}}, checkpoint_id="{saved}"), by the keys of that save, '
        "and stage.load_state_dict(state)."
    )
