"""Links between pipeline ranks in real processes: messages arrive whole and in order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh

from partc.api import compile
from partc.codegen.helpers.links import Inbox, Links, Outbox
from partc.errors import RunError
from partc.plan import Plan
from partc.program import load
from partc.verification.processes import Processes
from partc.verification.verification import verify
from tests.example_program import example_program
from tests.patience import patience
from tests.pipelines import TOLERANCE, toy_program

pytestmark = pytest.mark.gloo
MESSAGES, CPU = 5, torch.device("cpu")
LIKES = [((3, 2), torch.float32), ((700, 900), torch.float64), ((4,), torch.int64)]


def start_anew(backend: str | None) -> None:
    """The default group with another backend, over the same store."""
    store = dist.distributed_c10d._get_default_store()
    rank, num = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=PrefixStore("anew", store), rank=rank, world_size=num)


def sent_around(backend: str | None) -> list[bool]:
    """A V over two pipeline ranks, twice side by side; whether each message is what was sent."""
    start_anew(backend)
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "pp"))
    links = Links(mesh, [0, 1, 1, 0], {"x": [1, 3], "d": [0, 2]})
    links.meet(CPU)
    me, right = dist.get_rank(), []
    boxes = {key: Inbox(link, LIKES) for key, link in links.items() if link[2] == me}
    outs = {key: Outbox(link, bound=2) for key, link in links.items() if link[1] == me}
    for box in boxes.values():
        box.begin(MESSAGES, CPU)
    for message in range(MESSAGES):
        for key, out in outs.items():
            out.put(tuple(torch.full(s, number(key, message), dtype=d) for s, d in LIKES))
        for key, box in boxes.items():
            right += [bool((x == number(key, message)).all()) for x in box.take()]
    for out in outs.values():
        out.wait()
    return right


def number(key: tuple[str, int], message: int) -> int:
    what, stage = key
    return 100 * (what == "d") + 10 * stage + message


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", None])
def test_links_ask_no_backend_for_its_name(backend: str | None, world: Processes) -> None:
    """A name need not say what carries a tensor: ``cpu:gloo,cuda:nccl``, or none at all."""
    assert world.run(sent_around, backend) == [[True] * 2 * 3 * MESSAGES] * 4


def sharded_loss(folder: Path, backend: str | None) -> list[float]:
    """The loss and the norm of a step on this rank."""
    start_anew(backend)
    stage, (model, x) = load(folder).module(), small()
    stage.load_full(model)
    return [stage.step(x).item(), stage.clip_grad_norm_(1.0).item()]


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    return model, torch.randn(8, 6, dtype=torch.float64)


def small_loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().mean()


@pytest.mark.exhaustive
@pytest.mark.parametrize("sends", [False, True])
def test_a_program_runs_on_its_backend_alone(sends: bool, world: Processes, tmp_path: Path) -> None:
    """By whatever name the default group has it."""
    model, x = small()
    plan = Plan(preset="fsdp", messages=sends)
    compile(model, "dp=2", (x,), loss=small_loss, plan=plan).save(tmp_path / "saved")
    loss = small_loss(model, x)
    loss.backward()
    expected = [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
    for backend in ("cpu:gloo", None):
        found = world.run(sharded_loss, tmp_path / "saved", backend, num=2)
        assert found == [pytest.approx(expected)] * 2
    if not sends:
        plan = Plan(preset="fsdp", backend="nccl")
        compile(model, "dp=2", (x,), loss=small_loss, plan=plan).save(tmp_path / "nccl")
        world.run(refused_backend, tmp_path / "nccl", num=2)


def refused_backend(folder: Path) -> None:
    with pytest.raises(RunError, match="has the text for nccl, and the default process group"):
        load(folder).module()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "schedule"), [("pp=3", "interleaved-1f1b"), ("pp=4", "zb-h1")])
def test_ranks_in_the_middle(mesh: str, schedule: str) -> None:
    """Which hold more groups than those at the ends."""
    case, program = toy_program(schedule, 3, mesh, tied=True)
    report = verify(program, case.model, case.inputs, case.loss, processes=True, timeout=patience())
    report.check(TOLERANCE)


def start_on_a_turned_mesh() -> None:
    turned = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(RunError, match=r"ranks stand in the order \[0, 2, 1, 3\]"):
        example_program(2, 2).module(mesh=turned)


def test_a_mesh_of_ranks_in_another_order_is_refused(world: Processes) -> None:
    world.run(start_on_a_turned_mesh)
