"""Which sums are sent in narrow numbers, what they send, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partc.api import compile
from partc.cost.collective_cost import collective_seconds
from partc.errors import PlanError
from partc.plan import Plan
from partc.plan.compress import Compress
from partc.plan.wires import WIRES, is_residual
from partc.program import Program
from partc.program.checkpoints.residuals import fitted
from partc.program.role import Role
from partc.verification.threads import ThreadMesh, run_ranks

ROWS, WIDE = 8, 24
TABLE = '[compress]\nwire = "int8"\nblock = 32\nleast_mb = 0.001\n'
PLAN = f'preset = "ddp"\nallow = ["compress"]\n{TABLE}'


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(3)), nn.Linear(WIDE, 7))


def compiled(plan: str | Plan = PLAN, mesh: str = "dp=4", **named: Any) -> Program:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        mean: Tensor = model(x).square().mean()
        return mean

    return compile(model(), mesh, (torch.randn(ROWS, WIDE),), loss=loss, plan=plan, **named)


class Counting:
    """Functions of ``torch.distributed`` for threads, with the bytes that each sends."""

    def __init__(self, dist: Any, num: int) -> None:
        self.dist, self.num, self.sent = dist, num, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dist, name)

    def all_reduce(self, x: Tensor, **named: Any) -> Any:
        self.sent["all_reduce"] += 2 * (self.num - 1) * x.nbytes // self.num
        return self.dist.all_reduce(x, **named)

    def all_to_all_single(self, arrived: Tensor, x: Tensor, **named: Any) -> Any:
        self.sent["narrow"] += (self.num - 1) * x.nbytes // self.num
        return self.dist.all_to_all_single(arrived, x, **named)

    def all_gather_single(self, arrived: Tensor, x: Tensor, **named: Any) -> Any:
        self.sent["narrow"] += (self.num - 1) * x.nbytes
        return self.dist.all_gather_single(arrived, x, **named)


def counted(program: Program) -> Counter[str]:
    """What one rank's text sends in a step."""

    def rank(number: int, dist: Any) -> Counter[str]:
        role: Role = program.role(number)
        counting = Counting(dist, program.mesh.num_ranks)
        role.module.__dict__["dist"] = counting
        step: Any = role.build(ThreadMesh(program.mesh, number))
        for tensor in role.tensors(step).values():
            tensor.data.zero_()
        role.run(step, [torch.ones(ROWS, WIDE)])
        return counting.sent

    return run_ranks(program.mesh.num_ranks, rank)[0]


OWN = {
    "int8": "block = 32",
    "random-k": "share = 0.02",
    "sign": "block = 8",
    "top-k": "share = 0.02",
    "power-sgd": "rank = 2",
}


def plan_of(wire: str, own: str = "") -> str:
    table = f'[compress]\nwire = "{wire}"\nleast_mb = 0.001\n{own or OWN.get(wire, "")}\n'
    return f'preset = "ddp"\nallow = ["compress"]\n{table}'


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("wire", "own"),
    [
        *OWN.items(),
        ("int8", "block = 256"),
        *((each, "") for each in ("bf16", "fp8", "majority-sign")),
    ],
)
def test_bytes_are_those_that_are_sent(wire: str, own: str) -> None:
    program = compiled(plan_of(wire, own))
    traffic = {each["kind"]: each["sent_bytes"] for each in program.cost.as_json()["traffic"]}
    assert counted(program).total() == sum(traffic.values())
    assert f"all_reduce in {wire} over dp" in program.source()


@pytest.mark.rows(1)
@pytest.mark.parametrize("wire", ["bf16", "int8", "int8-stochastic"])
@pytest.mark.parametrize("preset", ["fsdp", "zero1"])
def test_pieces_have_the_bytes_that_are_sent(wire: str, preset: str) -> None:
    own = "block = 32" if WIRES[wire].entry else ""
    plan = f"{plan_of(wire, own)}error_feedback = false\n".replace("ddp", preset)
    program = compiled(plan)
    traffic = {each["kind"]: each["sent_bytes"] for each in program.cost.as_json()["traffic"]}
    assert counted(program).total() == sum(traffic.values())
    exact = compiled(preset).cost.as_json()["traffic"]
    [before] = [each["sent_bytes"] for each in exact if each["kind"] == "reduce_scatter"]
    share = 0.5 if wire == "bf16" else 0.3  # of one in four bytes, beside scales and padding
    assert traffic[f"reduce_scatter in {wire}"] <= share * before


@pytest.mark.exhaustive
def test_every_microbatch_sends_its_pieces() -> None:
    """Twice what one of the same rows sends, beside what leaves once a step."""
    own = f"{plan_of('int8', 'block = 32')}error_feedback = false\n".replace("ddp", "fsdp")
    once, twice = counted(compiled(own)), counted(compiled(f"microbatches = 2\n{own}"))
    assert once["narrow"] < twice["narrow"] <= 2 * once["narrow"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("wire", ["int8", "power-sgd", "majority-sign"])
def test_several_microbatches_send_as_much_as_one(wire: str) -> None:
    """Their gradients are added up first, and are sent once, in the same sums."""
    once = compiled(plan_of(wire))
    assert counted(compiled(f"microbatches = 2\n{plan_of(wire)}")) == counted(once)


@pytest.mark.parametrize(
    ("wire", "size", "sent"),
    [
        # 100 numbers on 4 ranks in blocks of 8: 128 bytes and 16 scales; 25 on each as bf16
        ("int8", 8, (("all_to_all", 192), ("all_gather", 48))),
        ("sign", 8, (("all_to_all", 16 + 64), ("all_gather", 20))),
        ("bf16", 1, (("all_to_all", 200), ("all_gather", 50))),
        # 4 bytes of 32 signs, and one behind them, for each rank
        ("majority-sign", 1, (("all_to_all", 4 * 5), ("all_gather", 5))),
        ("top-k", 3, (("all_gather", 24),)),
        ("random-k", 3, (("all_reduce", 12),)),
        # of 18 x 5 and 10: rows and 10 numbers, then columns
        ("power-sgd", 1, (("all_reduce", 4 * 28), ("all_reduce", 4 * 5))),
    ],
)
def test_what_a_sum_takes(wire: str, size: int, sent: tuple[tuple[str, int], ...]) -> None:
    assert WIRES[wire].sent([(18, 5), (10,)], 4, size) == sent


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("wire", "kind"),
    [
        ("int8", "all_to_all+all_gather"),
        ("top-k", "all_gather"),
        ("power-sgd", "all_reduce+all_reduce"),
    ],
)
def test_a_sum_takes_the_time_of_its_transfers(wire: str, kind: str) -> None:
    program = compiled(plan_of(wire))
    moves = {move.kind: move for tape in program.basis.tapes for move in tape.moves}
    mesh, size = program.mesh, moves[kind].put_in_bytes
    seconds = {
        "int8": collective_seconds("all_to_all", size, mesh, "dp")
        + collective_seconds("all_gather", size / 4, mesh, "dp"),
        "top-k": collective_seconds("all_gather", 8 * 12, mesh, "dp"),
        "power-sgd": 2 * collective_seconds("all_reduce", size / 2, mesh, "dp"),
    }
    assert collective_seconds(kind, size, mesh, "dp") == pytest.approx(seconds[wire])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("least_mb", "narrow"), [("0.001", 3), ("0.0005", 4)])
def test_small_sums_stay_exact(least_mb: str, narrow: int) -> None:
    """The last layer's gradients have 700 bytes; the loss, that others read, is always exact."""
    program = compiled(PLAN.replace("0.001", least_mb))
    counts = {each["kind"]: each["count"] for each in program.cost.as_json()["traffic"]}
    assert counts == {"all_reduce in int8": narrow, "all_reduce": 5 - narrow}


def test_a_plan_says_that_gradients_are_directions() -> None:
    """And a replay of the plan says it once."""
    program = compiled(plan_of("majority-sign"))
    again = compiled(program.plan)
    assert again.plan.count("arrive as +1 and -1") == program.plan.count("arrive as +1 and -1") == 1
    assert not program.role(0).buffers
    assert "arrive as" not in compiled().plan


def test_buffers_are_known_by_their_names() -> None:
    role = compiled().role(0)
    assert {is_residual(shard.name) for shard in role.buffers} == {True}
    assert all(shard.cuts == (("dp", 0, 1),) for shard in role.buffers)
    without = compiled(f"{PLAN}error_feedback = false").role(0)
    assert not without.buffers


REFUSED = {
    "nothing allows it": (f'preset = "ddp"\n{TABLE}', "dp=4", "nothing allows it"),
    "two data axes": (PLAN, "dp_replicate=2,dp_shard=2", "over one data axis"),
    "one rank": (PLAN, "dp=1", "has one rank"),
    "a share that saves nothing": (
        PLAN.replace('"int8"\nblock = 32', '"top-k"\nshare = 0.9'),
        "dp=4",
        "a smaller share",
    ),
    "two data axes beside pp": (PLAN, "pp=2,dp_replicate=2,dp_shard=2", "over one data axis"),
    "what fsdp has left over": (
        PLAN.replace("ddp", "fsdp"),
        "dp=4",
        "Write error_feedback = false",
    ),
    "a scheme that fsdp has not": (
        plan_of("top-k").replace("ddp", "fsdp"),
        "dp=4",
        "Take one of 'bf16', 'fp16', 'fp8', 'int8', 'int8-stochastic'",
    ),
    "directions in fsdp": (
        plan_of("majority-sign").replace("ddp", "fsdp"),
        "dp=4",
        "majority-sign is for sums that all ranks have whole",
    ),
    "zero1": (PLAN.replace("ddp", "zero1"), "dp=4", "sharded over dp"),
    "hsdp in every microbatch": (
        f"microbatches = 2\n{PLAN.replace('ddp', 'hsdp')}",
        "dp_replicate=2,dp_shard=2",
        'with preset = "zero1" in place of',
    ),
    "in every microbatch": (
        f'microbatches = 2\nreduce = "microbatch"\n{PLAN}',
        "dp=4",
        "once a step",
    ),
    "none is large enough": (PLAN.replace("0.001", "5"), "dp=4", "no sum of gradients"),
    "an unknown format": (PLAN.replace("int8", "int7"), "dp=4", "'int7' means nothing"),
    "an odd block": (PLAN.replace("= 32", "= 12"), "dp=4", "a multiple of 8"),
    "an entry of others": (f"{PLAN}share = 0.5\n", "dp=4", "int8 reads no share"),
    "no share": (plan_of("top-k", "share = 0"), "dp=4", "a number above 0"),
    "no step": (f"{PLAN}start_step = -1\n", "dp=4", "a number of steps"),
    "no rank": (plan_of("power-sgd", "rank = 0"), "dp=4", "from 1 to"),
    "no fewer bytes": (plan_of("power-sgd", "rank = 9"), "dp=4", "has to send fewer bytes"),
    "nothing kept": (
        f"{plan_of('power-sgd')}error_feedback = false\n",
        "dp=4",
        "does not work without error_feedback",
    ),
    "what a direction has left over": (
        plan_of("majority-sign", "error_feedback = true"),
        "dp=4",
        "majority-sign reads no error_feedback",
    ),
    "directions of late islands": (
        f"{plan_of('majority-sign')}[stale]\nsteps = 1\n",
        "island=2,dp=2",
        "their mean, which is no direction",
    ),
    "directions of uneven islands": (
        f"{plan_of('majority-sign')}[uneven]\nmicrobatches = [3, 1]\n",
        "island=2,dp=2",
        "their mean, which is no direction",
    ),
    "directions on servers": (
        f"{plan_of('majority-sign')}[servers]\ncount = 1\n",
        "island=2,dp=2",
        "their mean, which is no direction",
    ),
    "no format": (PLAN.replace('wire = "int8"', ""), "dp=4", "in which numbers"),
    "an unknown entry": (f"{PLAN}scale = 2\n", "dp=4", "no entry 'scale'"),
    "an unknown word": (PLAN.replace('["compress"]', '["speed"]'), "dp=4", "'speed'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    plan, mesh, said = REFUSED[case]
    with pytest.raises(PlanError, match=said):
        compiled(plan, mesh)


def test_a_stage_that_trains_nothing_is_refused() -> None:
    """It would not see whether the sums of other stages are finite."""
    plan = f'stages = ["1"]\nmicrobatches = 2\n{PLAN}'
    net, x = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)), torch.randn(ROWS, WIDE)
    net[0].requires_grad_(False)
    with pytest.raises(PlanError, match="has no parameters that are trained"):
        compile(net, "pp=2,dp=2", (x,), loss=lambda m, x: m(x).square().mean(), plan=plan)


@pytest.mark.parametrize("given", [Compress("int7"), {"wire": "int8"}, Compress("int8", block=9)])
def test_a_plan_in_python(given: Any) -> None:
    with pytest.raises(PlanError, match="compress"):
        compiled(Plan(preset="ddp", allow=("compress",), compress=given))


def test_a_plan_as_text() -> None:
    plan = Plan.parse(PLAN)
    assert Plan.parse(str(plan)) == plan
    assert Plan.parse(compiled().plan).compress == plan.compress


def test_another_number_of_ranks_has_the_same_sum_left_over() -> None:
    """Of gradients in one piece, and in two of 6 numbers that are summed apart."""
    whole = torch.randn(4, 12)
    two = fitted("w_residual@dp", whole, (2, 10), 1)
    assert torch.allclose(two.sum(0), whole.sum(0)[:10])
    assert torch.equal(two[0], two[1])
    two = fitted("w_residual@dp", whole, (2, 14), 2).sum(0).view(2, 7)
    assert torch.allclose(two[:, :6].flatten(), whole.sum(0))
    assert not two[:, 6:].any()
    of_sum = fitted("w_residual_of_sum@dp", whole, (2, 26), 1).flatten()
    assert of_sum.tolist() == [*whole.flatten().tolist(), 0, 0, 0, 0]
    of_sum = fitted("w_residual_of_sum@dp", whole, (2, 24), 2).view(2, 2, 12)
    assert torch.equal(of_sum[:, 1].flatten(), whole.view(4, 2, 6)[:, 1].flatten())
