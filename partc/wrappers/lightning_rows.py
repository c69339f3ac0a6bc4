"""Which rows each rank of a Lightning trainer reads, and how metrics join them.

In: a mesh, and whether loaders give a rank's rows or the whole batch. Out: a strategy whose loaders
and metrics follow the mesh.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import Metric

from partc.data.share import Division
from partc.errors import UsageError
from partc.plan.batch import data_axes
from partc.plan.mesh import Mesh
from partc.plan.sharding import cut

if "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules:
    from lightning.pytorch.strategies import DDPStrategy
else:
    from pytorch_lightning.strategies import DDPStrategy


class SharedRows(DDPStrategy):  # type: ignore[misc]
    """Data ranks read other rows, ranks of a pipeline or of tensor parallelism the same.

    ``is_whole``: all ranks' loaders give the whole batch.
    """

    def __init__(self, mesh: Mesh, *, is_whole: bool) -> None:
        super().__init__()
        self._mesh, self._is_whole = mesh, is_whole
        self._rows = Division(mesh, {axis: cut(0) for axis in data_axes(mesh)})

    def share_rows(self, trainer: Any) -> None:
        """Before loaders are made."""
        if self._is_whole:  # in the order of one process
            trainer._accelerator_connector.use_distributed_sampler = False
            torch.set_rng_state(self.broadcast(torch.get_rng_state()))
        self._share_metrics()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self._rows.world, "rank": self._rows.rank(self.global_rank)}

    def process_dataloader(self, dataloader: Any) -> Any:
        """RunError for rows that an evaluation would count twice, to give all ranks as many."""
        sampler = getattr(dataloader, "sampler", None)
        if isinstance(sampler, DistributedSampler) and not self.lightning_module.trainer.training:
            dataset: Any = sampler.dataset
            rows = len(dataset)
            if sampler.total_size > rows:
                raise _counted_twice(rows, sampler.num_replicas)
        return dataloader

    def _copies(self) -> int:
        """How many ranks are given the same rows."""
        world: int = self.world_size
        return world // (1 if self._is_whole else self._rows.world)

    def _share_metrics(self) -> None:
        """Let torchmetrics join the rows of one rank of each piece of the batch, at steps too."""
        metrics = [part for part in self.lightning_module.modules() if isinstance(part, Metric)]
        ranks = range(self.world_size)
        pieces = [0 if self._is_whole else self._rows.rank(rank) for rank in ranks]
        copies = [pieces[:rank].count(pieces[rank]) for rank in ranks]  # ranks before with the same
        for copy in sorted({*copies}) if metrics else ():
            group = dist.new_group([rank for rank in ranks if copies[rank] == copy])
            if copies[self.global_rank] == copy:
                for metric in metrics:
                    metric.process_group, metric.dist_sync_on_step = group, not self._is_whole

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As of DDP; in a sum rows count once, however many ranks are given them."""
        result = super().reduce(tensor, group, reduce_op)
        whole = isinstance(tensor, Tensor) and group is None and reduce_op == "sum"
        return result / self._copies() if whole else result


def _counted_twice(rows: int, ranks: int) -> UsageError:
    return UsageError(
        where="a loader that validates or tests",
        what=f"its {rows} rows cannot be shared evenly by {ranks} data ranks",
        why="DistributedSampler reads some twice then, and metrics would not be those of the data",
        do='Take Strategy(..., batch="global"), where every rank reads all rows and computes its '
        "own, or a sampler of your own.",
    )
