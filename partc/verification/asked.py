"""What a verification may be asked for: refusals that need no rank to run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partc.errors import RunError, UsageError
from partc.plan import Plan
from partc.program import Program
from partc.trace.arguments import Given
from partc.trace.fingerprint import Fingerprint
from partc.verification.reference import Reference, Tensors
from partc.wrong_calls import quoted


def check_asked(program: Program, lr: Any, dtype: Any, timeout: Any, *, lossy: bool) -> None:
    """UsageError for what ``verify`` cannot be asked, before a rank runs."""
    check_program(program)
    check_numbers(lr, dtype, timeout)
    if lossy:
        check_compresses(program)


def check_program(program: Program) -> None:
    """UsageError for what is no program."""
    if not isinstance(program, Program):
        do = "Pass what partc.compile gave: verify(program, model, inputs, loss=loss)."
        if isinstance(program, str | Path):
            do = f"Load it first: partc.load({str(program)!r})."
        raise UsageError(
            where="verify", what=f"the program is {quoted(program)}", why="it is compared with a "
            "model", do=do,
        )  # fmt: skip


def check_carried(program: Program, device: torch.device) -> None:
    """RunError if processes that share a GPU cannot carry what the program sends."""
    backend = Plan.parse(program.plan).backend
    if device.type == "cuda" and backend == "nccl":
        raise RunError(
            where='verify(device="cuda", processes=True)', what="the program has the text for NCCL",
            why="processes that share a GPU talk over gloo, as NCCL wants a GPU for each",
            do='Leave out processes, or compile the program with backend="gloo".',
        )  # fmt: skip


def check_numbers(lr: Any, dtype: Any, timeout: Any) -> None:
    """UsageError for a learning rate or seconds that are no such number, and for what is no dtype
    to compute gradients in.
    """
    rate = isinstance(lr, int | float) and 0 <= lr < math.inf
    wrong = None if rate else ("lr", lr, "a number from 0 on, such as 1e-3")
    if not isinstance(timeout, int | float) or not timeout > 0:
        wrong = "timeout", timeout, "a number of seconds above 0"
    floats = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    if dtype is not None and not floats:
        wrong = "dtype", dtype, "torch.float64, or None for the model's own"
    if wrong:
        name, given, right = wrong
        raise UsageError(
            where=f"verify({name}=...)", what=f"it is {_said(given)}", why=f"it should be {right}",
            do=f"Leave it out, or pass {right}.",
        )  # fmt: skip


def check_compresses(program: Program) -> None:
    """UsageError if a program sends neither gradients nor weights in fewer bytes."""
    plan = Plan.parse(program.plan)
    if plan.compress is None and plan.compress_weights is None:
        raise UsageError(
            where="verify(lossy=True)", what="the plan has no [compress], and no "
            "[compress_weights]", why="it asks for the errors of what is sent in fewer bytes",
            do="Leave it out: the other rows say how far this program is from the model.",
        )  # fmt: skip


def _said(given: Any) -> str:
    return str(given) if isinstance(given, torch.dtype) else quoted(given)


def other_shapes(program: Program, model: nn.Module) -> bool:
    """Whether a model has other tensors than the one that was compiled, whatever their dtypes."""
    mine, compiled = Fingerprint.of(model).tensors, program.fingerprint.tensors
    return {n: x.shape for n, x in mine.items()} != {n: x.shape for n, x in compiled.items()}


def other_mode(program: Program, model: nn.Module) -> str:
    """The mode of a program whose model is in the other one; "" where both are in one."""
    mode = program.wanted.mode
    return mode if model.training != (mode == "train") else ""


def without_number(given: Given, reference: Reference) -> str:
    """``the input x has NaN`` for the first input or weight that has; else of the first that has
    infinite numbers, as masks may; "" where the model alone gives finite numbers.
    """
    loss = {} if reference.loss is None else {"loss": reference.loss}
    made = {**loss, **reference.results, **reference.grads}
    if all(bool(x.isfinite().all()) for x in _floats(made).values()):
        return ""
    named = {f"the input {n}": x for n, x in zip(given.names, given.tensors, strict=True)}
    named |= {f"the model's {name}": x for name, x in reference.weights.items()}
    for word, has in (("NaN", torch.isnan), ("infinite numbers", torch.isinf)):
        if found := next((n for n, x in _floats(named).items() if bool(has(x).any())), ""):
            return f"{found} has {word}"
    return ""


def _floats(tensors: Tensors) -> Tensors:
    return {n: x for n, x in tensors.items() if x.is_floating_point() or x.is_complex()}
