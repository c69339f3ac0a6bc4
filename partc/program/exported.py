"""What exporters of torch ask of a stage, which is a part of a program of all ranks."""

from __future__ import annotations

import torch

from partc.errors import RunError


def check_not_exported() -> None:
    """RunError where a call of a stage is recorded for an export."""
    if torch.onnx.is_in_onnx_export():
        raise no_export("torch.onnx.export")
    if torch.compiler.is_exporting():
        raise no_export("torch.export")
    if torch._C._is_tracing():
        raise no_export("torch.jit.trace")


def no_export(call: str) -> RunError:
    """The refusal of an exporter."""
    return RunError(
        where=call, what="it is given a stage, which is no whole model",
        why="a stage is this rank's part of a program of all ranks: it has pieces of the weights, "
        "and sends tensors to other ranks",
        do="Export the model: whole = stage.full_state_dict() on all ranks, then on one "
        "model.load_state_dict(whole), and export model.eval().",
    )  # fmt: skip
