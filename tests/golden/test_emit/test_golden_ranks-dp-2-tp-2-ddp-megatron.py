"""ddp+megatron on dp=2,tp=2
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from .helpers import (
    Reduced, cross_entropy_grad, embedding_grad, layer_norm_backward, masked_embedding, room,
    weight_grad, window, write_weight_grad,
)

MESH = {"dp": 2, "tp": 2}
DTYPES = {"float64": torch.float64}
BLOCK_SHARDS = {  # of one of blocks.0 .. 1
    "norm_weight": ("norm.weight", (6,), "float64", ()),  # f64[6]
    "norm_bias": ("norm.bias", (6,), "float64", ()),  # f64[6]
    "w1_weight": ("w1.weight", (10, 6), "float64", (("tp", 0, 1),)),  # f64[10@tp,6]
    "w1_bias": ("w1.bias", (10,), "float64", (("tp", 0, 1),)),  # f64[10@tp]
    "w2_weight": ("w2.weight", (6, 10), "float64", (("tp", 1, 1),)),  # f64[6,10@tp]
    "w2_bias": ("w2.bias", (6,), "float64", ()),  # f64[6]
}
SHARDS = {  # attribute here: (name in the model, whole shape, dtype, cuts as (axis, dim, outer))
    "embed_weight": ("embed.weight", (14, 6), "float64", (("tp", 0, 1),)),  # f64[14@tp,6]
    "head_weight": ("head.weight", (14, 6), "float64", (("tp", 0, 1),)),  # f64[14@tp,6]
    **{f"blocks.{i}.{attribute}": ("blocks." + f"{i}.{name}", *rest)
       for i in range(2) for attribute, (name, *rest) in BLOCK_SHARDS.items()},
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


class Block(nn.Module):
    """One of blocks.0 .. 1."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.dp, self.tp = mesh.get_group("dp"), mesh.get_group("tp")
        for name, (_, *known) in BLOCK_SHARDS.items():
            self.register_parameter(name, nn.Parameter(empty(*known)))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        norm = F.layer_norm(x, (6,), self.norm_weight, self.norm_bias, 1e-05)  # f64[4@dp,8,6]
        w1 = F.linear(norm, self.w1_weight, self.w1_bias)  # f64[4@dp,8,10@tp]
        gelu = F.gelu(w1)                                  # f64[4@dp,8,10@tp]
        # w2
        w2_linear = F.linear(gelu, self.w2_weight)         # f64[4@dp,8,6]{U:tp}
        dist.all_reduce(w2_linear, group=self.tp)          # f64[4@dp,8,6]; exposed
        w2 = w2_linear + self.w2_bias                      # f64[4@dp,8,6]
        del norm
        y = x + w2                                         # f64[4@dp,8,6]
        return y, [w1, x]

    def backward(self, d_y: Tensor, saved: list[Tensor], reduced: Reduced) -> Tensor:
        w1, x = saved
        saved.clear()
        d_w1 = d_y @ self.w2_weight                           # f64[4@dp,8,10@tp]
        gelu = F.gelu(w1)                                     # f64[4@dp,8,10@tp]
        torch.ops.aten.gelu_backward.grad_input(d_w1, w1, grad_input=d_w1)  # f64[4@dp,8,10@tp]
        # w1
        d_norm = d_w1 @ self.w1_weight                        # f64[4@dp,8,6]{U:tp}
        d_norm_done = dist.all_reduce(d_norm, group=self.tp, async_op=True)  # f64[4@dp,8,6]
        del w1
        # w2
        norm, mean, rstd = torch.native_layer_norm(x, (6,), self.norm_weight, self.norm_bias, 1e-05)  # f64[4@dp,8,6]
        flat, grads = room([*self.parameters()])
        write_weight_grad(grads[self.w2_weight], d_y, gelu)   # f64[6,10@tp]{U:dp}
        grads[self.w2_bias].copy_(d_y.sum((0, 1)))            # f64[6]{U:dp}
        # w1
        write_weight_grad(grads[self.w1_weight], d_w1, norm)  # f64[10@tp,6]{U:dp}
        grads[self.w1_bias].copy_(d_w1.sum((0, 1)))           # f64[10@tp]{U:dp}
        # norm
        d_norm_done.wait()                                    # hidden behind 2 weight gradients (768 B beside 1.92 kFLOP)
        del norm
        d_x, d_norm_weight, d_norm_bias = layer_norm_backward(
            d_norm, x, mean, rstd, self.norm_weight)          # f64[4@dp,8,6], 2x f64[6]{U:dp}
        grads[self.norm_weight].copy_(d_norm_weight)
        grads[self.norm_bias].copy_(d_norm_bias)
        reduced.append((grads, dist.all_reduce(flat, group=self.dp, async_op=True)))
        d_x += d_y                                            # f64[4@dp,8,6]
        return d_x


class ToyStep(nn.Module):
    """This rank's share of the model; `step` runs it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.dp, self.dp_rank = mesh.get_group("dp"), mesh.get_local_rank("dp")
        self.tp, self.tp_rank = mesh.get_group("tp"), mesh.get_local_rank("tp")
        for name, (_, *known) in SHARDS.items():
            if "." not in name:
                self.register_parameter(name, nn.Parameter(empty(*known)))
        self.blocks = nn.ModuleList([Block(mesh) for _ in range(2)])  # blocks.0 .. 1

    @torch.no_grad()
    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        reduced = Reduced()
        ids_local = ids.chunk(2)[self.dp_rank]                            # i64[4@dp,8]
        # embed
        ids_in_shard = window(ids_local, self.tp_rank, 7, of=14)          # i64[4@dp,8]
        x = masked_embedding(self.embed_weight, ids_in_shard)             # f64[4@dp,8,6]{U:tp}
        dist.all_reduce(x, group=self.tp)                                 # f64[4@dp,8,6]; exposed
        del ids_local
        blocks_saved: list[list[Tensor]] = []
        for layer in self.blocks:
            x, saved = layer(x)                                           # f64[4@dp,8,6]
            blocks_saved.append(saved)
        del saved
        # head
        head = F.linear(x, self.head_weight)                              # f64[4@dp,8,14@tp]
        head_reshape = head.flatten(0, 1)                                 # f64[32@dp,14@tp]
        del head
        labels_reshape = labels.chunk(2)[self.dp_rank].flatten()          # i64[32@dp]
        amax = torch.amax(head_reshape, 1, keepdim=True)                  # f64[32@dp,1]{M:tp}
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.tp)        # f64[32@dp,1]; exposed
        head_reshape -= amax                                              # f64[32@dp,14@tp]
        head_total = torch.exp(head_reshape).sum(1, keepdim=True)         # f64[32@dp,1]{U:tp}
        dist.all_reduce(head_total, group=self.tp)                        # f64[32@dp,1]; exposed
        head_reshape -= torch.log(head_total)                             # f64[32@dp,14@tp]
        reshape_in_shard = window(labels_reshape, self.tp_rank, 7, ignore=-100, of=14, outside=-100)  # i64[32@dp]
        loss_sum = F.nll_loss(head_reshape, reshape_in_shard, reduction="sum")  # f64[]{U:dp}{U:tp}
        labels_total = (labels_reshape != -100).to(torch.float64).sum(0)  # f64[]{U:dp}
        dist.all_reduce(labels_total, group=self.dp)                      # f64[]; exposed
        loss = loss_sum / labels_total                                    # f64[]{U:dp}{U:tp}
        loss_done = dist.all_reduce(loss, group=self.dp, async_op=True)   # f64[]{U:tp}
        d_div = 1 / labels_total                                          # f64[]
        d_logits = cross_entropy_grad(
            d_div, head_reshape.exp_(), labels_reshape, reshape_in_shard, -100)  # f64[32@dp,14@tp]
        del amax, head_total, head_reshape, labels_reshape, reshape_in_shard
        d_head = d_logits.unflatten(0, (2, 8))                            # f64[4@dp,8,14@tp]
        del d_logits
        d_x = d_head @ self.head_weight                                   # f64[4@dp,8,6]{U:tp}
        d_x_done = dist.all_reduce(d_x, group=self.tp, async_op=True)     # f64[4@dp,8,6]
        d_head_weight = weight_grad(d_head, x)                            # f64[14@tp,6]{U:dp}
        del d_head, x
        reduced.append(
            ({self.head_weight: d_head_weight},
             dist.all_reduce(d_head_weight, group=self.dp, async_op=True)))  # f64[14@tp,6]
        d_x_done.wait()                                                   # hidden behind d_head_weight (768 B beside 1.34 kFLOP)
        del d_head_weight
        for layer in reversed(self.blocks):
            before, reduced = reduced, Reduced()
            d_x = layer.backward(d_x, blocks_saved.pop(), reduced)        # f64[4@dp,8,6]
            before.finish()                                               # reduced behind this block's backward
        # embed
        d_embed_weight = embedding_grad(d_x, ids_in_shard, 7)             # f64[14@tp,6]{U:dp}
        del d_x, ids_in_shard, d_x_done
        reduced.append(
            ({self.embed_weight: d_embed_weight},
             dist.all_reduce(d_embed_weight, group=self.dp, async_op=True)))  # f64[14@tp,6]
        del d_embed_weight
        loss_done.wait()                                                  # hidden behind the backward of blocks
        dist.all_reduce(loss, group=self.tp)                              # f64[]; exposed
        reduced.finish()                                                  # the last sum: exposed
        return loss


Step = ToyStep
