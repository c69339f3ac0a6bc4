"""The model under torch.distributed.pipelining, its stages written by hand as a user would."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import Side, norm_over_ranks, rows_of
from benchmarks.workload import Pipeline, Size, build_batch, build_model, stage_starts

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}


def pipelining(size: Size, cut: Pipeline) -> Side:
    """The cut's stages under torch's schedule, data parallel over what ranks are left.

    The loss is divided by the number of microbatches where it is made, outputs are not kept, and
    only the last stage's rank knows the loss: what torch can leave out is left out.
    """
    mesh = init_device_mesh(
        "cpu", (cut.ranks, dist.get_world_size() // cut.ranks), mesh_dim_names=("pp", "dp")
    )
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    modules = {n: LlamaStage(build_model(size), size, cut, n) for n in stages_of(rank, cut)}
    stages = [
        PipelineStage(_replicated(m, mesh), n, cut.stages, torch.device("cpu"), group=group)
        for n, m in modules.items()
    ]
    schedule = _schedule(stages, cut)
    ids, targets = (
        rows_of(x, mesh.get_local_rank("dp"), mesh["dp"].size()) for x in build_batch(size)
    )
    inputs = (ids,) if 0 in modules else ()
    labels = targets if cut.stages - 1 in modules else None

    def forward_backward() -> Tensor:
        losses: list[Tensor] = []
        schedule.step(*inputs, target=labels, losses=losses, return_outputs=False)
        # the mean over all ranks is then the loss
        return sum((loss.detach() for loss in losses), torch.zeros(())) * cut.ranks

    named = {
        f"{name} of stage {n}": p for n, m in modules.items() for name, p in m.named_parameters()
    }

    def grad_norm() -> float:
        return norm_over_ranks({n: p.grad for n, p in named.items() if p.grad is not None})

    return Side(SCHEDULES[cut.schedule].__name__, list(named.values()), forward_backward, grad_norm)


class LlamaStage(nn.Module):
    """The layers of one stage; the first has the embedding, the last the norm and the head."""

    def __init__(self, whole: Any, size: Size, cut: Pipeline, number: int) -> None:
        super().__init__()
        first, end = (*stage_starts(size, cut.stages), size.layers)[number : number + 2]
        is_last = number == cut.stages - 1
        self.embed_tokens = whole.model.embed_tokens if number == 0 else nn.Identity()
        self.layers = nn.ModuleList(whole.model.layers[first:end])
        self.norm = whole.model.norm if is_last else nn.Identity()
        self.lm_head = whole.lm_head if is_last else nn.Identity()
        x = torch.empty(1, size.seq, size.hidden)
        cos, sin = whole.model.rotary_emb(x, torch.arange(size.seq)[None])
        self.register_buffer("cos", cos, persistent=False)  # f32[1,seq,head]
        self.register_buffer("sin", sin, persistent=False)  # f32[1,seq,head]

    def forward(self, x: Tensor) -> Tensor:
        """Token ids or the stage before's ``f32[batch,seq,hidden]``; the last gives logits."""
        x = self.embed_tokens(x)
        for layer in self.layers:
            x = layer(x, position_embeddings=(self.cos, self.sin))
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def stages_of(rank: int, cut: Pipeline) -> list[int]:
    """The stages of a pipeline rank: dealt out in turns, of ZB-V in a V."""
    if cut.schedule == "zb-v":
        return [rank, cut.stages - 1 - rank]
    return list(range(rank, cut.stages, cut.ranks))


def _schedule(stages: list[PipelineStage], cut: Pipeline) -> Any:
    loss = partial(_loss_part, num=cut.microbatches)
    mine = stages if cut.stages > cut.ranks else stages[0]
    return SCHEDULES[cut.schedule](mine, cut.microbatches, loss_fn=loss, scale_grads=False)


def _loss_part(logits: Tensor, targets: Tensor, *, num: int) -> Tensor:
    """One of ``num`` microbatches' part of the mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / num


def _replicated(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if mesh["dp"].size() == 1:
        return stage
    return DistributedDataParallel(
        stage, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True
    )
