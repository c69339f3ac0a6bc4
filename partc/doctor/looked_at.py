"""What `partc doctor` looks at on one rank: its versions, its devices, its node, its program."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from partc.launch.job import machine_of
from partc.launch.network import devices_of_node
from partc.machines.topology import Topology
from partc.program import Program
from partc.program.manifest import NAME, sha256_of


@dataclass(frozen=True)
class Here:
    """One rank: its environment, how many ranks its node has, and the program, None without one."""

    variables: Mapping[str, str]
    program: Program | None = None
    folder: str = ""
    cores: int = field(default_factory=lambda: num_cores())

    @property
    def ranks(self) -> int:
        """The ranks of this node: those that torchrun started, or those that the program wants."""
        if "LOCAL_WORLD_SIZE" in self.variables:
            return int(self.variables["LOCAL_WORLD_SIZE"])
        machine = self.machine
        return 1 if machine is None else min(devices_of_node(machine), machine.num_devices)

    @property
    def machine(self) -> Topology | None:
        """The machines that the program was made for."""
        return None if self.program is None else machine_of(self.program)

    @property
    def library(self) -> str:
        """The library of collectives that the program is for; without one, that of the devices."""
        if self.machine is not None:
            return self.machine.library
        return "nccl" if torch.cuda.is_available() else "gloo"


def versions(folder: str) -> dict[str, str]:
    """What all ranks need to have alike, by name."""
    found = {
        "Python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "processor": platform.machine(),
        "CUDA of torch": str(torch.version.cuda),
        "NCCL": nccl_version(),
        "driver": driver_version(),
        "GPU": gpu_name(),
    }
    if folder:
        found["program"] = sha256_of(Path(folder) / NAME)[:12]
    return found


def num_cores() -> int:
    """The processors that this process may use."""
    may_use = getattr(os, "sched_getaffinity", None)  # not everywhere
    return len(may_use(0)) if may_use else os.cpu_count() or 1


def host() -> str:
    return socket.gethostname()


def nccl_version() -> str:
    """The version of NCCL, ``2.27.5``; "none" where torch was built without it."""
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def driver_version() -> str:
    """The newest CUDA that the driver knows, ``12.8``; "none" without a GPU."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "none"
    number = int(getattr(torch._C, "_cuda_getDriverVersion")())  # noqa: B009  torch for CPUs has none
    return f"{number // 1000}.{number % 1000 // 10}"


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def memory_bytes() -> int:
    """The memory that is free on this node now, as Linux says; else all that it has."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        return 1024 * int(text.partition("MemAvailable:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
