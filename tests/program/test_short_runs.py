"""Short runs whose sequences have other lengths on each data rank: on real ranks, in float64.

Each run is a process group, a model and lengths of its own. The suite makes 6 runs, each layout in
each way; for more:

    SHORT_RUNS=100 python -m pytest tests/program/test_short_runs.py
"""

from __future__ import annotations

import copy
import os
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.verification.processes import Processes
from partc.wrappers.how import How
from partc.wrappers.prepared import Prepared
from tests.compiles import counted
from tests.program.families import VOCAB, Language, close, language_loss, whole

pytestmark = pytest.mark.gloo
NUM_RUNS = int(os.environ.get("SHORT_RUNS", "6"))
NUM_RANKS, ROWS, PAD, IGNORED = 2, 3, 0, -100  # rows of one rank
LAYOUTS = [("dp=2", "ddp"), ("dp=2", "fsdp")]
Batch = tuple[Tensor, Tensor]


def rank_batch(length: int, draw: torch.Generator) -> Batch:
    """A rank's rows, some of whose words are ignored, so that ranks have other numbers of them."""
    ids, labels = (torch.randint(VOCAB, (ROWS, length), generator=draw) for _ in range(2))
    labels[torch.rand(labels.shape, generator=draw) < 0.3] = IGNORED
    labels[0, 0] = 1  # a rank with none at all is another edge
    return ids, labels


def filled(batches: list[Batch]) -> Batch:
    """The rows of all ranks, filled up to the longest: what one process is given."""
    longest = max(ids.shape[1] for ids, _ in batches)
    pairs = [(ids, labels, (0, longest - ids.shape[1])) for ids, labels in batches]
    ids = torch.cat([F.pad(each, more, value=PAD) for each, _, more in pairs])
    return ids, torch.cat([F.pad(each, more, value=IGNORED) for _, each, more in pairs])


def steps_of(seed: int) -> list[list[Batch]]:
    """The batches of all ranks in each step of a run, of few lengths that come again."""
    chance, draw = Random(seed), torch.Generator().manual_seed(seed)
    lengths = chance.sample(range(2, 12), chance.choice((2, 2, 3)))
    number = chance.randint(4, 8)
    return [
        [rank_batch(chance.choice(lengths), draw) for _ in range(NUM_RANKS)] for _ in range(number)
    ]


def model_of(seed: int) -> Language:
    torch.manual_seed(seed)
    return Language().double()


def run_of(seed: int) -> tuple[int, int, int]:
    """A run beside one process: how many steps it has, how many shapes, how often it compiles."""
    mesh, plan = LAYOUTS[seed % len(LAYOUTS)]
    reference, shapes = model_of(seed), set[int]()
    parallel: Any = partc.parallelize(
        model_of(seed), mesh, loss=language_loss, plan=plan, pad={"ids": PAD, "labels": IGNORED}
    )
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (parallel, reference))
    steps = steps_of(seed)
    with counted() as compiled:
        for batches in steps:
            batch, known = filled(batches), len(compiled)
            new = batch[0].shape[1] not in shapes
            shapes.add(batch[0].shape[1])
            ours.zero_grad()
            theirs.zero_grad()
            loss = stepped(parallel, batches[dist.get_rank()], way=seed // len(LAYOUTS) % 3)
            expected = language_loss(reference, *batch)
            close(loss, expected, "loss")
            expected.backward()
            same_gradients(parallel, reference)
            ours.step()
            theirs.step()
            assert len(compiled) - known == new
    return len(steps), len(shapes), len(compiled)


def stepped(parallel: Any, batch: Batch, way: int) -> Any:
    """The loss of a step, in each way in which scripts ask for it."""
    ids, labels = batch
    if way == 0:
        return parallel.step(ids, labels)
    if way == 1:
        return parallel.step(ids, labels=labels)
    loss = parallel(labels=labels, ids=ids)
    loss.backward()
    return loss


def same_gradients(parallel: nn.Module, reference: nn.Module) -> None:
    for (name, mine), theirs in zip(
        parallel.named_parameters(), reference.parameters(), strict=True
    ):
        assert mine.grad is not None
        assert theirs.grad is not None
        close(whole(mine.grad), theirs.grad, f"gradient of {name}")


@pytest.mark.exhaustive
def test_short_runs_of_other_lengths_on_each_rank(world: Processes) -> None:
    """No run hangs, each is that of one process, and a shape that was seen compiles nothing."""
    differing = 0
    for seed in range(NUM_RUNS):
        found = world.run(run_of, seed, num=NUM_RANKS)
        assert len({*found}) == 1, (seed, found)
        num_steps, num_shapes, num_compiled = found[0]
        assert num_compiled == num_shapes < num_steps, seed
        lengths = [[ids.shape[1] for ids, _ in batches] for batches in steps_of(seed)]
        differing += sum(len({*each}) > 1 for each in lengths)
    assert differing > NUM_RUNS  # of all steps more than one for each run


# what is filled up ---------------------------------------------------------------------------
def loss_of_dict(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return language_loss(model, batch["ids"], batch["labels"])


def in_dicts() -> str:
    """A batch in a dict, another loss, evaluations; then a rank that leaves out an argument."""
    pad = {"ids": PAD, "labels": IGNORED, "batch.ids": PAD, "batch.labels": IGNORED}
    reference, draw = model_of(0), torch.Generator().manual_seed(0)
    batches = [rank_batch(length, draw) for length in (4, 7)]
    parallel = partc.parallelize(model_of(0), "dp=2", loss=loss_of_dict, plan="fsdp", pad=pad)
    ids, labels = batches[dist.get_rank()]
    mine, whole_batch = {"ids": ids, "labels": labels}, filled(batches)
    expected = language_loss(reference, *whole_batch)
    close(parallel.step(mine), expected, "loss of a dict")
    assert [*mine.values()] == [ids, labels]  # the script's own is as it was
    other = parallel.also(language_loss)
    close(other.step(ids, labels), expected, "another loss")
    close(other(ids, labels), expected, "another loss, called")
    close(other.eval_step(ids, labels), expected, "another loss, evaluated")
    close(parallel.eval_step(mine), expected, "evaluated")
    rows = slice(ROWS * dist.get_rank(), ROWS * (dist.get_rank() + 1))
    close(parallel.eval()(ids), reference(whole_batch[0])[rows], "results, of the longest")
    parallel.train()
    try:
        other.step(ids, labels) if dist.get_rank() == 0 else other.step(ids)
    except partc.errors.PartcError as error:
        return str(error)
    return ""


def test_what_pad_names_is_filled_up_wherever_it_is_given(world: Processes) -> None:
    told = world.run(in_dicts, num=2)
    assert "rank 1 refused to begin" in told[0]
    assert "labels" in told[1]


# sequence first ------------------------------------------------------------------------------
class SequenceFirst(nn.Module):
    """An encoder of ``i64[T,B]``, which does not look at padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids == PAD).transpose(0, 1)
        result: Tensor = self.head(self.layer(self.embed(ids), src_key_padding_mask=mask))
        return result


def of_next_words(model: nn.Module, ids: Tensor) -> Tensor:
    logits, labels = model(ids[:-1]), ids[1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


def of_columns() -> None:
    """Batches of other lengths on each rank, also in the first step; dim 1 is the batch."""
    torch.manual_seed(0)
    reference = SequenceFirst().double()
    model: Any = partc.parallelize(
        copy.deepcopy(reference), "dp=2", loss=of_next_words, plan="fsdp", pad={"ids": PAD}
    )
    draw = torch.Generator().manual_seed(1)
    for lengths in ((5, 7), (8, 4)):
        each = [torch.randint(1, 9, (length, 3), generator=draw) for length in lengths]
        ids = torch.cat([F.pad(x, (0, 0, 0, max(lengths) - len(x)), value=PAD) for x in each], 1)
        mine = each[dist.get_rank()]
        close(model.step(mine), of_next_words(reference, ids), "loss")
        close(model.eval_step(mine), of_next_words(reference, ids), "evaluated")
    uneven = torch.cat([ids[:, :2], ids[:, 3:]], 1)  # 2 and 3 columns, of which all ranks get all
    loss = model.step(mine[:, : 2 + dist.get_rank()])
    close(loss, of_next_words(reference, uneven), "loss of uneven columns")
    model._how.pad = {}
    with pytest.raises(partc.errors.RunError, match="Where only lengths differ, pad="):
        model.step(mine)


@pytest.mark.exhaustive
def test_sequence_first_batches_of_other_lengths_on_each_rank(world: Processes) -> None:
    world.run(of_columns, num=2)


# a model that returns its loss ---------------------------------------------------------------
class WithLoss(SequenceFirst):
    """Called without labels it gives what it would give them for."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = super().forward(ids)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


def of_its_own_loss(accelerated: bool) -> int:
    """Called by place, by name, and by both in turn: one program a shape, and evaluations."""
    torch.manual_seed(0)
    reference, draw = WithLoss().double(), torch.Generator().manual_seed(1)
    model, pad = copy.deepcopy(reference), {"ids": PAD, "labels": PAD}
    ours: Any = (
        Prepared(model, How("dp=2", "fsdp", pad=pad), "cpu") if accelerated
        else partc.parallelize(model, "dp=2", plan="fsdp", pad=pad)
    )  # fmt: skip
    lengths = [(5, 7), (6, 7), (7, 3)]
    with counted() as compiled:
        for turn, each in enumerate([*lengths, *lengths]):
            ids = [torch.randint(1, 9, (length, 3), generator=draw) for length in each]
            whole_ids = torch.cat([F.pad(x, (0, 0, 0, 7 - len(x)), value=PAD) for x in ids], 1)
            expected, x = reference(whole_ids, whole_ids), ids[dist.get_rank()]
            ours.train(turn < len(lengths))
            forms: Any = [((x, x), {}), ((), {"labels": x, "ids": x}), ((x,), {"labels": x})]
            args, named = forms[turn % 3]
            close(ours(*args, **named), expected, f"call {turn}")
        columns = slice(3 * dist.get_rank(), 3 * (dist.get_rank() + 1))
        close(ours(ids=x), reference(whole_ids)[:, columns], "results, of the longest")
    return len(compiled)


@pytest.mark.exhaustive
@pytest.mark.parametrize("accelerated", [False, True])
def test_a_model_s_own_loss_takes_its_inputs_by_place_and_by_name(
    accelerated: bool, world: Processes
) -> None:
    assert world.run(of_its_own_loss, accelerated, num=2) == [3, 3]
