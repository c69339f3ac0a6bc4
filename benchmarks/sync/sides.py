"""One rank's side of each variant: how it takes a step, what it waits for, what it knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import partc
from benchmarks.measure import rows_of
from benchmarks.sync import workload
from benchmarks.sync.variants import ISLAND, Variant
from benchmarks.workload import Size, loss_of
from partc.plan.wires import bytes_of_counts
from partc.sent_counts import sent_counts

Batch = tuple[Tensor, Tensor]


class Side(Protocol):
    """One way to train on this rank."""

    def begin(self, seed: int) -> list[nn.Parameter]:
        """Begin anew with the weights of a seed; what the optimizer steps on."""

    def forward_backward(self, batch: Batch) -> None:
        """Fill every ``.grad``; ``batch`` has the rows of all ranks."""

    def after_update(self) -> None:
        """What belongs to a step behind the optimizer's part."""

    def settle(self) -> None:
        """Wait for what is still under way."""

    def weights(self) -> Mapping[str, Tensor]:
        """What would be evaluated: of islands, their mean."""

    def logged_bytes(self) -> int:
        """What this rank has sent since the last call in sums whose size is not known before."""


class Ours:
    """partc's program."""

    def __init__(self, folder: str, variant: Variant, size: Size) -> None:
        self.size, self.is_island = size, variant.axis == ISLAND
        self.meets = variant.meets
        self.stage = partc.load(folder).module()

    def begin(self, seed: int) -> list[nn.Parameter]:
        self.stage.load_full(workload.build_model(seed, self.size))
        self.stage.seed(seed)
        self.after_update()
        return list(self.stage.rank_step.parameters())

    def forward_backward(self, batch: Batch) -> None:
        self.stage.step(*(_own(batch) if self.is_island else batch))

    def after_update(self) -> None:
        if self.meets:
            self.stage.meet_islands()

    def settle(self) -> None:
        self.stage.meet_islands()

    def weights(self) -> Mapping[str, Tensor]:
        found: dict[str, Tensor] = self.stage.full_state_dict()
        return found

    def logged_bytes(self) -> int:
        return sum(map(bytes_of_counts, sent_counts(self.stage)))


class Peer:
    """PyTorch's DistributedDataParallel."""

    def __init__(self, size: Size) -> None:
        self.size = size
        model = workload.build_model(0, size)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def begin(self, seed: int) -> list[nn.Parameter]:
        self.model.module.load_state_dict(workload.build_model(seed, self.size).state_dict())
        return list(self.model.parameters())

    def forward_backward(self, batch: Batch) -> None:
        loss_of(self.model, *_own(batch)).backward()

    def after_update(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def weights(self) -> Mapping[str, Tensor]:
        found: dict[str, Tensor] = self.model.module.state_dict()
        return found

    def logged_bytes(self) -> int:
        return 0


def build(variant: Variant, folder: str, size: Size) -> Side:
    """This rank's side of a variant; ``folder`` has partc's program."""
    return Peer(size) if variant.is_peer else Ours(folder, variant, size)


class Judge:
    """The loss on rows that nobody trains on; each rank computes its share of them."""

    def __init__(self, size: Size) -> None:
        self.model = workload.build_model(0, size).eval()
        self.rows = _own(workload.held_out_rows(size))

    @torch.no_grad()
    def loss(self, weights: Mapping[str, Tensor]) -> float:
        missing, unknown = self.model.load_state_dict(weights, strict=False)
        assert not unknown
        assert set(missing) <= {"lm_head.weight"}  # which is the embedding
        loss = loss_of(self.model, *self.rows)
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()


def optimizer_of(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW, the same for all variants."""
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def _own(batch: Batch) -> Batch:
    rank, num = dist.get_rank(), dist.get_world_size()
    ids, targets = (rows_of(each, rank, num) for each in batch)
    return ids, targets


def slowest(values: list[float]) -> list[float]:
    """The largest of any rank, of each figure."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    result: list[float] = found.tolist()
    return result


def mean_of(values: list[float]) -> list[float]:
    """The mean over ranks, of each figure."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found)
    result: list[float] = (found / dist.get_world_size()).tolist()
    return result
