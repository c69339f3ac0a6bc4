"""Habits of scripts that parallelize serves as they are: each equal to one process in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import partc
from partc.errors import PlanError, RunError
from partc.verification.processes import Processes

X = torch.randn(16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Losses = list[float]


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


class Recurrent(nn.Module):
    """Its layer has a list of its weights, and so has the model itself, of those that decay."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(6, 8, batch_first=True)
        self.decaying = [self.layer.weight_ih_l0, self.layer.weight_hh_l0]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x.view(-1, 4, 6))[0]
        return result


def recurrent(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Recurrent(kind).double()


def parametrized() -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Linear(6, 8), nn.Linear(8, 4)
    net = nn.Sequential(
        parametrizations.spectral_norm(first), nn.Tanh(), parametrizations.weight_norm(second)
    )
    return net.double()


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


class OwnLoss(nn.Module):
    """A model whose forward returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain()

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x).square().mean()
        return loss


def trained(model: Any, step: Callable[[], Any]) -> Losses:
    """The losses of three steps, of which ``step`` computes loss and gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        found.append(float(step().detach()))
        optimizer.step()
    return found


def alone(model: nn.Module, loss_of: Callable[..., Tensor]) -> Losses:
    def step() -> Tensor:
        loss = loss_of(model, X)
        loss.backward()
        return loss

    return trained(model, step)


def parallel(model: nn.Module, plan: str, **given: Any) -> Any:
    return partc.parallelize(model, "dp=2", plan=plan, batch="global", **given)


def check(found: Losses, wanted: Losses) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-10, atol=1e-12)


# models that the script lets go -------------------------------------------------------------------
def let_go(make: Callable[[], nn.Module], loss_of: Callable[..., Tensor], plan: str) -> None:
    model = parallel(make(), plan, loss=loss_of)
    check(trained(model, lambda: model.step(X)), alone(make(), loss_of))


def flat_weights(kind: str, plan: str) -> None:
    let_go(lambda: recurrent(kind), mean_square, plan)
    model = parallel(recurrent(kind), plan, loss=mean_square)
    model.step(X)
    own = dict(model.named_parameters())
    assert all(x is y for x, y in zip(model.layer._flat_weights, own.values(), strict=True))
    names = [f"layer.weight_{kind}_l0" for kind in ("ih", "hh")]
    assert all(x is own[name] for x, name in zip(model.decaying, names, strict=True))


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize(("kind", "plan"), [("LSTM", "fsdp"), ("GRU", "ddp"), ("RNN", "fsdp")])
def test_recurrent_layers(kind: str, plan: str, world: Processes) -> None:
    world.run(flat_weights, kind, plan, num=2)


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_parametrized_layers(plan: str, world: Processes) -> None:
    world.run(let_go, parametrized, mean_square, plan, num=2)


class Adapted(nn.Module):
    """It has a method of a module inside, as adapters of peft have, and modules in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = OwnLoss()
        self.call = self.inside.forward
        self.layers = [*self.inside.net.children()]

    def forward(self, x: Tensor) -> Tensor:
        loss = self.call(x)
        for layer in self.layers:
            x = layer(x)
        return loss + x.square().mean()


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return Adapted()


def parts_inside(plan: str) -> None:
    let_go(adapted, lambda model, x: model(x), plan)
    model = parallel(adapted(), plan)
    model.step(X)
    assert model.call.__self__ is model.inside
    assert all(x is y for x, y in zip(model.layers, model.inside.net.children(), strict=True))


@pytest.mark.gloo
def test_a_model_with_methods_of_its_parts(world: Processes) -> None:
    world.run(parts_inside, "ddp", num=2)


# losses -------------------------------------------------------------------------------------------
def own_loss(plan: str) -> None:
    wanted = alone(OwnLoss(), lambda model, x: model(x))
    model = parallel(OwnLoss(), plan)
    check(trained(model, lambda: model.step(X)), wanted)
    model = parallel(OwnLoss(), plan)

    def step() -> Any:
        loss = model(X)
        loss.backward()
        return loss

    check(trained(model, step), wanted)


@pytest.mark.gloo
def test_a_model_that_returns_its_loss(world: Processes) -> None:
    world.run(own_loss, "fsdp", num=2)


def with_penalty(model: Any, loss: Tensor) -> Tensor:
    total: Tensor = loss + 0.1 * sum(param.abs().sum() for param in model.parameters())
    return total


def penalty(plan: str) -> None:
    wanted = alone(plain(), lambda model, x: with_penalty(model, mean_square(model, x)))
    model = parallel(plain(), plan, loss=mean_square)

    def step() -> Any:
        loss = with_penalty(model, model(X))
        loss.backward()
        return loss

    check(trained(model, step), wanted)


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_a_penalty_on_weights_added_to_the_loss(plan: str, world: Processes) -> None:
    world.run(penalty, plan, num=2)


# modes --------------------------------------------------------------------------------------------
class FrozenNorms(nn.Module):
    """Its own ``train`` keeps the batch norms in eval mode, as detectors and fine-tuning do."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.body = nn.Sequential(first, nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.0))
        self.head = second

    def train(self, mode: bool = True) -> FrozenNorms:
        super().train(mode)
        for part in self.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x))
        return result


def frozen_norms() -> nn.Module:
    torch.manual_seed(0)
    return FrozenNorms().double().train()


def in_both_modes(model: Any, step: Callable[[], Any]) -> Losses:
    found = []
    for _ in range(2):
        model.train()
        found += trained(model, step)
        model.eval()
        with torch.no_grad():
            found.append(float(model(X).square().mean()))
    return found


def own_modes(plan: str) -> None:
    model = frozen_norms()

    def step() -> Tensor:
        loss = mean_square(model, X)
        loss.backward()
        return loss

    wanted = in_both_modes(model, step)
    stage = parallel(frozen_norms(), plan, loss=mean_square)
    check(in_both_modes(stage, lambda: stage.step(X)), wanted)
    program = partc.compile(frozen_norms(), "dp=2", (X,), loss=mean_square, plan=plan)
    own = program.module()
    check(in_both_modes(own, lambda: own.step(X)), wanted)


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_a_model_with_a_train_of_its_own(plan: str, world: Processes) -> None:
    world.run(own_modes, plan, num=2)


# copies and states --------------------------------------------------------------------------------
def averaged(model: Any, mean: nn.Module, target: nn.Module, steps: Callable[[], Any]) -> Tensor:
    """What averages give that are assigned, not written."""
    trained(model, steps)
    params = zip(model.parameters(), mean.parameters(), target.parameters(), strict=True)
    for param, own, other in params:
        own.data = own.data * 0.9 + (1 - 0.9) * param.data
        other.data = param.data.clone()
    with torch.no_grad():
        found: Tensor = mean(X) + target(X)
    return found


def assigned(plan: str) -> None:
    model = plain()
    mean, target = copy.deepcopy(model), copy.deepcopy(model)
    one = copy.deepcopy(model)

    def step() -> Tensor:
        loss = mean_square(one, X)
        loss.backward()
        return loss

    wanted = averaged(one, copy.deepcopy(mean), copy.deepcopy(target), step)
    stage = parallel(model, plan, loss=mean_square)
    del model
    found = averaged(stage, mean, target, lambda: stage.step(X))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert all(type(each) is nn.Parameter for each in mean.parameters())


@pytest.mark.gloo
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_averages_that_are_assigned_to_data(plan: str, world: Processes) -> None:
    world.run(assigned, plan, num=2)


def kept_in_a_pipeline() -> None:
    """A pipeline rank has the parameters of its stage alone: an average would miss all others, or
    by position stand beside those of others.
    """
    model = plain()
    mean = copy.deepcopy(model)
    stage: Any = partc.parallelize(
        model, "pp=2", loss=mean_square, plan="ddp", batch="global", stages=["2"]
    )
    del model
    stage.step(X)
    own = dict(stage.named_parameters())
    with torch.no_grad():
        for name, each in mean.named_parameters():
            if name in own:
                with pytest.raises(RunError, match="to a tensor that is not the model's"):
                    each.mul_(0.9).add_(own[name], alpha=0.1)
        if dist.get_rank() == 0:
            return
        param, first = next(stage.parameters()), next(mean.parameters())
        with pytest.raises(RunError, match=r"2.weight: .*stand beside .*other stages.*Average a"):
            first.data = first.data * 0.9 + 0.1 * param.data


@pytest.mark.gloo
def test_averages_of_a_script_in_a_pipeline_are_refused(world: Processes) -> None:
    world.run(kept_in_a_pipeline, num=2)


def started(plan: str) -> tuple[Any, torch.optim.Optimizer]:
    model = parallel(plain(), plan, loss=mean_square)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def resumed(plan: str, folder: Path) -> None:
    model, optimizer = started(plan)
    losses = []
    for stop in range(4):
        optimizer.zero_grad()
        losses.append(float(model.step(X)))
        optimizer.step()
        if stop == 1:
            states = {"model": model.full_state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states, folder / f"{dist.get_rank()}.pt")
    again, optimizer = started(plan)
    states = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=False)
    again.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    for loss in losses[2:]:
        optimizer.zero_grad()
        check([float(again.step(X))], [loss])
        optimizer.step()


@pytest.mark.rows(1)
@pytest.mark.gloo
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_states_that_are_loaded_before_the_first_step(
    plan: str, world: Processes, tmp_path: Path
) -> None:
    world.run(resumed, plan, tmp_path, num=2)


# meshes -------------------------------------------------------------------------------------------
def test_one_ranks_rows_on_a_mesh_whose_axes_are_open(tmp_path: Path) -> None:
    (tmp_path / "mesh.toml").write_text('machine = "cpu"\ndevices = 2\n')
    mesh = str(tmp_path / "mesh.toml")
    with pytest.raises(PlanError, match="its axes are open"):
        partc.parallelize(plain(), mesh, loss=mean_square)
    model = partc.parallelize(plain(), mesh, loss=mean_square, batch="global")
    with pytest.raises(partc.PartcError, match="its axes are open"):
        _ = model.data_world


def evaluated_first(mesh: str, loads: bool) -> None:
    """Evaluated before the first step, as a check of a loop does, then trained and evaluated."""
    reference = plain()
    model: Any = partc.parallelize(plain(), mesh, loss=mean_square, batch="global")
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    for turn, rows in enumerate((16, 7, 16, 16)):
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(X[:rows]), reference(X[:rows]))
        if loads and turn < 2:
            other = {name: x + 1 for name, x in reference.state_dict().items()}
            model.load_state_dict(other)
            reference.load_state_dict(other)
        elif turn:
            check([float(model.train().step(X))], [float(mean_square(reference, X))])
            mean_square(reference, X).backward()
            ours.step(), theirs.step()


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize("loads", [False, True])
def test_a_model_is_evaluated_before_a_search_has_chosen_its_axes(
    loads: bool, world: Processes, tmp_path: Path
) -> None:
    (tmp_path / "mesh.toml").write_text('machine = "cpu"\ndevices = 2\n')
    world.run(evaluated_first, str(tmp_path / "mesh.toml"), loads, num=2)
