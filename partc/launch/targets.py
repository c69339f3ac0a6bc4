"""The targets of a launch: which files each has, and the command with which a person starts them.

``TARGETS.add("mine", Target(...))`` adds one; its templates see the names of ``_words``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import jinja2

from partc.amounts import amount
from partc.errors import UsageError
from partc.launch.job import JOIN_S, Job
from partc.launch.network import NETWORKS, devices_of_node
from partc.registry import Registry

LOOK_S, LOOKS = 30, 4  # seconds between two looks at ranks, and how many may find them standing
PROCESS_BYTES = 2_000_000_000  # of memory that Python and torch take beside tensors
MOST_SHOWN = 4  # nodes whose commands a comment shows
RDMA = ("infiniband", "roce", "efa")
AMD = "MI"  # how the names of its devices begin
SHARED = {  # the files that all targets have
    "node.sh": "node.sh.j2",
    "health.sh": "health.sh.j2",
    "Dockerfile": "Dockerfile.j2",
}
TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("partc.launch"), undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True, trim_blocks=True, autoescape=False,  # none of the files is HTML
)  # fmt: skip
TEMPLATES.filters |= {"sh": shlex.quote, "yaml": json.dumps, "py": json.dumps}


@dataclass(frozen=True)
class Target:
    """One way to start a job.

    ``files``: the template of each file beside those of ``SHARED``. ``start``: the command that
    starts them, with ``{out}`` for their folder. ``alike``: whether one request has to ask for
    nodes that are all alike.
    """

    files: Mapping[str, str]
    start: str
    alike: bool = True


TARGETS: Registry[Target] = Registry("target")
TARGETS.add(
    "torchrun",
    Target({"torchrun.sh": "torchrun.sh.j2"}, "{out}/torchrun.sh{node}", alike=False),
)
TARGETS.add("slurm", Target({"job.sbatch": "job.sbatch.j2"}, "sbatch {out}/job.sbatch"))
TARGETS.add(
    "kubernetes", Target({"jobset.yaml": "jobset.yaml.j2"}, "kubectl apply -f {out}/jobset.yaml")
)
TARGETS.add("skypilot", Target({"sky.yaml": "sky.yaml.j2"}, "sky jobs launch {out}/sky.yaml"))
TARGETS.add(
    "torchx",
    Target({"component.py": "component.py.j2"}, "torchx run -s slurm {out}/component.py:train"),
)


def files_of(job: Job, target: str, out: str) -> dict[str, str]:
    """The text of each file of a target, by name; ``out`` is their folder, as the job sees it.

    UsageError for a target that there is not, or that cannot start this job.
    """
    found = TARGETS[target]
    if found.alike and job.machine.is_mixed:
        raise UsageError(
            where=f"--emit {target}", what=f"one request cannot ask for {job.machine.kinds}",
            why="its nodes are all alike, and the ranks of this program are not",
            do="Take --emit torchrun, and start each node where its devices are.",
        )  # fmt: skip
    words = _words(job, out)
    return {
        name: TEMPLATES.get_template(template).render(words)
        for name, template in {**SHARED, **found.files}.items()
    }


def start_of(job: Job, target: str, out: str) -> str:
    """The command with which a person starts the files."""
    node = " NODE HOST_OF_NODE_0" if job.nodes > 1 else ""
    return TARGETS[target].start.format(out=out, node=node)


def notes_of(job: Job, target: str) -> list[str]:
    """What the files leave to the reader, in sentences."""
    checks: list[Callable[[Job, str], str]] = [_script, _checkpoints, _plugin, _rdma, _interface]
    return [note for note in (check(job, target) for check in checks) if note]


def _words(job: Job, out: str) -> dict[str, Any]:
    """All names that templates use."""
    memory = job.ranks * (job.peak_bytes + PROCESS_BYTES)
    return {
        "job": job, "out": out, "join_s": JOIN_S, "look_s": LOOK_S, "looks": LOOKS,
        "plugin": NETWORKS[job.network].plugin if job.on_gpus and job.nodes > 1 else "",
        "shown_nodes": range(min(job.nodes, MOST_SHOWN)),
        "whole_nodes": job.on_gpus and job.ranks >= devices_of_node(job.machine),
        "resources": _resources(job), "rdma": _uses_rdma(job), "accelerator": _accelerator(job),
        "amd": _is_amd(job), "packages": _packages(job),
        "memory_bytes": memory, "memory_gb": ceil(memory / 1e9), "memory_mb": ceil(memory / 1e6),
        "mount": f"/job/{job.checkpoints}" if job.checkpoints[:1] != "/" else job.checkpoints,
    }  # fmt: skip


def _uses_rdma(job: Job) -> bool:
    return job.on_gpus and job.nodes > 1 and job.network in RDMA


def _resources(job: Job) -> dict[str, int]:
    """What a pod asks for by name, beside processors and memory."""
    if not job.on_gpus:
        return dict(job.wishes.resources)
    maker = "amd" if _is_amd(job) else "nvidia"
    return {f"{maker}.com/gpu": job.ranks, **job.wishes.resources}


def _is_amd(job: Job) -> bool:
    return job.machine.kinds.startswith(AMD)


def _packages(job: Job) -> dict[str, str]:
    """The packages of Debian that the image needs, and why."""
    found = {}
    if _uses_rdma(job) and not NETWORKS[job.network].plugin:
        found["libibverbs1 ibverbs-providers"] = "NCCL reaches the network cards through libibverbs"
    if job.compiles:
        found["g++"] = "torch.compile writes C++"
    return found


def _accelerator(job: Job) -> str:
    """The devices of a node as SkyPilot's catalogue calls them: ``H100:8``; "" for CPUs."""
    if not job.on_gpus:
        return ""
    device = job.machine.device
    model = device.name.split()[0]
    large = model == "A100" and device.memory_bytes > 40e9
    return f"{model}{'-80GB' if large else ''}:{job.ranks}"


# notes ------------------------------------------------------------------------------------------
def _script(job: Job, target: str) -> str:
    if job.wishes.script:
        return ""
    return "run.py trains on random numbers, to try the program; name your own by --script train.py"


def _checkpoints(job: Job, target: str) -> str:
    if not job.checkpoints:
        return ""
    where = {
        "kubernetes": f"the claim {job.name}-checkpoints, which you make (ReadWriteMany)",
        "skypilot": f"the bucket {job.name}-checkpoints; name one that nobody else has",
    }.get(target, f"{job.checkpoints}, a folder that all nodes share")
    size = amount(job.state_bytes, "B")
    rate = amount(ceil(job.state_bytes / job.wishes.grace_s), "B/s")
    return (
        f"checkpoints are in {where}; one takes about {size}, so that to save within the "
        f"{job.wishes.grace_s} s of a notice takes {rate}"
    )


def _plugin(job: Job, target: str) -> str:
    plugin = NETWORKS[job.network].plugin if job.on_gpus and job.nodes > 1 else ""
    return f"NCCL needs {plugin} on every node, or in the image" if plugin else ""


def _rdma(job: Job, target: str) -> str:
    if target != "kubernetes" or not _uses_rdma(job) or job.wishes.resources:
        return ""
    return (
        "pods ask for no network card, since clusters call them differently: "
        "--resource rdma/hca=8, or --resource vpc.amazonaws.com/efa=4"
    )


def _interface(job: Job, target: str) -> str:
    if job.nodes == 1 or job.wishes.interface or target == "kubernetes":
        return ""
    return "libraries choose the network interface by themselves; --interface eth0 names it"
