"""Sequence-first models with flat targets, on batches of several lengths: ``i64[24]``, ``i64[16]``.

The targets are cut in a block for each step, of which another length has another number. On real
gloo processes, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import PlanError, ShardingError
from partc.plan.sharding import cut
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.program.families import begun, close, compare_step

pytestmark = pytest.mark.gloo
VOCAB, ROWS = 12, 8
LENGTHS = (3, 2, 6)  # less than the first, and twice as much
FIRST, LESS, MORE = LENGTHS
TWO = FIRST, MORE  # where it is what comes out, or goes in, that is tested
Model = Callable[[], nn.Module]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(VOCAB, 8), nn.LSTM(8, 8), nn.Linear(8, 12)

    def forward(self, data: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(self.embed(data))[0])
        return y.view(-1, VOCAB)  # f64[T*B,12]


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)

    def forward(self, data: Tensor) -> Tensor:
        mask = torch.full((len(data),) * 2, -torch.inf, dtype=torch.float64).triu(1)
        y: Tensor = self.head(self.layer(self.embed(data), src_mask=mask))
        return y.view(-1, VOCAB)


def recurrent() -> nn.Module:
    torch.manual_seed(0)
    return Recurrent().double()


def attentive() -> nn.Module:
    torch.manual_seed(0)
    return Attentive().double()


def flat_loss(model: nn.Module, data: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(data), targets)


def with_logits(
    model: nn.Module, data: Tensor, targets: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(data)
    return F.cross_entropy(logits, targets), {"logits": logits}


def rows_loss(model: nn.Module, data: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(data), labels.flatten())


def words(steps: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """``i64[T,B]``, and what follows each word."""
    generator = torch.Generator().manual_seed(steps)
    ids = torch.randint(VOCAB, (steps + 1, rows), generator=generator)
    return ids[:-1], ids[1:]


def own(x: Tensor, batch: str, num: int = 2) -> Tensor:
    """This data rank's samples of what has them along dim 1, or all."""
    if batch == "global":
        return x
    return x.chunk(num, 1)[dist.get_rank() * num // dist.get_world_size()].contiguous()


def own_flat(x: Tensor, steps: int, batch: str) -> Tensor:
    return own(x.unflatten(0, (steps, -1)), batch).flatten(0, 1)


def compare(stage: Stage, reference: nn.Module, steps: int, batch: str) -> None:
    """A step, the loss and the results in eval mode of one length."""
    data, targets = words(steps)
    given = own(data, batch), own(targets, batch).flatten()
    expected = flat_loss(reference, data, targets.flatten())
    stage.train()
    compare_step(stage, reference, stage.step(*given), expected)
    stage.eval()
    close(stage.eval_step(*given), expected, f"loss of {steps} steps in eval mode")
    found = own_flat(reference(data), steps, batch)
    close(stage(given[0]), found, f"results of {steps} steps")


def follow(
    model: Model, mesh: str, plan: str, batch: str, lengths: tuple[int, ...], first: int = 0
) -> None:
    """The program is compiled for the first of the lengths, or for another one."""
    data, targets = words(first or lengths[0])
    given, kept = (own(data, batch), own(targets, batch).flatten()), model()
    program = partc.compile(kept, mesh, given, loss=flat_loss, plan=plan, batch=batch)
    stage, reference = begun(program, kept), model()
    for steps in lengths:
        compare(stage, reference, steps, batch)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "plan", "batch"),
    [
        (recurrent, "ddp", "global"),
        (recurrent, "fsdp", "local"),
        (attentive, "ddp", "local"),
        (attentive, "fsdp", "global"),
    ],
)
def test_three_lengths(world: Processes, model: Model, plan: str, batch: str) -> None:
    world.run(follow, model, "dp=2", plan, batch, LENGTHS, num=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [recurrent, attentive])
def test_three_lengths_by_tensor_ranks(world: Processes, model: Model) -> None:
    world.run(follow, model, "tp=2", "megatron", "global", LENGTHS, num=2)


def in_microbatches(mesh: str) -> None:
    kept, reference, (data, targets) = attentive(), attentive(), words(LENGTHS[0])
    program = partc.compile(
        kept, mesh, (data, targets.flatten()), loss=flat_loss, plan="ddp", microbatches=2
    )
    compare(begun(program, kept), reference, MORE, "global")


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
def test_a_longer_batch_in_microbatches(world: Processes, mesh: str) -> None:
    world.run(in_microbatches, mesh, num=2)


@pytest.mark.exhaustive
def test_a_shorter_batch_by_data_and_tensor_ranks(world: Processes) -> None:
    world.run(follow, attentive, "dp=2,tp=2", "fsdp+megatron", "local", (LESS,), FIRST, num=4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("batch", "lengths"), [("global", (1, 4, 1)), ("global", (4, 1)), ("local", (1, 4, 1))]
)
def test_from_and_to_one_step(world: Processes, batch: str, lengths: tuple[int, ...]) -> None:
    """Targets of one step look like rows, and have no blocks."""
    world.run(follow, recurrent, "dp=2", "ddp", batch, lengths, num=2)


# compiled ahead ------------------------------------------------------------------------------
def loaded(folder: Path) -> None:
    stage, reference = begun(partc.load(folder), recurrent()), recurrent()
    for steps in TWO:
        compare(stage, reference, steps, "local")


@pytest.mark.exhaustive
def test_saved_programs_have_the_blocks_of_their_lengths(world: Processes, tmp_path: Path) -> None:
    pieces = [words(n, ROWS // 2) for n in TWO]
    batches, model = [(data, targets.flatten()) for data, targets in pieces], recurrent()
    program = partc.compile(model, "dp=2", batches[0], loss=flat_loss, plan="ddp", batch="local")
    program = program.for_shapes(*batches, modes=("train", "eval"))
    program = program.for_shapes(*(each[:1] for each in batches), modes=("forward",))
    program.save(tmp_path / "made")
    world.run(loaded, tmp_path / "made", num=2)


# results -------------------------------------------------------------------------------------
def extras(batch: str) -> None:
    data, targets = words(LENGTHS[0])
    given, kept = (own(data, batch), own(targets, batch).flatten()), recurrent()
    program = partc.compile(kept, "dp=2", given, loss=with_logits, plan="ddp", batch=batch)
    stage, reference = begun(program, kept), recurrent()
    for steps in TWO:
        data, targets = words(steps)
        given = own(data, batch), own(targets, batch).flatten()
        expected, whole = with_logits(reference, data, targets.flatten())
        for call in (stage.step, stage.eval_step):
            loss, found = call(*given)
            close(loss, expected, "loss")
            close(found["logits"], own_flat(whole["logits"], steps, batch), "logits")


@pytest.mark.exhaustive
def test_extras_have_the_blocks_of_their_length(world: Processes) -> None:
    world.run(extras, "local", num=2)


def uneven() -> None:
    """Ranks have 3 and 2 sequences; each gets back its own rows of the flat results."""
    data, labels = words(LENGTHS[0])
    given, kept = (own(data, "local"), own(labels, "local")), recurrent()
    program = partc.compile(kept, "dp=2", given, loss=rows_loss, plan="ddp", batch="local")
    stage, reference = begun(program, kept, partial="replicate").eval(), recurrent()
    stage(given[0])
    for steps in TWO:
        data, _ = words(steps, 5)
        parts = [x.contiguous() for x in data.split((3, 2), 1)]
        mine = reference(data).unflatten(0, (steps, 5)).split((3, 2), 1)[dist.get_rank()]
        close(stage(parts[dist.get_rank()]), mine.flatten(0, 1), f"results of {steps} steps")


@pytest.mark.exhaustive
def test_flat_results_of_uneven_rows(world: Processes) -> None:
    world.run(uneven, num=2)


def rows_with_logits(
    model: nn.Module, data: Tensor, labels: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    return with_logits(model, data, labels.flatten())


def uneven_extras() -> None:
    data, labels = words(LENGTHS[0])
    given, kept = (own(data, "local"), own(labels, "local")), recurrent()
    program = partc.compile(kept, "dp=2", given, loss=rows_with_logits, plan="ddp", batch="local")
    stage, reference = begun(program, kept, partial="replicate"), recurrent()
    batch = words(MORE, 5)
    mine = (x.split((3, 2), 1)[dist.get_rank()].contiguous() for x in batch)
    expected, whole = rows_with_logits(reference, *batch)
    loss, found = stage.step(*mine)
    close(loss, expected, "loss")
    own_rows = whole["logits"].unflatten(0, (MORE, 5)).split((3, 2), 1)[dist.get_rank()]
    close(found["logits"], own_rows.flatten(0, 1), "logits")


@pytest.mark.exhaustive
def test_flat_extras_of_uneven_rows(world: Processes) -> None:
    world.run(uneven_extras, num=2)


# forwards of flat inputs ---------------------------------------------------------------------
class Weighted(Recurrent):
    """Which also takes a flat weight for each word, ``f64[T*B]``."""

    def forward(self, data: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(data) * weights[:, None]


def weighted() -> nn.Module:
    torch.manual_seed(0)
    return Weighted().double()


def weighted_loss(model: nn.Module, data: Tensor, weights: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(data, weights), targets)


def flat_forwards(batch: str) -> None:
    kept, stage, reference = weighted(), None, weighted()
    for steps in TWO:
        data, targets = words(steps)
        weights = torch.linspace(0, 1, steps * ROWS, dtype=torch.float64)
        flat = own_flat(weights, steps, batch), own_flat(targets.flatten(), steps, batch)
        given = own(data, batch), *flat
        if stage is None:
            program = partc.compile(
                kept, "dp=2", given, loss=weighted_loss, plan="ddp", batch=batch
            )
            stage = begun(program, kept)
        expected = weighted_loss(reference, data, weights, targets.flatten())
        compare_step(stage.train(), reference, stage.step(*given), expected)
        found = stage.eval()(*given[:2])
        close(found, own_flat(reference(data, weights), steps, batch), f"{steps} steps")


@pytest.mark.exhaustive
def test_forwards_of_flat_inputs(world: Processes) -> None:
    world.run(flat_forwards, "global", num=2)


# read otherwise in eval mode -----------------------------------------------------------------
def unread(model: nn.Module, data: Tensor, targets: Tensor) -> Tensor:
    return flat_loss(model, data, targets) if model.training else model(data).square().mean()


def sorted_then(model: nn.Module, data: Tensor, targets: Tensor) -> Tensor:
    loss = flat_loss(model, data, targets)
    return loss if model.training else loss + targets.sort().values[0]


def evaluated(loss: Any, batch: str) -> str:
    """Evaluations of other lengths; empty, or why they are refused."""
    (data, targets), kept, reference = words(LENGTHS[0]), recurrent(), recurrent().eval()
    given = own(data, batch), own(targets, batch).flatten()
    stage = begun(partc.compile(kept, "dp=2", given, loss=loss, batch=batch), kept)
    for steps in LENGTHS[1:]:
        data, targets = words(steps)
        try:
            found = stage.eval_step(own(data, batch), own(targets, batch).flatten())
        except PlanError as error:
            return str(error)
        close(found, loss(reference, data, targets.flatten()), f"{steps} steps")
    return ""


@pytest.mark.exhaustive
def test_what_is_not_read_has_no_blocks(world: Processes) -> None:
    assert world.run(evaluated, unread, "local", num=2) == ["", ""]


@pytest.mark.exhaustive
def test_blocks_that_are_not_found_are_refused_where_ranks_have_pieces(world: Processes) -> None:
    assert world.run(evaluated, sorted_then, "global", num=2) == ["", ""]
    for told in world.run(evaluated, sorted_then, "local", num=2):
        assert "it is not found which part of it each rank is given" in told
        assert "[24], was cut in 3 blocks" in told
        assert "flatten it in the loss" in told


# pinned --------------------------------------------------------------------------------------
def pinned(entry: dict[str, Any]) -> Any:
    """The program of 2 steps where the plan pins how the targets of 3 are cut."""
    model, (data, targets) = recurrent(), words(3)
    plan = partc.Plan(preset="ddp", inputs={"targets": entry})
    program = partc.compile(model, "dp=2", (data, targets.flatten()), loss=flat_loss, plan=plan)
    data, targets = words(2)
    return program.for_shapes((data, targets.flatten())).others[0]


@pytest.mark.exhaustive
def test_what_the_plan_pins_stays() -> None:
    assert partc.Plan.parse(pinned({}).plan).inputs["targets"] == {}


def test_pinned_blocks_of_another_length_are_refused() -> None:
    with pytest.raises(ShardingError) as error:
        pinned({"dp": cut(0, 3)})
    told = str(error.value)
    assert "dim 0 of i64[16] cannot be cut by dp=2 (16 is not a multiple of 6: 3 blocks" in told
    assert "Leave the entry out of the plan" in told
