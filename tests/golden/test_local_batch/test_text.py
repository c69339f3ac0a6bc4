"""Pipeline rank 0 of 1.  Written by partc 0.1.0 for Tokens; change the plan, not this file.

mesh      dp=2
plan      ddp
schedule  1f1b, 2 microbatches
inputs    ids dim 0 over dp, dim 0 over mb
          targets dim 0 over dp, dim 0 over mb
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from .helpers import (
    Partials, Reduced, cross_entropy_grad, embedding_grad, layer_norm_backward, log_softmax_over,
    sum_grads,
)

MESH = {"dp": 2}
DTYPES = {"float32": torch.float32}
STAGE0_SHARDS = {  # of stage 0
    "embed_weight": ("embed.weight", (32, 16), "float32", ()),  # f32[32,16]
    "norm_weight": ("norm.weight", (16,), "float32", ()),  # f32[16]
    "norm_bias": ("norm.bias", (16,), "float32", ()),  # f32[16]
    "up_weight": ("up.weight", (32, 16), "float32", ()),  # f32[32,16]
    "up_bias": ("up.bias", (32,), "float32", ()),  # f32[32]
    "down_weight": ("down.weight", (16, 32), "float32", ()),  # f32[16,32]
    "down_bias": ("down.bias", (16,), "float32", ()),  # f32[16]
    "head_weight": ("head.weight", (32, 16), "float32", ()),  # f32[32,16]
    "head_bias": ("head.bias", (32,), "float32", ()),  # f32[32]
}
SHARDS = {  # attribute here: (name in the model, whole shape, dtype, cuts as (axis, dim, outer))
    **{f"stage0.{name}": row for name, row in STAGE0_SHARDS.items()},
}
BUFFERS = {}  # the same for buffers
ALIASES = {}  # second name of a tied parameter: the name it stands under
INPUTS = {  # (shape in the global batch, dtype, cuts as (axis, dim, outer)); a rank passes its piece
    "ids": ((8, 6), "int64", (("dp", 0, 2),)),
    "targets": ((8, 6), "int64", (("dp", 0, 2),)),
}


def empty(shape: tuple[int, ...], dtype: str, cuts: tuple[tuple[str, int, int], ...]) -> Tensor:
    """Memory for this rank's piece of a parameter or buffer."""
    for axis, dim, _ in cuts:
        shape = *shape[:dim], shape[dim] // MESH[axis], *shape[dim + 1 :]
    return torch.empty(shape, dtype=DTYPES[dtype])


class Stage0(nn.Module):
    """Stage 0: embed, norm, up, down, head."""

    def __init__(self, mesh: DeviceMesh, n: int, partials: Partials) -> None:
        super().__init__()
        self.dp = mesh.get_group("dp")
        self.partials = partials
        self.n = n
        for name, (_, *known) in STAGE0_SHARDS.items():
            self.register_parameter(name, nn.Parameter(empty(*known)))

    def begin(self, ids: Tensor, targets: Tensor) -> None:
        """Compute what all microbatches share."""
        self.saved = {}
        self.losses = []
        total = (targets.flatten() != 3).to(torch.float32).sum(0)  # f32[]{U:dp}
        dist.all_reduce(total, group=self.dp)                      # f32[]; exposed
        self.ids = ids                                             # i64[(2 4@dp),6]
        self.targets = targets                                     # i64[(2 4@dp),6]
        self.total = total                                         # f32[]

    def forward(self, i: int) -> tuple[Tensor, ...]:
        """Microbatch `i` through this stage."""
        ids_local = self.ids.chunk(2)[i]                         # i64[8@mb+dp,6]
        embed = F.embedding(ids_local, self.embed_weight)        # f32[8@mb+dp,6,16]
        norm = F.layer_norm(embed, (16,), self.norm_weight, self.norm_bias, 1e-05)  # f32[8@mb+dp,6,16]
        up = F.linear(norm, self.up_weight, self.up_bias)        # f32[8@mb+dp,6,32]
        del norm
        gelu = F.gelu(up)                                        # f32[8@mb+dp,6,32]
        down = F.linear(gelu, self.down_weight, self.down_bias)  # f32[8@mb+dp,6,16]
        del gelu
        add = embed + down                                       # f32[8@mb+dp,6,16]
        del down
        head = F.linear(add, self.head_weight, self.head_bias)   # f32[8@mb+dp,6,32]
        targets_reshape = self.targets.chunk(2)[i].flatten()     # i64[48@mb+dp]
        log_softmax = log_softmax_over(head.flatten(0, 1))       # f32[48@mb+dp,32]
        del head
        loss_sum = F.nll_loss(log_softmax, targets_reshape, ignore_index=3, reduction="sum")  # f32[]{U:dp}{U:mb}
        loss = loss_sum / self.total                             # f32[]{U:dp}{U:mb}
        self.saved[i] = (ids_local, embed, up, add, targets_reshape, log_softmax, loss)
        self.losses.append(loss)
        return ()

    def backward(self, i: int) -> tuple[Tensor, ...]:
        """The gradients of microbatch `i`."""
        ids_local, embed, up, add, targets_reshape, log_softmax, loss = self.saved.pop(i)
        d_div = torch.ones_like(loss) / self.total                  # f32[]
        d_head_reshape = cross_entropy_grad(
            d_div, log_softmax.exp(), targets_reshape, targets_reshape, 3)  # f32[48@mb+dp,32]
        d_head = d_head_reshape.unflatten(0, (2, 6))                # f32[8@mb+dp,6,32]
        del d_head_reshape
        # head
        self.partials.add_product(self.head_weight, d_head, add)    # f32[32,16]{U:dp}{U:mb}
        d_embed = d_head @ self.head_weight                         # f32[8@mb+dp,6,16]
        self.partials.add(self.head_bias, d_head.sum((0, 1)))       # f32[32]{U:dp}{U:mb}
        del d_head
        # down
        gelu = F.gelu(up)                                           # f32[8@mb+dp,6,32]
        self.partials.add_product(self.down_weight, d_embed, gelu)  # f32[16,32]{U:dp}{U:mb}
        del gelu
        d_up = d_embed @ self.down_weight                           # f32[8@mb+dp,6,32]
        self.partials.add(self.down_bias, d_embed.sum((0, 1)))      # f32[16]{U:dp}{U:mb}
        torch.ops.aten.gelu_backward.grad_input(d_up, up, grad_input=d_up)  # f32[8@mb+dp,6,32]
        # up
        norm, mean, rstd = torch.native_layer_norm(
            embed, (16,), self.norm_weight, self.norm_bias, 1e-05)  # f32[8@mb+dp,6,16]
        self.partials.add_product(self.up_weight, d_up, norm)       # f32[32,16]{U:dp}{U:mb}
        del norm
        d_norm = d_up @ self.up_weight                              # f32[8@mb+dp,6,16]
        self.partials.add(self.up_bias, d_up.sum((0, 1)))           # f32[32]{U:dp}{U:mb}
        del d_up
        # norm
        d_embed_via_norm, d_norm_weight, d_norm_bias = layer_norm_backward(
            d_norm, embed, mean, rstd, self.norm_weight)            # f32[8@mb+dp,6,16], 2x f32[16]{U:dp}{U:mb}
        self.partials.add(self.norm_weight, d_norm_weight)
        self.partials.add(self.norm_bias, d_norm_bias)
        del d_norm, d_norm_bias, d_norm_weight, mean, rstd
        d_embed += d_embed_via_norm                                 # f32[8@mb+dp,6,16]
        del d_embed_via_norm
        self.partials.add(self.embed_weight, embedding_grad(d_embed, ids_local, 32))  # f32[32,16]{U:dp}{U:mb}
        return ()

    def finish(self) -> Tensor:
        """Sum over ranks what all microbatches have added up."""
        reduced = Reduced()
        for bucket in self.partials.buckets([*self.parameters()], 100_000_000):
            reduced.append(sum_grads(self.partials.take(bucket), self.dp))
        reduced.finish()
        loss = torch.stack(self.losses).sum()
        dist.all_reduce(loss, group=self.dp)
        return loss


class TokensStep(nn.Module):
    """Pipeline rank 0 of 1: stage 0 of 1."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.partials = Partials()
        self.stage0 = Stage0(mesh, None, self.partials)
        self.stages = {0: self.stage0}

    def F(self, stage: int, i: int) -> None:
        """Forward of microbatch `i`."""
        self.stages[stage].forward(i)

    def B(self, stage: int, i: int) -> None:
        """Backward of microbatch `i`."""
        self.stages[stage].backward(i)

    @torch.no_grad()
    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Schedule 1f1b, 2 microbatches."""
        self.partials.clear()  # of a step that did not end
        for stage in self.stages.values():
            stage.begin(ids, targets)
        # steady state: 1 forward, 1 backward
        for i in range(2):
            self.F(0, i)
            self.B(0, i)
        loss = self.stage0.finish()
        return loss


Step = TokensStep
