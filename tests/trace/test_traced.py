"""A step that is traced once serves any number of plans, and notices what changed behind it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partc
import partc.traced
from partc.errors import TraceError
from partc.lowering import traced
from partc.passes.runner import State

BATCH = torch.randn(8, 6), torch.randn(8, 4)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 4))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


@pytest.mark.exhaustive
def test_plans_are_those_of_a_fresh_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[State] = []

    def counted(*args: object, **options: object) -> State:
        traces.append(traced(*args, **options))  # type: ignore[arg-type]
        return traces[-1]

    step = partc.Traced(model_of(), BATCH, loss_of)
    monkeypatch.setattr(partc.traced, "traced", counted)
    plans = [("dp=2", "fsdp", 1), ("tp=2", "megatron", 1), ("dp=2", "ddp", 2), ("dp=2", "fsdp", 1)]
    made = [partc.compile(step, mesh, plan=plan, microbatches=m) for mesh, plan, m in plans]
    assert len(traces) == 1
    for program, (mesh, plan, m) in zip(made, plans, strict=True):
        fresh = partc.compile(model_of(), mesh, BATCH, loss=loss_of, plan=plan, microbatches=m)
        assert (program.plan, program.sources) == (fresh.plan, fresh.sources)
        assert str(program.cost) == str(fresh.cost)
    partc.verify(made[0], step.model, BATCH, loss_of).check(1e-11)


def test_training_and_inference_have_a_graph_each() -> None:
    step = partc.Traced(model_of(), BATCH[:1], lambda m, x: m(x).sum())
    assert step.graph().loss is not None
    with torch.no_grad():
        forward = partc.Traced(step.model, BATCH[:1])
        assert forward.graph().loss is None
    with pytest.raises(TraceError, match="the loss is a tensor"):
        forward.graph()


@pytest.mark.parametrize("change", ["eval", "frozen", "double", "tensor"])
def test_a_model_that_changed_is_refused(change: str) -> None:
    model = model_of()
    step = partc.Traced(model, BATCH, loss_of)
    step.graph()
    match change:
        case "eval":
            model.eval()
        case "frozen":
            model[0].requires_grad_(False)  # type: ignore[index]
        case "double":
            model.double()
        case "tensor":
            model.register_buffer("more", torch.zeros(1))
    with pytest.raises(TraceError, match="not as it was") as caught:
        partc.compile(step, "dp=2", plan="ddp")
    assert ("more" in caught.value.why) == (change == "tensor")


def test_what_belongs_to_the_trace_is_not_given_beside_it() -> None:
    step = partc.Traced(model_of(), BATCH, loss_of)
    with pytest.raises(TraceError, match="beside a traced step"):
        partc.compile(step, "dp=2", BATCH, plan="ddp")
    with pytest.raises(TraceError, match="no example inputs"):
        partc.compile(step.model, "dp=2", plan="ddp")
