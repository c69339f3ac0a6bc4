"""What `partc doctor` finds right and wrong on one rank, and in what several ranks say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partc.cli.main import main
from partc.doctor import here as here_module
from partc.doctor.between import compare
from partc.doctor.finding import NOTE, OK, WRONG, Finding, Findings, merged, named_ranks
from partc.doctor.here import look_here
from partc.doctor.links import _compared
from partc.doctor.looked_at import Here
from partc.doctor.variables import RULES, look_at_variables
from partc.machines.topology import Topology
from partc.measure.measured import Measured
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.program.basis import Basis
from tests.launch.saved import saved_program

OF_TWO = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}


def on(machine: str) -> Program:
    """A program that says it was made for two nodes of a machine."""
    program = saved_program("dp=2")
    plan = replace(Plan.parse(program.plan), backend="nccl")
    return replace(program, basis=Basis(str(Topology.load(machine, 16))), plan=str(plan))


def states(here: Here) -> dict[str, str]:
    return {found.what: found.state for found in look_at_variables(here)}


# variables ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "value", "state"),
    [
        ("NCCL_P2P_DISABLE", "1", WRONG),
        ("NCCL_P2P_DISABLE", "0", OK),
        ("NCCL_SHM_DISABLE", "1", WRONG),
        ("NCCL_IB_DISABLE", "1", WRONG),
        ("NCCL_NET", "Socket", WRONG),
        ("NCCL_NET", "IB", OK),
        ("NCCL_ALGO", "Ring", NOTE),
        ("NCCL_DEBUG", "INFO", NOTE),
        ("NCCL_DEBUG", "WARN", OK),
        ("NCCL_SOCKET_IFNAME", "=nowhere0", WRONG),
        ("NCCL_SOCKET_IFNAME", "lo", OK),
        ("NCCL_SOCKET_IFNAME", "^docker", OK),
        ("GLOO_SOCKET_IFNAME", "nowhere0", WRONG),
        ("CUDA_LAUNCH_BLOCKING", "1", WRONG),
        ("CUDA_VISIBLE_DEVICES", "0", WRONG),
        ("CUDA_VISIBLE_DEVICES", "0,1", OK),
        ("CUDA_VISIBLE_DEVICES", "", WRONG),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", WRONG),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", WRONG),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", OK),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", NOTE),
        ("TORCH_FR_BUFFER_SIZE", "2000", OK),
        ("TORCH_FR_BUFFER_SIZE", "0", NOTE),
        ("OMP_NUM_THREADS", "many", WRONG),
        ("OMP_NUM_THREADS", "4", WRONG),
    ],
)
def test_a_variable(name: str, value: str, state: str) -> None:
    here = Here({**OF_TWO, name: value}, on("dgx-h100"), "build", cores=4)
    assert states(here)[name] == state


def test_what_is_right_off_the_network_is_right() -> None:
    here = Here({**OF_TWO, "NCCL_IB_DISABLE": "1"}, on("l40s-pcie"), "build", cores=4)
    assert states(here)["NCCL_IB_DISABLE"] == OK


def test_threads_are_a_share_of_the_cores() -> None:
    found = next(look_at_variables(Here({"LOCAL_WORLD_SIZE": "2"}, cores=8)))
    assert (found.state, found.do) == (WRONG, "Set it to 4.")
    assert "OMP_NUM_THREADS" not in states(Here({}, cores=8))


def test_old_and_misspelt_names_are_told() -> None:
    given = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "1",
        "NCCL_SOCKET_IFNAM": "eth0",
        "NCCL_IB_HCA": "mlx5",
    }
    found = {each.what: each for each in look_at_variables(Here(given))}
    assert found["TORCH_NCCL_TRACE_BUFFER_SIZE"].do == "Set TORCH_FR_BUFFER_SIZE."
    assert "NCCL_SOCKET_IFNAME" in found["NCCL_SOCKET_IFNAM"].do
    assert "NCCL_IB_HCA" not in found


def test_a_variable_of_yours_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RULES, "_entries", dict(RULES.items()))
    RULES.add("MINE", lambda value, here: (WRONG, f"is {value}", "Unset it."))
    assert states(Here({"MINE": "1"}))["MINE"] == WRONG


# one rank -----------------------------------------------------------------------------------------
def found_here(here: Here) -> dict[str, Finding]:
    return {found.what: found for found in look_here(here)}


def test_a_program_for_these_ranks() -> None:
    found = found_here(Here(OF_TWO, saved_program("dp=2"), "build", cores=2))
    assert {each.state for each in found.values()} == {OK}
    assert {"torch", "collectives", "cores", "program", "memory"} <= found.keys()


def test_another_number_of_ranks_is_wrong() -> None:
    found = found_here(Here({**OF_TWO, "WORLD_SIZE": "3"}, saved_program("dp=2"), "build"))
    assert found["program"].state == WRONG
    assert "Start 2" in found["program"].do


def test_one_process_is_told_to_look_at_all_ranks() -> None:
    found = found_here(Here({}, saved_program("dp=2"), "build"))["program"]
    assert found.state == NOTE
    assert "torchrun --nproc-per-node 2 -m partc doctor build" in found.do


def test_a_program_for_gpus_needs_them() -> None:
    found = found_here(Here(OF_TWO, on("dgx-h100"), "build"))
    assert found["devices"].state == WRONG
    assert found["devices"].found.startswith("0 GPUs for 2 ranks")


def test_another_torch_and_little_memory_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.9.1")
    monkeypatch.setattr(here_module, "memory_bytes", lambda: 1000)
    found = found_here(Here(OF_TWO, saved_program("dp=2"), "build", cores=1))
    assert found["torch"].state == WRONG
    assert found["memory"].state == WRONG
    assert found["cores"].state == NOTE


# several ranks ------------------------------------------------------------------------------------
def test_findings_of_ranks_stand_once() -> None:
    all_have, one_has = Finding(OK, "a", "1"), Finding(WRONG, "b", "2", "Mend it.")
    rows = merged([[all_have], [all_have, one_has], [all_have]])
    assert rows == [all_have, Finding(WRONG, "b (rank 1)", "2", "Mend it.")]
    assert named_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert named_ranks([3]) == "rank 3"


def test_what_ranks_have_of_another_kind_is_told() -> None:
    same: dict[str, str] = {"torch": "2.13.0", "driver": "12.8", "NCCL": "none"}
    other = {**same, "torch": "2.14.1", "driver": "12.6"}
    found = {each.what: each for each in compare([same, same, other])}
    assert found["torch of all ranks"].state == WRONG
    assert found["torch of all ranks"].found == "most have 2.13.0; rank 2 has 2.14.1"
    assert found["driver of all ranks"].state == NOTE
    assert "NCCL of all ranks" not in found


@pytest.mark.parametrize(("times", "state"), [(0.1, NOTE), (0.9, OK), (1.9, OK), (2.1, WRONG)])
def test_links_are_compared_with_the_machine(times: float, state: str) -> None:
    from partc.cost.collective_cost import collective_seconds

    mesh = Mesh((("between", 2), ("inside", 8)), Topology.load("dgx-h100", 16))
    predicted = collective_seconds("all_reduce", 64e6, mesh, "inside")
    measured = Measured("all_reduce", "f32[16000000] of 8", 64e6, (times * predicted,) * 3)
    found = _compared(measured, "inside", mesh)
    assert (found.state, found.what) == (state, "all_reduce inside of a node")
    assert found.do or state == OK


def test_the_result_says_how_much_is_wrong() -> None:
    found = Findings((Finding(OK, "a", "1"), Finding(NOTE, "bc", "2", "See.")))
    assert str(found) == "ok     a   1\nnote   bc  2. See.\nnothing wrong, 1 to note, 2 looked at"
    assert found.ok
    assert found
    wrong = Findings((*found.rows, Finding(WRONG, "d", "3")))
    assert not wrong.ok
    assert not wrong


# the command --------------------------------------------------------------------------------------
def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "NCCL_P2P_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    saved_program("dp=2").save(tmp_path / "build")
    assert main(["doctor"]) == 0
    assert "nothing wrong" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "build"), "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["ok"]
    assert "program" in {each["what"] for each in told["findings"]}
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert main(["doctor"]) == 1
    (tmp_path / "build" / "run.py").write_text("edited")
    assert main(["doctor", str(tmp_path / "build")]) == 1
    out = capsys.readouterr().out
    assert "was changed or damaged" in out
