"""Mistakes in stage graphs and in rank programs: a static check, the ranks in threads or the
numbers find each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor, fx, nn

from partc.checks.local_graph import check
from partc.codegen.files.take_ends import Ends, check_one_way
from partc.errors import CheckError, PlanError, RunError
from partc.graph import Graph, collectives, first_operand, set_fake
from partc.plan import Plan
from partc.program import Program
from partc.program.helper_file import NAME as HELPERS
from partc.verification.verification import verify
from tests.patience import patience
from tests.pipelines import BATCH, HIDDEN, Block, Cut, compiled
from tests.zoo import Case

TOLERANCE = 1e-9
POINTS = ("blocks.1",)
MICROBATCHES = 4


class Skip(nn.Module):
    """Two blocks, around which the input passes too, and one weight on both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first = x @ self.weight
        out: Tensor = (self.blocks[1](self.blocks[0](first)) * first) @ self.weight
        return out.square().mean()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


def case() -> Case:
    torch.manual_seed(0)
    return Case(Skip().double(), (torch.randn(BATCH, HIDDEN).double(),), loss)


# stages of a rank ---------------------------------------------------------------------------------
def test_one_gradient_cannot_be_summed_in_two_ways() -> None:
    """Two stages of a rank add to the gradient of one parameter."""
    total = fx.Graph().call_function(collectives.all_reduce, (), {"axis": "dp", "num": 2})
    set_fake(total, torch.zeros(2))
    summed, whole = Ends({"w": (total,)}, None), Ends({"w": ()}, None)
    check_one_way("w", {0: summed, 3: summed})
    with pytest.raises(PlanError, match="stages 0, 3 of one rank sum its gradient"):
        check_one_way("w", {0: summed, 3: whole})


# stage graphs -------------------------------------------------------------------------------------
GraphMistake = Callable[[list[Graph]], None]


def drop_accumulation(graphs: list[Graph]) -> None:
    """A gradient is that of one microbatch."""
    node = _call(graphs[0], collectives.accumulate)
    node.replace_all_uses_with(first_operand(node))
    graphs[0].fx.erase_node(node)


def reduce_each_microbatch(graphs: list[Graph]) -> None:
    """The sum over ranks starts before the last microbatch has been added."""
    node = _call(graphs[0], collectives.accumulate)
    started = next(u for u in node.users if u.target is collectives.all_reduce)
    started.replace_input_with(node, first_operand(node))


def drop_tied_gradient(graphs: list[Graph]) -> None:
    outputs = graphs[1].outputs
    grads = {name: grad for name, grad in outputs.grads.items() if name != "weight"}
    graphs[1].set_outputs(replace(outputs, grads=grads))


def swap_sent(graphs: list[Graph]) -> None:
    """Two tensors of one type arrive in each other's place."""
    outputs = graphs[0].outputs
    (a, first), (b, second) = outputs.sent.items()
    graphs[0].set_outputs(replace(outputs, sent={a: second, b: first}))


def _call(graph: Graph, target: object) -> fx.Node:
    return next(n for n in graph.calls() if n.target is target)


GRAPHS: dict[str, GraphMistake] = {
    "accumulation dropped": drop_accumulation,
    "reduced before the last microbatch": reduce_each_microbatch,
    "gradient of a tied copy dropped": drop_tied_gradient,
    "sent tensors swapped": swap_sent,
}


def found_in_graphs(mistake: GraphMistake) -> str:
    """What finds a mistake: ``check``, ``numbers`` or nothing."""
    plan = Plan(preset="ddp", stages=POINTS, microbatches=MICROBATCHES)
    cut = Cut.of(case(), "dp=2", plan)
    assert cut.error() < TOLERANCE
    mistake(cut.graphs)
    try:
        for graph in cut.graphs:
            check(graph)
    except CheckError:
        return "check"
    return "numbers" if cut.error() > TOLERANCE else "nothing"


# programs -----------------------------------------------------------------------------------------
Edit = Callable[[str], str]


def _replaced(pattern: str, by: str, text: str) -> str:
    """The text with the first match replaced."""
    return re.sub(pattern, by, text, count=1, flags=re.MULTILINE | re.DOTALL)


PROGRAMS: dict[str, tuple[int, Edit]] = {  # which rank's program is spoiled, and how
    name: (rank, partial(_replaced, pattern, by))
    for name, rank, pattern, by in [
        ("tied gradients not summed", 0, r"^ *sum_tied\(.*?\)\s*(#.*?)?\n", ""),
        ("tied gradients summed on one rank only", 1, r"^ *sum_tied\(.*?\)\s*(#.*?)?\n", ""),
        ("sent to oneself", 0, r'Outbox\(self\.links\["x", 1\]', 'Outbox(self.links["d", 0]'),
        ("links made in another order", 0, r"i % 2 == odd", "i % 2 != odd"),
        ("links met in another order", 0, r"in self\.values\(\)", "in reversed(self.values())"),
        ("sent tensors swapped", 0, r"for x in whole\]", "for x in whole[::-1]]"),
        ("not sent", 0, r"self\.x_out\[stage\]\.put\((.*?)\)$", r"\1"),
        ("received is not waited for", 1, r"(for _, done in here:\s*)done\.wait\(\)", r"\1pass"),
        ("sends are not waited for", 0, r"^ *self\.x_out\[0\]\.wait\(\)\n", ""),
        ("one microbatch less received", 1, r"begin\(4,", "begin(3,"),
        ("gradient replaced, not added to", 0, 
         r"= (grad if param.*?add_\(grad\)|self\[param\]\.add_.*? else grad)", "= grad"),
        ("reduced before the last backward", 0,
         r"(        # cool-down.*?)(        self\.x_out.*?)(        self\.stage0\.finish\(\)\n)",
         r"\3\1\2"),
        ("not reduced", 0, r"^ *self\.stage0\.finish\(\)\n", ""),
        ("backwards of other microbatches", 0, r"for i in range\(2, 4\)",
         "for i in reversed(range(2, 4))"),
        ("a forward left out", 0, r"for i in range\(2\):\n *self\.F",
         "for i in range(1):\n            self.F"),
        ("loss of one rank's own", 0, r"^ *dist\.broadcast\(loss.*?\n", ""),
    ]
}  # fmt: skip


@cache
def program() -> Program:
    plan = Plan(preset="ddp", stages=POINTS)
    return compiled(case(), "pp=2,dp=2", plan, "1f1b", MICROBATCHES)


def with_own_helpers(role: str) -> str:
    """A role with the helpers in its own file, so that a mistake in them is one rank's alone."""
    helpers = program().sources[HELPERS].partition('"""\n\n')[2]
    return re.sub(r"from \.helpers import (\([^)]*\)|.*)\n", lambda _: helpers, role, count=1)


def found_in_programs(rank: int, edit: Edit) -> str:
    """What finds a mistake: the ranks in ``threads``, or ``numbers``, or nothing."""
    role = f"pipeline{rank}.py"
    before = with_own_helpers(program().sources[role])
    text = edit(before)
    assert text != before, "the mistake was made nowhere"
    spoiled = replace(program(), sources={**program().sources, role: text})
    given = case()
    try:
        report = verify(spoiled, given.model, given.inputs, given.loss, timeout=patience())
    except (RunError, KeyError, IndexError):
        return "threads"
    return "numbers" if not report.ok(TOLERANCE) else "nothing"


def test_sound_programs_pass() -> None:
    given = case()
    verify(program(), given.model, given.inputs, given.loss).check(TOLERANCE)


def test_every_mistake_is_found(golden: Callable[..., None]) -> None:
    lines = [f"{'in a stage graph':<40}  found by"]
    lines += [f"{name:<40}  {found_in_graphs(mistake)}" for name, mistake in GRAPHS.items()]
    lines += ["", f"{'in a rank program':<40}  found by"]
    lines += [f"{name:<40}  {found_in_programs(*how)}" for name, how in PROGRAMS.items()]
    golden("\n".join(lines))
    assert not [line for line in lines if line.endswith("nothing")]
