"""Mistakes in code that partc calls: rules, passes, costs, rows of a dataset, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import partc
from partc.data.failed_rows import naming_failures
from partc.graph import Graph, is_call, set_like
from partc.graph.graph_edits import call_before, replace_by
from partc.passes import own_passes
from partc.rules.signature import Signature, f
from partc.rules.table import RULES, rule
from partc.schedules import make
from partc.schedules.timing import Costs, timeline
from tests.mistakes.things import check, compiled, loss_of

aten = torch.ops.aten
ANY: Any = None  # what a call with wrong arguments is made of, past the types


def any_type(given: Any) -> Any:
    return given


class Squashed(nn.Module):
    """``f32[8,4] -> f32[8,4]`` by two linears and a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x)))
        return result


class Words(nn.Module):
    """Rows of a table of 8, ``i64[8] -> f32[8,4]``."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.table(ids)
        return found


def ruled(notation: Any, **fields: Any) -> None:
    """A compile with this rule for tanh."""
    try:
        rule("aten.tanh", notation, **fields)
        compiled(model=Squashed())
    finally:
        RULES._entries.pop("aten.tanh", None)


def looked_up(call: Any) -> str:
    found: dict[str, str] = {}
    return found["dim"]


def passed(function: Callable[..., Any], after: str = "name_calls") -> None:
    """A compile with this pass."""
    try:
        partc.graph_pass(after=after)(function)
        compiled(model=Squashed())
    finally:
        own_passes._OWN.clear()


def narrower(graph: Graph) -> None:
    """A sum of each row stands where the tanh of it stood."""
    for node in list(graph.calls()):
        if is_call(node, aten.tanh.default):
            replace_by(node, call_before(node, aten.sum.dim_IntList, node.args[0], [1], True))


def disguised(graph: Graph) -> None:
    """The same, described as if it were as wide."""
    for node in list(graph.calls()):
        if is_call(node, aten.tanh.default):
            row = call_before(node, aten.sum.dim_IntList, node.args[0], [1], True)
            set_like(row, node)
            replace_by(node, row)


def halved(graph: Graph) -> None:
    for node in list(graph.calls()):
        if is_call(node, aten.tanh.default):
            half = call_before(node, aten._to_copy.default, node.args[0], dtype=torch.bfloat16)
            replace_by(node, half)


def of_torch(graph: Graph) -> None:
    """Asks for a function of torch, which no graph calls."""
    for node in graph.calls():
        is_call(node, F.gelu)


def without_overload(graph: Graph) -> None:
    next(each for each in graph.calls() if is_call(each, aten.tanh))


def put_in(graph: Graph) -> None:
    for node in list(graph.calls()):
        if is_call(node, aten.tanh.default):
            replace_by(node, call_before(node, F.gelu, node.args[0]))


def other_op(graph: Graph) -> None:
    """Another op of the same shape stands where the tanh stood."""
    for node in list(graph.calls()):
        if is_call(node, aten.tanh.default):
            other = call_before(node, aten.relu.default, node.args[0])
            set_like(other, node)
            replace_by(node, other)


def unsummed(graph: Graph) -> None:
    """Sums over ranks are left out."""
    for node in list(graph.calls()):
        if "all_reduce" in str(node.target):
            replace_by(node, node.args[0])  # type: ignore[arg-type]


def untold(graph: Graph) -> None:
    """A pass of partc stumbles over what this one leaves."""
    for node in graph.calls():
        node.meta["custom"] = None
    graph.classes = ANY


def compared(**given: Any) -> None:
    """A program that was compiled with something of the user's, beside the model."""
    program = compiled(model=Squashed(), **given)
    batch = torch.randn(8, 4), torch.randn(8, 4)
    partc.verify(program, Squashed(), batch, loss_of).check()


def wrong_rule() -> None:
    """Rows of a softmax are said to be cut anywhere."""
    ops = {"aten._softmax": "...->...", "aten._softmax_backward_data": "...,...->..."}
    before = {op: RULES._entries.pop(op) for op in ops}
    try:
        for op, notation in ops.items():
            rule(op, notation)
        compared(
            loss=lambda model, x, y: loss_of(_softened(model), x, y), mesh="tp=2", plan="megatron"
        )
    finally:
        RULES._entries.update(before)


def _softened(model: nn.Module) -> Any:
    return lambda x: model.down(torch.softmax(model.up(x), -1))  # type: ignore[operator]


def wrong_pass() -> None:
    try:
        partc.graph_pass(after="name_calls")(other_op)
        compared()
    finally:
        own_passes._OWN.clear()


def failing(graph: Graph) -> None:
    next(iter(graph.calls())).args[9]


class Broken(Dataset[Tensor]):
    def __getitem__(self, row: int) -> Tensor:
        raise FileNotFoundError(f"{row}.png")


def read() -> None:
    def rows() -> Iterator[Tensor]:
        yield Broken()[3]

    list(naming_failures(rows, Broken()))


def squares(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).pow(2).mean()  # type: ignore[no-any-return]


def stepped(ids: Tensor) -> None:
    """The step of a program on numbers for which the table has no rows."""
    program = partc.compile(Words(), "dp=1", (torch.arange(8),), loss=squares, plan="ddp")
    role = program.role(0)
    step = role.build(None)
    with torch.no_grad():
        step.get_parameter(role.params[0].key).zero_()
    role.run(step, [ids])


def verified(ids: Tensor) -> None:
    program = partc.compile(Words(), "dp=2", (torch.arange(8),), loss=squares, plan="ddp")
    partc.verify(program, Words(), (ids,), loss=squares)


MISTAKES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a rule that fails": (
        lambda: ruled(looked_up),
        ("rule of aten.tanh.default", "looked_up", "KeyError: 'dim', at test_own_code_mistakes.py"),
    ),
    "a rule without a text": (lambda: ruled(lambda call: None), ("aten.tanh", "it gives None")),
    "slots that fail": (
        lambda: ruled("...->...", linear=looked_up), ("linear=looked_up", "KeyError"),
    ),
    "slots with a comma": (lambda: ruled("...->...", linear="0,1"), ("'0,1'", '"0|1"')),
    "a slot as text": (lambda: ruled("...->...", added="1"), ("added is '1'", "from 0")),
    "a name for names": (lambda: ruled("...->...", traced="A"), ("traced is 'A'", '("input"')),
    "a reduction": (lambda: ruled("...->...", reduce="prod"), ("'prod'", "sum, max, mean")),
    "a mean of another op": (
        lambda: ruled("...->", reduce="mean"), ("aten.tanh is no aten.mean", "Leave reduce out"),
    ),
    "a rule without an arrow": (lambda: ruled("ab"), ("'ab'", "'->'")),
    "an op that is not there": (lambda: rule("aten.tanhh", "a->a"), ("aten.tanhh", "'tanh'")),
    "an overload": (lambda: rule("aten.add.Tensr", "a,a->a"), ("aten.add.Tensr", "'Tensor'")),
    "an op's name": (
        lambda: Signature.call(any_type("aten.mm"), f(2, 3)), ("'aten.mm'", ".default"),
    ),
    "an op of many": (lambda: Signature.call(aten.mm, f(2, 3)), ("OpOverloadPacket", ".default")),
    "tensors": (
        lambda: Signature.call(aten.relu.default, torch.ones(2)), ("a tensor", "f(4, 6)"),
    ),
    "shapes": (
        lambda: Signature.call(aten.mm.default, f(2, 3), f(4, 4)).node(),
        ("aten.mm.default(f32[2,3], f32[4,4])", "reduction dim"),
    ),
    "few costs": (
        lambda: timeline(make("1f1b", ranks=3, microbatches=4), Costs.even(2)),
        ("forward", "2 of 3", "Costs.even(3)"),
    ),
    "a pass of another shape": (lambda: passed(narrower), ("narrower", "f32[8,1]", "f32[8,4]")),
    "a pass that says else": (
        lambda: passed(disguised, "insert_collectives"), ("disguised", "gives f32[4,1]"),
    ),
    "a pass of another dtype": (lambda: passed(halved), ("halved", "bf16[8,4]", "f32[8,4]")),
    "a pass that fails": (
        lambda: passed(failing), ("IndexError", "next(iter(graph.calls())).args[9]"),
    ),
    "a pass that asks for a function": (
        lambda: passed(of_torch), ("is_call: gelu", "torch.ops.aten.gelu.default"),
    ),
    "a pass that asks for an op": (
        lambda: passed(without_overload), ("aten.tanh is", "torch.ops.aten.tanh.default"),
    ),
    "a pass that calls a function": (
        lambda: passed(put_in), ("call_before: gelu", "torch.ops.aten.gelu.default"),
    ),
    "a pass that drops sums": (
        lambda: passed(unsummed, "insert_collectives"),
        ("pass unsummed (", "is yours", "disable=['unsummed']"),
    ),
    "a pass that partc falls over": (
        lambda: passed(untold), ("pass untold (", "disable=['untold']"),
    ),
    "a pass that computes else": (
        wrong_pass, ("pass other_op (", "disable=['other_op']", "These differ most"),
    ),
    "a rule that is wrong": (
        wrong_rule, ("rules of aten._softmax (", "prove them", "These differ most"),
    ),
    "a letter of no operand": (
        lambda: ruled("ab->az"),
        ("aten.tanh", "the letter 'z'", "no operand has", "this rule has 1"),
    ),
    "a pass that is none": (lambda: partc.graph_pass(after="name_calls")(ANY), ("None", "def")),
    "a row that fails": (read, ("Broken", "FileNotFoundError: 3.png", "raise FileNotFound")),
    "a number without a row": (
        lambda: stepped(torch.full((8,), 9)),
        ("table (", "self.table(ids)", "the input ids", "from 9 to 9", "table.weight", "[8, 4]"),
    ),
    "a number for the model": (
        lambda: verified(torch.full((8,), 9)), ("the model itself", "self.table(ids)", "from 9"),
    ),
    "a name that is not there": (
        lambda: compiled(loss=lambda model, x, y: F.mse_loss(model(x), missing)),  # type: ignore[name-defined]  # noqa: F821
        ("NameError", "'missing'", "Correct this line"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_code_of_the_user_is_named(mistake: str) -> None:
    check(MISTAKES[mistake])


def test_fields_of_pipelines_say_nothing_without_one() -> None:
    with pytest.warns(UserWarning, match="schedule says nothing here: the mesh dp=2 has no axis"):
        compiled(schedule="gpipe")
