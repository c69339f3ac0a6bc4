"""Rounded sums of which ranks keep pieces: they are what the format defines, on real processes too,
and what is not is found.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from partc.api import compile
from partc.audit.audit import audit
from partc.checks.local_graph import check
from partc.cost.collective_cost import collective_seconds
from partc.errors import CheckError, PlanError, RunError
from partc.graph.moves import kind_of, wire_of
from partc.lowering import partition
from partc.plan import Plan
from partc.plan.compress import Compress
from partc.plan.mesh import Mesh
from partc.plan.wires import WIRES
from partc.program import Program
from partc.verification.defined_sums import Site
from partc.verification.processes import Processes
from partc.verification.report import Report
from partc.verification.verification import verify
from tests.patience import patience
from tests.texts import everywhere
from tests.verification.two_blocks import small
from tests.zoo import MODELS, Case

pytestmark = pytest.mark.gloo
PIECES = sorted(wire for wire, each in WIRES.items() if each.scatter)
ONCE = 'microbatches = 2\nreduce = "step"\n'


def plan_of(wire: str, preset: str = "fsdp", more: str = "") -> str:
    entry = f"block = {BLOCK}\n" if WIRES[wire].entry else ""
    table = f'[compress]\nwire = "{wire}"\nerror_feedback = false\nleast_mb = 0\n{entry}'
    return f'{more}preset = "{preset}"\nallow = ["compress"]\n{table}'


BLOCK = 8


@cache
def compiled(
    wire: str, mesh: str = "dp=4", preset: str = "fsdp", more: str = "", name: str = "small"
) -> Program:
    case = case_of(name)
    return compile(
        case.step, mesh, plan=plan_of(wire, preset, more)
    )  # fmt: skip


@cache
def case_of(name: str) -> Case:
    return small() if name == "small" else MODELS[name]()


def verified(program: Program, name: str = "small", **named: Any) -> Report:
    case = case_of(name)
    report = verify(program, case.model, case.inputs, loss=case.loss, lossy=True, **named).check()
    assert "rounded gradient" in report.kinds()
    assert report.sent
    assert all(0 < each.error <= each.bound for each in report.sent)
    return report


# the definition -----------------------------------------------------------------------------------
def by_hand(numbers: list[float], wire: str) -> list[float]:
    """One block as it arrives, number by number."""
    if not WIRES[wire].entry:
        dtype = torch.bfloat16 if wire == "bf16" else torch.float16
        return [float(torch.tensor(x, dtype=dtype)) for x in numbers]
    most = 448 if wire == "fp8" else 127
    scale = max(map(abs, numbers)) / most or 1.0
    if wire == "fp8":
        eighths = [torch.tensor(x / scale).to(torch.float8_e4m3fn).double() for x in numbers]
        return [scale * float(x) for x in eighths]
    return [scale * ((x / scale + 0.5) // 1) for x in numbers]


@pytest.mark.parametrize("wire", [wire for wire in PIECES if not WIRES[wire].drawn])
def test_a_piece_by_hand(wire: str) -> None:
    """Of 2 ranks' 22 numbers rank 1 keeps the sum of the last 11, rounded in blocks of 8 and 3."""
    every = torch.randn(2, 22, generator=torch.Generator().manual_seed(3)).double()
    how = Compress(wire, block=8, error_feedback=False)
    found = Site(how, []).add_piece(every, 1)
    sums = [0.0] * 11
    for own in every[:, 11:].tolist():
        arrived = [*by_hand(own[:8], wire), *by_hand(own[8:], wire)]
        sums = [a + b for a, b in zip(sums, arrived, strict=True)]
    torch.testing.assert_close(found, torch.tensor(sums).double(), rtol=0, atol=1e-6)


def test_a_piece_rounded_at_random_is_right_on_average() -> None:
    every = torch.rand(2, 16, generator=torch.Generator().manual_seed(1)).double()
    how = Compress("int8-stochastic", block=8, error_feedback=False)
    numbers = torch.Generator().manual_seed(2)
    site = Site(how, [], lambda rank: torch.Generator().manual_seed(drawn()))

    def drawn() -> int:
        return int(torch.randint(2**31, (1,), generator=numbers))

    mean = torch.stack([site.add_piece(every, 0) for _ in range(2000)]).mean(0)
    torch.testing.assert_close(mean, every[:, :8].sum(0), rtol=0, atol=1e-3)


# programs -----------------------------------------------------------------------------------------
@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("wire", "mesh"), [*((wire, "dp=4") for wire in PIECES), ("int8", "dp=2"), ("bf16", "dp=2")]
)
def test_programs_sum_as_defined(wire: str, mesh: str) -> None:
    """Rows of 27 and 39 numbers, and a bias of 9 that ranks have whole, so that it is summed so."""
    program = compiled(wire, mesh)
    verified(program)
    kinds = {each["kind"] for each in program.cost.as_json()["traffic"]}
    assert f"reduce_scatter in {wire}" in kinds
    assert f"all_reduce in {wire}" in kinds or WIRES[wire].entry
    assert not program.role(0).buffers
    assert "makes of sums of gradients" in str(audit(program))


LAYOUTS = {
    "zero1, microbatches": ("dp=4", "zero1", ONCE, "small"),
    "zero2": ("dp=4", "zero2", "", "small"),
    "a llama": ("dp=2", "fsdp", "", "llama"),
    "tp, sequences": ("dp=2,tp=2", "zero1+megatron-sp", ONCE, "llama"),
    "pp": ("pp=2,dp=2", "zero1", ONCE, "llama"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts(layout: str) -> None:
    mesh, preset, more, name = LAYOUTS[layout]
    program = compiled("int8-stochastic", mesh, preset, more, name)
    verified(program, name)
    assert any("RandomInt8Scatter(in_rows(" in text for text in program.sources.values())


EACH = {
    "fsdp": ("int8", "dp=2", "fsdp", "small"),
    "fsdp of four, fp8": ("fp8", "dp=4", "fsdp", "small"),
    "zero2, bf16": ("bf16", "dp=2", "zero2", "small"),
    "tp": ("int8", "dp=2,tp=2", "fsdp+megatron", "llama"),
    "pp": ("int8", "pp=2,dp=2", "fsdp", "llama"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", EACH)
def test_every_microbatch_is_rounded(layout: str) -> None:
    """Where gradients are scattered in each; the plan says so."""
    wire, mesh, preset, name = EACH[layout]
    program = compiled(wire, mesh, preset, "microbatches = 2\n", name)
    verified(program, name)
    assert f"rounded to {wire} in each of 2 microbatches" in program.plan
    text = next(iter(program.sources.values()))
    assert f"{WIRES[wire].scatter}(in_rows(" in text.split("def backward")[1]


def test_what_every_microbatch_would_draw_alike_is_refused() -> None:
    with pytest.raises(PlanError, match="would be the same in each of its microbatches"):
        compiled("int8-stochastic", "dp=2", "fsdp", "microbatches = 2\n")
    more = 'reduce = "microbatch"\nmicrobatches = 2\n'
    with pytest.raises(PlanError, match="are compressed once a step"):
        compiled("int8", "dp=2", "ddp", more)


@pytest.mark.exhaustive
@pytest.mark.parametrize("feedback", ["true", "false"])
def test_machines_sum_exactly_first(feedback: str) -> None:
    """Inside of a machine all microbatches' sums are scattered as they are; between machines whole
    pieces are summed.
    """
    plan = plan_of("int8", "zero1", ONCE).replace("feedback = false", f"feedback = {feedback}")
    case, mesh = small(), "dp_replicate=2,dp_shard=2"
    program = compile(case.step, mesh, plan=plan)
    verified(program)
    assert "self.partials.update(grads)" in program.sources["pipeline0.py"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("wire", "mesh"), [("int8-stochastic", "dp=4"), ("fp8", "dp=2")])
def test_processes_find_the_same(wire: str, mesh: str) -> None:
    verified(compiled(wire, mesh), processes=True, timeout=patience())


@pytest.mark.exhaustive
def test_the_first_steps_are_exact() -> None:
    plan = f"{plan_of('int8')}start_step = 2\n"
    case = small()
    program = compile(case.step, "dp=4", plan=plan)
    assert "if self.rng.step > 2 else scatter_grads(grads, 4, self.dp)" in program.source()
    verified(program)
    with pytest.raises((CheckError, RuntimeError)):
        verified(everywhere(program, "self.rng.step > 2", "self.rng.step > 1"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", ["", "start_step = 1\n"])
def test_a_gradient_that_leaves_alone(start: str) -> None:
    """Its dict keeps its name where the line that sends it reads it twice."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    x, plan = torch.randn(8, 16), plan_of("int8", more="bucket_mb = 0.00001\n") + start
    program = compile(model, "dp=4", (x,), loss=loss, plan=plan)
    assert "{self._2_bias: d_m2.sum(0)}" in program.source()
    assert "scattered({" not in program.source()
    verify(program, model, (x,), loss=loss).check()


# bytes and seconds --------------------------------------------------------------------------------
@pytest.mark.parametrize("wire", PIECES)
def test_what_a_piece_takes(wire: str) -> None:
    """Of 90 and 10 numbers on 2 ranks: rows of 50, in blocks of 8 rows of 56 and 7 scales."""
    sent = WIRES[wire].scattered
    assert sent is not None
    row = 56 + 4 * 7 if WIRES[wire].entry else 2 * 50
    assert sent([(18, 5), (10,)], 2, 8 if WIRES[wire].entry else 1) == (("all_to_all", 2 * row),)


def test_it_takes_the_time_of_its_transfer() -> None:
    program = compiled("int8")
    moves = [move for tape in program.basis.tapes for move in tape.moves]
    sizes = {move.put_in_bytes for move in moves if move.kind == "all_to_all"}
    assert sizes == {4 * (32 + 16), 4 * (40 + 20)}  # of rows of 27 and of 39
    size = max(sizes)
    assert collective_seconds("all_to_all", size, program.mesh, "dp") > 0


# training on processes ----------------------------------------------------------------------------
class Net(nn.Module):
    """Gradients that are scattered on dim 0 and on dim 1, and one that no rank has a piece of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.head = nn.Linear(12, 7)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.head(x)
        return out


def loss(model: nn.Module, x: Tensor) -> Tensor:
    mean: Tensor = model(x).square().mean()
    return mean


def batch() -> Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(4)).double()


@cache
def alone(mesh: str, wire: str) -> Program:
    """Every gradient has a transfer of its own, so that a test knows what is rounded together."""
    plan = plan_of(wire, more="bucket_mb = 0.00001\n")
    return compile(Net(), mesh, (batch(),), loss=loss, plan=plan)


def expected(program: Program, wire: str, num: int) -> dict[str, Tensor]:
    """Gradients as they arrive, by parameter: of each rank's rows of the batch, in float64."""
    cuts = {shard.name: shard.cuts for shard in program.role(0).params}
    found: dict[str, Tensor] = {}
    for rows in batch().chunk(num):
        model = Net()
        (loss(model, rows) / num).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            arrived = param.grad.clone()
            for _, dim, _ in cuts[name]:
                for piece in arrived.chunk(num, dim):
                    piece.copy_(of_blocks(piece.flatten(), wire).view(piece.shape))
            found[name] = found.get(name, 0) + arrived
    return found


def of_blocks(numbers: Tensor, wire: str) -> Tensor:
    return torch.tensor([x for b in numbers.split(BLOCK) for x in by_hand(b.tolist(), wire)])


def trains(mesh: str, wire: str) -> None:
    """A step, then the norm of what has arrived, and a step with a scaler."""
    program = alone(mesh, wire)
    num = dist.get_world_size()
    stage = program.module(partial="replicate")
    stage.load_full(Net())
    stage.step(batch())
    wanted = expected(program, wire, num)
    close(stage, wanted)
    every = [param.grad.full_tensor() for param in stage.parameters()]  # type: ignore[union-attr]
    norm = torch.stack([x.square().sum() for x in every]).sum().sqrt()
    whole = stage.clip_grad_norm_(0.5 * float(norm))
    torch.testing.assert_close(float(whole), float(norm), rtol=1e-5, atol=0)
    close(stage, {name: 0.5 * grad for name, grad in wanted.items()})
    stage.zero_grad()
    if wire != "fp16":
        scales(stage, wanted)
        return
    with pytest.raises(RunError, match="multiplied by 64, and the program computes in float16"):
        scales(stage, wanted)


def close(stage: Any, wanted: dict[str, Tensor]) -> None:
    for name, param in stage.named_parameters():
        if name != "head.bias":  # ranks have it whole, so that its sum is rounded once more
            torch.testing.assert_close(param.grad.full_tensor(), wanted[name], rtol=1e-5, atol=1e-7)


def scales(stage: Any, wanted: dict[str, Tensor]) -> None:
    """A factor of the loss is taken back; an infinite number of one rank stops all ranks."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD(stage.parameters(), 0.5)
    scaler.scale(stage(batch())).backward()
    scaler.unscale_(optimizer)
    close(stage, wanted)
    scaler.step(optimizer)
    scaler.update()
    before = [p.detach().full_tensor().clone() for p in stage.parameters()]
    stage.zero_grad()
    spoil(stage)
    scaler.scale(stage(batch())).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0
    for kept, param in zip(before, stage.parameters(), strict=True):
        assert torch.equal(kept, param.detach().full_tensor())


def spoil(stage: Any) -> None:
    """From now on the last rank's first number of every sum is infinite."""
    module = stage._role.module.__dict__
    for name in (name for name in module if name.endswith("Scatter")):
        plain = module[name]

        def with_inf(rows: Tensor, *given: Any, plain: Any = plain) -> Any:
            rows[0, 0] = inf if dist.get_rank() == dist.get_world_size() - 1 else rows[0, 0]
            return plain(rows, *given)

        module[name] = with_inf


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("wire", "num"), [*((each, 4) for each in PIECES if not WIRES[each].drawn), ("int8", 2)]
)
def test_ranks_train_with_it(world: Processes, wire: str, num: int) -> None:
    world.run(trains, f"dp={num}", wire, num=num)


# mistakes -----------------------------------------------------------------------------------------
SUM = "self.write(self.decode(self.sums).sum(0))"
MISTAKES = {  # in the text of a program -> what is wrong then
    "a mean": (SUM, SUM.replace("sum(0)", "mean(0)")),
    "twice the sum": (SUM, SUM.replace("self.decode", "2 * self.decode")),
    "a rank is left out": (SUM, SUM.replace(".sum(0)", "[1:].sum(0)")),
    "another block": (", 4, 8,", ", 4, 16,"),
    "all ranks draw the same": (", self.dp_rank)", ", 0)"),
    "rounded to the nearest": ("(x + up).floor()", "(x + 0.5).floor()"),
    "one gradient twice": ("param.grad = grad if", "param.grad = 2 * grad if"),
    "gradients in another order": ("[x.reshape(num, -1)", "[x.flip(0).reshape(num, -1)"),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str) -> None:
    """By verify; and by the check of the text, which knows the printed one."""
    old, new = MISTAKES[mistake]
    program = compiled("int8-stochastic")
    edited = everywhere(program, old, new)
    with pytest.raises((CheckError, RuntimeError)):
        verified(edited)
    with pytest.raises(CheckError):
        audit(replace(edited, fixed=program.fixed))


@pytest.mark.exhaustive
def test_a_scheme_for_whole_sums_scatters_nothing() -> None:
    graph = MODELS["llama"]().step.graph()
    graph.mesh = Mesh.parse("dp=4")
    local = partition(graph, Plan.parse(plan_of("int8")))[1]
    check(local)
    scattered = [n for n in local.calls() if wire_of(n) and kind_of(n) == "reduce_scatter"]
    scattered[0].kwargs = {**scattered[0].kwargs, "wire": "sign"}
    with pytest.raises(CheckError, match="sign has no reduce-scatter"):
        check(local)
