"""The files of `partc launch`: their text, what is refused, and that no file of a user is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from partc.cli.launch_options import EMITTED
from partc.cli.main import main
from partc.errors import UsageError
from partc.launch.job import Job, Wishes, job_of
from partc.launch.network import devices_of_node, network_between_nodes
from partc.launch.targets import SHARED, TARGETS, files_of, notes_of, start_of
from partc.launch.writing import seen_path, write_files
from partc.machines.topology import Topology
from partc.plan import Plan
from tests.launch.launched import MACHINES, job
from tests.launch.saved import SAVED, saved_program

OWN = [(target, name) for target, each in TARGETS.items() for name in each.files]


@pytest.mark.parametrize("name", SHARED)
def test_a_file_of_all_targets(name: str, golden: Callable[..., None]) -> None:
    golden(files_of(job(), "torchrun", "launch")[name])


@pytest.mark.parametrize(("target", "name"), OWN)
def test_a_file_of_a_target(target: str, name: str, golden: Callable[..., None]) -> None:
    golden(files_of(job(), target, "launch")[name])


def test_targets_are_those_of_the_command_line() -> None:
    assert (*TARGETS,) == EMITTED


def test_all_targets_run_the_same_node_file() -> None:
    texts = {files_of(job(), target, "launch")["node.sh"] for target in TARGETS}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("machine", "ranks", "network", "variables"),
    [
        ("dgx-h100", 8, "infiniband", {"NCCL_NET": "IB"}),
        ("p4d-ethernet", 8, "efa", {"FI_PROVIDER": "efa", "NCCL_NET": "AWS Libfabric"}),
        ("l40s-pcie", 8, "ethernet", {}),
        ("mi300x", 8, "other", {}),
    ],
)
def test_the_machine_says_nodes_and_variables(
    machine: str, ranks: int, network: str, variables: dict[str, str]
) -> None:
    of = job(machine)
    assert (of.nodes, of.ranks, of.network) == (16 // ranks, ranks, network)
    of_network = {v.name: v.value for v in of.variables if v.name in ("NCCL_NET", "FI_PROVIDER")}
    assert of_network == variables
    for name, value in variables.items():
        assert f'export {name}="${{{name}-{value}}}"' in node_text(of)


def node_text(of: Job) -> str:
    return files_of(of, "torchrun", "launch")["node.sh"]


def test_a_node_ends_at_the_first_network() -> None:
    h100 = Topology.load("dgx-h100", 64)
    leaf, spine = replace(h100.levels[1], size=4), replace(h100.levels[1], name="spine", size=2)
    pairs, node = replace(h100.levels[0], name="nvlink", size=2), replace(h100.levels[0], size=4)
    deep = replace(h100, levels=(pairs, node, leaf, spine))
    assert devices_of_node(deep) == 8
    assert network_between_nodes(deep) == "infiniband"
    alone = replace(h100, levels=(replace(h100.levels[1], size=64),))
    assert devices_of_node(alone) == 1  # each device is a host
    measured = Topology.load("cpu", 4)
    inner, outer = (replace(measured.levels[0], name=n, size=2) for n in ("node", "between nodes"))
    assert devices_of_node(replace(measured, levels=(inner, outer))) == 2


def test_an_interface_is_that_of_both_libraries() -> None:
    of = job(interface="ib0")
    assert 'export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME-ib0}"' in node_text(of)
    assert 'export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME-ib0}"' in node_text(of)
    assert "NCCL" not in node_text(job("cpu", 2))


def test_devices_of_several_kinds_are_started_by_torchrun_alone() -> None:
    h100, a100 = (Topology.load(name, 8) for name in ("dgx-h100", "dgx-a100"))
    mixed = replace(Topology.load("dgx-h100", 16), groups=((h100.device, 8), (a100.device, 8)))
    of = replace(job(), machine=mixed)
    assert "torchrun.sh" in files_of(of, "torchrun", "launch")
    for target in {*TARGETS} - {"torchrun"}:
        with pytest.raises(UsageError, match="one request cannot ask for"):
            files_of(of, target, "launch")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_machine_has_files(machine: str, target: str) -> None:
    of = job(machine, 2 if machine == "cpu" else 16)
    for text in files_of(of, target, "launch").values():
        assert text.endswith("\n")
        assert "{{" not in text.replace("{{ '{' }}", "")
    assert "NODE" in start_of(of, target, "launch") or of.nodes == 1 or target != "torchrun"


def test_an_image_has_what_its_program_needs() -> None:
    def image(of: Job) -> str:
        return files_of(of, "kubernetes", "launch")["Dockerfile"]

    assert "libibverbs1" in image(job())
    assert "libibverbs1" not in image(job("l40s-pcie"))
    assert "g++" not in image(job())
    assert "install -y --no-install-recommends g++ " in image(replace(job("cpu", 2), compiles=True))
    assert "torch==" not in image(job("mi300x"))
    assert "whl/cpu torch==2.13.0" in image(job("cpu", 2))


def test_notes_say_what_is_left_to_the_reader() -> None:
    told = " ".join(notes_of(job("p4d-ethernet"), "kubernetes"))
    assert "aws-ofi-nccl" in told
    assert "pods ask for no network card" in told
    assert "the claim gpt-checkpoints" in told
    of = job("p4d-ethernet", resources={"vpc.amazonaws.com/efa": 4})
    assert "pods ask" not in " ".join(notes_of(of, "kubernetes"))
    assert '"vpc.amazonaws.com/efa": 4' in files_of(of, "kubernetes", "launch")["jobset.yaml"]


# what a program says ------------------------------------------------------------------------------
def test_a_pipeline_names_what_each_node_runs() -> None:
    program = saved_program("pp=2,dp=2", microbatches=2)
    of = job_of(program, "build", Wishes(devices_per_node=2))
    assert of.placed == ("node 0: 2 ranks of pipeline0.py", "node 1: 2 ranks of pipeline1.py")
    mixed = job_of(program, "build", Wishes(devices_per_node=4))
    assert mixed.placed == ("node 0: 2 ranks of pipeline0.py, 2 ranks of pipeline1.py",)


def test_the_library_is_that_of_the_plan() -> None:
    program = saved_program("dp=2")
    plan = replace(Plan.parse(program.plan), backend="nccl")
    of = job_of(replace(program, plan=str(plan)), "build", Wishes())
    assert of.on_gpus
    assert "build/run.py --device cuda" in node_text(of)
    assert "--gpus-per-node=2" in files_of(of, "slurm", "launch")["job.sbatch"]
    assert not job_of(program, "build", Wishes()).on_gpus


def test_a_name_in_program_json_stays_in_its_comment() -> None:
    program = replace(saved_program("dp=2"), model="Net\nrm -rf $HOME #")
    for text in files_of(job_of(program, "build", Wishes()), "slurm", "launch").values():
        assert all(line.startswith("#") for line in text.splitlines() if "rm -rf $HOME" in line)


def test_what_a_checkpoint_takes_is_parameters_and_two_moments() -> None:
    program = saved_program("dp=2")
    num = sum(p.numel() for p in SAVED().parameters())
    assert job_of(program, "build", Wishes()).state_bytes == 3 * 4 * num


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        (Wishes(devices_per_node=3), "ranks do not fill nodes"),
        (Wishes(name="My Job"), "no name of a job"),
        (Wishes(checkpoints="there"), "nothing writes there"),
        (Wishes(restarts=-1), "--restarts -1"),
        (Wishes(grace_s=0), "--grace 0"),
        (Wishes(time_limit="soon"), "no time"),
        (Wishes(network="ethernt"), "Did you mean ethernet"),
        (Wishes(interface='eth0"; reboot; "'), "no file can say that"),
        (Wishes(script="train.py", checkpoints="$(reboot)"), "no file can say that"),
        (Wishes(arguments=("a\nb",)), "no file can say that"),
        (Wishes(resources={"rdma": 8}), "no file can say that"),
    ],
)
def test_wishes_that_no_file_can_say_are_refused(wishes: Wishes, said: str) -> None:
    with pytest.raises(UsageError) as error:
        job_of(saved_program("dp=2"), "build", wishes)
    assert said in str(error.value)


def test_arguments_reach_the_script_as_they_are() -> None:
    assert "train.py 'a b' '$HOME' '\"'" in node_text(job(arguments=("a b", "$HOME", '"')))


# writing ------------------------------------------------------------------------------------------
@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_of_the_user_stay(here: Path) -> None:
    write_files("launch", {"a.sh": "1\n", "b": "2\n"}, force=False)
    (here / "launch" / "mine.txt").write_text("mine")
    (here / "launch" / "b").write_text("edited")
    with pytest.raises(UsageError, match="will not be replaced"):
        write_files("launch", {"a.sh": "new\n", "b": "2\n", "c": "3\n"}, force=False)
    texts = {path.name: path.read_text() for path in (here / "launch").iterdir()}
    assert texts == {"a.sh": "1\n", "b": "edited", "mine.txt": "mine"}
    write_files("launch", {"a.sh": "new\n", "b": "2\n"}, force=True)
    assert (here / "launch" / "b").read_text() == "2\n"
    assert (here / "launch" / "mine.txt").read_text() == "mine"
    assert (here / "launch" / "a.sh").stat().st_mode & 0o111
    assert [path.name for path in here.iterdir()] == ["launch"]


def test_a_link_or_a_folder_in_the_place_of_a_file_is_refused(here: Path) -> None:
    (here / "launch").mkdir()
    (here / "launch" / "a").symlink_to("/dev/null")
    with pytest.raises(UsageError, match="will not be replaced"):
        write_files("launch", {"a": "1\n"}, force=False)
    (here / "launch" / "b").mkdir()
    with pytest.raises(UsageError, match="it is a folder"):
        write_files("launch", {"b": "1\n"}, force=True)


@pytest.mark.parametrize("path", ["..", "/", "/elsewhere", ".", "a b", "a$b", "-x"])
def test_paths_that_other_nodes_do_not_see_are_refused(here: Path, path: str) -> None:
    with pytest.raises(UsageError):
        seen_path("", path)


def test_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_program("dp=2,tp=2").save("build")
    assert main(["launch", "build", "--emit", "slurm", "--devices-per-node", "2"]) == 0
    text = capsys.readouterr().out
    assert "2 nodes of CPU process of one thread, 2 ranks each" in text
    assert text.endswith("start it: sbatch launch/job.sbatch\n")
    words = ["launch", "build", "--emit", "slurm", "-o", "other", "--json", "--args=--steps 5"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["nodes"], told["ranks_per_node"] == (1, 4)
    assert "build/run.py --device cpu --steps 5" in (here / "other" / "node.sh").read_text()
    assert main(["launch", "build", "--emit", "slurm", "--grace", "60"]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["launch", "build", "--emit", "slurm", "--grace", "60", "--force"]) == 0
    with pytest.raises(SystemExit):
        main(["launch", "build", "--emit", "slurn"])
    assert "slurm" in capsys.readouterr().err
    assert main(["launch", "bild", "--emit", "slurm"]) == 2
    assert main(["launch", "build", "--emit", "slurm", "--script", "no.py"]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert main(["launch", "build", "--emit", "slurm", "-o", "build/launch"]) == 2
    assert "it lies in the program's folder" in capsys.readouterr().err
    for option, said in (
        ("--args=--epochs 3", "--args, --epochs: the program's run.py has no such option"),
        ("--args=--step 3 --stepz=4", "Did you mean '--steps'.* A script of yours is named by"),
        ("--devices-per-node=0", "--devices-per-node 0: that cannot be .* Write --devices-per-n"),
        ("--resource=rdma/hca=0", "--resource rdma/hca=0: that cannot be .* Write rdma/hca=8"),
    ):
        assert main(["launch", "build", "--emit", "slurm", "-o", "none", option]) == 2
        assert re.search(said, capsys.readouterr().err)
    assert not (here / "build" / "launch").exists()
