"""Shown parameters and gradients are the program's own; what they cannot be is refused by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import partc
from partc.errors import RunError
from partc.plan.mesh import Mesh
from partc.program import load
from partc.program.role import Shard
from partc.program.stage.runtime import Stage
from partc.program.tensors.chunks import chunks_of
from partc.verification.processes import Processes
from tests.example_program import example_batch, example_loss, example_model, example_program
from tests.program.training import (
    MAKERS,
    FrozenTwice,
    batch_of,
    difference,
    loss_of,
    model_of,
    save_program,
    stage_of,
)

pytestmark = pytest.mark.gloo
Change = Callable[[nn.Module], None]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "sharded"
    return save_program(path, "dp=2,tp=2", "fsdp+megatron")


def each_grad(change: Callable[[Tensor], Tensor | None]) -> Change:
    def apply(module: nn.Module) -> None:
        for param in module.parameters():
            assert param.grad is not None
            param.grad = change(param.grad)

    return apply


def add_penalty(module: nn.Module) -> None:
    """A term of the loss that the program does not know."""
    terms = [param.square().sum() for param in module.parameters()]
    total = sum(terms, start=0 * terms[0])
    total.backward()


def freeze_first(module: nn.Module) -> None:
    next(module.parameters()).requires_grad_(False)


CHANGES: dict[str, Change] = {
    "kept": lambda module: None,
    "set to None": lambda module: module.zero_grad(),
    "set to 0": lambda module: module.zero_grad(set_to_none=False),
    "scaled": each_grad(lambda grad: grad * 0.5),
    "scaled in place": each_grad(lambda grad: grad.mul_(0.5)),
    "another": each_grad(torch.ones_like),
    "of a penalty": add_penalty,
    "of a frozen one": freeze_first,
    "clipped by value": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1e-3),
}


def compare(stage: Stage, model: nn.Module, why: str) -> None:
    for name, param in stage.named_parameters():
        expected = model.get_parameter(name).grad
        assert isinstance(param.grad, DTensor)
        assert expected is not None
        torch.testing.assert_close(param.grad.full_tensor(), expected, msg=f"{why}: {name}")
        piece = stage.pieces()[name][1].grad
        assert piece is not None
        assert piece.data_ptr() == param.grad.to_local().data_ptr()
        assert piece.stride() == stage.pieces()[name][1].stride()  # as fused optimizers need it


def changed_between_steps(path: Path) -> None:
    """One after the other to one stage, whose weights stay: a stage of each takes long to make."""
    batch, stage, model = batch_of(), stage_of(path), model_of()
    for number, (why, change) in enumerate(CHANGES.items()):
        for step in range(2):
            if (number + step) % 2:
                stage(*batch).backward()
            else:
                stage.step(*batch)
            loss_of(model, *batch).backward()
            compare(stage, model, why)
            change(stage)
            change(model)
        for module in (stage, model):
            module.requires_grad_().zero_grad()


@pytest.mark.exhaustive
def test_what_a_user_does_to_gradients_is_seen(world: Processes, sharded: Path) -> None:
    world.run(changed_between_steps, sharded)


def written_in_every_way(path: Path) -> None:
    stage, model = stage_of(path), model_of()
    with torch.no_grad():
        for param in (*stage.parameters(), *model.parameters()):
            param.data.mul_(2)
            param.add_(1)
    for name, tensor in stage.full_state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name])
    held = list(stage.parameters())
    stage.step(*batch_of())
    stage.double()  # the same parameters, as of any module, so that optimizers stay right
    assert all(a is b for a, b in zip(held, stage.parameters(), strict=True))
    assert {p.grad.dtype for p in held if p.grad is not None} == {torch.float64}
    before = stage.full_state_dict()
    torch.optim.SGD(held, lr=1.0).step()
    assert not any(torch.equal(before[n], t) for n, t in stage.full_state_dict().items())


@pytest.mark.exhaustive
def test_writes_to_parameters_reach_the_program(world: Processes, sharded: Path) -> None:
    world.run(written_in_every_way, sharded)


def refused(path: Path) -> None:
    batch, stage = batch_of(), stage_of(path)
    stage.step(*batch)
    param, (_, piece) = stage.get_parameter("head.bias"), stage.pieces()["head.bias"]
    piece.grad = None
    stage.step(*batch)  # one view alone was changed
    param.grad, piece.grad = None, torch.zeros_like(piece)
    with pytest.raises(RunError, match=r"head.bias.grad: was changed in stage.parameters\(\) and"):
        stage.step(*batch)


def test_what_cannot_be_known_is_refused(world: Processes, sharded: Path) -> None:
    world.run(refused, sharded)


# weights of several parts, each cut by itself -------------------------------------------------
def fused_trained(options: dict[str, Any]) -> None:
    stage, model = example_program(2, 2).module(), example_model()
    stage.load_full(model)
    ours, theirs = (
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], eps=1e-4, **options)
        for m in (stage, model)
    )
    for _ in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        stage.step(*example_batch())
        example_loss(model, *example_batch()).backward()
        norm = torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.1)
        assert isinstance(norm, DTensor)
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(norm.full_tensor(), expected)
        ours.step()
        theirs.step()
    for name, param in stage.named_parameters():
        assert isinstance(param, DTensor)
        torch.testing.assert_close(param.full_tensor(), model.get_parameter(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_elementwise_tools_are_right_on_fused_weights(
    world: Processes, options: dict[str, Any]
) -> None:
    world.run(fused_trained, options)


def with_rows_at_their_places() -> list[float]:
    """How far optimizers of whole matrices take a fused weight from one device's."""
    far = []
    for maker in ("Muon", "Whitened", "LBFGS"):
        stage, model = example_program(2, 2).module(), example_model()
        stage.load_full(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "bfloat16", Tensor.clone)  # rounding errors flip digits there
            for module in (stage, model):
                trained = [each for each in module.parameters() if each.requires_grad]
                optimizer = MAKERS[maker](trained)
                for _ in range(3):
                    optimizer.zero_grad()
                    if isinstance(module, Stage):
                        module.step(*example_batch())
                    else:
                        example_loss(module, *example_batch()).backward()
                    optimizer.step(lambda: 0.0)
        param = stage.get_parameter("up.weight")
        with pytest.raises(RunError, match=r"up.weight: .* pickled .* 2 parts by tp"):
            pickle.dumps(param)
        assert isinstance(param, DTensor)
        far.append(float((param.full_tensor() - model.get_parameter("up.weight")).abs().max()))
    return far


@pytest.mark.exhaustive
def test_fused_weights_have_their_rows_at_their_places(world: Processes) -> None:
    assert max(world.run(with_rows_at_their_places)[0]) < 1e-5


def test_pieces_lie_where_chunks_say() -> None:
    mesh = Mesh((("dp", 2), ("tp", 3)))
    shards = {
        "fused": Shard("", "fused", (12, 4), torch.float32, (("tp", 0, 2), ("dp", 1, 1))),
        "twice": Shard("", "twice", (24,), torch.float32, (("tp", 0, 2), ("dp", 0, 1))),
        "within": Shard("", "within", (24,), torch.float32, (("dp", 0, 1), ("tp", 0, 2))),
        "whole": Shard("", "whole", (2, 3), torch.float32, ()),
        "number": Shard("", "number", (), torch.float32, ()),
    }
    for shard in shards.values():
        whole = torch.arange(torch.Size(shard.shape).numel()).view(shard.shape)
        joined = torch.full_like(whole, -1)
        for coords in mesh.all_coords():
            piece = shard.take(whole, mesh, coords)
            for chunk in chunks_of(shard, mesh, coords):
                box = joined
                for dim, (begin, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                    box = box.narrow(dim, begin, size)
                box.copy_(chunk.of(piece))
        assert torch.equal(joined, whole), shard.name


# pipelines -----------------------------------------------------------------------------------
ROUTES = {
    "AdamW": "", "AdamW fused": "step_on_pieces", "Whitened": "", "Adafactor": "step_on_whole"
}  # fmt: skip


def whole(value: Tensor | None) -> Tensor:
    assert isinstance(value, DTensor)
    return value.full_tensor().clone()


def check_means(param: nn.Parameter) -> None:
    """An average in tensors of the script would miss the parameters of other ranks' stages."""
    mean = nn.Parameter(torch.ones(param.shape))

    def assigned() -> None:
        mean.data = 0.9 * mean.data + 0.1 * param.data

    keeps: list[Callable[[], object]] = [
        lambda: mean.mul_(0.9).add_(param, alpha=0.1), lambda: mean.copy_(param),
        lambda: torch._foreach_lerp_([mean], [param], 0.1), assigned,
    ]  # fmt: skip
    for keep in keeps:
        with pytest.raises(RunError, match="to a tensor that is not the model's"):
            keep()
    own = param.clone()
    own.lerp_(param, 0.1)
    torch.testing.assert_close(whole(own), whole(param.detach()))


def in_stages(path: Path) -> list[float]:
    stage, scales = stage_of(path), []
    stage.step(*batch_of())
    grads = [param.grad for param in stage.parameters() if param.grad is not None]
    uses: list[Callable[[], object]] = [
        lambda: torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0, foreach=True),
        lambda: torch.nn.utils.clip_grad_norm_(next(stage.parameters()), 1.0),
        lambda: sum(grad.norm() for grad in grads),
        lambda: MAKERS["LBFGS"](stage.parameters()).step(lambda: 0.0),
    ]
    for use in uses:
        with pytest.raises(RunError, match="joins gradients of this pipeline rank alone"):
            use()
    number = grads[0].norm()
    with pytest.raises(RunError, match="is known to this pipeline rank alone"):
        number.item()
    assert isinstance(number, DTensor)
    assert isinstance(grads[0], DTensor)
    torch.testing.assert_close(number.full_tensor(), grads[0].full_tensor().norm())
    params, before = list(stage.parameters()), [whole(grad) for grad in grads]
    terms = [param.square().sum() for param in params]
    sum(terms, start=0 * terms[0]).backward()  # whose gradients are right, if not its value
    for param, grad in zip(params, before, strict=True):
        torch.testing.assert_close(whole(param.grad), grad + 2 * whole(param.detach()))
    with torch.no_grad():
        for param in stage.parameters():  # other ones on each rank, which no rank waits for
            expected = param.numel() + param.norm().square().item()
            mixed = param.square().add_(torch.ones(param.shape)).sum().item()
            assert mixed == pytest.approx(expected, rel=1e-5)
            check_means(param)
            nn.init.normal_(param)
    stage.load_full(model_of())
    with pytest.raises(RunError, match="its step on one parameter depends on others"):
        stage.step_on_whole(MAKERS["LBFGS"](stage.parameters()))
    for maker, route in ROUTES.items():
        assert difference(path, maker, route) < 1e-6
    for bad in (None, *range(dist.get_world_size())):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = stage.step_on_pieces(MAKERS["AdamW"](stage.parameters()))
        scaler.scale(torch.zeros(()))
        stage.step(*batch_of())
        if bad == dist.get_rank():
            stage.pieces()[next(iter(stage.pieces()))][1].grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        stage.zero_grad()
    return scales


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan"), [("pp=2", "ddp"), ("pp=2,dp=2", "fsdp")])
def test_tools_in_a_pipeline_are_right_or_refuse(
    world: Processes, tmp_path: Path, mesh: str, plan: str
) -> None:
    path = save_program(tmp_path / "stages", mesh, plan, microbatches=2)
    num = Mesh.of(mesh).num_ranks
    assert world.run(in_stages, path, num=num) == [[8.0] + [4.0] * num] * num


def decayed(path: Path, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    stage = load(path).module()
    stage.load_full(model)
    ours, theirs = (
        torch.optim.AdamW(params, lr=0.1, weight_decay=0.5)
        for params in (stage.rank_step.parameters(), model.parameters())
    )
    for _ in range(2):
        stage.step(*batch)
        loss_of(model, *batch).backward()
        ours.step()
        theirs.step()
    for name, tensor in stage.full_state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], msg=name)


def test_a_frozen_parameter_of_two_stages_has_no_gradient(world: Processes, tmp_path: Path) -> None:
    model, batch = FrozenTwice(), (torch.randn(8, 8), torch.randn(8, 8))
    program = partc.compile(model, "pp=2", batch, loss=loss_of, plan="ddp", microbatches=2)
    program.save(tmp_path / "frozen")
    world.run(decayed, tmp_path / "frozen", model, batch, num=2)


class Shared(nn.Module):
    """Its last layer reads the weights of the first two, and has no gradient for them.

    One of these is frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.blocks[1].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        for block in self.blocks[:2]:
            x = x + (x @ block.weight.detach()).tanh()  # type: ignore[operator]
        return x


@pytest.mark.exhaustive
def test_a_parameter_is_trained_on_stages_that_have_no_gradient_for_it(
    world: Processes, tmp_path: Path
) -> None:
    model, batch = Shared(), (torch.randn(8, 8), torch.randn(8, 8))
    program = partc.compile(model, "pp=2", batch, loss=loss_of, plan="ddp", microbatches=2)
    program.save(tmp_path / "shared")
    world.run(trained_alike, tmp_path / "shared", model, batch, num=2)
    old = "self.blocks_0_weight = nn.Parameter(torch.empty(8, 8)"
    text = program.source(1)
    assert old in text
    frozen = text.replace(old, f"{old}, requires_grad=False")
    spoilt = replace(program, sources={**program.sources, program.role_of(1): frozen})
    assert not partc.verify(spoilt, model, batch, loss=loss_of).ok()


def trained_alike(path: Path, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    stage = load(path).module()
    stage.load_full(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (stage, model))
    for _ in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        loss = loss_of(model, *batch)
        torch.testing.assert_close(stage.step(*batch), loss.detach())
        loss.backward()
        ours.step()
        theirs.step()
