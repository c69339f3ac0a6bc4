"""Losses and evaluations that run some stages of a pipeline alone, on real gloo processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import RunError
from partc.verification.processes import Processes
from tests.program.families import Gan, begun, close, gan, maker_loss

pytestmark = pytest.mark.gloo
Loss = Callable[..., Tensor]
STAGES = {2: ["critic"], 4: ["maker.2", "critic.0", "critic.2"]}


def critic_alone(model: Any, real: Tensor) -> Tensor:
    found: Tensor = model.critic(real).square().mean()
    return found


def maker_alone(model: Any, noise: Tensor) -> Tensor:
    found: Tensor = model.maker(noise).square().mean()
    return found


def drawn(loss: Loss, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    width = 6 if loss is critic_alone else 4
    return torch.randn(8, width, generator=generator, dtype=torch.float64)


def trained(ranks: int, microbatches: int) -> None:
    """Three losses in turn: of both halves, and of each alone."""
    model, reference = gan(), gan()
    program = partc.compile(
        model, {"pp": ranks}, (drawn(maker_loss, 0),), loss=maker_loss, plan="ddp",
        stages=STAGES[ranks], microbatches=microbatches,
    )  # fmt: skip
    stage = begun(program, model)
    others: list[Any] = [
        stage.share(program.also(drawn(loss, 0), loss=loss)) for loss in (critic_alone, maker_alone)
    ]
    ours, theirs = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (stage, reference))
    for seed in range(2):
        turns: Any = zip((maker_loss, critic_alone, maker_alone), (stage, *others), strict=True)
        for loss, run in turns:
            batch = drawn(loss, seed)
            stage.zero_grad()
            reference.zero_grad()
            expected = loss(reference, batch)
            close(run.step(batch), expected, loss.__name__)
            expected.backward()
            ours.step()
            theirs.step()
    for name, tensor in stage.full_state_dict().items():
        close(tensor, reference.get_parameter(name), name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 1)])
def test_losses_of_some_stages(world: Processes, ranks: int, microbatches: int) -> None:
    world.run(trained, ranks, microbatches, num=ranks)


class Sampled(Gan):
    """Two halves, of which the forward of the whole is the first."""

    def forward(self, noise: Tensor) -> Tensor:
        y: Tensor = self.maker(noise)
        return y


def sampled(mesh: str, options: dict[str, Any]) -> None:
    model, noise = Sampled().double(), drawn(maker_loss, 0)
    program = partc.compile(model, mesh, (noise,), loss=maker_loss, **options)
    reference = Sampled().double()
    stage = begun(program, reference)
    close(stage.step(noise), maker_loss(reference, noise), "loss")
    stage.eval()
    with torch.no_grad():
        close(stage(noise), reference(noise), "samples")
        with pytest.raises(RunError, match=r"plain.load_state_dict\(stage.full_state_dict\(\)\)"):
            stage.maker(noise)


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("dp=2", {"plan": "fsdp"}),
    ("pp=2", {"plan": "ddp", "stages": ["critic"]}),
]


@pytest.mark.parametrize(("mesh", "options"), LAYOUTS)
def test_a_generator_is_the_forward_of_its_model(
    world: Processes, mesh: str, options: dict[str, Any]
) -> None:
    world.run(sampled, mesh, options, num=2)


class Headed(nn.Module):
    """A model whose loss has a head that its forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


def headed_loss(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model.head(model(x)).square().mean()
    return found


def evaluated() -> None:
    torch.manual_seed(0)
    model, x = Headed().double(), drawn(maker_loss, 0)
    program = partc.compile(
        model, "pp=2", (x,), loss=headed_loss, plan="ddp", stages=["head"], microbatches=2
    )
    reference = Headed().double()
    reference.load_state_dict(model.state_dict())
    stage = program.module()
    close(stage.step(x), headed_loss(reference, x), "loss")
    stage.eval()
    close(stage(x), reference(x), "what the model returns")
    close(stage.eval_step(x), headed_loss(reference, x), "loss in eval mode")


def test_a_forward_without_the_last_stage(world: Processes) -> None:
    world.run(evaluated, num=2)
