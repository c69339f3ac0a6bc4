"""The cases: models of the zoo and of hand-written styles, under layouts of every kind.

``float64``: equal to the model on a CPU to 1e-9, as ``partc.verify`` has it. ``float32`` and
``bfloat16``: the largest error against float64 beside that of the model's own step on the same
device, since each rounds in its own order.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import partc
from partc.errors import CheckError, PartcError
from partc.verification.reference import Reference, eager, is_noise
from tests.patience import patience
from tests.styles import STYLES
from tests.zoo import FAMILIES, MODELS

Outcome = tuple[str, str]
Layout = tuple[str, dict[str, Any]]
AS_THREADS: dict[str, Layout] = {
    "ddp": ("dp=2", {"plan": "ddp"}),
    "ddp, microbatches": ("dp=2", {"plan": "ddp", "microbatches": 2}),
    "fsdp": ("dp=2", {"plan": "fsdp"}),
    "megatron": ("tp=2", {"plan": "megatron"}),
    "1f1b": ("pp=2", {"plan": "ddp", "microbatches": 2}),
}
OF_FAMILIES: dict[str, Layout] = AS_THREADS | {
    "fsdp+megatron-sp": ("dp=2,tp=2", {"plan": "fsdp+megatron-sp"}),
    "zb-v x fsdp": ("pp=2,dp=2", {"plan": "fsdp", "schedule": "zb-v", "microbatches": 2}),
}
AS_PROCESSES = ("ddp", "fsdp", "megatron", "fsdp+megatron-sp")
ROUNDING = 3.0  # times the error of the model's own step


@dataclass(frozen=True)
class Subject:
    """A model with its batch and loss."""

    model: nn.Module
    inputs: Any
    loss: Any


def family(name: str, dtype: torch.dtype = torch.float64) -> Subject:
    """A model of the zoo, in another dtype if one is given."""
    made = MODELS[name]()
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in made.inputs)
    return Subject(made.model.to(dtype), inputs, made.loss)


def style(name: str) -> Subject:
    torch.manual_seed(0)
    return Subject(*STYLES[name]())


def compiled(of: Subject, layout: Layout, **fields: Any) -> partc.Program:
    mesh, given = layout
    return partc.compile(of.model, mesh, of.inputs, loss=of.loss, **given, **fields)


def equal(make: Callable[[], Subject], layout: Layout, device: str, **fields: Any) -> Outcome:
    """In float64 as the model, as threads."""
    of = make()
    program = compiled(of, layout, **fields)
    report = partc.verify(
        program, of.model, of.inputs, loss=of.loss, device=device, timeout=patience(),
        processes=fields["backend"] == "gloo",
    )  # fmt: skip
    report.check()
    return "right", ""


def rounded(name: str, dtype: torch.dtype, layout: Layout, device: str) -> Outcome:
    """In its own precision no further from float64 than the model's own step is."""
    of = family(name, dtype)
    program = compiled(of, layout, backend="nccl")
    exact = replace(eager(of.model, of.inputs, of.loss), inputs=of.inputs)
    found = partc.verify(
        program, of.model, of.inputs, loss=of.loss, dtype=None, reference=exact, device=device,
        timeout=patience(),
    )  # fmt: skip
    ours = max(row.error for row in found.rows if row.kind == "gradient")
    theirs = own_error(of, exact, device)
    told = f"largest error of a gradient {ours:.1e}, of the model's own step {theirs:.1e}"
    return ("right" if ours <= ROUNDING * theirs else "WRONG"), told


def own_error(of: Subject, exact: Reference, device: str) -> float:
    """The largest error of a gradient of the model's own step on the device."""
    model = of.model.to(device)
    of.loss(model, *(x.to(device) for x in of.inputs)).backward()
    found = {name: param.grad for name, param in model.named_parameters()}
    sizes = {name: float(grad.abs().max()) for name, grad in exact.grads.items()}
    most = max(sizes.values())
    return max(
        float((found[name].double().cpu() - grad).abs().max())  # type: ignore[union-attr]
        / (most if is_noise(sizes[name], most, grad.dtype) else sizes[name])
        for name, grad in exact.grads.items()
    )


CASES: dict[str, Callable[[str], Outcome]] = {}
for _layout, _how in OF_FAMILIES.items():
    for _name in MODELS:
        CASES[f"{_name} {_layout} float64"] = partial(
            lambda name, how, device: equal(partial(family, name), how, device, backend="nccl"),
            _name, _how,
        )  # fmt: skip
for _layout, _how in AS_THREADS.items():
    for _name in STYLES:
        CASES[f"{_name}, {_layout}, style"] = partial(
            lambda name, how, device: equal(partial(style, name), how, device, backend="nccl"),
            _name, _how,
        )  # fmt: skip
for _layout in AS_PROCESSES:
    for _name in MODELS:
        CASES[f"{_name} {_layout} processes"] = partial(
            lambda name, how, device: equal(partial(family, name), how, device, backend="gloo"),
            _name, OF_FAMILIES[_layout],
        )  # fmt: skip
for _dtype in (torch.float32, torch.bfloat16):
    for _name in FAMILIES:
        CASES[f"{_name} fsdp+megatron {str(_dtype).removeprefix('torch.')}"] = partial(
            lambda name, dtype, device: rounded(
                name, dtype, ("dp=2,tp=2", {"plan": "fsdp+megatron"}), device
            ),
            _name, _dtype,
        )  # fmt: skip


def outcome(name: str, device: str) -> Outcome:
    """ "right", "refused", "WRONG" or "RAW", and the message."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        return CASES[name](device)
    except CheckError as error:
        return "WRONG", str(error)
    except PartcError as error:
        return "refused", str(error)
    except Exception:
        return "RAW", traceback.format_exc()[-600:]
