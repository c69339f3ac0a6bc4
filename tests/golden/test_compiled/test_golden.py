"""One rank of 2.  Written by partc 0.1.0 for Toy; change the plan, not this file.

mesh      dp=2
plan      fsdp
inputs    ids dim 0 over dp
          labels dim 0 over dp
gathered  over dp before each use, forward and backward (ZeRO-3)
moves     all_gather over dp x10, 5.15 KB
          all_reduce over dp x2, 16 B
          reduce_scatter over dp x6, 6.08 KB
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from .helpers import (
    Gathered, Reduced, cross_entropy_grad, embedding_grad, gather_weights, layer_norm_backward,
    nll_loss_and_count, scatter_grads, weight_grad,
)

MESH = {"dp": 2}
DTYPES = {"float64": torch.float64}
BLOCK_SHARDS = {  # of one of blocks.0 .. 3
    "norm_weight": ("norm.weight", (6,), "float64", (("dp", 0, 1),)),  # f64[6@dp]
    "norm_bias": ("norm.bias", (6,), "float64", (("dp", 0, 1),)),  # f64[6@dp]
    "w1_weight": ("w1.weight", (10, 6), "float64", (("dp", 0, 1),)),  # f64[10@dp,6]
    "w1_bias": ("w1.bias", (10,), "float64", (("dp", 0, 1),)),  # f64[10@dp]
    "w2_weight": ("w2.weight", (6, 10), "float64", (("dp", 0, 1),)),  # f64[6@dp,10]
    "w2_bias": ("w2.bias", (6,), "float64", (("dp", 0, 1),)),  # f64[6@dp]
}
SHARDS = {  # attribute here: (name in the model, whole shape, dtype, cuts as (axis, dim, outer))
    "embed_weight": ("embed.weight", (14, 6), "float64", (("dp", 0, 1),)),  # f64[14@dp,6]
    "head_weight": ("head.weight", (14, 6), "float64", (("dp", 0, 1),)),  # f64[14@dp,6]
    **{f"blocks.{i}.{attribute}": ("blocks." + f"{i}.{name}", *rest)
       for i in range(4) for attribute, (name, *rest) in BLOCK_SHARDS.items()},
}
BUFFERS = {}  # the same for buffers
ALIASES = {}  # second name of a tied parameter: the name it stands under
INPUTS = {  # the global batch: (shape, dtype)
    "ids": ((4, 8), "int64"),
    "labels": ((4, 8), "int64"),
}


def empty(shape: tuple[int, ...], dtype: str, cuts: tuple[tuple[str, int, int], ...]) -> Tensor:
    """Memory for this rank's piece of a parameter or buffer."""
    for axis, dim, _ in cuts:
        shape = *shape[:dim], shape[dim] // MESH[axis], *shape[dim + 1 :]
    return torch.empty(shape, dtype=DTYPES[dtype])


@torch.compile
def mlp_forward(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, w1_weight: Tensor,
                w1_bias: Tensor, w2_weight: Tensor, w2_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Forward of `Mlp`."""
    # blocks.0
    norm = F.layer_norm(x, (6,), norm_weight, norm_bias, 1e-05)  # f64[4@dp,8,6]
    w1 = F.linear(norm, w1_weight, w1_bias)                      # f64[4@dp,8,10]
    gelu = F.gelu(w1)                                            # f64[4@dp,8,10]
    w2 = F.linear(gelu, w2_weight, w2_bias)                      # f64[4@dp,8,6]
    return x + w2, w1                                            # f64[4@dp,8,6]


@torch.compile
def head_forward(x: Tensor, head_weight: Tensor,
                 labels_reshape: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Forward of `head`."""
    head = F.linear(x, head_weight)                                    # f64[4@dp,8,14]
    log_softmax = torch.log_softmax(head.flatten(0, 1), 1)             # f64[32@dp,14]
    del head
    loss_sum, count = nll_loss_and_count(log_softmax, labels_reshape)  # 2x f64[]{U:dp}
    return log_softmax, loss_sum, count


@torch.compile
def step_backward(loss: Tensor, count: Tensor, log_softmax: Tensor,
                  labels_reshape: Tensor) -> Tensor:
    """Backward of `step`."""
    d_div = torch.ones_like(loss) / count                                # f64[]
    d_head_reshape = cross_entropy_grad(
        d_div, log_softmax.exp(), labels_reshape, labels_reshape, -100)  # f64[32@dp,14]
    return d_head_reshape.unflatten(0, (2, 8))                           # f64[4@dp,8,14]


@torch.compile
def mlp_backward(w1: Tensor, d_y: Tensor, w2_weight: Tensor, x: Tensor, norm_weight: Tensor,
                 norm_bias: Tensor, w1_weight: Tensor) -> tuple[Tensor, ...]:
    """Backward of `Mlp`."""
    # blocks.0
    gelu = F.gelu(w1)                                # f64[4@dp,8,10]
    d_gelu = d_y @ w2_weight                         # f64[4@dp,8,10]
    d_w2_bias = d_y.sum((0, 1))                      # f64[6]{U:dp}
    d_w1 = torch.ops.aten.gelu_backward(d_gelu, w1)  # f64[4@dp,8,10]
    norm, mean, rstd = torch.native_layer_norm(x, (6,), norm_weight, norm_bias, 1e-05)  # f64[4@dp,8,6]
    d_norm = d_w1 @ w1_weight                        # f64[4@dp,8,6]
    d_w1_bias = d_w1.sum((0, 1))                     # f64[10]{U:dp}
    d_x, d_norm_weight, d_norm_bias = layer_norm_backward(d_norm, x, mean, rstd, norm_weight)  # f64[4@dp,8,6], 2x f64[6]{U:dp}
    return (gelu, d_w2_bias, d_w1, norm, d_w1_bias, d_x, d_norm_weight, d_norm_bias)


class Block(nn.Module):
    """One of blocks.0 .. 3."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.dp = mesh.get_group("dp")
        self.whole = Gathered()  # weights that are being gathered
        for name, (_, *known) in BLOCK_SHARDS.items():
            self.register_parameter(name, nn.Parameter(empty(*known)))

    def gather(self) -> None:
        """Start to gather the block's weights."""
        self.whole = gather_weights([*self.parameters()], 2, self.dp)

    def regather(self) -> None:
        """Start to gather the block's weights for its backward."""
        self.whole = gather_weights([self.norm_weight, self.norm_bias, self.w1_weight,
                                     self.w2_weight], 2, self.dp)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        norm_weight, norm_bias, w1_weight, w1_bias, w2_weight, w2_bias = self.whole.take()
        y, w1 = mlp_forward(x, norm_weight, norm_bias, w1_weight, w1_bias, w2_weight, w2_bias)  # f64[4@dp,8,6]
        return y, [w1, x]

    def backward(self, d_y: Tensor, saved: list[Tensor], reduced: Reduced) -> Tensor:
        w1, x = saved
        saved.clear()
        norm_weight, norm_bias, w1_weight, w2_weight = self.whole.take()
        # w2
        grads: dict[nn.Parameter, Tensor] = {}
        (gelu, grads[self.w2_bias], d_w1, norm, grads[self.w1_bias], d_x, grads[self.norm_weight],
         grads[self.norm_bias]) = mlp_backward(
            w1, d_y, w2_weight, x, norm_weight, norm_bias, w1_weight)  # f64[4@dp,8,10]
        del w1
        grads[self.w2_weight] = weight_grad(d_y, gelu)                 # f64[6,10]{U:dp}
        grads[self.w1_weight] = weight_grad(d_w1, norm)                # f64[10,6]{U:dp}
        reduced.append(scatter_grads(grads, 2, self.dp))
        del grads
        # norm
        d_x += d_y                                                     # f64[4@dp,8,6]
        return d_x


class ToyStep(nn.Module):
    """This rank's share of the model; `step` runs it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.dp, self.dp_rank = mesh.get_group("dp"), mesh.get_local_rank("dp")
        for name, (_, *known) in SHARDS.items():
            if "." not in name:
                self.register_parameter(name, nn.Parameter(empty(*known)))
        self.blocks = nn.ModuleList([Block(mesh) for _ in range(4)])  # blocks.0 .. 3

    @torch.no_grad()
    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        reduced = Reduced()
        gathered = gather_weights([self.embed_weight], 2, self.dp)
        self.blocks[0].gather()                                           # what the next loop begins with
        ids_local = ids.chunk(2)[self.dp_rank]                            # i64[4@dp,8]
        # embed
        [embed_weight] = gathered.take()                                  # exposed: its result is needed next
        x = F.embedding(ids_local, embed_weight)                          # f64[4@dp,8,6]
        del embed_weight
        blocks_saved: list[list[Tensor]] = []
        for layer, following in zip(self.blocks, [*self.blocks, None][1:], strict=True):
            if following is not None:
                following.gather()                                        # hidden behind this block's forward
            else:
                gathered = gather_weights([self.head_weight], 2, self.dp)
            x, saved = layer(x)                                           # f64[4@dp,8,6]
            blocks_saved.append(saved)
        del saved
        self.blocks[-1].regather()                                        # what the next loop begins with
        self.blocks[-2].regather()                                        # and goes on with
        # head
        [head_weight] = gathered.take()                                   # hidden behind the last block
        labels_reshape = labels.chunk(2)[self.dp_rank].flatten()          # i64[32@dp]
        log_softmax, loss_sum, count = head_forward(x, head_weight, labels_reshape)  # f64[32@dp,14]
        dist.all_reduce(count, group=self.dp)                             # f64[]; exposed
        loss = loss_sum / count                                           # f64[]{U:dp}
        loss_1 = loss.clone()
        loss_1_done = dist.all_reduce(loss_1, group=self.dp, async_op=True)  # f64[]
        d_head = step_backward(loss, count, log_softmax, labels_reshape)  # f64[4@dp,8,14]
        del log_softmax, labels_reshape
        grads = {self.head_weight: weight_grad(d_head, x)}                # f64[14,6]{U:dp}
        del x
        reduced.append(scatter_grads(grads, 2, self.dp))                  # f64[14@dp,6]
        del grads
        d_x = d_head @ head_weight                                        # f64[4@dp,8,6]
        del d_head, head_weight
        for layer, following in zip(
            reversed(self.blocks), [*reversed(self.blocks), None][1:], strict=True):
            before, reduced = reduced, Reduced()
            if following is not None and not following.whole:
                following.regather()                                      # hidden behind this block's backward
            d_x = layer.backward(d_x, blocks_saved.pop(), reduced)        # f64[4@dp,8,6]
            before.finish()                                               # reduced behind this block's backward
        grads = {self.embed_weight: embedding_grad(d_x, ids_local, 14)}   # f64[14,6]{U:dp}
        del d_x, ids_local
        reduced.append(scatter_grads(grads, 2, self.dp))                  # f64[14@dp,6]
        del grads
        loss_1_done.wait()                                                # hidden behind the backward of blocks
        reduced.finish()                                                  # the last sum: exposed
        return loss_1


Step = ToyStep
