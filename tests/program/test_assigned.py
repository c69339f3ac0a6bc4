"""What a user assigns to ``.data`` and ``.grad``, and the order of tensors, is as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils import _pytree as pytree

import partc
from partc.errors import RunError
from partc.program import load
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.example_program import example_batch, example_loss, example_model, example_program
from tests.program.training import batch_of, loss_of, model_of, save_program, stage_of

pytestmark = pytest.mark.gloo
Step = Callable[[], Tensor]
Use = Callable[[nn.Module, Step], Any]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("programs")
    return [save_program(path / plan, "dp=2", plan) for plan in ("fsdp", "ddp")]


def whole(value: Any) -> Any:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def sides(path: Path | None) -> list[tuple[nn.Module, Step]]:
    """A stage and the model it is compared with, each with one step of it; None: fused weights."""
    fused = path is None
    model: nn.Module = example_model() if fused else model_of()
    batch = example_batch() if fused else batch_of()
    stage = example_program(1, 2).module() if path is None else stage_of(path)
    stage.load_full(model)

    def step() -> Tensor:
        loss = (example_loss if fused else loss_of)(model, *batch)
        loss.backward()
        return loss.detach()

    return [(stage, lambda: stage.step(*batch)), (model, step)]


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


# .data ---------------------------------------------------------------------------------------
def ema_swapped(module: nn.Module, step: Step) -> Any:
    """A shadow of the weights, put in their place for a step and taken out again."""
    optimizer = torch.optim.SGD(trained(module).values(), lr=0.1)
    shadow = {name: p.data.clone() for name, p in trained(module).items()}
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(step())
        optimizer.step()
        for name, p in trained(module).items():
            shadow[name] = 0.5 * shadow[name] + 0.5 * p.data
        backup = {name: p.data for name, p in trained(module).items()}
        for name, p in trained(module).items():
            p.data = shadow[name]
        losses.append(step())
        for name, p in trained(module).items():
            p.data = backup[name]
    return losses, shadow


def swapped(module: nn.Module, step: Step) -> Any:
    same: dict[torch.Size, list[nn.Parameter]] = {}
    for p in trained(module).values():
        same.setdefault(p.shape, []).append(p)
    one, other = (max(same.values(), key=len) * 2)[:2]  # of the fused program one alone
    with torch.no_grad():
        other.add_(0.5)
    one.data, other.data = other.data, one.data
    return step(), one.grad, other.grad


def followed(module: nn.Module, step: Step) -> Any:
    """What was assigned is the parameter's memory: either sees what is written to the other."""
    p = max(trained(module).values(), key=Tensor.numel)
    old, new = p.data, p.data * 0.5
    p.data = new
    new.mul_(0.5)
    loss = step()
    torch.optim.SGD([p], lr=0.1).step()
    old.zero_()
    return loss, p, new, old


def assigned_plain(module: nn.Module, step: Step) -> Any:
    """Plain tensors are copied; what was read before keeps its values."""
    old = {name: p.data for name, p in trained(module).items()}
    for p in trained(module).values():
        p.data = torch.linspace(-0.3, 0.3, p.numel()).view(p.shape)
    first = step()
    for name, p in trained(module).items():
        p.data = old[name]
    return first, step()


def assigned_gradient_data(module: nn.Module, step: Step) -> Any:
    step()
    p = max(trained(module).values(), key=Tensor.numel)
    assert p.grad is not None
    before = p.grad.data
    p.grad.data = before * 3
    step()
    now, p.grad.data = p.grad.clone(), before
    step()
    return now, p.grad, before


def of_a_vector(module: nn.Module, step: Step) -> Any:
    vector = whole(parameters_to_vector(trained(module).values()))
    step_along = torch.linspace(-0.3, 0.3, vector.numel())
    vector_to_parameters(vector + step_along, trained(module).values())
    return vector, step()


DATA: list[Use] = [
    ema_swapped, swapped, followed, assigned_plain, assigned_gradient_data, of_a_vector,
]  # fmt: skip


def compared(paths: list[Path | None], uses: list[Use]) -> None:
    for path in paths:
        for use in uses:
            found, expected = (use(module, step) for module, step in sides(path))
            why = f"{use.__name__} of {path}"
            for ours, theirs in zip(leaves(found), leaves(expected), strict=True):
                torch.testing.assert_close(whole(ours), theirs, msg=why, rtol=1e-5, atol=1e-6)


def leaves(value: Any) -> list[Any]:
    return [x.detach() if isinstance(x, Tensor) else x for x in pytree.tree_leaves(value)]


@pytest.mark.exhaustive
def test_assigned_data_is_the_memory_of_the_parameter(
    world: Processes, programs: list[Path]
) -> None:
    world.run(compared, [*programs, None], DATA, num=2)


def data_refused(path: Path) -> None:
    stage = stage_of(path)
    one, other = (stage.get_parameter(f"blocks.{i}.up.bias") for i in (0, 1))
    other.data = one.data
    with pytest.raises(RunError, match=r"blocks.1.up.bias.data: is the memory of blocks.0.up.bias"):
        stage.step(*batch_of())
    other.data = one.data.clone()
    stage.step(*batch_of())
    twin = copy.deepcopy(stage)
    twin.get_parameter("gain").data = torch.tensor(3.0)  # which reaches the copy alone
    assert stage.get_parameter("gain").item() == 1.0
    assert copy.deepcopy(one).follower is None  # type: ignore[attr-defined]


@pytest.mark.exhaustive
def test_memory_of_two_parameters_is_refused(world: Processes, programs: list[Path]) -> None:
    world.run(data_refused, programs[0], num=2)


# .grad ---------------------------------------------------------------------------------------
def views_of_a_flat_buffer(module: nn.Module, step: Step) -> Any:
    params = list(trained(module).values())
    flat, at = torch.zeros(sum(p.numel() for p in params)), 0
    for p in params:
        p.grad = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    step()
    step()
    twice = flat.clone()
    flat.mul_(0.5)
    torch.optim.SGD(params, lr=0.1).step()
    for p in params:
        assert p.grad is not None
        p.grad.zero_()
    return twice, step(), flat


def plain_or_of_another_layout(module: nn.Module, step: Step) -> Any:
    """What the user holds gets what the step adds; None lets it go."""
    held = {}
    for i, (name, p) in enumerate(trained(module).items()):
        rows = (p.data * 2).sum(-1, True).expand_as(p).clone()
        held[name] = torch.zeros(p.shape) if i % 2 else rows
        p.grad = held[name]
    step()
    kept = {name: whole(grad).clone() for name, grad in held.items()}
    module.zero_grad()
    step()
    return kept, held, [p.grad for p in trained(module).values()]


def held_over_autograd(module: nn.Module, step: Step) -> Any:
    """A penalty of the script adds to the gradient that the user holds."""
    p = max(trained(module).values(), key=Tensor.numel)
    step()
    own = p.grad
    p.square().sum().backward()
    plain = p.grad = torch.ones(p.shape)
    p.square().sum().backward()
    step()
    return own, plain, p.grad


def clipped(module: nn.Module, step: Step) -> Any:
    plain = {name: torch.zeros(p.shape) for name, p in trained(module).items()}
    for name, p in trained(module).items():
        p.grad = plain[name]
    step()
    clip: Any = module.clip_grad_norm_ if isinstance(module, Stage) else (
        lambda most: nn.utils.clip_grad_norm_(module.parameters(), most)
    )  # fmt: skip
    return clip(0.01), plain


def by_backward(module: nn.Module, step: Step) -> Any:
    plain = {name: torch.ones(p.shape) for name, p in trained(module).items()}
    for name, p in trained(module).items():
        p.grad = plain[name]
    if isinstance(module, Stage):
        batch = example_batch() if "up.weight" in plain else batch_of()
        module(*batch).backward()
    else:
        step()
    return plain, [p.grad for p in trained(module).values()]


def unscaled(module: nn.Module, step: Step) -> Any:
    """GradScaler looks at plain gradients and at others together."""
    optimizer = torch.optim.SGD(trained(module).values(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    first = next(iter(trained(module).values()))
    plain = first.grad = torch.ones(first.shape)
    step()
    scaler.unscale_(optimizer)
    now = plain.clone(), [p.grad for p in trained(module).values()]
    scaler.step(optimizer)
    return now, plain, step()


GRADIENTS: list[Use] = [
    views_of_a_flat_buffer, plain_or_of_another_layout, held_over_autograd, clipped, by_backward,
    unscaled,
]  # fmt: skip


@pytest.mark.exhaustive
def test_assigned_gradients_get_what_the_step_adds(world: Processes, programs: list[Path]) -> None:
    world.run(compared, [*programs, None], GRADIENTS, num=2)


# the model's order ---------------------------------------------------------------------------
class Later(nn.Module):
    """A list of blocks that runs behind what was made later; tied weights; buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.register_buffer("scale", torch.ones(8), persistent=False)
        self.first = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("shift", torch.zeros(8))
        self.gain = nn.Parameter(torch.ones(8))
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)) * self.scale + self.shift
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        y: Tensor = self.last(x * self.gain)
        return y


def names_in_order(module: nn.Module) -> dict[str, list[str]]:
    return {
        "parameters": [name for name, _ in module.named_parameters()],
        "buffers": [name for name, _ in module.named_buffers()],
        "state dict": list(module.state_dict()),
        "modules": [name for name, _ in module.named_modules()],
        "children": [name for name, _ in module.named_children()],
    }


def ordered(path: Path, model: nn.Module) -> None:
    stage = load(path).module()
    found, expected = names_in_order(stage), names_in_order(model)
    for kind, names in expected.items():
        assert found[kind] == [name for name in names if name in found[kind]], kind
    if stage.pipeline is None:
        assert found == expected


@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "microbatches"), [("dp=2", 1), ("pp=2", 2)])
def test_tensors_stand_in_the_order_of_the_model(
    world: Processes, tmp_path: Path, mesh: str, microbatches: int
) -> None:
    batch = (torch.randn(8, 8), torch.randn(8, 8))
    program = partc.compile(
        Later(), mesh, batch, loss=loss_of, plan="ddp", microbatches=microbatches
    )
    program.save(tmp_path / "later")
    world.run(ordered, tmp_path / "later", Later(), num=2)


def gone_on(path: Path, model: nn.Module, state: dict[str, Any], batch: tuple[Tensor, ...]) -> None:
    stage = load(path).module()
    stage.load_full(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (stage, model))
    for optimizer in (ours, theirs):
        optimizer.load_state_dict(copy.deepcopy(state))
    for _ in range(2):
        ours.zero_grad()
        theirs.zero_grad()
        loss = loss_of(model, *batch)
        torch.testing.assert_close(stage.step(*batch), loss.detach())
        loss.backward()
        ours.step()
        theirs.step()
    for ours_, theirs_ in zip(stage.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(ours_), theirs_.detach())


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_states_of_one_process_load_by_position(
    world: Processes, tmp_path: Path, plan: str
) -> None:
    model, batch = Later(), (torch.randn(8, 8), torch.randn(8, 8))
    partc.compile(model, "dp=2", batch, loss=loss_of, plan=plan).save(tmp_path / "later")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        optimizer.step()
    world.run(gone_on, tmp_path / "later", model, optimizer.state_dict(), batch, num=2)
