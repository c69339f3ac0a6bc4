"""Sums in narrow numbers: they are what the format defines, and what is not is found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from partc.api import compile
from partc.audit.audit import audit
from partc.checks.local_graph import check
from partc.errors import CheckError, PlanError
from partc.graph import Graph, collectives, fake_of, set_fake, set_value, update, value
from partc.graph.moves import state_of, wire_of
from partc.lowering import partition
from partc.plan import Plan
from partc.plan.compress import Compress
from partc.plan.mesh import Mesh
from partc.plan.sharding import R, Sharding
from partc.plan.wires import WIRES, is_residual
from partc.program import Program
from partc.verification.defined_sums import Site
from partc.verification.verification import verify
from tests.texts import everywhere
from tests.verification.two_blocks import small
from tests.zoo import MODELS, Case

PLAN = 'preset = "ddp"\nallow = ["compress"]\n[compress]\nleast_mb = 0.0001\nwire = '
INT8 = f'{PLAN}"int8"\nblock = 64'


@cache
def llama() -> Case:
    return MODELS["llama"]()


@cache
def compiled(plan: str = INT8, case: Case | None = None) -> Program:
    case = case or small()
    return compile(case.step, "dp=4", plan=Plan.parse(plan))


def verified(program: Program, case: Case | None = None) -> set[str]:
    case = case or small()
    rows = verify(program, case.model, case.inputs, loss=case.loss).check().rows
    return {row.kind for row in rows}


# the definition -----------------------------------------------------------------------------------
SIZES: dict[str, Any] = {"block": 8, "share": 0.1, "rank": 1}
SHAPES = [torch.Size([18, 5]), torch.Size([10])]
EVERY = sorted(WIRES)
SUMS = [wire for wire in EVERY if not WIRES[wire].is_direction]


def site_of(wire: str, **named: Any) -> Site:
    entry = WIRES[wire].entry
    least: dict[str, Any] = {"threshold": 0.5} if WIRES[wire].has_threshold else {}
    how = Compress(wire, **({entry: SIZES[entry]} if entry else {}), **least, **named)
    return Site(how, SHAPES, lambda rank: torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("wire", SUMS)
def test_what_was_applied_and_what_is_left_are_the_exact_sum(wire: str) -> None:
    """Error feedback's identity, in float64: pieces of 4 ranks that blocks do not divide."""
    steps, site = torch.randn(6, 4, 100, dtype=torch.float64), site_of(wire)
    applied = torch.zeros(100, dtype=torch.float64)
    for parts in steps:
        applied += site.add(parts)
        site.keep()
    left = site.kept[0].sum(0)[:100]
    if "residual_of_sum" in WIRES[wire].kept(SHAPES, 4, 8):
        left = left + site.kept[1].flatten()[:100]
    exact = steps.sum((0, 1))
    assert (applied + left - exact).abs().max() < 1e-12
    assert (applied - exact).abs().max() > 1e-4  # it does leave something over


def test_int8_by_hand() -> None:
    """One rank's 254 is sent as 127 whole numbers of 2; a tie becomes the larger one."""
    site = Site(Compress("int8", block=8, error_feedback=False), [])
    x = torch.tensor([[254.0, 1.0, -1.0, 3.0, 0.9, 0.0, -254.0, 2.0]])
    assert site.add(x).tolist() == [254.0, 2.0, 0.0, 4.0, 0.0, 0.0, -254.0, 2.0]
    assert site.add(torch.zeros(1, 8)).tolist() == [0.0] * 8


def test_signs_and_largest_by_hand() -> None:
    """Of a block's three gradients the mean size; of equal sizes the first is sent."""
    x = torch.tensor([[3.0, -2.0, 1.0]])
    assert site_of("sign").add(x).tolist() == [2.0, -2.0, 2.0]
    x = torch.tensor([[1.0, -2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 5.0]])
    assert site_of("top-k").add(x).tolist() == [0.0, -2.0, 0.0, 5.0]


# programs -----------------------------------------------------------------------------------------
LEFT_OVER = [(wire, flag) for wire in SUMS for flag in ("true", "false")]


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("wire", "feedback"), [(w, f) for w, f in LEFT_OVER if f == "true" or not WIRES[w].needs_rest]
)
def test_programs_sum_as_defined(wire: str, feedback: str) -> None:
    entry = WIRES[wire].entry
    own = f"{entry} = {SIZES[entry]}" if entry else ""
    start = 2 if wire == "random-k" else 0
    program = compiled(f'{PLAN}"{wire}"\nerror_feedback = {feedback}\n{own}\nstart_step = {start}')
    kinds = verified(program)
    assert "rounded gradient" in kinds
    assert ("left over" in kinds) == (feedback == "true")


@pytest.mark.exhaustive
def test_a_llama_whose_blocks_share_a_loop() -> None:
    """The second transfer of a block's sum starts behind the next block's backward."""
    program = compiled(f'{PLAN}"int8"\nblock = 512', llama())
    assert "            before.pass_on(reduced)" in program.source()
    verified(program, llama())
    assert "what int8 makes" in str(audit(program))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("wire", "preset"),
    [('"int8"\nblock = 64', "ddp+megatron"), ('"power-sgd"\nrank = 2', "ddp+megatron-sp")],
)
def test_pieces_over_tp_are_summed_apart(wire: str, preset: str) -> None:
    """Each with buffers of its own; what all tp ranks have is rounded alike there."""
    case, plan = llama(), f"{PLAN}{wire}".replace('"ddp"', f'"{preset}"')
    program = compile(case.step, "dp=2,tp=2", plan=plan)
    verified(program, case)
    cuts = {shard.cuts for shard in program.role(0).buffers if is_residual(shard.name)}
    assert len(cuts) > 1
    assert "reduced.finish(self.tp)" in program.source()
    edited = everywhere(program, "reduced.finish(self.tp)", "reduced.finish()")
    with pytest.raises((CheckError, RuntimeError)):
        verified(edited, case)


BETWEEN = [  # every wire once; of each kind one with every preset
    *((wire, ("hsdp", "zero1", "zero2")[i % 3]) for i, wire in enumerate(WIRES)),
    ("int8", "hsdp"), ("int8", "zero1"), ("int8", "zero2"),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(("wire", "preset"), [*dict.fromkeys(BETWEEN)])
def test_sums_between_machines_are_compressed_alone(wire: str, preset: str) -> None:
    """Inside of a machine gradients are scattered as they are, each rank sends its shard on."""
    case, entry = tower(), WIRES[wire].entry
    own = f'"{wire}"\n' + (f"{entry} = {SIZES[entry]}" if entry else "")
    plan = f"{PLAN}{own}".replace('"ddp"', f'"{preset}"').replace("0.0001", "0")
    mesh = "dp_replicate=2,dp_shard=2"
    program = compile(case.step, mesh, plan=plan)
    verified(program, case)
    sent = [each for each in program.cost.as_json()["traffic"] if " in " in each["kind"]]
    assert {each["axis"] for each in sent} == {"dp_replicate"}
    if WIRES[wire].needs_rest or wire == "int8":
        edited = everywhere(program, "reduced.finish(self.dp_shard)", "reduced.finish()")
        with pytest.raises((CheckError, RuntimeError)):
            verified(edited, case)


@cache
def tower(length: int = 8) -> Case:
    """Equal blocks between two layers of other sizes."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(length)]
    model = nn.Sequential(nn.Linear(6, 12), *blocks, nn.Linear(12, 5))
    return Case(model, (torch.randn(8, 6),), lambda m, x: m(x).square().mean())


@cache
def staged(
    own: str, mesh: str, case: Case | None = None, preset: str = "ddp", schedule: str = "1f1b"
) -> Program:
    case = case or tower()
    plan = f'microbatches = 2\nschedule = "{schedule}"\n{PLAN}{own}'
    plan = plan.replace('"ddp"', f'"{preset}"')
    return compile(case.step, mesh, plan=plan)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("own", "mesh"),
    [
        ('"int8"\nblock = 8', "dp=2"),
        ('"int8-stochastic"\nblock = 8', "pp=2,dp=2"),
        ('"random-k"\nshare = 0.2\nstart_step = 2', "pp=4,dp=2"),
        ('"top-k"\nshare = 0.2\nerror_feedback = false', "pp=2,dp=2"),
        ('"power-sgd"\nrank = 1', "dp=4"),
    ],
)
def test_microbatches_are_added_up_and_then_sent(own: str, mesh: str) -> None:
    program = staged(own, mesh)
    verified(program, tower())
    assert "for layer in self." in program.sources["pipeline0.py"].split("def finish(self, red")[1]
    assert "makes" in str(audit(program))


@pytest.mark.exhaustive
def test_functions_of_torch_compile() -> None:
    """They stand beside the classes of sums, whose text is run as it was printed."""
    case = tower(3)
    plan = f'compile = "inductor"\n{PLAN}"int8"'
    program = compile(case.step, "dp=2", plan=plan)
    assert "@torch.compile" in program.source()
    verified(program, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "lines"),
    [
        ("dp=2,tp=2", ["reduced.append(sum_grads(grads, self.tp))"]),
        ("pp=2,tp=2,dp=2", ["self.partials.update(grads)", "reduced.finish(self.pp, self.tp)"]),
    ],
)
def test_sums_over_tp_come_first(mesh: str, lines: list[str]) -> None:
    """A norm's gradient is an exact sum over tp, which comes first on both meshes, and over dp."""
    program = staged('"int8"\nblock = 64', mesh, llama(), "ddp+megatron-sp")
    verified(program, llama())
    assert all(line in program.sources["pipeline0.py"] for line in lines)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["zb-v", "gpipe"])
def test_stages_of_one_rank_begin_together(schedule: str) -> None:
    if schedule == "zb-v":
        with pytest.raises(PlanError, match="compress sums of its gradient"):
            staged('"int8"', "pp=2,dp=2", MODELS["gpt2"](), schedule=schedule)
    program = staged('"int8"\nblock = 8\n', "pp=2,dp=2", schedule=schedule)
    verified(program, tower())
    assert program.sources["pipeline0.py"].count("reduced.finish(self.pp)") == 1


IN_STAGES = {  # in the texts of a pipeline's programs -> what is wrong then
    "other stages are not asked": ("reduced.finish(self.pp)", "reduced.finish()"),
    "a block is left out": (
        "in self.blocks:\n            flat", "in self.blocks[1:]:\n            flat"
    ),
    "all blocks draw the same": ('f"{layer.name}.0.weight"', '"1.0.weight"'),
    "all ranks draw the same": ('.0.weight", self.dp_rank)', '.0.weight", 0)'),
    "one buffer is for two": (
        "[layer._0_weight_residual_dp, ", "[self.blocks[0]._0_weight_residual_dp, "
    ),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", IN_STAGES)
def test_mistakes_in_stages_are_found(mistake: str) -> None:
    old, new = IN_STAGES[mistake]
    program = staged('"int8-stochastic"\nblock = 8', "pp=2,dp=2")
    edited = everywhere(program, old, new)
    with pytest.raises((CheckError, RuntimeError)):
        verified(edited, tower())
    with pytest.raises(CheckError):
        audit(replace(edited, fixed=program.fixed))


OWN = """        pieces = self.decode(self.sums)
        pieces[dist.get_rank(self.group)] = self.own
        self.write(pieces)"""
ADDED = "self.decode(self.sums).sum(0, keepdim=True)"
KEPT = "torch.where(finite, lost.view(kept.shape), kept)"
TEXT = "[self._2_weight_residual_dp, self._2_weight_residual_of_sum_dp]"
MISTAKES = {  # in the text of a program -> what is wrong then
    "what is left over is forgotten": (f"kept.copy_({KEPT})", "pass"),
    "one sum forgets it": (TEXT, "[]"),
    "half of it is lost": ("x + self.state[", "x + 0.5 * self.state["),
    "a mean": (ADDED, ADDED.replace(".sum(", ".mean(")),
    "twice the sum": (ADDED, f"2 * {ADDED}"),
    "a rank is left out": (ADDED, ADDED.replace(".sum(", "[1:].sum(")),
    "a sum goes nowhere": ("Int8Sum(flat,", "Int8Sum(flat.clone(),"),
    "the owner keeps what it did not send": (
        "        self.write(self.decode(self.sums))", OWN
    ),
    "it is kept before the sum is known to be finite": (KEPT, "lost.view(kept.shape)"),
    "it is kept if this one sum is finite": (
        KEPT, "torch.where(self.flat.isfinite().all(), lost.view(kept.shape), kept)"
    ),
    "added twice": ("param.grad = grad if", "param.grad = 2 * grad if"),
    "rounded down": ("(x + 0.5).floor()", "x.floor()"),
    "another block": (", 4, 64,", ", 4, 32,"),
}  # fmt: skip


OF_OTHERS = {  # scheme -> in the text -> what is wrong then
    "top-k": {
        "zip(places, numbers, strict=True)": "zip(places[1:], numbers[1:], strict=True)",
        "[x.index_fill(0, at, 0.0)]": "[x]",
        "equal.cumsum(0) <=": "equal.cumsum(0) <",
        "total.index_add_(0, at, each)": "total.index_copy_(0, at, each)",
    },
    "random-k": {
        'self.rng("2.weight")': 'self.rng("2.weight", self.dp_rank)',
        'self.rng("2.weight") ': 'self.rng("0.0.weight") ',
        "self.rng.step > 2": "self.rng.step > 9",
        "torch.where(x.isfinite().all(), x[self.at], torch.nan)": "x[self.at]",
    },
    "int8-stochastic": {
        'self.rng("2.weight", self.dp_rank)': 'self.rng("2.weight", 0)',
        "(x + up).floor()": "(x + 0.5).floor()",
    },
    "power-sgd": {
        "self.lost.append(self.sums)": "self.lost.append(self.sums * 0)",
        "m -= p @ q.T": "m -= 2 * p @ q.T",
        "m.zero_()": "pass",
        "in zip(others, summed, strict=True)": "in zip(others[1:], summed[1:], strict=True)",
    },
}  # fmt: skip


def wrong(program: Program, edited: Program) -> None:
    """Both verify and the check of the text refuse an edit."""
    with pytest.raises((CheckError, RuntimeError)):
        verified(edited)
    with pytest.raises(CheckError):
        audit(replace(edited, fixed=program.fixed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("wire", OF_OTHERS)
def test_mistakes_of_other_schemes_are_found(wire: str) -> None:
    own = f"{WIRES[wire].entry} = {SIZES[WIRES[wire].entry]}"
    start = "start_step = 2" if wire == "random-k" else ""
    program = compiled(f'{PLAN}"{wire}"\n{own}\n{start}')
    for old, new in OF_OTHERS[wire].items():
        wrong(program, everywhere(program, old.strip(), new.strip()))


@pytest.mark.rows(2)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str) -> None:
    """By verify; and by the check of the text, which knows the printed one."""
    old, new = MISTAKES[mistake]
    edited = everywhere(compiled(), old, new)
    if new is OWN:
        rounded = "sent = self.rounded(self"
        edited = everywhere(edited, rounded, f"self.own = self.rounded_sum()\n        {rounded}")
        edited = everywhere(edited, "    def wait(self) -> bool:", KEEPS)
    wrong(compiled(), edited)


KEEPS = """    def rounded_sum(self) -> Tensor:
        return self.decode(self.sums).sum(0) + self.state[1].view(-1)

    def wait(self) -> bool:"""


def local_graph(plan: str = INT8) -> Graph:
    graph = llama().step.graph()
    graph.mesh = Mesh.parse("dp=4")
    return partition(graph, Plan.parse(plan))[1]


# the graph ----------------------------------------------------------------------------------------
@pytest.mark.exhaustive
def test_buffers_of_their_own() -> None:
    """Each of a sum's two buffers has its size and layout, and one reader."""
    graph = local_graph()
    sums = [node for node in graph.calls() if wire_of(node)]
    first, second = sums[:2]
    check(graph)
    mine, others = state_of(first), state_of(second)
    first.kwargs = {**first.kwargs, "state": others}
    with pytest.raises(CheckError, match="of each rank"):
        check(graph)
    first.kwargs = {**first.kwargs, "state": []}
    with pytest.raises(CheckError, match="0 calls read"):
        check(graph)
    first.kwargs = {**first.kwargs, "state": mine}
    known = value(mine[1]).sharding
    update(mine[1], sharding=Sharding.of({"dp": R}, graph.mesh))
    with pytest.raises(CheckError):
        check(graph)
    update(mine[1], sharding=known)
    first.kwargs = {**first.kwargs, "wire": "int7"}
    with pytest.raises(CheckError, match="int7"):
        check(graph)


@pytest.mark.exhaustive
def test_directions_are_read_by_nobody() -> None:
    """What adds them up has neither a sum nor a direction."""
    graph = local_graph(f'{PLAN}"majority-sign"')
    check(graph)
    first = next(node for node in graph.calls() if wire_of(node))
    [waited], end = first.users, graph.fx.output_node()
    last = next(iter(waited.users))
    with graph.fx.inserting_before(end):
        twice = graph.fx.call_function(torch.ops.aten.mul.Tensor, (last, 2.0))
    set_fake(twice, fake_of(last))
    set_value(twice, value(last))
    end.replace_input_with(last, twice)
    with pytest.raises(CheckError, match="and no sum"):
        check(graph)


def test_sums_that_others_read_stay_exact() -> None:
    """That of the loss, and those of a count."""
    graph = local_graph()
    exact = [n for n in graph.calls() if n.target is collectives.all_reduce and not wire_of(n)]
    assert graph.loss is not None
    assert {fake_of(n).dim() for n in exact} == {0}
