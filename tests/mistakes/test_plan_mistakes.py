"""Plans, meshes and schedules of any content, as strangers may send them, are refused in time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import Tensor, nn

import partc
from partc.errors import PlanError
from partc.plan.field_kinds import FIELDS
from partc.schedules.csv_form import load_csv
from tests.mistakes.things import batch_of, check, compiled, loss_of

VALUES = ("5", "-1", "1.5", "nan", "true", '"x"', "[1]", "[[1], [2]]", "{ a = 1 }", "1979-05-27")
TEXTS = {
    "brackets": ("a = " + "[" * 100_000, "nested too deeply"),
    "brackets at the head of a line": ("[" * 100_000, "at line 1"),
    "tables": ("a = " + "{a=" * 20_000, "nested too deeply"),
    "a deep key": (".".join("a" * 20_000) + " = 1", "more than 50 parts"),
    "a long number": ("microbatches = " + "9" * 5000, "4300 digits"),
    "many microbatches": ("microbatches = 1000000", "65,536"),
    "a long mesh": ("[mesh]\ndp = 1000000000000", "fewer ranks"),
    "a misspelt field": ("microbatch = 4", "Did you mean 'microbatches'"),
    "a dim that is not there": ('preset = "ddp"\n[inputs]\n"x" = { batch = 9 }', "no dim 9"),
    "an escape": ('"\\u001b[2J" = 1', "\\x1b[2J"),
    "a bare name": ("[params]\nup.weight = { dp = 0 }", '"up.weight" = { axis = dim }'),
    "a line below a table": ('[mesh]\ndp = 2\npreset = "ddp"', "above the first line in brackets"),
    "Python's words": ("messages = True", "TOML writes true and false"),
    "YAML": ("preset: ddp\nmicrobatches: 2", "TOML writes key = value"),
    "a negative dim": ("[scatter]\ntp = -1", "scatter.tp = 1"),
}


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_field_of_any_kind_is_read_or_refused(field: str) -> None:
    refused = [error for value in VALUES if (error := refusal(f"{field} = {value}"))]
    assert [str(error) for error in refused if field not in str(error) or not error.do] == []
    assert len(refused) >= len(VALUES) - 4  # none takes numbers, texts, lists and tables alike


def refusal(text: str) -> PlanError | None:
    try:
        partc.Plan.parse(text)
    except PlanError as error:
        return error
    return None


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_refused_in_words(name: str) -> None:
    text, words = TEXTS[name]
    check((lambda: compiled(plan=partc.Plan.parse(text)), (words,)))


VALUES_OF = {
    "a dim that a result has not": ('"up:linear" = { tp = 5 }', "no dim 5", "from 0 to 1"),
    "a dim that a weight has not": ('"up.weight" = { tp = 5 }', "'up.weight'", "no dim 5"),
    "a dim of an operand": (
        '"up:linear" = { tp = "7, whole -> 0" }', "operand 0 has no dim 7", "[8, 4]",
    ),
    "a dim to be moved to": (
        '"up:linear" = { tp = "whole, whole -> whole -> 7" }', "the result has no dim 7",
    ),
    "operands": ('"up:linear" = { tp = "0 -> 0" }', "names 1 operand", "it has 2"),
    "pieces": ('"down:linear" = { tp = "1/3" }', "along dim 1 by tp=2", "multiple of 6"),
    "a negative dim": ('"up:linear" = { tp = -1 }', "-1 is no layout", "whole, sum, max"),
    "a maximum": ('"up:linear" = { tp = "max" }', "it cannot lie as", '{ tp = "sum" }'),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES_OF)
def test_a_value_that_cannot_lie_so_is_told(name: str) -> None:
    entry, *words = VALUES_OF[name]
    plan = f'preset = "ddp"\n[values]\n{entry}'
    check((lambda: compiled(mesh="dp=1,tp=2", plan=plan), tuple(words)))


@pytest.mark.parametrize(("stages", "words"), [("[5]", "no stage 5, of 2"), ('["a"]', "[0, 1]")])
def test_stages_that_sum_early_are_stages(stages: str, words: str) -> None:
    plan = f"microbatches = 2\nearly_sums = {stages}"
    check((lambda: compiled(mesh="pp=2", plan=plan), ("early_sums", words)))


@pytest.mark.exhaustive
def test_rows_of_a_rank_that_microbatches_do_not_divide_are_told() -> None:
    words = ("microbatches could be 2, 3", "divide the rows of each rank")
    own = {"batch": "local", "inputs": batch_of(6), "microbatches": 4}
    check((lambda: compiled(**own), words))
    check((lambda: compiled(inputs=batch_of(6), microbatches=4), ("cut by microbatches=4",)))
    own = {"batch": "local", "inputs": batch_of(3)}
    check((lambda: compiled(**own, microbatches=2), ("microbatches could be 3",)))
    compiled(**own, microbatches=3)


def test_how_long_gathered_weights_live_is_explained() -> None:
    words = "gather.dp = 'forward'", "'use', a weight is gathered before each use", "'step', it is"
    plan = 'preset = "fsdp"\n[gather]\ndp = "{}"'
    check((lambda: compiled(plan=plan.format("forward")), words))
    check((lambda: compiled(plan=plan.format("shard_grad_op")), ("Write 'step'",)))


def perplexity(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    loss = loss_of(model, x, y)
    return loss, loss.exp()


def test_an_extra_of_the_whole_batch_is_told_at_its_own_line() -> None:
    line = perplexity.__code__.co_firstlineno + 2
    where = f"test_plan_mistakes.py:{line})"
    words = (where, "this line needs the whole batch", "of div, of the step")
    check((lambda: compiled(loss=perplexity, microbatches=2), words))


@pytest.mark.parametrize("content", ["folder", "pipe", "device", "bytes", "missing"])
@pytest.mark.parametrize("read", [partc.Plan.load, partc.Mesh.of, load_csv])
def test_what_is_no_text_is_not_read(tmp_path: Path, content: str, read: object) -> None:
    path = tmp_path / "it.toml"
    if content == "folder":
        path.mkdir()
    elif content == "pipe":
        os.mkfifo(path)  # reading would wait for whoever writes
    elif content == "device":
        path.symlink_to("/dev/zero")  # reading would take all memory
    elif content == "bytes":
        path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"it\.toml"):
        read(path)  # type: ignore[operator]


def test_a_schedule_with_a_long_cell_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("0F0," + "x" * 200_000)
    with pytest.raises(PlanError, match=r"own\.csv.*no CSV.*field limit"):
        load_csv(tmp_path / "own.csv")
