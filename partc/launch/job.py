"""What a launch needs to know: how many nodes, what each runs, and how long it may take."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from partc.amounts import amount, counted, time_text
from partc.errors import UsageError
from partc.launch.network import (
    NETWORKS,
    Variable,
    devices_of_node,
    network_between_nodes,
    variables_of,
)
from partc.machines.topology import Topology
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program

NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?\Z", re.ASCII)  # of jobs, hosts and services
MOST = 10**8  # seconds, restarts or things: more is a slip
MOMENTS = 3  # a checkpoint of AdamW has a parameter and two moments of its size
JOIN_S = 900  # nodes of one job do not start in the same second, and images have to be pulled


@dataclass(frozen=True)
class Wishes:
    """What the user says of the cluster; what is left out follows from the program.

    ``script``: what ranks run in place of ``run.py``, with ``arguments``. ``checkpoints``: its
    folder. ``grace_s``: seconds from the notice that a node goes until it is gone. ``restarts``:
    how often a run that failed is started again. ``resources``: further ones of each node, such as
    ``{"rdma/hca": 8}``.
    """

    name: str = ""
    script: str = ""
    arguments: tuple[str, ...] = ()
    checkpoints: str = ""
    devices_per_node: int | None = None
    network: str = ""
    interface: str = ""
    image: str = ""
    restarts: int = 3
    grace_s: int = 120
    time_limit: str = ""
    resources: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """Everything that the files of a launch say.

    ``folder`` is the saved program's, as seen from where the job starts. ``nodes`` have ``ranks``
    processes each, one for each device. ``placed`` has a line for each run of ranks with one role.
    ``step_s``: the predicted seconds of a step. ``state_bytes``: about what a checkpoint takes.
    """

    folder: str
    model: str
    mesh: Mesh
    machine: Topology
    nodes: int
    ranks: int
    network: str
    placed: tuple[str, ...]
    step_s: float
    peak_bytes: int
    state_bytes: int
    torch: str
    variables: tuple[Variable, ...]
    wishes: Wishes
    compiles: bool = False  # whether kernels of torch.compile are made where it runs

    @property
    def name(self) -> str:
        return self.wishes.name or _name_of(self.folder)

    @property
    def on_gpus(self) -> bool:
        """Whether a rank has a GPU."""
        return self.machine.library == "nccl"

    @property
    def script(self) -> str:
        """What each rank runs."""
        return self.wishes.script or f"{self.folder}/run.py"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The script's arguments; ``run.py`` is told the device, so that it takes no other."""
        device = ("--device", "cuda" if self.on_gpus else "cpu")
        return (*(() if self.wishes.script else device), *self.wishes.arguments)

    @property
    def checkpoints(self) -> str:
        """The folder of the script's checkpoints; "" where ``run.py`` runs, which writes none."""
        return (self.wishes.checkpoints or "checkpoints") if self.wishes.script else ""

    @property
    def image(self) -> str:
        """The name of the container image that the Dockerfile makes."""
        return self.wishes.image or f"{self.name}:latest"

    @property
    def about(self) -> tuple[str, ...]:
        """Lines for people: what the program is, and where its ranks run."""
        return (
            f"{self.model} on {self.mesh}: {counted(self.nodes, 'node')} of {self.machine.kinds}, "
            f"{counted(self.ranks, 'rank')} each",
            f"a step is predicted to take {time_text(self.step_s)}, a rank "
            f"{amount(self.peak_bytes, 'B')} of memory",
            *self.placed,
        )


def job_of(program: Program, folder: str, wishes: Wishes) -> Job:
    """What follows from a saved program; UsageError for wishes that it cannot have."""
    _check(wishes)
    machine, mesh = machine_of(program), program.mesh
    ranks = _ranks_of_node(machine, mesh, wishes)
    network = wishes.network or network_between_nodes(machine)
    NETWORKS[network]  # UsageError for another name
    cost = program.cost.as_json()
    return Job(
        folder=folder.rstrip("/") or folder, model=_on_one_line(program.model),
        mesh=mesh, machine=machine, nodes=mesh.num_ranks // ranks, ranks=ranks, network=network,
        placed=tuple(_placed(program, ranks)),
        step_s=float(cost["prediction"]["seconds"]), peak_bytes=peak_bytes(cost),
        state_bytes=MOMENTS * _param_bytes(program), torch=_torch(),
        variables=variables_of(machine, network, wishes.interface), wishes=wishes,
        compiles=program.role(0).compiles,
    )  # fmt: skip


def machine_of(program: Program) -> Topology:
    """The machines that a program was made for, with the library of collectives that its text has:
    the plan may name another one than theirs.
    """
    machine = program.basis.topology()
    return replace(machine, library=Plan.parse(program.plan).backend or machine.library)


def _ranks_of_node(machine: Topology, mesh: Mesh, wishes: Wishes) -> int:
    ranks = wishes.devices_per_node or devices_of_node(machine)
    if mesh.num_ranks % ranks:
        raise UsageError(
            where=f"{ranks} devices of a node", what=f"{mesh.num_ranks} ranks do not fill nodes",
            why=f"each device is one rank of the mesh {mesh}",
            do="Give --devices-per-node a number that divides the ranks.",
        )  # fmt: skip
    return ranks


def _placed(program: Program, ranks: int) -> list[str]:
    """A line for each run of nodes whose ranks run the same files."""
    roles = [name for num, name in program.roles for _ in range(num)]
    nodes = [roles[first : first + ranks] for first in range(0, len(roles), ranks)]
    lines, first = [], 0
    for files, alike in groupby(nodes):
        num = len([*alike])
        of = f"node {first}" if num == 1 else f"nodes {first}-{first + num - 1}, each"
        runs = [(name, len([*run])) for name, run in groupby(files)]
        inside = ", ".join(f"{counted(n, 'rank')} of {name}" for name, n in runs)
        lines.append(f"{of}: {inside}")
        first += num
    return lines


def _on_one_line(name: str) -> str:
    """A name as a comment may have it, whoever wrote it into program.json."""
    return "".join(sign if sign.isprintable() else "?" for sign in name)


def peak_bytes(cost: Mapping[str, Any]) -> int:
    """The predicted memory of the fullest rank; the ranks of a pipeline differ."""
    ranks = cost.get("ranks", [cost])
    return max(int(rank["peak_bytes"]) for rank in ranks)


def _param_bytes(program: Program) -> int:
    """The bytes of all parameters; tied ones count once for each name."""
    from partc.program.role import dtype_of

    params = (spec for spec in program.fingerprint.tensors.values() if spec.kind == "param")
    return sum(prod(spec.shape) * dtype_of(spec.dtype).itemsize for spec in params)


def _torch() -> str:
    """The version of torch that compiled, as a package index names it."""
    import torch

    return torch.__version__.partition("+")[0]


def _name_of(folder: str) -> str:
    """A name for a job from its folder's: ``build/My_GPT`` is ``my-gpt``."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(folder).resolve().name.lower()).strip("-")[:40]
    return name.rstrip("-") if NAME.match(name.rstrip("-")) else f"job-{name}".rstrip("-")[:40]


# wishes -----------------------------------------------------------------------------------------
def _check(wishes: Wishes) -> None:
    """UsageError for what no file can say."""
    if wishes.name and not NAME.match(wishes.name):
        why = "hosts and services are called by it: small letters, digits and -, 40 at most"
        raise _no(f"--name {wishes.name}", "that is no name of a job", why, "Name it train-1.")
    least = {"--devices-per-node": (1, 8), "--restarts": (0, 3), "--grace": (1, 120)}
    given = (wishes.devices_per_node, wishes.restarts, wishes.grace_s)
    for (option, (low, some)), number in zip(least.items(), given, strict=True):
        if number is not None and not low <= number <= MOST:
            why = f"it is from {low} to {MOST:,}"
            raise _no(f"{option} {number}", "that cannot be", why, f"Write {option} {some}.")
    for name, number in wishes.resources.items():
        if not 1 <= number <= MOST:
            why = f"it is from 1 to {MOST:,}"
            raise _no(f"--resource {name}={number}", "that cannot be", why, f"Write {name}=8.")
    if wishes.checkpoints and not wishes.script:
        why = "run.py trains on random numbers, to try a program, and saves nothing"
        do = "Name the script that saves them: --script train.py. Or leave it out."
        raise _no(f"--checkpoints {wishes.checkpoints}", "nothing writes there", why, do)
    if wishes.time_limit and not re.fullmatch(r"(\d+-)?\d{1,3}(:\d\d){0,2}", wishes.time_limit):
        do = "Write 4:00:00 for four hours, 2-00:00:00 for two days."
        raise _no(f"--time-limit {wishes.time_limit}", "that is no time", "", do)
    texts: dict[str, tuple[str, Sequence[str]]] = {
        "--checkpoints": (r"[A-Za-z0-9_./-]+", [wishes.checkpoints]),
        "--interface": (r"\^?[A-Za-z0-9_.,=-]+", [wishes.interface]),
        "--image": (r"[A-Za-z0-9_.][A-Za-z0-9_./:@-]*", [wishes.image]),
        "--resource": (r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", [*wishes.resources]),
        "an argument of the script": (r"[ -~]+", wishes.arguments),
    }
    for option, (form, given_texts) in texts.items():
        for text in given_texts:
            if text and not re.fullmatch(form, text, re.ASCII):
                why = "files of a launch show letters, digits and a few signs"
                raise _no(f"{option} {text!r}", "no file can say that", why, "Take another name.")


def _no(where: str, what: str, why: str, do: str) -> UsageError:
    return UsageError(where=where, what=what, why=why, do=do)
