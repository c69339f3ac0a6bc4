"""Jobs for tests of launch files, made without compiling, and the tools that check such files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partc.launch.job import Job, Wishes
from partc.launch.network import devices_of_node, network_between_nodes, variables_of
from partc.launch.targets import files_of
from partc.machines.topology import Topology
from partc.plan.mesh import Mesh

TOOLS = "PARTC_LAUNCH_TOOLS"  # names environments that have the tools, where they stand apart
WISHES = Wishes(name="gpt", script="train.py", arguments=("--lr", "1e-3"), grace_s=90)
MACHINES = ("dgx-h100", "p4d-ethernet", "l40s-pcie", "mi300x", "cpu")


def job(machine: str = "dgx-h100", devices: int = 16, **wishes: Any) -> Job:
    """A job of a Llama on so many devices of a machine that comes with partc."""
    topology = Topology.load(machine, devices)
    wished = replace(WISHES, **wishes)
    ranks = wished.devices_per_node or devices_of_node(topology)
    network = wished.network or network_between_nodes(topology)
    return Job(
        folder="build", model="LlamaForCausalLM", mesh=Mesh.parse(f"dp={devices // 2},tp=2"),
        machine=topology, nodes=devices // ranks, ranks=ranks, network=network,
        placed=(f"nodes 0-{devices // ranks - 1}, each: {ranks} ranks of stage0.py",),
        step_s=0.25, peak_bytes=24_000_000_000, state_bytes=96_000_000_000, torch="2.13.0",
        variables=variables_of(topology, network, wished.interface), wishes=wished,
    )  # fmt: skip


def written(folder: Path, target: str, of: Job) -> Path:
    """The folder ``launch`` with the files of a target, and what they name beside it."""
    out = folder / "launch"
    out.mkdir()
    for name, text in files_of(of, target, "launch").items():
        (out / name).write_text(text, encoding="utf-8")
    (folder / "build").mkdir()
    (folder / "train.py").touch()
    return out


def apart() -> list[str]:
    """The folders of commands of the environments that are named."""
    return [f"{each}/bin" for each in os.environ.get(TOOLS, "").split(os.pathsep) if each]


def python_with(module: str) -> str:
    """A Python that has a module: one of the tools', or that of the tests."""
    for python in (*(f"{folder}/python" for folder in apart()), sys.executable):
        if not subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode:
            return python
    pytest.skip(f"no Python here has {module}, nor one in ${TOOLS}")


def tool(name: str) -> str:
    """The path of a command; the test is skipped where there is none."""
    places = [*apart(), str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        pytest.skip(f"no {name} here, nor in ${TOOLS}")
    return found


def passes(*command: str | Path, **more: Any) -> str:
    """What a command prints; the test fails with it unless it ends with exit code 0."""
    done = subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False, **more,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return str(done.stdout)
