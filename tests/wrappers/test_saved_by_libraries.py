"""What libraries save of a model in a pipeline: they walk its modules, names and states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import partc
from partc.errors import RunError
from partc.verification.processes import Processes

pytestmark = pytest.mark.gloo
X, Y = torch.ones(4, 8), torch.zeros(4, 2)
Tensors = dict[str, Tensor]


class Wrapped(nn.Module):
    """A part that is trained whole beside its frozen original, as peft's ``modules_to_save``."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        trained = copy.deepcopy(part)
        self.original_module = part.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": trained})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.modules_to_save["default"](x)
        return y

    def chosen(self, state: Tensors) -> Tensors:
        names = self.modules_to_save["default"].state_dict()
        return {n: state[f"modules_to_save.default.{n}"] for n in names}


class Classifier(nn.Module):
    """Frozen layers with an adapter in each, and a head that is trained whole."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(8, 8).requires_grad_(False) for _ in range(2)])
        self.adapters = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
        self.head = Wrapped(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2)))

    def forward(self, x: Tensor) -> Tensor:
        for layer, adapter in zip(self.body, self.adapters, strict=True):
            x = (layer(x) + adapter(x)).relu()
        y: Tensor = self.head(x)
        return y

    def save_pretrained(self, folder: Path, is_main_process: bool = True, **named: Any) -> None:
        state = chosen(self, named.get("state_dict") or self.state_dict())
        if is_main_process:
            torch.save(state, folder / "chosen.pt")

    def save_trained(self, path: Path) -> None:
        torch.save(self.state_dict(), path)


class ByTrainable(Classifier):
    """Saves what its own parameters say, in a file that each caller writes."""

    def save_pretrained(self, folder: Path, **named: Any) -> None:  # type: ignore[override]
        trained = {n for n, p in self.named_parameters() if p.requires_grad}
        state = {n: x for n, x in self.state_dict().items() if n in trained}
        torch.save((state, dist.get_rank()), folder / "trained.pt")


def chosen(model: nn.Module, state: Tensors) -> Tensors:
    """The tensors of a state that peft writes, as it finds them."""
    found = {n: x for n, x in state.items() if n.startswith("adapters.")}
    for path, module in model.named_modules():
        if isinstance(module, Wrapped):
            own = {n.removeprefix(f"{path}."): x for n, x in state.items() if n.startswith(path)}
            found |= {f"{path}.{n}": x for n, x in module.chosen(own).items()}
    return found


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(model(x), y)


def plain(kind: type[Classifier] = Classifier) -> Classifier:
    torch.manual_seed(0)
    return kind()


def trained(mesh: str, kind: type[Classifier] = Classifier) -> Any:
    model: Any = partc.parallelize(
        plain(kind), mesh, loss=loss_of, plan="ddp", batch="global", **stages_of(mesh)
    )
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5)
    model.step(X, Y)
    optimizer.step()
    return model


def stages_of(mesh: str) -> dict[str, Any]:
    return {"stages": ["head"]} if mesh.startswith("pp") else {}


def alone(kind: type[Classifier] = Classifier) -> Classifier:
    """The same in one process."""
    model = plain(kind)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5)
    loss_of(model, X, Y).backward()
    optimizer.step()
    return model


def close(found: Tensors, expected: Tensors) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def saved_as_peft_does(mesh: str, folder: Path) -> None:
    model, reference = trained(mesh), alone()
    expected = chosen(reference, reference.state_dict())
    assert len(expected) == 6
    model.save_pretrained(folder)
    close(chosen(model, model.full_state_dict()), expected)
    dist.barrier()
    close(torch.load(folder / "chosen.pt"), expected)


def saved_by_its_own_parameters(mesh: str, folder: Path) -> None:
    model, reference = trained(mesh, ByTrainable), alone(ByTrainable)
    model.save_pretrained(folder)
    dist.barrier()
    state, rank = torch.load(folder / "trained.pt")
    assert rank == 0
    close(state, {n: p.detach() for n, p in reference.named_parameters() if p.requires_grad})
    model.step(X, Y)  # the model is as it was
    assert [n for n, _ in model.named_parameters()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
@pytest.mark.parametrize("run", [saved_as_peft_does, saved_by_its_own_parameters])
def test_a_models_own_writer_has_all_of_its_tensors(
    world: Processes, tmp_path: Path, run: Any, mesh: str
) -> None:
    world.run(run, mesh, tmp_path, num=2)


def parts_of_a_pipeline(folder: Path) -> None:
    model, reference = trained("pp=2"), alone()
    rank = dist.get_rank()
    here, away = (model.adapters, model.head) if rank == 0 else (model.head, model.adapters)
    for name in ("adapters", "head", "body"):
        assert [*getattr(model, name).state_dict()] == [*getattr(reference, name).state_dict()]
        flags = {n: p.requires_grad for n, p in getattr(model, name).named_parameters()}
        assert flags == {n: p.requires_grad for n, p in getattr(reference, name).named_parameters()}
    torch.save({n: x.full_tensor() for n, x in here.state_dict().items()}, folder / f"{rank}.pt")
    where = "belongs to another stage of the pipeline"
    with pytest.raises(RunError, match=where):
        torch.save(away.state_dict(), folder / "away.pt")
    trained_there = {n: x for n, x in away.state_dict().items() if "original" not in n}
    with pytest.raises(RunError, match=where):
        save_file(trained_there, folder / "away.safetensors")
    with pytest.raises(RunError, match=where):
        model.save_trained(folder / "whole.pt")
    kept = copy.deepcopy(away.state_dict())
    away.load_state_dict(kept)
    away.requires_grad_(False)
    assert not any(p.requires_grad for p in away.parameters())
    assert not any(p.requires_grad for part in away.modules() for p in part.parameters())


@pytest.mark.exhaustive
def test_a_part_names_what_other_ranks_have(world: Processes, tmp_path: Path) -> None:
    world.run(parts_of_a_pipeline, tmp_path, num=2)


def frozen_and_unread(mesh: str) -> None:
    """What no step reads was frozen when it was compiled, and the script has changed nothing."""
    trained(mesh)  # warnings are errors


@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
def test_what_no_step_reads_is_told_nothing_of(world: Processes, mesh: str) -> None:
    world.run(frozen_and_unread, mesh, num=2)
