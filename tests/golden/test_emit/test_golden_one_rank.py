"""toy on one device
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .helpers import (
    add_grad, add_weight_grad, embedding_grad, layer_norm_backward, log_softmax_over,
    nll_loss_and_count, nll_loss_backward,
)

MESH = {}
DTYPES = {"float64": torch.float64}
BLOCK_SHARDS = {  # of one of blocks.0 .. 1
    "norm_weight": ("norm.weight", (6,), "float64", ()),  # f64[6]
    "norm_bias": ("norm.bias", (6,), "float64", ()),  # f64[6]
    "w1_weight": ("w1.weight", (10, 6), "float64", ()),  # f64[10,6]
    "w1_bias": ("w1.bias", (10,), "float64", ()),  # f64[10]
    "w2_weight": ("w2.weight", (6, 10), "float64", ()),  # f64[6,10]
    "w2_bias": ("w2.bias", (6,), "float64", ()),  # f64[6]
}
SHARDS = {  # attribute here: (name in the model, whole shape, dtype, cuts as (axis, dim, outer))
    "embed_weight": ("embed.weight", (14, 6), "float64", ()),  # f64[14,6]
    "head_weight": ("head.weight", (14, 6), "float64", ()),  # f64[14,6]
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

    def __init__(self) -> None:
        super().__init__()
        for name, (_, *known) in BLOCK_SHARDS.items():
            self.register_parameter(name, nn.Parameter(empty(*known)))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        norm, mean, rstd = torch.native_layer_norm(x, (6,), self.norm_weight, self.norm_bias, 1e-05)  # f64[4,8,6]
        w1 = F.linear(norm, self.w1_weight, self.w1_bias)  # f64[4,8,10]
        gelu = F.gelu(w1)                                  # f64[4,8,10]
        w2 = F.linear(gelu, self.w2_weight, self.w2_bias)  # f64[4,8,6]
        y = x + w2                                         # f64[4,8,6]
        return y, [gelu, w1, norm, x, mean, rstd]

    def backward(self, d_y: Tensor, saved: list[Tensor]) -> Tensor:
        gelu, w1, norm, x, mean, rstd = saved
        saved.clear()
        # w2
        d_w1 = d_y @ self.w2_weight                   # f64[4,8,10]
        add_weight_grad(self.w2_weight, d_y, gelu)    # f64[6,10]
        add_grad(self.w2_bias, d_y.sum((0, 1)))       # f64[6]
        torch.ops.aten.gelu_backward.grad_input(d_w1, w1, grad_input=d_w1)  # f64[4,8,10]
        del gelu, w1
        # w1
        d_norm = d_w1 @ self.w1_weight                # f64[4,8,6]
        add_weight_grad(self.w1_weight, d_w1, norm)   # f64[10,6]
        add_grad(self.w1_bias, d_w1.sum((0, 1)))      # f64[10]
        # norm
        d_x, d_norm_weight, d_norm_bias = layer_norm_backward(
            d_norm, x, mean, rstd, self.norm_weight)  # f64[4,8,6], 2x f64[6]
        add_grad(self.norm_weight, d_norm_weight)
        add_grad(self.norm_bias, d_norm_bias)
        d_x += d_y                                    # f64[4,8,6]
        return d_x


class ToyStep(nn.Module):
    """This rank's share of the model; `step` runs it."""

    def __init__(self, mesh: object = None) -> None:
        super().__init__()
        for name, (_, *known) in SHARDS.items():
            if "." not in name:
                self.register_parameter(name, nn.Parameter(empty(*known)))
        self.blocks = nn.ModuleList([Block() for _ in range(2)])  # blocks.0 .. 1

    @torch.no_grad()
    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = F.embedding(ids, self.embed_weight)                    # f64[4,8,6]
        blocks_saved: list[list[Tensor]] = []
        for layer in self.blocks:
            x, saved = layer(x)                                    # f64[4,8,6]
            blocks_saved.append(saved)
        del saved
        # head
        head = F.linear(x, self.head_weight)                       # f64[4,8,14]
        labels_reshape = labels.flatten()                          # i64[32]
        log_softmax = log_softmax_over(head.flatten(0, 1))         # f64[32,14]
        del head
        loss_sum, count = nll_loss_and_count(log_softmax, labels_reshape)  # 2x f64[]
        loss = loss_sum / count                                    # f64[]
        d_div = 1 / count                                          # f64[]
        d_log_softmax = nll_loss_backward(d_div, log_softmax, labels_reshape, count)  # f64[32,14]
        d_head_reshape = torch.ops.aten._log_softmax_backward_data(
            d_log_softmax, log_softmax, dim=1, input_dtype=torch.float64)  # f64[32,14]
        del labels_reshape, d_log_softmax, log_softmax
        d_head = d_head_reshape.unflatten(0, (4, 8))               # f64[4,8,14]
        del d_head_reshape
        add_weight_grad(self.head_weight, d_head, x)               # f64[14,6]
        d_x = d_head @ self.head_weight                            # f64[4,8,6]
        del x, d_head
        for layer in reversed(self.blocks):
            d_x = layer.backward(d_x, blocks_saved.pop())          # f64[4,8,6]
        add_grad(self.embed_weight, embedding_grad(d_x, ids, 14))  # f64[14,6]
        return loss


Step = ToyStep
