"""What can be right or wrong on one rank: versions, libraries, devices, cores, memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from partc.amounts import amount, counted
from partc.doctor.finding import NOTE, OK, WRONG, Finding
from partc.doctor.looked_at import Here, driver_version, memory_bytes, nccl_version
from partc.launch.job import peak_bytes
from partc.program.manifest import TORCH_BELOW, TORCH_MIN


def look_here(here: Here) -> Iterator[Finding]:
    """The findings of one rank, beside those of its variables."""
    yield _torch()
    yield from _library(here)
    yield from _driver()
    yield from _devices(here)
    yield from _world(here)
    yield from _memory(here)


def _torch() -> Finding:
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    low, below = (".".join(map(str, version)) for version in (TORCH_MIN, TORCH_BELOW))
    text = f"{torch.__version__}; partc is for {low} to below {below}"
    if TORCH_MIN <= found < TORCH_BELOW:
        return Finding(OK, "torch", text)
    return Finding(
        WRONG, "torch", text, f"Install one of these: pip install 'torch>={low},<{below}'."
    )


def _library(here: Here) -> Iterator[Finding]:
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    there = [name for name, has in built.items() if has]
    text = f"torch has {' and '.join(there) or 'none'}"
    if here.library == "nccl" and built["nccl"] and torch.cuda.is_available():
        text += f", NCCL {nccl_version()}"
    if built[here.library]:
        yield Finding(OK, "collectives", f"{text}; {here.library} is used")
    else:
        do = "Install a torch that was built with it."
        yield Finding(WRONG, "collectives", f"{text}, and {here.library} is used", do)


def _driver() -> Iterator[Finding]:
    """A driver is right for a CUDA of its own major version, or an older one."""
    driver, needed = driver_version(), torch.version.cuda
    if driver == "none" or needed is None:
        return
    text = f"for CUDA {driver}, and torch was built with {needed}"
    old = int(driver.partition(".")[0]) < int(needed.partition(".")[0])
    do = "Update the driver, or install a torch for an older CUDA."
    yield Finding(WRONG if old else OK, "driver", text, do * old)


def _devices(here: Here) -> Iterator[Finding]:
    if here.library != "nccl":
        yield _cores(here)
        return
    seen = torch.cuda.device_count()
    text = f"{counted(seen, 'GPU')} for {counted(here.ranks, 'rank')} of this node"
    if seen < here.ranks:
        do = "Start one rank for each GPU, and look at CUDA_VISIBLE_DEVICES and nvidia-smi."
        yield Finding(WRONG, "devices", text, do)
    else:
        yield Finding(OK, "devices", text)
    if seen and here.machine is not None:
        yield _kind(torch.cuda.get_device_name(), here.machine.kinds)


def _kind(name: str, planned: str) -> Finding:
    """Whether the GPU is the one of the plan, by the first word of its name there: ``H100``."""
    models = [each.split()[0] for each in planned.split(" and ")]
    if any(model.lower() in name.lower() for model in models):
        return Finding(OK, "kind of GPU", f"{name}, as planned")
    do = "Predictions are for the other: measure this one by partc calibrate, and compile again."
    return Finding(NOTE, "kind of GPU", f"{name}; the program was planned for {planned}", do)


def _cores(here: Here) -> Finding:
    text = f"{counted(here.cores, 'core')} for {counted(here.ranks, 'rank')} of this node"
    if here.cores < here.ranks:
        return Finding(NOTE, "cores", text, "Ranks take turns: steps are slower than predicted.")
    return Finding(OK, "cores", text)


def _world(here: Here) -> Iterator[Finding]:
    if here.program is None:
        return
    need, world = here.program.mesh.num_ranks, here.variables.get("WORLD_SIZE")
    text = f"{here.folder}: {here.program.model} on {here.program.mesh}, whole"
    if world is None:
        do = f"Look at all ranks: torchrun --nproc-per-node {need} -m partc doctor {here.folder}"
        yield Finding(OK if need == 1 else NOTE, "program", text, do if need > 1 else "")
    elif int(world) != need:
        do = f"Start {need}, or compile for a mesh of {world}."
        yield Finding(WRONG, "program", f"{text}, has {need} ranks; there are {world}", do)
    else:
        yield Finding(OK, "program", text)


def _memory(here: Here) -> Iterator[Finding]:
    if here.program is None:
        return
    peak = peak_bytes(here.program.cost.as_json())
    if here.library == "nccl":
        if not torch.cuda.is_available():
            return
        free, of = torch.cuda.mem_get_info()[0], "free on this rank's GPU"
    else:
        free, of, peak = memory_bytes(), "free on this node", peak * here.ranks
    text = f"{amount(peak, 'B')} are needed at the peak, {amount(free, 'B')} are {of}"
    do = "End what else takes memory, or compile with a smaller memory_bytes."
    yield Finding(OK if peak < free else WRONG, "memory", text, "" if peak < free else do)
