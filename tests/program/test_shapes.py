"""Several shapes over one stage's weights, on real gloo processes, in float64."""

from __future__ import annotations

import copy
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import LoadError, RunError, UsageError
from partc.plan.mesh import Mesh
from partc.verification.processes import Processes
from tests.program.families import (
    HIDDEN,
    LAYOUTS,
    ROWS,
    VOCAB,
    begun,
    bytes_of_model,
    close,
    compare_step,
    compiled,
    images,
    language,
    language_loss,
    picture_loss,
    pictures,
    tokens,
)

pytestmark = pytest.mark.gloo
LENGTHS = tuple(range(3, 9))  # six


# six lengths, and a partial batch ------------------------------------------------------------
def follow(folder: Path) -> int:
    """Train and evaluate batches of all lengths as one process does; the bytes of all tensors."""
    stage, model = begun(partc.load(folder), language()), language()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (stage, model))
    for i, length in enumerate((*LENGTHS, *LENGTHS[:2])):
        batch = tokens(ROWS - 2 * (i == 3), length, seed=i)  # one has fewer rows
        compare_step(stage, model, stage.step(*batch), language_loss(model, *batch))
        stage.step(*batch)
        language_loss(model, *batch).backward()
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        if i in (0, 4, 6):  # the last is of the first one's length
            stage.eval()
            close(stage(batch[0]), model(batch[0]), "logits")
            close(stage.eval_step(*batch), language_loss(model, *batch), "loss in eval mode")
            assert all(p.grad is None for p in stage.parameters())
            stage.train()
    assert len(stage._own.members) == len(LENGTHS) + 4
    return bytes_of_model(stage)


@pytest.mark.rows(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_six_lengths_train_and_evaluate_over_one_set_of_weights(
    world: Processes, tmp_path: Path, layout: str
) -> None:
    """Loaded programs cannot compile: nothing is compiled in the loop."""
    batches = [tokens(ROWS - 2 * (i == 3), n, i) for i, n in enumerate(LENGTHS)]
    model = language()
    program = compiled(layout, batches[0], model)
    one = program.for_shapes(*batches)
    looked = batches[::4]
    one = one.for_shapes(*looked, modes=("eval",))
    one = one.for_shapes(*(batch[:1] for batch in looked), modes=("forward",))
    one.save(tmp_path / "many")
    program.save(tmp_path / "one")
    for many, alone in zip(
        world.run(follow, tmp_path / "many", num=2),
        world.run(bytes_of_weights, tmp_path / "one", num=2),
        strict=True,
    ):
        assert many == alone


@pytest.mark.exhaustive
def test_programs_are_saved_together(tmp_path: Path) -> None:
    """Saved over an earlier one, and with nothing of it left; what is not partc's stays."""
    model = language()
    program = compiled("ddp", tokens(ROWS, 3), model)
    many = program.for_shapes(tokens(ROWS, 4), tokens(7, 4), modes=("train", "eval"))
    many.save(tmp_path / "build")
    loaded = partc.load(tmp_path / "build")
    assert [each.wanted for each in loaded.others] == [each.wanted for each in many.others]
    assert [each.sources for each in loaded.others] == [each.sources for each in many.others]
    assert [each.wanted.replicated for each in loaded.others] == [False, True, False, True]
    program.save(tmp_path / "build")
    assert not partc.load(tmp_path / "build").others
    many.save(tmp_path / "build")
    (tmp_path / "build/programs/0/notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt, which partc did not write"):
        many.save(tmp_path / "build")
    other = compiled("fsdp", tokens(ROWS, 3), model)
    shutil.copytree(tmp_path / "build", tmp_path / "mixed")
    shutil.rmtree(tmp_path / "mixed/programs/0")
    replace(other, mesh=Mesh.of("dp=4"), roles=((4, other.roles[0][1]),)).save(
        tmp_path / "mixed/programs/0"
    )
    with pytest.raises(LoadError, match="a program of another model or mesh"):
        partc.load(tmp_path / "mixed")


def bytes_of_weights(folder: Path) -> int:
    return bytes_of_model(begun(partc.load(folder), language()))


def partial_batches(layout: str) -> None:
    model, seven = language(), tokens(7, 4)
    stage = begun(compiled(layout, tokens(ROWS, 4), model), model, partial="replicate")
    reference = language()
    compare_step(stage, reference, stage.step(*seven), language_loss(reference, *seven))
    stage.eval()
    close(stage(seven[0]), reference(seven[0]), "logits")
    close(stage.eval_step(*seven), language_loss(reference, *seven), "loss in eval mode")


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "pp"])
def test_a_partial_batch_is_computed_by_every_rank(world: Processes, layout: str) -> None:
    world.run(partial_batches, layout, num=2)


def odd_choices() -> list[str]:
    """What a batch of seven rows does under each choice."""
    seven, model, kept = tokens(7, 4), language(), language()
    program = compiled("fsdp", tokens(ROWS, 4), kept)
    told = []
    try:
        begun(program, model).step(*seven)
    except RunError as error:
        told.append(str(error))
    assert begun(program, model, partial="drop").step(*seven) is None
    filled = begun(program, model, partial="pad", pad={"ids": 0, "labels": -100})
    compare_step(filled, model, filled.step(*seven), language_loss(model, *seven))
    assert len(filled._own.members) == 1
    close(filled.eval()(seven[0]), model(seven[0]), "results, of seven rows")
    try:  # the targets are not ignored, and the loss is a mean over more rows
        begun(program, model, partial="pad", pad={"ids": 0, "labels": 0}).step(*seven)
    except RunError as error:
        told.append(str(error))
    return told


@pytest.mark.exhaustive
def test_a_partial_batch_is_an_error_dropped_or_filled_up(world: Processes) -> None:
    refused, unproved = world.run(odd_choices, num=2)[0]
    assert "a batch of 7 cannot be shared by 2 data ranks" in refused
    assert 'partial="replicate"' in refused
    assert "rows that the loss ignores (loss differs)" in unproved


def filled_norms() -> str:
    kept = pictures()
    program = partc.compile(kept, "dp=2", images(8), loss=picture_loss, plan="ddp")
    stage = begun(program, kept, partial="pad", pad={"x": 0, "y": -100})
    try:
        stage.step(*images(7))
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.exhaustive
def test_rows_that_change_a_batch_norm_are_not_ignored(world: Processes) -> None:
    assert "rows that the loss ignores" in world.run(filled_norms, num=2)[0]


# on demand -----------------------------------------------------------------------------------
def on_demand() -> tuple[list[str], str]:
    """Compiles three programs, and no fourth."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("partc").addHandler(handler)
    logging.getLogger("partc").setLevel(logging.DEBUG)
    model = language()
    stage = begun(compiled("fsdp", tokens(ROWS, 4), model), model, most_programs=3)
    model.eval()  # the model's own mode decides nothing
    reference = language()
    for length in (4, 5, 4, 5):
        batch = tokens(ROWS, length)
        compare_step(stage, reference, stage.step(*batch), language_loss(reference, *batch))
    with torch.inference_mode():
        close(stage.eval_step(*tokens(ROWS, 5)), language_loss(reference, *tokens(ROWS, 5)), "")
    assert not model.training
    try:
        stage.step(*tokens(ROWS, 6))
    except RunError as error:
        return records, str(error)
    return records, ""


@pytest.mark.exhaustive
def test_programs_are_made_when_first_needed_and_bounded(world: Processes) -> None:
    told, refused = world.run(on_demand, num=2)[0]
    begun, ended = told[::2], told[1::2]
    assert "partc compiles a program" in begun[0]
    assert "step in train mode of (int64[8, 5], int64[8, 5])" in begun[0]
    assert "eval_step in eval mode" in begun[1]
    assert [text.partition(" s ")[2] for text in ended] == [
        f"(program {number} of at most 3 of this stage)" for number in (2, 3)
    ]
    assert "the stage has 3 programs already" in refused


def changed_model() -> str:
    model = language()
    stage = begun(compiled("ddp", tokens(ROWS, 4), model), model)
    model.head = nn.Linear(HIDDEN, VOCAB + 1, bias=False).double()
    with pytest.raises(RunError) as error:
        stage.step(*tokens(ROWS, 5))
    return str(error.value)


def test_another_model_than_the_compiled_one_is_refused(world: Processes) -> None:
    told = world.run(changed_model, num=2)[0]
    assert "the model is not what it was when the stage's first program was compiled" in told
    assert "head.weight" in told


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: object) -> Uncopied:
        raise TypeError("no copies")


def without_a_model() -> str:
    stage = begun(compiled("ddp", tokens(ROWS, 4)), language())
    model, batch = language(), tokens(ROWS, 5)
    compare_step(stage, model, stage.step(*batch), language_loss(model, *batch))
    x = torch.randn(ROWS, 4)
    stage = partc.compile(Uncopied(4, 4), "dp=2", (x,), loss=squares, plan="ddp").module()
    with pytest.raises(RunError) as error:
        stage.step(x[:2])
    return str(error.value)


@pytest.mark.exhaustive
def test_a_model_that_is_gone_has_a_copy_without_weights(world: Processes) -> None:
    assert "the model is no longer there" in world.run(without_a_model, num=2)[0]


# ranks that differ ---------------------------------------------------------------------------
def hundred_lengths(folder: Path) -> None:
    """Each rank fills its batch up to a length of its own; all take the longest."""
    stage = begun(partc.load(folder), language(), pad={"ids": 0, "labels": -100})
    reference, mine = language(), torch.Generator().manual_seed(dist.get_rank())
    lengths = torch.Generator().manual_seed(9)
    for step in range(100):
        length = int(torch.randint(3, 8, (), generator=lengths))
        more = int(torch.randint(0, 8 - length, (), generator=mine))
        ids, labels = tokens(ROWS, length, step)
        filled = F.pad(ids, (0, more)), F.pad(labels, (0, more), value=-100)
        loss, expected = stage.step(*filled), language_loss(reference, ids, labels)
        compare_step(stage, reference, loss, expected)
    assert len(stage._own.members) > 3


@pytest.mark.exhaustive
def test_a_hundred_steps_whose_lengths_differ_between_ranks(
    world: Processes, tmp_path: Path
) -> None:
    model = language()
    program = compiled("fsdp", tokens(ROWS, 3), model)
    program.for_shapes(*(tokens(ROWS, n) for n in range(3, 8))).save(tmp_path / "program")
    world.run(hundred_lengths, tmp_path / "program", num=2)


def two_shapes(pad: dict[str, float] | None) -> str:
    stage = begun(compiled("ddp", tokens(ROWS, 4)), language(), pad=pad)
    try:
        stage.step(*tokens(ROWS, 4 + dist.get_rank()))
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.exhaustive
def test_ranks_with_different_lengths_are_named_on_every_rank(world: Processes) -> None:
    for told in world.run(two_shapes, None, num=2):
        assert "ranks 0: step in train mode of (int64[8, 4], int64[8, 4])" in told
        assert "ranks 1: step in train mode of (int64[8, 5], int64[8, 5])" in told
    for told in world.run(two_shapes, {"ids": 0}, num=2):
        assert "ranks differ in what they run" in told


def other_calls() -> str:
    stage = begun(compiled("ddp", tokens(ROWS, 4)), language())
    try:
        if dist.get_rank():
            stage.step(*tokens(ROWS, 4))
        else:
            stage.eval_step(*tokens(ROWS, 4))
    except RunError as error:
        return str(error)
    return ""


def test_one_rank_that_evaluates_alone_is_named(world: Processes) -> None:
    for told in world.run(other_calls, num=2):
        assert "ranks 0: eval_step in eval mode" in told
        assert "out of `if rank == 0`" in told
        assert "filled up" not in told


def moved() -> None:
    """No program follows ``.double()``: neither those that are there already, nor later ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB))
    program = partc.compile(model, "dp=2", tokens(ROWS, 4), loss=language_loss, plan="fsdp")
    stage = begun(program, model)
    stage.step(*tokens(ROWS, 5))
    assert len(stage._own.programs) == 2
    stage.double()
    for length in (4, 5):
        with pytest.raises(RunError, match="was cast to float64"):
            stage.step(*tokens(ROWS, length))


def test_no_program_follows_the_stage_to_another_dtype(world: Processes) -> None:
    world.run(moved, num=2)


def only_one() -> None:
    """A stage that may have one program refuses all else, and asks no other rank."""
    model = language()
    stage = begun(compiled("ddp", tokens(ROWS, 4), model), model, most_programs=1)
    with pytest.raises(RunError, match="the program was compiled for one global batch"):
        stage.step(*tokens(ROWS, 5))
    stage.eval()
    ids, labels = tokens(ROWS, 4)
    for call, batch in ((stage, (ids,)), (stage.eval_step, (ids, labels))):
        with pytest.raises(RunError, match="the stage has 1 programs already"):
            call(*batch)
    assert all(p.grad is None for p in stage.parameters())


def test_a_stage_of_one_program_runs_nothing_else(world: Processes) -> None:
    world.run(only_one, num=2)


class TwoHeads(nn.Module):
    """In eval mode a second head is read, which no training step does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        y: Tensor = self.head(h) if self.training else self.head(h) + self.other(h)
        return y


def second_head() -> None:
    torch.manual_seed(0)
    model = TwoHeads().double()
    x = torch.randn(8, 6, dtype=torch.float64)
    program = partc.compile(model, "dp=2", (x,), loss=squares, plan="fsdp")
    stage = begun(program, model).eval()
    close(stage(x), copy.deepcopy(model).eval()(x), "both heads")
    other, reference = stage.share(program.also(x, loss=other_squares)), copy.deepcopy(model)
    stage.train()
    compare_step(stage, reference, other.step(x), other_squares(reference, x))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(model(x).square().mean())


def other_squares(model: TwoHeads, x: Tensor) -> Tensor:
    return torch.as_tensor(model.other(model.body(x)).square().mean())


def test_what_the_first_program_does_not_read_others_may(world: Processes) -> None:
    world.run(second_head, num=2)


@pytest.mark.exhaustive
def test_entries_of_values_are_those_of_the_first_batch() -> None:
    """A table's rows are exchanged in a program of 4 rows, and not in that of 3, whole on all."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 2))
    batch = torch.randint(8, (4,)), torch.randint(2, (4,))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    program = partc.compile(model, "dp=2", batch, loss=loss, plan="fsdp")
    assert "[values]" in program.plan
    odd = batch[0][:3], batch[1][:3]
    [other] = program.for_shapes(odd).others
    partc.verify(other, model, odd, loss=loss).check()
