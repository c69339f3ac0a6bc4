"""fsdp on dp=2
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

MESH = {"dp": 2}
DTYPES = {"float64": torch.float64}
BLOCK_SHARDS = {  # of one of blocks.0 .. 1
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
       for i in range(2) for attribute, (name, *rest) in BLOCK_SHARDS.items()},
}
BUFFERS = {}  # the same for buffers
ALIASES = {}  # second name of a tied parameter: the name it stands under
INPUTS = {  # the global batch: (shape, dtype)
    "ids": ((4, 8), "int64"),
    "labels": ((4, 8), "int64"),
}

Reduced = list[tuple[nn.Parameter, Tensor, dist.Work]]  # gradients on their way


def empty(shape: tuple[int, ...], dtype: str, cuts: tuple[tuple[str, int, int], ...]) -> Tensor:
    """Memory for this rank's piece of a parameter or buffer."""
    for axis, dim, _ in cuts:
        shape = *shape[:dim], shape[dim] // MESH[axis], *shape[dim + 1 :]
    return torch.empty(shape, dtype=DTYPES[dtype])


def add_grad(param: nn.Parameter, grad: Tensor) -> None:
    """Add to a parameter's gradient, as autograd does."""
    param.grad = grad if param.grad is None else param.grad.add_(grad)


def finish(reduced: list[tuple[nn.Parameter, Tensor, dist.Work]]) -> None:
    """Wait for reduced gradients and add them to their parameters; the list is left empty."""
    for param, grad, done in reduced:
        done.wait()
        add_grad(param, grad)
    reduced.clear()


def take(gathered: list[tuple[Tensor, dist.Work]]) -> list[Tensor]:
    """Wait for gathered weights and hand them over; the list is left empty."""
    for _, done in gathered:
        done.wait()
    whole = [weight for weight, _ in gathered]
    gathered.clear()
    return whole


def with_next(blocks: list[nn.Module]) -> list[tuple[nn.Module, nn.Module | None]]:
    """Each block with the one that follows it, the last with None."""
    return list(zip(blocks, [*blocks[1:], None], strict=True))


def gather(x: Tensor, num: int, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start to gather the pieces of all ranks, one after the other on dim 0."""
    pieces = x.new_empty(num * x.shape[0], *x.shape[1:])
    return pieces, dist.all_gather_single(pieces, x.contiguous(), group=group, async_op=True)


def scatter_sum(x: Tensor, num: int, group: dist.ProcessGroup, dim: int = 0,
                outer: int = 1) -> tuple[Tensor, dist.Work]:
    """Start to sum over the group and keep this rank's piece of `dim`."""
    pieces = in_pieces(x, num, dim, outer)
    piece = torch.empty_like(pieces[: pieces.shape[0] // num])
    return piece, dist.reduce_scatter_single(piece, pieces, group=group, async_op=True)


def in_pieces(x: Tensor, num: int, dim: int, outer: int = 1) -> Tensor:
    """The `num` pieces of `dim`, cut in the rest of (outer, rest), in a row on dim 0."""
    pieces: Tensor = x.unflatten(dim, (outer, num, -1)).movedim(dim + 1, 0)
    return pieces.flatten(dim + 1, dim + 2).flatten(0, 1).contiguous()


def weight_grad(d_y: Tensor, x: Tensor) -> Tensor:
    """Gradient of the weight in `y = x @ weight.T`."""
    return d_y.flatten(0, -2).T @ x.flatten(0, -2)


class Block(nn.Module):
    """One of blocks.0 .. 1."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.dp, self.dp_rank = mesh.get_group("dp"), mesh.get_local_rank("dp")
        self.whole = []  # weights that are being gathered
        for name, (_, *known) in BLOCK_SHARDS.items():
            self.register_parameter(name, nn.Parameter(empty(*known)))

    def gather(self) -> None:
        """Start to gather the block's weights."""
        self.whole = [
            gather(self.norm_weight, 2, self.dp),  # f64[6]
            gather(self.norm_bias, 2, self.dp),    # f64[6]
            gather(self.w1_weight, 2, self.dp),    # f64[10,6]
            gather(self.w1_bias, 2, self.dp),      # f64[10]
            gather(self.w2_weight, 2, self.dp),    # f64[6,10]
            gather(self.w2_bias, 2, self.dp),      # f64[6]
        ]

    def regather(self) -> None:
        """Start to gather the block's weights for its backward."""
        self.whole = [
            gather(self.norm_weight, 2, self.dp),  # f64[6]
            gather(self.norm_bias, 2, self.dp),    # f64[6]
            gather(self.w1_weight, 2, self.dp),    # f64[10,6]
            gather(self.w2_weight, 2, self.dp),    # f64[6,10]
        ]

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        norm_weight, norm_bias, w1_weight, w1_bias, w2_weight, w2_bias = take(self.whole)
        norm, mean, rstd = torch.native_layer_norm(
            x, (6,), norm_weight, norm_bias, 1e-05)  # f64[4@dp,8,6], f64[4@dp,8,1], f64[4@dp,8,1]
        w1 = F.linear(norm, w1_weight, w1_bias)      # f64[4@dp,8,10]
        gelu = F.gelu(w1)                            # f64[4@dp,8,10]
        w2 = F.linear(gelu, w2_weight, w2_bias)      # f64[4@dp,8,6]
        y = x + w2                                   # f64[4@dp,8,6]
        return y, (gelu, w1, norm, x, mean, rstd)

    def backward(self, d_y: Tensor, saved: tuple[Tensor, ...], reduced: Reduced) -> Tensor:
        gelu, w1, norm, x, mean, rstd = saved
        norm_weight, norm_bias, w1_weight, w2_weight = take(self.whole)
        d_gelu = d_y @ w2_weight                                      # f64[4@dp,8,10]
        d_w2_weight = weight_grad(d_y, gelu)                          # f64[6,10]{U:dp}
        d_w2_weight, done = scatter_sum(d_w2_weight, 2, self.dp)      # f64[6@dp,10]
        reduced.append((self.w2_weight, d_w2_weight, done))
        d_w2_bias = d_y.sum((0, 1))                                   # f64[6]{U:dp}
        d_w2_bias, done = scatter_sum(d_w2_bias, 2, self.dp)          # f64[6@dp]
        reduced.append((self.w2_bias, d_w2_bias, done))
        d_w1 = torch.ops.aten.gelu_backward(d_gelu, w1)               # f64[4@dp,8,10]
        d_norm = d_w1 @ w1_weight                                     # f64[4@dp,8,6]
        d_w1_weight = weight_grad(d_w1, norm)                         # f64[10,6]{U:dp}
        d_w1_weight, done = scatter_sum(d_w1_weight, 2, self.dp)      # f64[10@dp,6]
        reduced.append((self.w1_weight, d_w1_weight, done))
        d_w1_bias = d_w1.sum((0, 1))                                  # f64[10]{U:dp}
        d_w1_bias, done = scatter_sum(d_w1_bias, 2, self.dp)          # f64[10@dp]
        reduced.append((self.w1_bias, d_w1_bias, done))
        d_x, d_norm_weight, d_norm_bias = torch.ops.aten.native_layer_norm_backward(
            d_norm, x, (6,), mean, rstd, norm_weight, norm_bias, (True, True, True),
        )                                                             # f64[4@dp,8,6], f64[6]{U:dp}, f64[6]{U:dp}
        d_norm_weight, done = scatter_sum(d_norm_weight, 2, self.dp)  # f64[6@dp]
        reduced.append((self.norm_weight, d_norm_weight, done))
        d_norm_bias, done = scatter_sum(d_norm_bias, 2, self.dp)      # f64[6@dp]
        reduced.append((self.norm_bias, d_norm_bias, done))
        d_x += d_y                                                    # f64[4@dp,8,6]
        return d_x


class ToyStep(nn.Module):
    """This rank's share of the model; `step` runs it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.dp, self.dp_rank = mesh.get_group("dp"), mesh.get_local_rank("dp")
        for name, (_, *known) in SHARDS.items():
            if "." not in name:
                self.register_parameter(name, nn.Parameter(empty(*known)))
        self.blocks = nn.ModuleList([Block(mesh) for _ in range(2)])  # blocks.0 .. 1

    @torch.no_grad()
    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        reduced = []
        # embed
        embed_weight, embed_weight_done = gather(self.embed_weight, 2, self.dp)  # f64[14,6]
        self.blocks[0].gather()                                         # what the next loop begins with
        ids_1 = ids.chunk(2)[self.dp_rank]                              # i64[4@dp,8]
        embed_weight_done.wait()                                        # hidden behind ids_1
        x = F.embedding(ids_1, embed_weight)                            # f64[4@dp,8,6]
        del embed_weight, embed_weight_done
        # blocks
        blocks_saved = []
        for layer, following in with_next([*self.blocks]):
            if following is not None:
                following.gather()                                      # hidden behind this block's forward
            else:
                head_weight, head_weight_done = gather(self.head_weight, 2, self.dp)  # f64[14,6]
            x, saved = layer(x)                                         # f64[4@dp,8,6]
            blocks_saved.append(saved)
        del saved
        self.blocks[-1].regather()                                      # what the next loop begins with
        # head
        head_weight_done.wait()                                         # hidden behind the last block
        head = F.linear(x, head_weight)                                 # f64[4@dp,8,14]
        reshape = labels.chunk(2)[self.dp_rank].reshape(16)             # i64[32@dp]
        log_softmax = torch.log_softmax(head.reshape(16, 14), 1)        # f64[32@dp,14]
        del head
        nll_loss_forward, count = torch.ops.aten.nll_loss_forward(
            log_softmax, reshape, None, 2, -100)                        # f64[]{U:dp}, f64[]{U:dp}
        dist.all_reduce(count, group=self.dp)                           # f64[]; exposed
        loss = nll_loss_forward / count                                 # f64[]{U:dp}
        loss_1 = loss.clone()
        loss_1_done = dist.all_reduce(loss_1, group=self.dp, async_op=True)  # f64[]
        ones_like = torch.ones_like(loss)                               # f64[]
        d_div = ones_like / count                                       # f64[]
        d_log_softmax = torch.ops.aten.nll_loss_backward(
            d_div, log_softmax, reshape, None, 2, -100, count)          # f64[32@dp,14]
        d_reshape = torch.ops.aten._log_softmax_backward_data(
            d_log_softmax, log_softmax, 1, torch.float64)               # f64[32@dp,14]
        del reshape, d_log_softmax, log_softmax
        d_head = d_reshape.reshape(2, 8, 14)                            # f64[4@dp,8,14]
        del d_reshape
        d_head_weight = weight_grad(d_head, x)                          # f64[14,6]{U:dp}
        d_head_weight, done = scatter_sum(d_head_weight, 2, self.dp)    # f64[14@dp,6]
        reduced.append((self.head_weight, d_head_weight, done))
        d_x = d_head @ head_weight                                      # f64[4@dp,8,6]
        del x, d_head_weight, d_head, head_weight, head_weight_done
        # blocks
        for layer, following in with_next([*reversed(self.blocks)]):
            before, reduced = reduced, []
            if following is not None:
                following.regather()                                    # hidden behind this block's backward
            d_x = layer.backward(d_x, blocks_saved.pop(), reduced)      # f64[4@dp,8,6]
            finish(before)                                              # reduced behind this block's backward
        # embed
        d_embed_weight = torch.ops.aten.embedding_dense_backward(
            d_x, ids_1, 14, -1, scale_grad_by_freq=False)               # f64[14,6]{U:dp}
        d_embed_weight, done = scatter_sum(d_embed_weight, 2, self.dp)  # f64[14@dp,6]
        reduced.append((self.embed_weight, d_embed_weight, done))
        del d_x, ids_1, d_embed_weight
        loss_1_done.wait()                                              # hidden behind ones_like, d_log_softmax, d_reshape ...
        finish(reduced)
        return loss_1


Step = ToyStep
