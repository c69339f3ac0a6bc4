"""Pipeline rank 0 of 2.  Written by partc 0.1.0 for Toy; change the plan, not this file.

mesh      pp=2
plan      ddp
schedule  looped-bfs, 8 microbatches
stage     2 begins at blocks.1
inputs    ids dim 0 over mb
          labels dim 0 over mb
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from .helpers import (
    Inbox, Links, Nothing, Outbox, add_grad, add_weight_grad, embedding_grad, layer_norm_backward,
)

MESH = {"pp": 2}
STAGE0_SHARDS = {"embed_weight": ("embed.weight", (14, 12), "float64", ())}  # of stage 0
STAGE2_SHARDS = {  # of stage 2
    "blocks_1_norm_weight": ("blocks.1.norm.weight", (12,), "float64", ()),
    "blocks_1_norm_bias": ("blocks.1.norm.bias", (12,), "float64", ()),
    "blocks_1_w1_weight": ("blocks.1.w1.weight", (20, 12), "float64", ()),
    "blocks_1_w1_bias": ("blocks.1.w1.bias", (20,), "float64", ()),
    "blocks_1_w2_weight": ("blocks.1.w2.weight", (12, 20), "float64", ()),
    "blocks_1_w2_bias": ("blocks.1.w2.bias", (12,), "float64", ()),
}
SHARDS = {  # attribute here: (name in the model, whole shape, dtype, cuts as (axis, dim, outer))
    **{f"stage0.{name}": row for name, row in STAGE0_SHARDS.items()},
    **{f"stage2.{name}": row for name, row in STAGE2_SHARDS.items()},
}
BUFFERS = {}  # the same for buffers
ALIASES = {}  # second name of a tied parameter: the name it stands under
INPUTS = {  # the global batch: (shape, dtype)
    "ids": ((24, 10), "int64"),
    "labels": ((24, 10), "int64"),
}


class Stage0(nn.Module):
    """Stage 0: embed."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embed_weight = nn.Parameter(torch.empty(14, 12, dtype=torch.float64))  # f64[14,12]

    def begin(self, ids: Tensor, labels: Tensor) -> None:
        """Compute what all microbatches share."""
        self.saved = {}
        self.ids = ids  # i64[24,10]

    def forward(self, i: int) -> tuple[Tensor, ...]:
        """Microbatch `i` through this stage."""
        ids_local = self.ids.chunk(8)[i]                       # i64[24@mb,10]
        embedding = F.embedding(ids_local, self.embed_weight)  # f64[24@mb,10,12]
        self.saved[i] = (ids_local,)
        return (embedding,)                                    # f64[24@mb,10,12]

    def backward(self, i: int, d_y: Tensor) -> tuple[Tensor, ...]:
        """The gradients of microbatch `i`."""
        (ids_local,) = self.saved.pop(i)
        add_grad(self.embed_weight, embedding_grad(d_y, ids_local, 14))  # f64[14,12]{U:mb}
        return ()


class Stage2(nn.Module):
    """Stage 2: blocks.1."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.blocks_1_norm_weight = nn.Parameter(torch.empty(12, dtype=torch.float64))  # f64[12]
        self.blocks_1_norm_bias = nn.Parameter(torch.empty(12, dtype=torch.float64))  # f64[12]
        self.blocks_1_w1_weight = nn.Parameter(torch.empty(20, 12, dtype=torch.float64))  # f64[20,12]
        self.blocks_1_w1_bias = nn.Parameter(torch.empty(20, dtype=torch.float64))  # f64[20]
        self.blocks_1_w2_weight = nn.Parameter(torch.empty(12, 20, dtype=torch.float64))  # f64[12,20]
        self.blocks_1_w2_bias = nn.Parameter(torch.empty(12, dtype=torch.float64))  # f64[12]

    def begin(self, ids: Tensor, labels: Tensor) -> None:
        """Compute what all microbatches share."""
        self.saved = {}

    def forward(self, i: int, x: Tensor) -> tuple[Tensor, ...]:
        """Microbatch `i` through this stage."""
        # blocks.1
        norm = F.layer_norm(x, (12,), self.blocks_1_norm_weight, self.blocks_1_norm_bias, 1e-05)  # f64[24@mb,10,12]
        w1 = F.linear(norm, self.blocks_1_w1_weight, self.blocks_1_w1_bias)  # f64[24@mb,10,20]
        del norm
        gelu = F.gelu(w1)  # f64[24@mb,10,20]
        w2 = F.linear(gelu, self.blocks_1_w2_weight, self.blocks_1_w2_bias)  # f64[24@mb,10,12]
        del gelu
        add = x + w2       # f64[24@mb,10,12]
        self.saved[i] = (x, w1)
        return (add,)      # f64[24@mb,10,12]

    def backward(self, i: int, d_y: Tensor) -> tuple[Tensor, ...]:
        """The gradients of microbatch `i`."""
        x, w1 = self.saved.pop(i)
        # blocks.1
        gelu = F.gelu(w1)                                      # f64[24@mb,10,20]
        add_weight_grad(self.blocks_1_w2_weight, d_y, gelu)    # f64[12,20]{U:mb}
        del gelu
        d_w1 = d_y @ self.blocks_1_w2_weight                   # f64[24@mb,10,20]
        add_grad(self.blocks_1_w2_bias, d_y.sum((0, 1)))       # f64[12]{U:mb}
        torch.ops.aten.gelu_backward.grad_input(d_w1, w1, grad_input=d_w1)  # f64[24@mb,10,20]
        norm, mean, rstd = torch.native_layer_norm(
            x, (12,), self.blocks_1_norm_weight, self.blocks_1_norm_bias, 1e-05)  # f64[24@mb,10,12]
        add_weight_grad(self.blocks_1_w1_weight, d_w1, norm)   # f64[20,12]{U:mb}
        del norm
        d_norm = d_w1 @ self.blocks_1_w1_weight                # f64[24@mb,10,12]
        add_grad(self.blocks_1_w1_bias, d_w1.sum((0, 1)))      # f64[20]{U:mb}
        del d_w1
        d_x, d_norm_weight, d_norm_bias = layer_norm_backward(
            d_norm, x, mean, rstd, self.blocks_1_norm_weight)  # f64[24@mb,10,12], 2x f64[12]{U:mb}
        add_grad(self.blocks_1_norm_weight, d_norm_weight)
        add_grad(self.blocks_1_norm_bias, d_norm_bias)
        del d_norm, d_norm_bias, d_norm_weight, mean, rstd
        d_x += d_y                                             # f64[24@mb,10,12]
        return (d_x,)                                          # f64[24@mb,10,12]


class ToyStep(nn.Module):
    """Pipeline rank 0 of 2: stages 0, 2 of 4."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.pp = mesh.get_group("pp")
        self.stage0 = Stage0(mesh)
        self.stage2 = Stage2(mesh)
        self.stages = {0: self.stage0, 2: self.stage2}
        # the rank of every stage, and the stages that receive from another rank
        self.links = Links(mesh, [0, 1, 0, 1], {"x": range(1, 4), "d": range(3)})
        # by stage: where a forward's `x` comes from and goes to
        self.x_in = {0: Nothing(), 2: Inbox(self.links["x", 2], [((3, 10, 12), torch.float64)])}
        self.x_out = {0: Outbox(self.links["x", 1], bound=5),
                      2: Outbox(self.links["x", 3], bound=5)}
        # and a backward's `d`, the gradient of `x`
        self.d_in = {0: Inbox(self.links["d", 0], [((3, 10, 12), torch.float64)]),
                     2: Inbox(self.links["d", 2], [((3, 10, 12), torch.float64)])}
        self.d_out = {0: Nothing(), 2: Outbox(self.links["d", 1], bound=1)}

    def F(self, stage: int, i: int) -> None:
        """Forward of microbatch `i`: `x` from the stage before, the result to the stage behind."""
        x = self.x_in[stage].take()
        self.x_out[stage].put(self.stages[stage].forward(i, *x))

    def B(self, stage: int, i: int) -> None:
        """Backward of microbatch `i`: `d_y` from the stage behind, `d_x` to the stage before."""
        d_y = self.d_in[stage].take()
        self.d_out[stage].put(self.stages[stage].backward(i, *d_y))

    @torch.no_grad()
    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Schedule looped-bfs, 8 microbatches."""
        self.links.meet(ids.device)
        for stage in self.stages.values():
            stage.begin(ids, labels)
        for link in (self.x_in[2], self.d_in[0], self.d_in[2]):
            link.begin(8, ids.device)
        # forwards
        for i in range(8):
            self.F(0, i)
        for i in range(8):
            self.F(2, i)
        # backwards
        for i in reversed(range(8)):
            self.B(2, i)
        for i in reversed(range(8)):
            self.B(0, i)
        for link in (self.x_out[0], self.x_out[2], self.d_out[2]):
            link.wait()
        loss = torch.empty((), dtype=torch.float64, device=ids.device)
        dist.broadcast(loss, group=self.pp, group_src=1)  # every rank learns the loss
        return loss


Step = ToyStep
