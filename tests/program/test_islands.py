"""Islands train copies of the model apart and meet as local SGD and DiLoCo define it."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partc.codegen.helpers.islands import paired_with
from partc.verification.processes import Processes
from tests.program.island_runs import (
    DILOCO,
    LAYOUTS,
    LONG,
    MEAN,
    OVERLAPPED,
    PAIRS,
    RING,
    STEPS,
    STREAMING,
    Deep,
    Net,
    batch,
    begin,
    loss,
    made,
    train,
)

pytestmark = pytest.mark.gloo


# the definitions, of whole models in one process --------------------------------------------------
class Reference:
    """Islands in one process: each a model with an optimizer of its own."""

    def __init__(self, kind: type[nn.Module], num: int, own: str) -> None:
        said = dict(line.split(" = ") for line in own.splitlines())
        self.period, self.start = int(said["period"]), int(said.get("start_step", 0))
        self.num_fragments = int(said.get("fragments", 1))
        self.outer = (
            (float(said.get("outer_lr", 0.7)), float(said.get("outer_momentum", 0.9)))
            if "outer" in said else None
        )  # fmt: skip
        self.rounds = "wire" in said
        self.overlap, self.mix_share = int(said.get("overlap", 0)), float(said.get("mix", 0))
        self.sums: dict[str, Tensor] = {}
        self.partners = said.get("partners", '"all"').strip('"')
        self.models = [made(kind) for _ in range(num)]
        self.optimizers = [
            torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
            for m in self.models
        ]
        self.kept: dict[str, tuple[Tensor, Tensor]] = {}

    def trained(self, model: nn.Module) -> dict[str, Tensor]:
        return {n: p for n, p in model.named_parameters() if p.requires_grad}

    def meet(self, step: int) -> None:
        """What islands do before a step, by number from 0."""
        behind = step - self.start
        if behind == 0:
            self.kept = {
                n: (p.detach().clone(), torch.zeros_like(p))
                for n, p in self.trained(self.models[0]).items()
            }
        if behind == 0 and self.partners != "all":
            self.mix(torch.ones(len(self.models), len(self.models), dtype=torch.float64))
            return
        for number in range(self.num_fragments):
            at = number * self.period // self.num_fragments
            if self.overlap:
                self.meet_later(number, behind, at)
                continue
            if behind <= 0 or behind % self.period != at:
                continue
            if self.partners == "all":
                self.meet_fragment(number)
            else:
                self.mix(self.weights(step), number)

    @torch.no_grad()
    def meet_later(self, number: int, behind: int, at: int) -> None:
        """Streaming DiLoCo: a fragment's way is summed from here on, and applied steps later."""
        assert self.outer is not None
        lr, mu = self.outer
        if behind > 0 and behind % self.period == at:
            for name in self.fragment(number):
                ways = [self.kept[name][0] - self.trained(model)[name] for model in self.models]
                self.sums[name] = torch.stack(ways).sum(0)
            self.average_running()
        begun = behind - self.overlap
        if begun > 0 and begun % self.period == at:
            for name in self.fragment(number):
                theta, velocity = self.kept[name]
                gradient = self.sums[name] / len(self.models)
                velocity = mu * velocity + gradient
                new = theta - lr * (gradient + mu * velocity)
                self.kept[name] = new, velocity
                for model in self.models:
                    own = self.trained(model)[name]
                    own.copy_((1 - self.mix_share) * new + self.mix_share * own)

    def weights(self, step: int) -> Tensor:
        """Which islands share, a row for each: doubly stochastic once rows are divided."""
        num = len(self.models)
        found = torch.eye(num, dtype=torch.float64)
        if self.partners == "ring":
            for i in range(num):
                found[i, (i + 1) % num] = found[i, i - 1] = 1
            return found
        digest = blake2b(f"0 {step} pairs".encode(), digest_size=8).digest()
        numbers = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        order = torch.randperm(num, generator=numbers).tolist()
        for one, other in zip(order[::2], order[1::2], strict=False):
            found[one, other] = found[other, one] = 1
        return found

    @torch.no_grad()
    def mix(self, shares: Tensor, number: int | None = None) -> None:
        """Gossip: each island's parameters, of one fragment or all, become a mean over its row."""
        weights = shares / shares.sum(1, keepdim=True)
        assert torch.allclose(weights.sum(0), torch.ones(len(weights), dtype=torch.float64))
        held = [self.trained(model) for model in self.models]
        names = [*held[0]] if number is None else [*self.fragment(number)]
        floats = [dict(model.named_buffers()) for model in self.models]
        running = [name for name, x in floats[0].items() if x.is_floating_point()]
        for of, which in ((held, names), (floats, running)):
            for name in which:
                old = torch.stack([each[name] for each in of])
                for each, row in zip(of, weights, strict=True):
                    each[name].copy_(torch.tensordot(row, old, 1))

    def fragment(self, number: int) -> Iterator[str]:
        """The parameters that begin in one of equal parts of the model; blocks are not divided."""
        every = list(self.models[0].named_parameters())
        whole, seen = sum(p.numel() for _, p in every), 0
        first: dict[str, int] = {}
        for name, param in every:
            block = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else name
            first.setdefault(block, int(seen / whole * self.num_fragments))
            if first[block] == number and param.requires_grad:
                yield name
            seen += param.numel()

    @torch.no_grad()
    def meet_fragment(self, number: int) -> None:
        for name in self.fragment(number):
            copies = [self.trained(model)[name] for model in self.models]
            new = torch.stack([*copies]).mean(0)
            if self.outer is not None:
                lr, mu = self.outer
                theta, velocity = self.kept[name]
                gradient = self.int8_mean([theta - each for each in copies]) if self.rounds else (
                    theta - new
                )  # fmt: skip
                velocity = mu * velocity + gradient
                new = theta - lr * (gradient + mu * velocity)
                self.kept[name] = new, velocity
            for each in copies:
                each.copy_(new)
        self.average_running()

    def average_running(self) -> None:
        running = [dict(model.named_buffers()) for model in self.models]
        for name, first in running[0].items():
            if first.is_floating_point():
                mean = torch.stack([buffers[name] for buffers in running]).mean(0)
                for buffers in running:
                    buffers[name].copy_(mean)

    def int8_mean(self, ways: list[Tensor]) -> Tensor:
        """Of ways in int8, whose sum is sent in int8 too; blocks are those of one tensor."""
        total = int8(torch.stack([int8(way.float()) for way in ways]).sum(0))
        return (total / len(ways)).double()

    def step(self, step: int) -> list[float]:
        self.meet(step)
        losses = []
        for i, model in enumerate(self.models):
            value = loss(model, *batch(step, i))
            value.backward()
            losses.append(value.item())
        if step < self.start:
            for same in zip(*(self.trained(m).values() for m in self.models), strict=True):
                mean = torch.stack([p.grad for p in same if p.grad is not None]).mean(0)
                for param in same:
                    param.grad = mean.clone()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def mean(self, name: str) -> Tensor:
        return torch.stack([model.state_dict()[name].double() for model in self.models]).mean(0)


def int8(x: Tensor) -> Tensor:
    """What arrives of a tensor in whole numbers from -127 to 127, with a scale for each 64."""
    found = x.flatten().clone()
    for block in found.split(64):
        scale = block.abs().max() / 127 or torch.ones(())
        block.copy_((block / scale + 0.5).floor() * scale)
    return found.view(x.shape)


def trains_as_defined(
    mesh: str, preset: str, own: str, kind: type[nn.Module], least: float = 1e-11
) -> None:
    num = int(mesh.partition("=")[2][0])
    stage, optimizer = begin(mesh, preset, own, kind)
    reference = Reference(kind, num, own)
    island = stage.coords["island"]
    for step in range(STEPS):
        wanted = reference.step(step)[island]
        [found] = train(stage, optimizer, range(step, step + 1))
        assert abs(found - wanted) < least * max(1, abs(wanted)), (step, found, wanted)
    reference.meet(STEPS)
    stage.meet_islands()
    whole = stage.full_state_dict()
    assert list(whole) == list(made(kind).state_dict())
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor.double(), reference.mean(name), atol=least, rtol=0)


DDP, FSDP, TP, FOUR, NAMES, STAGES, ZERO1 = LAYOUTS
DEEP_FOUR = "island=4", "ddp;microbatches = 2", Deep
# Of each table the layouts that may change what it does.
TRAINED: dict[str, tuple[str, list[Any]]] = {
    "mean": (MEAN, [TP, FOUR, STAGES]),
    "diloco": (DILOCO, [DDP, FSDP, ZERO1]),
    "streaming": (STREAMING, LAYOUTS),  # fragments are of pieces, of stages, and told by name
    "ring": (RING, [FSDP, FOUR, DEEP_FOUR]),  # of two islands a ring is a mean
    "pairs": (PAIRS, [TP, FOUR, STAGES, DEEP_FOUR]),
    "short": (OVERLAPPED, [FSDP, FOUR, NAMES, STAGES]),
    "long": (LONG, [DDP, ZERO1]),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TRAINED)
def test_islands_train_as_their_definition_says(world: Processes, name: str) -> None:
    own, layouts = TRAINED[name]
    for mesh, preset, kind in layouts:
        world.run(trains_as_defined, mesh, preset, own, kind)


def test_pairs_are_drawn_alike_by_all_and_anew_for_each_meeting() -> None:
    for num in (2, 3, 4, 7):
        drawn = [[paired_with(i, num, 5, step) for i in range(num)] for step in range(40)]
        for pairs in drawn:
            alone = [i for i, others in enumerate(pairs) if not others]
            assert len(alone) == num % 2
            assert all(pairs[other] == [i] for i, others in enumerate(pairs) for other in others)
        met = {(i, *pairs[i]) for pairs in drawn for i in range(num) if pairs[i]}
        assert len(met) == num * (num - 1)


@pytest.mark.exhaustive
def test_outer_gradients_may_be_sent_in_int8(world: Processes) -> None:
    for own, (mesh, preset, kind) in ((DILOCO, DDP), (STREAMING, FOUR)):  # whole on each rank
        own += '\nwire = "int8"\nblock = 64'
        world.run(trains_as_defined, mesh, preset, own, kind, 1e-6)


# what each island reads, and what differs ---------------------------------------------------------
def reads() -> tuple[list[list[int]], str]:
    """The rows of two steps, and what is said of islands that are given the same batch."""
    import warnings

    stage, _ = begin("island=2,dp=2", "ddp", MEAN)
    rows = torch.utils.data.TensorDataset(torch.arange(64))
    found = [each.tolist() for [each] in stage.loader(rows, shuffle=False)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        stage.step(*batch(0, 0))
    return found[:2], "".join(str(each.message) for each in told)


@pytest.mark.exhaustive
def test_each_island_reads_rows_of_its_own(world: Processes) -> None:
    found = world.run(reads)
    for rank, (rows, told) in enumerate(found):
        island = rank // 2
        assert rows == [list(range(b * 16 + 8 * island, b * 16 + 8 * island + 8)) for b in (0, 1)]
        assert "the same" in told


def clipped() -> float:
    """The norm of an island's own gradients."""
    stage, _ = begin("island=2,dp=2", "fsdp", MEAN)
    island = stage.coords["island"]
    stage.step(*batch(0, island))
    model = made(Net)
    loss(model, *batch(0, island)).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    wanted = torch.nn.utils.clip_grad_norm_(trained, 0.1)
    found = stage.clip_grad_norm_(0.1)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    return found.item()


@pytest.mark.exhaustive
def test_each_island_clips_its_own_gradients(world: Processes) -> None:
    norms = world.run(clipped)
    assert norms[0] == norms[1] != norms[2] == norms[3]


# torch's own post-local SGD -----------------------------------------------------------------------
def post_local_of_torch(period: int, start: int) -> list[float]:
    """The losses of DistributedDataParallel with ``post_localSGD_hook`` and its model averager.

    Its first averaging follows the optimizer step of number ``warmup_steps``, counted from 0.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hooks
    from torch.distributed.algorithms.model_averaging import averagers
    from torch.distributed.optim import PostLocalSGDOptimizer

    alone = [torch.distributed.new_group([rank]) for rank in range(4)]
    rank = torch.distributed.get_rank()
    model = nn.parallel.DistributedDataParallel(made(Deep))
    state = hooks.PostLocalSGDState(None, alone[rank], start_localSGD_iter=start)
    model.register_comm_hook(state, hooks.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period, warmup_steps=start + period - 1)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = PostLocalSGDOptimizer(inner, averager)
    losses = []
    for step in range(STEPS):
        value = loss(model, *batch(step, rank))
        value.backward()
        losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def of_islands(period: int, start: int) -> list[float]:
    return train(
        *begin("island=4", "ddp", f"period = {period}\nstart_step = {start}", Deep), range(STEPS)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("period", "start"), [(2, 3), (4, 1)])
def test_post_local_sgd_is_that_of_torch(world: Processes, period: int, start: int) -> None:
    theirs = world.run(post_local_of_torch, period, start)
    ours = world.run(of_islands, period, start)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


# random numbers -----------------------------------------------------------------------------------
class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.5)


def noisy(mesh: str) -> list[float]:
    stage, _ = begin(mesh, "ddp", "period = 100", Noisy)
    stage.seed(3)
    return [stage.step(*batch(0, 0)).item() for _ in range(2)]


def test_islands_draw_numbers_of_their_own(world: Processes) -> None:
    found = world.run(noisy, "island=2,dp=2")
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert len({*found[0], *found[2]}) == 4
    assert world.run(noisy, "island=2,dp=2") == found
