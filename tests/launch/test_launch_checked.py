"""The files of `partc launch` pass what checks such files: the tools of their own systems.

A test is skipped where its tool is missing; `CONTRIBUTING.md` says how to install them.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from partc.launch.targets import TARGETS
from tests.launch.launched import MACHINES, job, passes, python_with, tool, written
from tests.patience import patience

SLURM = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}
SlurmdSpoolDir={folder}
SlurmctldPidFile={folder}/pid
SlurmctldPort={port}
SlurmdPort={slurmd}
ProctrackType=proctrack/pgid
SwitchType=switch/none
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=600
NodeName=n[1-32] CPUs=64 RealMemory=500000 Gres=gpu:8 State=CLOUD
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def devices(machine: str) -> int:
    return 2 if machine == "cpu" else 16


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("target", ["torchrun", "slurm"])
def test_shellcheck(machine: str, target: str, tmp_path: Path) -> None:
    shellcheck = tool("shellcheck")
    out = written(tmp_path, target, job(machine, devices(machine)))
    files = [path for path in sorted(out.iterdir()) if path.suffix in (".sh", ".sbatch")]
    assert len(files) == 3
    passes(shellcheck, *files)


def test_shellcheck_of_what_sky_runs(tmp_path: Path) -> None:
    yaml, shellcheck = pytest.importorskip("yaml"), tool("shellcheck")
    sky = yaml.safe_load((written(tmp_path, "skypilot", job()) / "sky.yaml").read_text())
    script = tmp_path / "run.sh"
    script.write_text(f"#!/usr/bin/env bash\n{sky['run']}")
    passes(shellcheck, "-e", "SC1091", script)


@pytest.mark.parametrize("machine", MACHINES)
def test_hadolint(machine: str, tmp_path: Path) -> None:
    hadolint = tool("hadolint")
    out = written(tmp_path, "torchrun", job(machine, devices(machine)))
    passes(hadolint, out / "Dockerfile")


# Slurm --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a controller that has nodes in name only."""
    controller, folder = tool("slurmctld"), tmp_path_factory.mktemp("slurm")
    tool("sbatch")
    ports = free_ports(2)
    text = SLURM.format(
        host=socket.gethostname().partition(".")[0], user=os.environ.get("USER") or "root",
        folder=folder, port=ports[0], slurmd=ports[1],
    )  # fmt: skip
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text("NodeName=n[1-32] Name=gpu Count=8\n")
    conf = str(folder / "slurm.conf")
    surroundings = {**os.environ, "SLURM_CONF": conf}
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(
            [controller, "-D", "-f", conf], stdout=log, stderr=log, env=surroundings
        )
    try:
        until = time.monotonic() + patience(30.0)
        while (
            subprocess.run(
                ["scontrol", "ping"], env=surroundings, capture_output=True, text=True, check=False
            ).stdout.count("UP")
            < 1
        ):
            assert running.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.2)
        yield surroundings
    finally:
        running.terminate()
        running.wait()


def free_ports(num: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.mark.parametrize("machine", MACHINES)
def test_sbatch_takes_the_job(machine: str, slurm: dict[str, str], tmp_path: Path) -> None:
    out = written(tmp_path, "slurm", job(machine, devices(machine), time_limit="4:00:00"))
    told = passes("sbatch", "--test-only", out / "job.sbatch", env=slurm)
    assert "to start at" in told
    assert f"on nodes {'n1' if machine == 'cpu' else 'n[1-2]'} in" in told


def test_sbatch_would_refuse_an_option_that_there_is_not(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    file = written(tmp_path, "slurm", job()) / "job.sbatch"
    file.write_text(file.read_text().replace("--requeue", "--requeu"))
    file.write_text(file.read_text().replace("--requeu\n", "--requeued\n"))
    done = subprocess.run(
        ["sbatch", "--test-only", file], env=slurm, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0


# Kubernetes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("machine", MACHINES)
def test_kubernetes_validate(machine: str, tmp_path: Path) -> None:
    validate, yaml = tool("kubernetes-validate"), pytest.importorskip("yaml")
    out = written(tmp_path, "kubernetes", job(machine, devices(machine)))
    jobset = yaml.safe_load((out / "jobset.yaml").read_text())
    inner = jobset["spec"]["replicatedJobs"][0]["template"]
    file = tmp_path / "job.yaml"
    plain = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "gpt"}, **inner}
    file.write_text(yaml.safe_dump(plain))
    assert "passed" in passes(validate, "--strict", file)
    container = inner["spec"]["template"]["spec"]["containers"][0]
    container["comand"] = container.pop("command")
    file.write_text(yaml.safe_dump(plain))
    assert subprocess.run([validate, "--strict", file], check=False).returncode != 0


ROUND_TRIP = """
import json, sys, yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet as JobSet
given = yaml.safe_load(open(sys.argv[1]))
back = json.loads(JobSet.from_dict(given).to_json())
assert back == given, (back, given)
"""


@pytest.mark.parametrize("machine", MACHINES)
def test_jobset_is_the_same_behind_its_model(machine: str, tmp_path: Path) -> None:
    """The model takes unknown fields and drops them, so that they are missing then."""
    python = python_with("kubeflow_trainer_api")
    out = written(tmp_path, "kubernetes", job(machine, devices(machine)))
    passes(python, "-c", ROUND_TRIP, out / "jobset.yaml")
    wrong = (out / "jobset.yaml").read_text().replace("maxRestarts:", "maxRestart:")
    (out / "wrong.yaml").write_text(wrong)
    done = subprocess.run(
        [python, "-c", ROUND_TRIP, out / "wrong.yaml"], capture_output=True, check=False
    )
    assert done.returncode == 1


# SkyPilot and TorchX ------------------------------------------------------------------------------
SKY = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
one = next(iter(task.resources))
print("found", json.dumps([task.name, task.num_nodes, one.accelerators, one.cpus, task.envs]))
"""


@pytest.mark.parametrize(
    ("machine", "found"),
    [
        ("dgx-h100", [2, {"H100": 8}, None]),
        ("p4d-ethernet", [2, {"A100": 8}, None]),
        ("dgx-a100", [2, {"A100-80GB": 8}, None]),
        ("l40s-pcie", [2, {"L40S": 8}, None]),
        ("cpu", [1, None, "2+"]),
    ],
)
def test_sky_reads_the_task(machine: str, found: list[object], tmp_path: Path) -> None:
    python = python_with("sky")
    out = written(tmp_path, "skypilot", job(machine, devices(machine)))
    told = passes(python, "-c", SKY, out / "sky.yaml", cwd=tmp_path)
    line = next(each for each in told.splitlines() if each.startswith("found "))
    name, *rest = json.loads(line.removeprefix("found "))
    assert (name, rest[:3]) == ("gpt", found)
    assert rest[3]["CHECKPOINTS"] == "/checkpoints"


def test_torchx_makes_a_request(tmp_path: Path) -> None:
    torchx = tool("torchx")
    written(tmp_path, "torchx", job())
    told = passes(
        torchx, "run", "--workspace", "", "--dryrun", "-s", "slurm", "launch/component.py:train",
        cwd=tmp_path,
    )  # fmt: skip
    assert len(re.findall(r"srun .*|^     --output.*", told, re.MULTILINE)) == 2  # of two nodes
    assert told.count(":=localhost} exec bash launch/node.sh'") >= 2
    assert "NODE_RANK=0" in told
    assert "NODE_RANK=1" in told
    assert "--gpus-per-task=8" in told


def test_every_target_is_checked() -> None:
    """A target that somebody adds is checked by the tool of its system, too."""
    assert {*TARGETS} == {"torchrun", "slurm", "kubernetes", "skypilot", "torchx"}
