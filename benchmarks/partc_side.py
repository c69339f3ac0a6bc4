"""partc's program for a layout, compiled once and loaded by every rank."""

from __future__ import annotations

import torch
from torch import Tensor

import partc
from benchmarks.measure import Side, norm_over_ranks
from benchmarks.workload import Pipeline, Size, build_batch, build_model, loss_of, stage_starts
from partc.plan.mesh import Mesh


def compile_to(
    folder: str,
    size: Size,
    mesh: str | Mesh,
    plan: str,
    cut: Pipeline | None,
    bucket_mb: float = partc.Plan.bucket_mb,
) -> None:
    """Compile the size's training step and save its sources in ``folder``."""
    with torch.device("meta"):
        model = build_model(size)
    full = partc.Plan(preset=plan, bucket_mb=bucket_mb)
    if cut is not None:
        starts = stage_starts(size, cut.stages)[1:]
        full = full.changed(
            stages=tuple(f"model.layers.{start}" for start in starts),
            microbatches=cut.microbatches,
            schedule=cut.schedule,
        )
    partc.compile(model, mesh, build_batch(size), loss=loss_of, plan=full).save(folder)


def load(folder: str, size: Size) -> Side:
    """This rank's side of the program saved in ``folder``, with the model's weights."""
    stage = partc.load(folder).module()
    stage.load_full(build_model(size))
    batch = build_batch(size)
    parameters = list(stage.rank_step.parameters())  # plain pieces, as this rank steps on them

    def forward_backward() -> Tensor:
        loss: Tensor = stage.step(*batch)
        return loss

    def grad_norm() -> float:
        weights = [p.data for p in parameters]
        for p in parameters:  # whole tensors come from the state dict, so gradients stand in it
            p.data = torch.zeros_like(p) if p.grad is None else p.grad
        norm = norm_over_ranks(stage.full_state_dict())
        for p, weight in zip(parameters, weights, strict=True):
            p.data = weight
        return norm

    return Side("partc", parameters, forward_backward, grad_norm)
