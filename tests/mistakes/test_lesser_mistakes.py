"""Mistakes in the calls around a compile: flags, rules, schedules, meshes, loggers, files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partc
from partc.metrics import JsonLines, Meter
from partc.program.choices import check_fillers
from partc.program.ranks.meeting import NotMetError, open_store
from partc.rules.prove import prove
from partc.rules.signature import Signature, f
from partc.rules.table import rule
from partc.schedules import make
from partc.schedules.actions import Action
from partc.schedules.csv_form import read_csv
from partc.schedules.named import NAMES, Needs, schedule
from tests.mistakes.things import Net, batch_of, check, compiled, loss_of

MESH = partc.Mesh.of("dp=2,tp=2")
ANY: Any = None  # what a call with wrong arguments is made of, past the types


def any_type(given: Any) -> Any:
    return given


def swapped(x: Any, target: Any, model: Any) -> Any:
    return loss_of(model, x, target)


def orders(ranks: int, microbatches: int, chunks: int) -> Any:
    return [["0F0", "0B0"], ["1F0", "1B0"]]


def failing(ranks: int) -> Any:
    return []


def odd(ranks: int, microbatches: int, chunks: int) -> Any:
    return [[Action(rank, any_type("X"), 0)] for rank in range(ranks)]


class Tells:
    def log(self, numbers: Any) -> None:
        """Takes no step."""


def made(function: Any) -> Any:
    NAMES._entries["mine"] = Needs(function)
    try:
        return make("mine", ranks=2, microbatches=1)
    finally:
        del NAMES._entries["mine"]


CALLS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a text for a flag": (lambda: compiled(strict="no"), ("compile(strict=...)", "True or False")),
    "the model last": (lambda: compiled(loss=swapped), ("loss(model, *inputs)",)),
    "a generator": (lambda: compiled(inputs=iter(batch_of())), ("tuple(inputs)",)),
    "samples": (lambda: compiled(inputs=[batch_of()] * 8), ("default_collate",)),
    "stages without pp": (lambda: compiled(stages=["down"]), ("no axis pp",)),
    "a dim too high": (
        lambda: compiled(plan='preset = "ddp"\n[params]\n"up.weight" = { dp = 5 }'),
        ("up.weight", "from 0 to 1"),
    ),
    "a number for a layout": (
        lambda: compiled(plan=partc.Plan(preset="ddp", params={"up.weight": any_type({"dp": 0})})),
        ("params['up.weight']", "no Layout"),
    ),
    "a word for a table": (
        lambda: compiled(plan=partc.Plan(preset="fsdp", gather=any_type("use"))),
        ("gather = 'use'",),
    ),
    "a rank outside": (lambda: MESH.coords(9), ("rank 9", "from 0 to 3")),
    "a place outside": (lambda: MESH.rank({"dp": 5, "tp": 0}), ("along dp",)),
    "axes for a machine": (lambda: partc.Mesh.load("dp=2"), ("Mesh.of('dp=2')",)),
    "a semicolon": (lambda: read_csv("0F0;0B0", "s.csv"), ("s.csv, row 1", "comma")),
    "texts for actions": (lambda: made(orders), ("orders", "'0F0' is no action")),
    "a schedule that fails": (lambda: made(failing), ("failing", "TypeError", "(2, 1, 1)")),
    "a schedule without a name": (lambda: schedule(ANY)(orders), ("@schedule",)),
    "an op for its name": (lambda: rule(any_type(torch.ops.aten.mm), "mk,kn->mn"), ("aten.mm",)),
    "a field of a rule": (lambda: rule("a.b", "m->m", liner="0"), ("'liner'", "'linear'")),
    "a rule that is none": (lambda: rule("a.b", ANY), ("None", "mk,kn->mn")),
    "passes for a pass": (lambda: partc.graph_pass(after=ANY), ("graph_pass(after=...)",)),
    "no parentheses": (
        lambda: partc.graph_pass(orders),  # type: ignore[call-arg, arg-type]
        ('@graph_pass(after="insert_collectives")',),
    ),
    "a path for loggers": (lambda: Meter(any_type("m.jsonl")), ("'m.jsonl' is no logger",)),
    "several numbers": (lambda: Meter([]).log(1, {"a": torch.ones(2)}), ("Meter.log, a",)),
    "a traced step": (
        lambda: partc.Traced(Net(), loss_of, any_type(batch_of())),
        ("Write Traced(model, inputs, loss)",),
    ),
    "a preset by place": (lambda: partc.Plan(any_type("fsdp")), ("Plan(preset='fsdp')",)),
    "an attribute of a program": (lambda: any_type(compiled()).modul, ("Did you mean 'module'",)),
    "a logger that fails": (
        lambda: Meter([any_type(Tells())]).log(1, {"a": 1.0}), ("Tells.log", "positional"),
    ),
    "a line of no JSON": (
        lambda: JsonLines("/dev/null").log({"a": any_type(torch.ones(2))}, 1), ("JSON", "Tensor"),
    ),
    "a kind of action": (lambda: made(odd), ("0X0 is no action",)),
    "a strategy as text": (
        lambda: prove(Signature.call(torch.ops.aten.relu.default, f(4)), any_type("cut 0"), 2),
        ("prove(aten.relu.default", "'cut 0'"),
    ),
    "a dict for a loss": (
        lambda: compiled(loss=lambda model, x, y: nn.functional.mse_loss(any_type({}), y)),
        ("'dict' object has no attribute", "model(x)['logits']"),
    ),
    "whole numbers for a loss": (
        lambda: compiled(loss=lambda model, x, y: model(x).argmax()), ("argmax", "floating-point"),
    ),
    "no batches": (lambda: Meter([]).waiting(ANY), ("Meter.waiting", "None", "loader")),
    "lines below a file": (lambda: JsonLines(f"{__file__}/a/m.jsonl"), ("Not a directory",)),
    "no machine's file": (lambda: partc.Topology.read(ANY), ("Topology.read", "None is no path")),
    "a text for its file": (
        lambda: partc.Topology.read('name = "lab"\nlibrary = "gloo"'), ("several lines", "path"),
    ),
    "a path for a plan": (lambda: partc.Plan.parse("plan.toml"), ("Plan.load('plan.toml')",)),
    "a rank as text": (lambda: compiled().source(any_type("0")), ("'0'", "Write 0")),
    "rows of a step as a number with a point": (
        lambda: any_type(compiled()).sampler(16, 0, rows_per_step=8.0),
        ("sampler(rows_per_step", "8.0"),
    ),
    "an order as a text": (
        lambda: any_type(compiled()).sampler(16, 0, shuffle="no"), ("shuffle", "'no'"),
    ),
    "rows below none": (lambda: compiled().sampler(-5, 0), ("-5", "0 or more")),
    "a folder for lines": (lambda: JsonLines("."), ("metrics.jsonl",)),
    "no devices": (lambda: Meter([], devices=0), ("devices", "1 or more")),
    "a text that fills": (lambda: check_fillers("module", {"x": "0"}), ("'0' is no number",)),
    "a graph for a plan": (lambda: partc.partition(ANY, ANY), ("partition",)),
    "whole numbers": (lambda: verified(dtype=torch.int64), ("torch.int64", "torch.float64")),
    "no time": (lambda: verified(**{"timeout": 0}), ("timeout", "above 0")),
    "no values": (lambda: verified(device="meta"), ("device='meta'", "no values")),
}  # fmt: skip


def verified(**changed: Any) -> Any:
    return partc.verify(compiled(), Net(), batch_of(), loss=loss_of, **changed)


@pytest.mark.parametrize("name", CALLS)
def test_a_lesser_call_names_what_is_wrong(name: str) -> None:
    check(CALLS[name])


def test_a_plan_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('preset = "fsdp"\n', encoding="utf-8-sig")
    assert partc.Plan.load(tmp_path / "plan.toml").preset == "fsdp"


def test_a_plan_for_a_mesh_is_told(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('preset = "fsdp"\n')
    check((lambda: partc.Mesh.of(tmp_path / "plan.toml"), ("preset", "plan=")))


def test_a_plan_that_cuts_nothing_is_told() -> None:
    with pytest.warns(UserWarning, match="cuts nothing over dp=2"):
        compiled(plan=partc.Plan())


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_launch_with_words_for_numbers_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500", "MASTER_ADDR": "localhost"}
    for each, text in {**launch, name: "two"}.items():
        monkeypatch.setenv(each, text)
    with pytest.raises(NotMetError, match=f"{name} is 'two'"):
        open_store(1.0, keeps=False)


def test_a_size_that_other_axes_cut_too_is_told_with_all_of_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    words = ("6 is not a multiple of 4",)
    check((
        lambda: partc.compile(
            model, "dp=2", batch_of(3), loss=loss_of, plan="ddp", batch="local", microbatches=2
        ),
        words,
    ))  # fmt: skip
