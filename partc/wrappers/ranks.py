"""An ``Accelerator`` whose ranks stand on a mesh: it gathers and counts pieces of a batch."""

from __future__ import annotations

import atexit
import json
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from accelerate.utils.operations import recursively_apply
from torch import Tensor

from partc.errors import RunError
from partc.program.ranks.farewell import tell_at_exit
from partc.program.ranks.other_ranks import of_other_ranks
from partc.program.step.uneven_rows import gather_uneven
from partc.program.tensors.holders import exchange_texts
from partc.wrappers.dealing import DataRanks


class OnMesh(accelerate.Accelerator):  # type: ignore[misc]
    """As accelerate's where every process is a data rank; ranks along tp and pp share a piece."""

    ranks: DataRanks

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        atexit.register(_leave)
        tell_at_exit()  # before the ranks part

    @property
    def num_processes(self) -> int:
        """How many pieces every batch has; ranks that differ along tp or pp share one."""
        return self.ranks.world

    @property
    def data_rank(self) -> int:
        """The number of this rank's piece of every batch."""
        return self.ranks.pieces[self.process_index]

    @property
    def is_last_process(self) -> bool:
        return bool(self.process_index == self.state.num_processes - 1)

    @of_other_ranks("gather")
    def gather(self, tensor: Any) -> Any:
        """The rows of all pieces of the batch, each once; ranks may have different numbers."""
        return recursively_apply(self._gathered, tensor, error_on_other_type=True)

    @of_other_ranks("gather_for_metrics")
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The rows of all pieces in the order of the dataset, each once."""
        if not use_gather_object and _is_of_tensors(input_data):
            return super().gather_for_metrics(input_data)
        each = gather_object([input_data])
        return [row for rank in self.ranks.firsts for row in each[rank]]

    @of_other_ranks("reduce")
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As accelerate's, over the pieces of the batch."""
        if reduction != "sum":
            return super().reduce(tensor, reduction, scale)
        return recursively_apply(lambda x: self._gathered(x[None]).sum(0), tensor)

    @of_other_ranks("pad_across_processes")
    def pad_across_processes(self, *args: Any, **named: Any) -> Any:
        """As accelerate's."""
        return super().pad_across_processes(*args, **named)

    @of_other_ranks("wait_for_everyone")
    def wait_for_everyone(self) -> None:
        """As accelerate's."""
        super().wait_for_everyone()

    @of_other_ranks("prepare")
    def of_first(self, number: int) -> int:
        """The first rank's number; all ranks call this together."""
        told = torch.tensor([number % 2**62], device=self.device)
        if dist.is_initialized():
            dist.broadcast(told, src=0)
        return int(told)

    def _gathered(self, x: Tensor) -> Tensor:
        """The rows of all pieces in their order; RunError on every rank if other sizes differ."""
        x = x[None] if not x.dim() else x
        if not dist.is_initialized():
            return x
        texts = exchange_texts(json.dumps([*x.shape]), dist.group.WORLD, self.device)
        shapes = [json.loads(text) for text in texts]
        if len({tuple(shape[1:]) for shape in shapes}) > 1:
            raise _other_lengths(shapes)
        found = gather_uneven(x.contiguous(), [shape[0] for shape in shapes])
        return torch.cat([found[rank] for rank in self.ranks.firsts])


def _leave() -> None:
    """End the process group: a process that ends with threads of gloo in it may abort."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _is_of_tensors(value: Any) -> bool:
    """Whether a nested value has tensors alone."""
    try:
        recursively_apply(lambda x: x, value, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _other_lengths(shapes: list[list[int]]) -> RunError:
    told = ", ".join(f"rank {rank} {shape}" for rank, shape in enumerate(shapes))
    return RunError(
        where="gather",
        what=f"ranks have tensors of other sizes than their rows: {told}",
        why="rows are put behind each other",
        do="Call accelerator.pad_across_processes(tensor, dim=1) before.",
    )
