"""Two threads in one stage: on one rank they wait for each other, on several they are refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from partc.api import compile
from partc.errors import RunError
from partc.program.stage.runtime import Stage
from tests.mistakes.things import one_rank


def loss(model: nn.Module, x: Tensor) -> Tensor:
    mean: Tensor = model(x).square().mean()
    return mean


def begun() -> tuple[Stage, Tensor]:
    model, x = nn.Linear(8, 4), torch.ones(4, 8)
    stage = compile(model, "dp=1", (x,), loss=loss, plan="ddp").module()
    stage.load_full(model)
    return stage, x


def test_threads_of_one_rank_wait_for_each_other() -> None:
    with one_rank():
        stage, x = begun()
        wanted = stage.step(x).item()
        with ThreadPoolExecutor(4) as threads:
            assert {value.item() for value in threads.map(stage.step, [x] * 20)} == {wanted}


@pytest.mark.parametrize("call", ["step", "forward", "eval_step"])
def test_a_second_thread_is_refused_where_ranks_are_several(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with one_rank():
        stage, x = begun()
        calls: dict[str, Callable[[Tensor], object]] = {
            "step": stage.step,
            "forward": stage,
            "eval_step": stage.eval_step,
        }
        monkeypatch.setattr(stage._turn, "num_ranks", 2)
        with ThreadPoolExecutor(1) as threads, stage._turn.of("step"):
            found = threads.submit(calls[call], x).exception()
        assert isinstance(found, RunError)
        assert f"stage.{call}: another thread is in a step of this stage" in str(found)
