"""Pipeline ranks 1 and 2 of 4.  Written by partc 0.1.0 for Toy; change the plan, not this file.

mesh      pp=4
plan      ddp
schedule  1f1b, 8 microbatches
stage     1 begins at blocks.2
          2 begins at blocks.4
inputs    ids dim 0 over mb
          labels dim 0 over mb
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from .helpers import Inbox, Links, Outbox, add_grad, add_weight_grad, layer_norm_backward

MESH = {"pp": 4}
DTYPES = {"float64": torch.float64}
PIPELINE_RANKS = (1, 2)  # the pipeline ranks that run this file
BLOCK_SHARDS = {  # of one of blocks.n .. n+1
    "norm_weight": ("norm.weight", (12,), "float64", ()),  # f64[12]
    "norm_bias": ("norm.bias", (12,), "float64", ()),  # f64[12]
    "w1_weight": ("w1.weight", (20, 12), "float64", ()),  # f64[20,12]
    "w1_bias": ("w1.bias", (20,), "float64", ()),  # f64[20]
    "w2_weight": ("w2.weight", (12, 20), "float64", ()),  # f64[12,20]
    "w2_bias": ("w2.bias", (12,), "float64", ()),  # f64[12]
}
STAGE_SHARDS = {  # of stage pp_rank, by n, its first of blocks
    n: {
        **{f"blocks.{i}.{attribute}": ("blocks." + f"{i + n}.{name}", *rest)
           for i in range(2) for attribute, (name, *rest) in BLOCK_SHARDS.items()},
    }
    for pp_rank in PIPELINE_RANKS for n in (2 * pp_rank,)
}
SHARDS = {  # by pipeline rank; attribute here: (name in the model, whole shape, dtype, cuts as (axis, dim, outer))
    pp_rank: {
        **{f"stage.{name}": row for name, row in STAGE_SHARDS[2 * pp_rank].items()},
    }
    for pp_rank in PIPELINE_RANKS
}
BUFFERS = {pp_rank: {} for pp_rank in PIPELINE_RANKS}  # by pipeline rank; the same for buffers
ALIASES = {}  # second name of a tied parameter: the name it stands under
INPUTS = {  # the global batch: (shape, dtype)
    "ids": ((24, 10), "int64"),
    "labels": ((24, 10), "int64"),
}


def empty(shape: tuple[int, ...], dtype: str, cuts: tuple[tuple[str, int, int], ...]) -> Tensor:
    """Memory for this rank's piece of a parameter or buffer."""
    for axis, dim, _ in cuts:
        shape = *shape[:dim], shape[dim] // MESH[axis], *shape[dim + 1 :]
    return torch.empty(shape, dtype=DTYPES[dtype])


class Block(nn.Module):
    """One of blocks.n .. n+1."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        for name, (_, *known) in BLOCK_SHARDS.items():
            self.register_parameter(name, nn.Parameter(empty(*known)))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        norm = F.layer_norm(x, (12,), self.norm_weight, self.norm_bias, 1e-05)  # f64[24@mb,10,12]
        w1 = F.linear(norm, self.w1_weight, self.w1_bias)  # f64[24@mb,10,20]
        gelu = F.gelu(w1)                                  # f64[24@mb,10,20]
        w2 = F.linear(gelu, self.w2_weight, self.w2_bias)  # f64[24@mb,10,12]
        del gelu
        y = x + w2                                         # f64[24@mb,10,12]
        return y, [w1, x]

    def backward(self, d_y: Tensor, saved: list[Tensor]) -> Tensor:
        w1, x = saved
        saved.clear()
        # w2
        gelu = F.gelu(w1)                                       # f64[24@mb,10,20]
        add_weight_grad(self.w2_weight, d_y, gelu)              # f64[12,20]{U:mb}
        del gelu
        d_w1 = d_y @ self.w2_weight                             # f64[24@mb,10,20]
        add_grad(self.w2_bias, d_y.sum((0, 1)))                 # f64[12]{U:mb}
        torch.ops.aten.gelu_backward.grad_input(d_w1, w1, grad_input=d_w1)  # f64[24@mb,10,20]
        del w1
        # w1
        norm, mean, rstd = torch.native_layer_norm(
            x, (12,), self.norm_weight, self.norm_bias, 1e-05)  # f64[24@mb,10,12]
        add_weight_grad(self.w1_weight, d_w1, norm)             # f64[20,12]{U:mb}
        del norm
        d_norm = d_w1 @ self.w1_weight                          # f64[24@mb,10,12]
        add_grad(self.w1_bias, d_w1.sum((0, 1)))                # f64[20]{U:mb}
        del d_w1
        # norm
        d_x, d_norm_weight, d_norm_bias = layer_norm_backward(
            d_norm, x, mean, rstd, self.norm_weight)            # f64[24@mb,10,12], 2x f64[12]{U:mb}
        add_grad(self.norm_weight, d_norm_weight)
        add_grad(self.norm_bias, d_norm_bias)
        d_x += d_y                                              # f64[24@mb,10,12]
        return d_x


class Stage(nn.Module):
    """Stage pp_rank: blocks.n .. n+1."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(mesh) for _ in range(2)])  # blocks.n .. n+1

    def begin(self, ids: Tensor, labels: Tensor) -> None:
        """Compute what all microbatches share."""
        self.saved = {}

    def forward(self, i: int, x: Tensor) -> tuple[Tensor, ...]:
        """Microbatch `i` through this stage."""
        blocks_1_x = x
        blocks_saved: list[list[Tensor]] = []
        for layer in self.blocks:
            blocks_1_x, saved = layer(blocks_1_x)  # f64[24@mb,10,12]
            blocks_saved.append(saved)
        self.saved[i] = (blocks_saved,)
        return (blocks_1_x,)                       # f64[24@mb,10,12]

    def backward(self, i: int, d_y: Tensor) -> tuple[Tensor, ...]:
        """The gradients of microbatch `i`."""
        (blocks_saved,) = self.saved.pop(i)
        d_x = d_y
        for layer in reversed(self.blocks):
            d_x = layer.backward(d_x, blocks_saved.pop())  # f64[24@mb,10,12]
        return (d_x,)                                      # f64[24@mb,10,12]


class ToyStep(nn.Module):
    """Pipeline rank pp_rank of 4: stage pp_rank of 4."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        pp_rank = mesh.get_local_rank("pp")
        self.pp, self.pp_rank = mesh.get_group("pp"), pp_rank
        self.stage = Stage(mesh)
        self.stages = {pp_rank: self.stage}
        # the rank of every stage, and the stages that receive from another rank
        self.links = Links(mesh, range(4), {"x": range(1, 4), "d": range(3)})
        # by stage: where a forward's `x` comes from and goes to
        self.x_in = {pp_rank: Inbox(self.links["x", pp_rank], [((3, 10, 12), torch.float64)])}
        self.x_out = {pp_rank: Outbox(self.links["x", pp_rank + 1], bound=1)}
        # and a backward's `d`, the gradient of `x`
        self.d_in = {pp_rank: Inbox(self.links["d", pp_rank], [((3, 10, 12), torch.float64)])}
        self.d_out = {pp_rank: Outbox(self.links["d", pp_rank - 1], bound=1)}

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
        """Schedule 1f1b, 8 microbatches."""
        pp_rank = self.pp_rank
        self.links.meet(ids.device)
        for stage in self.stages.values():
            stage.begin(ids, labels)
        for link in (self.x_in[pp_rank], self.d_in[pp_rank]):
            link.begin(8, ids.device)
        # warm-up: forwards
        for i in range(4 - pp_rank):
            self.F(pp_rank, i)
        # steady state: 1 forward, 1 backward
        for i in range(pp_rank + 4):
            self.B(pp_rank, i)
            self.F(pp_rank, i + 4 - pp_rank)
        # cool-down: backwards
        for i in range(pp_rank + 4, 8):
            self.B(pp_rank, i)
        for link in (self.x_out[pp_rank], self.d_out[pp_rank]):
            link.wait()
        loss = torch.empty((), dtype=torch.float64, device=ids.device)
        dist.broadcast(loss, group=self.pp, group_src=3)  # every rank learns the loss
        return loss


Step = ToyStep
