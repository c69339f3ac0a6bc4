"""The cases: models of the zoo and of hand-written styles, under layouts of every kind.

``float64``: equal to the model on a CPU to 1e-9, as ``partc.verify`` has it. ``float32`` and
``bfloat16``: the largest error against float64 beside that of the model's own step on the same
device, since each rounds in its own order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import partc
from partc.errors import CheckError
from partc.plan.wires import WIRES
from partc.verification.reference import Reference, eager, is_noise
from tests.patience import patience
from tests.styles import LAYOUTS, STYLES, Style, outcome
from tests.zoo import MODELS

Layout = tuple[str, dict[str, Any]]
Case = Callable[[str], object]  # given the device
OF_STYLES: dict[str, Layout] = {name: LAYOUTS[name] for name in LAYOUTS if name != "auto"}
OF_FAMILIES: dict[str, Layout] = OF_STYLES | {
    "fsdp+megatron-sp": ("dp=2,tp=2", {"plan": "fsdp+megatron-sp"}),
    "zb-v x fsdp": ("pp=2,dp=2", {"plan": "fsdp", "schedule": "zb-v", "microbatches": 2}),
}
AS_PROCESSES = ("ddp", "fsdp", "megatron", "fsdp+megatron-sp")
NARROW: dict[str, Layout] = {
    wire: ("dp=2,tp=2", {"plan": f"""
preset = "ddp+megatron"
allow = ["compress"]

[compress]
wire = "{wire}"
least_mb = 0.0001
"""})
    for wire in WIRES
}  # fmt: skip
_ISLANDS = 'allow = ["local_steps"]\n[local_steps]\nperiod = 2\n'
_OUTER = f'{_ISLANDS}outer = "nesterov"\nfragments = 2\nstart_step = 1\n'
ISLANDS: dict[str, Layout] = {
    "islands of ddp": ("island=2,dp=2", {"plan": f'preset = "ddp"\n{_ISLANDS}'}),
    "islands of fsdp": ("island=2,dp=2", {"plan": f'preset = "fsdp"\n{_OUTER}'}),
    "islands of tp": ("island=2,tp=2", {"plan": f'preset = "megatron"\n{_OUTER}'}),
    "islands of pp": ("island=2,pp=2", {"plan": f"microbatches = 2\n{_OUTER}"}),
    "islands in a ring": ("island=4", {"plan": f'{_ISLANDS}partners = "ring"\n'}),
    "islands in pairs": ("island=4", {"plan": f'{_ISLANDS}partners = "pairs"\n'}),
    "islands that go on": (
        "island=2,dp=2",
        {"plan": f'preset = "fsdp"\n{_ISLANDS}outer = "nesterov"\noverlap = 1\nmix = 0.5\n'},
    ),
    "islands in int8": ("island=2,dp=2", {"plan": f'preset = "ddp"\n{_OUTER}wire = "int8"\n'}),
    "islands in fp8": ("island=2,dp=2", {"plan": f'preset = "fsdp"\n{_OUTER}wire = "fp8"\n'}),
}
_SERVERS, _PEERS = "[servers]\ncount = 1\n", "[servers]\ncount = 4\ncompute = true\n"
_UNEVEN = "[uneven]\nmicrobatches = [3, 1]\n"
_LATE = 'allow = ["stale"]\n[stale]\nsteps = 1\n'
LATE: dict[str, Layout] = {
    "late, of ddp": ("island=2,dp=2", {"plan": f'preset = "ddp"\n{_LATE}compensation = 0.5\n'}),
    "late, of fsdp": ("island=2,dp=2", {"plan": f'preset = "fsdp"\n{_LATE}'}),
    "late, of tp": ("island=2,tp=2", {"plan": f'preset = "megatron"\n{_LATE}'}),
    "uneven, of ddp": ("island=2,dp=2", {"plan": f'preset = "ddp"\n{_UNEVEN}'}),
    "uneven, of fsdp": ("island=2,dp=2", {"plan": f'preset = "fsdp"\n{_UNEVEN}'}),
    "servers, of ddp": ("island=2,dp=2", {"plan": f'preset = "ddp"\n{_SERVERS}'}),
    "servers that compute": ("island=4", {"plan": f'preset = "ddp"\n{_PEERS}'}),
    "late, of pp": ("island=2,pp=2", {"plan": f"microbatches = 2\n{_LATE}"}),
}
_BETWEEN = 'allow = ["compress"]\n[compress]\nleast_mb = 0.0001\nwire = '
MACHINES: dict[str, Layout] = {
    f"{wire} between machines, {preset}": (
        "dp_replicate=2,dp_shard=2", {"plan": f'preset = "{preset}"\n{_BETWEEN}"{wire}"\n'}
    )
    for preset in ("hsdp", "zero1", "zero2") for wire in WIRES
}  # fmt: skip
ROUNDED: Layout = ("dp=2,tp=2", {"plan": "fsdp+megatron"})
ROUNDING = 3.0  # times the error of the model's own step


def family(name: str, dtype: torch.dtype = torch.float64) -> Style:
    """A model of the zoo, in another dtype if one is given."""
    made = MODELS[name]()
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in made.inputs)
    return Style(made.model.to(dtype), inputs, made.loss)


def hand_written(name: str) -> Style:
    """A model of a style, with the same weights every time."""
    torch.manual_seed(0)
    return STYLES[name]()


def compiled(of: Style, layout: Layout, backend: str) -> partc.Program:
    mesh, given = layout
    return partc.compile(of.model, mesh, of.inputs, loss=of.loss, backend=backend, **given)


def equal(make: Callable[[], Style], layout: Layout, backend: str, device: str) -> None:
    """CheckError unless a program is in float64 as its model: over gloo its ranks are processes,
    else threads.
    """
    of = make()
    program = compiled(of, layout, backend)
    partc.verify(
        program, of.model, of.inputs, loss=of.loss, device=device, timeout=patience(),
        processes=backend == "gloo",
    ).check()  # fmt: skip


def rounded(name: str, dtype: torch.dtype, device: str) -> None:
    """CheckError if a program in its own precision is further from float64 than its model is."""
    of = family(name, dtype)
    program = compiled(of, ROUNDED, "nccl")
    exact = replace(eager(of.model, of.inputs, of.loss), inputs=of.inputs)
    found = partc.verify(
        program, of.model, of.inputs, loss=of.loss, dtype=None, reference=exact, device=device,
        timeout=patience(),
    )  # fmt: skip
    ours = max(row.error for row in found.rows if row.kind == "gradient")
    theirs = own_error(of, exact, device)
    if not ours <= ROUNDING * theirs:
        raise CheckError(
            where=name, what=f"the largest error of a gradient is {ours:.1e}",
            why=f"that of the model's own step is {theirs:.1e}", do="Look for a sum in few bits.",
        )  # fmt: skip


def own_error(of: Style, exact: Reference, device: str) -> float:
    """The largest error of a gradient of the model's own step on the device."""
    assert of.loss is not None
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


def cases() -> dict[str, Case]:
    """Every case by its name."""
    found: dict[str, Case] = {}
    for layout, how in OF_FAMILIES.items():
        for name in MODELS:
            made = partial(family, name)
            found[f"{name} {layout} float64"] = partial(equal, made, how, "nccl")
            if layout in AS_PROCESSES:
                found[f"{name} {layout} processes"] = partial(equal, made, how, "gloo")
    for layout, how in OF_STYLES.items():
        for name in STYLES:
            made = partial(hand_written, name)
            found[f"{name}, {layout}, style"] = partial(equal, made, how, "nccl")
    for layout, how in (ISLANDS | LATE).items():
        for name in MODELS:
            made = partial(family, name)
            found[f"{name} {layout} float64"] = partial(equal, made, how, "nccl")
        if "pp" not in layout:  # gloo sends no tensors of a GPU from rank to rank
            made = partial(family, "llama")
            found[f"llama {layout} processes"] = partial(equal, made, how, "gloo")
    for wire, how in (NARROW | MACHINES).items():
        made = partial(family, "llama")
        found[f"llama {wire} float64"] = partial(equal, made, how, "nccl")
        found[f"llama {wire} processes"] = partial(equal, made, how, "gloo")
    for dtype in (torch.float32, torch.bfloat16):
        word = str(dtype).removeprefix("torch.")
        for name in MODELS:
            found[f"{name} fsdp+megatron {word}"] = partial(rounded, name, dtype)
    return found


def run(name: str, device: str) -> tuple[str, str]:
    """What becomes of a case, in a process of its own, and the message."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return outcome(partial(cases()[name], device))
