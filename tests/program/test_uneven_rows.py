"""Ranks that were given different numbers of rows compute all of them, on real gloo processes."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import Tensor, nn

import partc
from partc.errors import RunError
from partc.verification.processes import Processes
from tests.program.families import close, compare_step, language, language_loss, tokens


def with_logits(model: nn.Module, ids: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return language_loss(model, ids, labels), {"logits": model(ids)}


def uneven(mesh: str, plan: str) -> None:
    model, reference = language(), language()
    program = partc.compile(model, mesh, tokens(2, 6), loss=with_logits, plan=plan, batch="local")
    stage = program.module(partial="replicate")
    piece = program.data_rank(dist.get_rank())
    for begin, rows in ((3, 5), (0, 1)):  # 3 and 2 rows, none and 1
        batch = tokens(rows, 6)
        mine = slice(0, begin) if piece == 0 else slice(begin, rows)
        own = [x[mine] for x in batch]
        loss, extras = stage.train().step(*own)
        expected = reference(batch[0])[mine]
        compare_step(stage, reference, loss, language_loss(reference, *batch))
        close(extras["logits"], expected, "extras")
        close(stage.eval()(own[0]), expected, "results")
        loss, extras = stage.eval_step(*own)
        close(extras["logits"], expected, "extras of the loss in eval mode")


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_ranks_with_other_numbers_of_rows_compute_all_of_them(world: Processes) -> None:
    world.run(uneven, "dp=2,tp=2", "fsdp+megatron")


def not_said() -> None:
    program = partc.compile(
        language(), "dp=2", tokens(2, 6), loss=language_loss, plan="ddp", batch="local"
    )
    stage = program.module()
    with pytest.raises(RunError, match="replicate"):
        stage.step(*tokens(2 + dist.get_rank(), 6))
    lengths = program.module(partial="replicate")
    with pytest.raises(RunError, match="ranks differ"):
        lengths.step(*tokens(2, 6 + dist.get_rank()))


@pytest.mark.gloo
def test_other_numbers_of_rows_are_refused_where_nothing_says_what_is_meant(
    world: Processes,
) -> None:
    world.run(not_said, num=2)
