"""What exporters of torch ask of a stage, which is a part of a program of all ranks."""

from __future__ import annotations

import torch

from partc.errors import RunError


def check_not_exported() -> None:
    """RunError where a call of a stage is recorded for an export, or transformed."""
    if torch.onnx.is_in_onnx_export():
        raise no_export("torch.onnx.export")
    if torch.compiler.is_exporting():
        raise no_export("torch.export")
    if torch._C._is_tracing():
        raise no_export("torch.jit.trace")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise _no_transform()


def no_export(call: str) -> RunError:
    """The refusal of an exporter."""
    return RunError(
        where=call, what="it is given a stage, which is no whole model",
        why="a stage is this rank's part of a program of all ranks: it has pieces of the weights, "
        "and sends tensors to other ranks",
        do="Export the model: whole = stage.full_state_dict() on all ranks, then on one "
        "model.load_state_dict(whole), and export model.eval().",
    )  # fmt: skip


def _no_transform() -> RunError:
    return RunError(
        where="torch.func", what="a stage is called inside of a transform (grad, vmap, jacrev)",
        why="a step is a program that computes the gradients of one loss, and no function of torch",
        do="Write the transform inside of the loss that is compiled; gradients of that loss are in "
        ".grad behind stage.step(...).",
    )  # fmt: skip
