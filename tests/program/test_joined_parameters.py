"""In a pipeline a rank has the parameters of its own stages: what joins them is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from partc.errors import RunError
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.program.training import batch_of, loss_of, model_of, save_program, stage_of

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "stages"
    return save_program(path, "pp=2", "ddp", microbatches=2)


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def plain_gradient(path: Path) -> None:
    stage = stage_of(path)
    param = next(stage.parameters())
    param.grad = torch.zeros_like(param)
    stage.step(*batch_of())
    param.grad = torch.zeros(param.shape)
    with pytest.raises(RunError, match="grad: was set to a plain tensor, in a pipeline"):
        stage.step(*batch_of())


def test_plain_gradients_are_refused(world: Processes, stages: Path) -> None:
    world.run(plain_gradient, stages, num=2)


def vectors(path: Path) -> None:
    stage, model = stage_of(path), model_of()
    vector = parameters_to_vector(stage.parameters())
    uses: list[Callable[[], object]] = [
        lambda: whole(vector),
        lambda: vector.detach().tolist(),
        lambda: vector.norm().item(),
        lambda: torch.stack([p.norm() for p in stage.parameters()]).norm().item(),
        lambda: float(sum(p.detach().sum() for p in stage.parameters())),
    ]
    for use in uses:
        with pytest.raises(RunError, match="is of this pipeline rank's parameters alone"):
            use()
    before = {name: whole(p).clone() for name, p in stage.named_parameters()}
    of_all = parameters_to_vector(model.parameters())
    with pytest.raises(RunError, match=rf"assigned a part of {of_all.numel()} elements"):
        vector_to_parameters(of_all, stage.parameters())
    vector_to_parameters(vector * 0.5, stage.parameters())  # of this rank's own
    for name, param in stage.named_parameters():
        torch.testing.assert_close(whole(param), before[name] * 0.5)
        param.data = of_all[: param.numel()].view(param.shape).clone()


def test_vectors_of_all_parameters_are_refused(world: Processes, stages: Path) -> None:
    world.run(vectors, stages, num=2)


def largest(grad: Tensor) -> Tensor:
    """All but the largest quarter of the elements set to 0, by lists of indices."""
    flat = grad.flatten()
    at = flat.abs().topk(max(1, flat.numel() // 4))[1]
    kept = torch.zeros_like(flat)
    kept[at] = flat[at]
    return kept.view_as(grad)


def of_one_parameter(path: Path) -> None:
    stage, model = stage_of(path), model_of()
    grads: list[list[dict[str, Any]]] = [[], []]
    for seed in range(3):
        for module, each in zip((stage, model), grads, strict=True):
            module.zero_grad()
            if isinstance(module, Stage):
                module.step(*batch_of(seed))
            else:
                loss_of(module, *batch_of(seed)).backward()
            named = nn.Module.named_parameters(module)
            each.append({name: p.grad.clone() for name, p in named if p.grad is not None})
    uses: list[Callable[[list[Any]], Any]] = [
        lambda each: torch.stack(each).mean(0),
        lambda each: torch.cat([x.flatten() for x in each]).sort()[0],
        lambda each: largest(each[0]),
    ]
    for name in grads[0][0]:
        ours, theirs = ([each[name] for each in side] for side in grads)
        for use in uses:
            torch.testing.assert_close(whole(use(ours)), use(theirs), msg=name)


def test_lists_of_one_parameters_gradients_are_right(world: Processes, stages: Path) -> None:
    world.run(of_one_parameter, stages, num=2)
