"""One rank of 2.  Written by partc 0.1.0 for Words; change the plan, not this file.

mesh      dp=2
plan      fsdp
inputs    x dim 0 over dp
gathered  over dp before each use, forward and backward (ZeRO-3)
moves     all_gather over dp x11, 596 KB
          all_reduce over dp x2, 8 B
          all_to_all over dp x2, 131 KB
          reduce_scatter over dp x6, 864 KB
note      embed.weight: its rows travel, which takes less time than the whole
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

MESH = {"dp": 2}
DTYPES = {"float32": torch.float32}
BLOCK_SHARDS = {  # of one of blocks.0 .. 4
    "up_weight": ("up.weight", (128, 64), "float32", (("dp", 0, 1),)),  # f32[128@dp,64]
    "up_bias": ("up.bias", (128,), "float32", (("dp", 0, 1),)),  # f32[128@dp]
    "down_weight": ("down.weight", (64, 128), "float32", (("dp", 0, 1),)),  # f32[64@dp,128]
    "down_bias": ("down.bias", (64,), "float32", (("dp", 0, 1),)),  # f32[64@dp]
}
SHARDS = {  # attribute here: (name in the model, whole shape, dtype, cuts as (axis, dim, outer))
    "embed_weight": ("embed.weight", (2048, 64), "float32", (("dp", 1, 1),)),  # f32[2048,64@dp]
    "head_weight": ("head.weight", (2048, 64), "float32", (("dp", 0, 1),)),  # f32[2048@dp,64]
    "head_bias": ("head.bias", (2048,), "float32", (("dp", 0, 1),)),  # f32[2048@dp]
    **{f"blocks.{i}.{attribute}": ("blocks." + f"{i}.{name}", *rest)
       for i in range(5) for attribute, (name, *rest) in BLOCK_SHARDS.items()},
}
BUFFERS = {}  # the same for buffers
ALIASES = {}  # second name of a tied parameter: the name it stands under
INPUTS = {"x": ((8, 64), "int64")}  # the global batch: (shape, dtype)


def empty(shape: tuple[int, ...], dtype: str, cuts: tuple[tuple[str, int, int], ...]) -> Tensor:
    """Memory for this rank's piece of a parameter or buffer."""
    for axis, dim, _ in cuts:
        shape = *shape[:dim], shape[dim] // MESH[axis], *shape[dim + 1 :]
    return torch.empty(shape, dtype=DTYPES[dtype])


def add_grad(param: nn.Parameter, grad: Tensor) -> None:
    """Add to a parameter's gradient, as autograd does."""
    param.grad = grad if param.grad is None else param.grad.add_(grad)


class Gathered(list[tuple[list[Tensor], dist.Work]]):
    def take(self) -> list[Tensor]:
        """Wait for weights that ranks are gathering in pieces, and hand them over whole."""
        whole = []
        while self:
            pieces, done = self.pop(0)
            done.wait()
            whole += [x.flatten(0, 1) for x in pieces]
        return whole


def exchange(x: Tensor, num: int, group: dist.ProcessGroup, dim: int,
             outer: int = 1) -> tuple[Tensor, dist.Work]:
    """Start to send piece `i` of `dim` to rank `i`; what arrives lies on dim 0."""
    pieces = in_pieces(x, num, dim, outer)
    arrived = torch.empty_like(pieces)
    return arrived, dist.all_to_all_single(arrived, pieces, group=group, async_op=True)


def in_pieces(x: Tensor, num: int, dim: int, outer: int = 1) -> Tensor:
    """The `num` pieces of `dim`, cut in the rest of (outer, rest), in a row on dim 0."""
    pieces: Tensor = x.unflatten(dim, (outer, num, -1)).movedim(dim + 1, 0)
    return pieces.flatten(dim + 1, dim + 2).flatten(0, 1).contiguous()


def join(pieces: Tensor, num: int, dim: int, outer: int = 1) -> Tensor:
    """The whole from pieces that lie one after the other on dim 0: the inverse of `in_pieces`."""
    parts: Tensor = pieces.unflatten(0, (num, -1)).unflatten(dim + 1, (outer, -1))
    return parts.movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()


def weight_grad(d_y: Tensor, x: Tensor) -> Tensor:
    """Gradient of the weight in `y = x @ weight.T`."""
    return d_y.flatten(0, -2).T @ x.flatten(0, -2)


def log_softmax_over(x: Tensor) -> Tensor:
    """Log-probabilities by the last dim, written over their logits a few rows at a time."""
    for rows in x.chunk(16):
        rows.copy_(rows.log_softmax(-1))
    return x


def cross_entropy_grad(d_loss: Tensor, p: Tensor, target: Tensor, place: Tensor,
                       ignored: int) -> Tensor:
    """Gradient of a summed cross entropy, over its softmax; `place` < 0 is another rank's."""
    scale, place = torch.where(target == ignored, 0, d_loss)[:, None], place[:, None]
    return p.mul_(scale).scatter_add_(1, place.clamp(min=0), torch.where(place < 0, 0, -scale))


def by_messages(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether to send messages: gloo's collectives copy all that they bring once more."""
    return not x.is_cuda and f"{x.device.type}:gloo" in dist.get_backend_config(group)


class Messages(dist.Work):
    """Each rank sends `sent[i]` to rank `i` and receives `arriving[i]` from it."""

    def __init__(
        self, sent: list[Tensor], arriving: list[Tensor], group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self.works: list[dist.Work] = []
        here, num = dist.get_rank(group), len(sent)
        for step in range(1, num):
            source, target = (here - step) % num, (here + step) % num
            self.works.append(dist.irecv(arriving[source], group=group, group_src=source))
            self.works.append(dist.isend(sent[target], group=group, group_dst=target))

    def wait(self) -> bool:
        for work in self.works:
            work.wait()
        self.works = []
        return True


class SumOfPieces(Messages):
    """What each rank has for this one, added up in the order of the ranks."""

    def __init__(self, total: Tensor, pieces: list[Tensor], group: dist.ProcessGroup) -> None:
        here = dist.get_rank(group)
        first = int(here == 0)  # to arrive from another rank: the sum is written over it
        self.total = total
        self.parts = [
            total if i == first else x if i == here else torch.empty_like(x)
            for i, x in enumerate(pieces)
        ]
        super().__init__(pieces, self.parts, group)

    def wait(self) -> bool:
        super().wait()
        if self.parts:
            torch.add(self.parts[0], self.parts[1], out=self.total)
            for part in self.parts[2:]:
                self.total += part
        self.parts = []
        return True


def gather_into(flat: Tensor, mine: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to gather the pieces of all ranks, one after the other."""
    if not by_messages(mine, group):
        return dist.all_gather_single(flat, mine, group=group, async_op=True)
    pieces = flat.view(-1, *mine.shape)
    pieces[dist.get_rank(group)] = mine
    return Messages([mine] * len(pieces), [*pieces], group)


def scatter_into(total: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to sum `x` over the group, of which this rank keeps its piece."""
    if not by_messages(x, group):
        flat = total.view(-1), x.view(-1)  # gloo divides dim 0, which is one piece's in total
        return dist.reduce_scatter_single(*flat, group=group, async_op=True)
    return SumOfPieces(total, [*x.view(-1, *total.shape)], group)


def gather_weights(shards: list[Tensor], num: int, group: dist.ProcessGroup) -> Gathered:
    """Start one transfer of all ranks' pieces of weights."""
    mine = torch.cat([x.flatten() for x in shards]) if len(shards) > 1 else shards[0].flatten()
    flat = mine.new_empty(num * mine.numel())
    done = gather_into(flat, mine, group)
    parts = zip(flat.view(num, -1).split([x.numel() for x in shards], 1), shards, strict=True)
    return Gathered([([part.view(num, *x.shape) for part, x in parts], done)])


def scatter_grads(grads: dict[nn.Parameter, Tensor], num: int,
                  group: dist.ProcessGroup) -> tuple[dict[nn.Parameter, Tensor], dist.Work]:
    """Start to sum gradients in one transfer, of which this rank keeps its pieces."""
    pieces = [x.reshape(num, -1) for x in grads.values()]
    sent = torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]
    total = torch.empty_like(sent[0])
    parts = zip(grads.items(), total.split([x.shape[1] for x in pieces]), strict=True)
    mine = {p: part.view(x.shape[0] // num, *x.shape[1:]) for (p, x), part in parts}
    return mine, scatter_into(total, sent, group)


class Reduced(list[tuple[dict[nn.Parameter, Tensor], dist.Work]]):
    def finish(self) -> None:
        """Wait for gradients that ranks are summing, and add them to those of the parameters."""
        while self:
            self[0][1].wait()
            for param, grad in self.pop(0)[0].items():  # the handle holds what was sent
                param.grad = grad if param.grad is None else param.grad.add_(grad)


def embedding_grad(d_y: Tensor, ids: Tensor, rows: int, padding_idx: int = -1) -> Tensor:
    """Gradient of a table of `rows` rows, of which `ids` were read."""
    return torch.ops.aten.embedding_dense_backward(d_y, ids, rows, padding_idx, False)


def nll_loss_and_count(log_p: Tensor, target: Tensor,
                       ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """`F.nll_loss`, a sum, and the number of targets in it."""
    return torch.ops.aten.nll_loss_forward(log_p, target, None, 2, ignore_index)


class Block(nn.Module):
    """One of blocks.0 .. 4."""

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
        self.whole = gather_weights([self.up_weight, self.down_weight], 2, self.dp)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        up_weight, up_bias, down_weight, down_bias = self.whole.take()
        up = F.linear(x, up_weight, up_bias)           # f32[8@dp,64,128]
        gelu = F.gelu(up)                              # f32[8@dp,64,128]
        down = F.linear(gelu, down_weight, down_bias)  # f32[8@dp,64,64]
        del gelu
        y = x + down                                   # f32[8@dp,64,64]
        return y, [up, x]

    def backward(self, d_y: Tensor, saved: list[Tensor], reduced: Reduced) -> Tensor:
        up, x = saved
        saved.clear()
        up_weight, down_weight = self.whole.take()
        # down
        gelu = F.gelu(up)                                   # f32[8@dp,64,128]
        grads = {self.down_weight: weight_grad(d_y, gelu)}  # f32[64,128]{U:dp}
        del gelu
        d_up = d_y @ down_weight                            # f32[8@dp,64,128]
        grads[self.down_bias] = d_y.sum((0, 1))             # f32[64]{U:dp}
        torch.ops.aten.gelu_backward.grad_input(d_up, up, grad_input=d_up)  # f32[8@dp,64,128]
        del up
        # up
        grads[self.up_weight] = weight_grad(d_up, x)        # f32[128,64]{U:dp}
        d_x = d_up @ up_weight                              # f32[8@dp,64,64]
        grads[self.up_bias] = d_up.sum((0, 1))              # f32[128]{U:dp}
        reduced.append(scatter_grads(grads, 2, self.dp))
        del grads
        d_x += d_y                                          # f32[8@dp,64,64]
        return d_x


class WordsStep(nn.Module):
    """This rank's share of the model; `step` runs it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.dp, self.dp_rank = mesh.get_group("dp"), mesh.get_local_rank("dp")
        for name, (_, *known) in SHARDS.items():
            if "." not in name:
                self.register_parameter(name, nn.Parameter(empty(*known)))
        self.blocks = nn.ModuleList([Block(mesh) for _ in range(5)])  # blocks.0 .. 4

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        reduced = Reduced()
        self.blocks[0].gather()                                          # what the next loop begins with
        # embed
        embed_x = F.embedding(x, self.embed_weight)                      # f32[8,64,64@dp]
        embed_x, embed_x_done = exchange(embed_x, 2, self.dp, 0)         # f32[8@dp,64,64]
        embed_x_done.wait()                                              # exposed: its result is needed next
        embed_x = join(embed_x, 2, 2)                                    # f32[8@dp,64,64]
        blocks_saved: list[list[Tensor]] = []
        for layer, following in zip(self.blocks, [*self.blocks, None][1:], strict=True):
            if following is not None:
                following.gather()                                       # hidden behind this block's forward
            else:
                gathered = gather_weights([self.head_weight, self.head_bias], 2, self.dp)
            embed_x, saved = layer(embed_x)                              # f32[8@dp,64,64]
            blocks_saved.append(saved)
        del saved
        self.blocks[-1].regather()                                       # what the next loop begins with
        self.blocks[-2].regather()                                       # and goes on with
        # head
        head_weight, head_bias = gathered.take()                         # hidden behind the last block
        head = F.linear(embed_x, head_weight, head_bias)                 # f32[8@dp,64,2048]
        x_reshape = x.chunk(2)[self.dp_rank].flatten()                   # i64[512@dp]
        log_softmax = log_softmax_over(head.flatten(0, 1))               # f32[512@dp,2048]
        del head
        loss_sum, count = nll_loss_and_count(log_softmax, x_reshape)     # 2x f32[]{U:dp}
        dist.all_reduce(count, group=self.dp)                            # f32[]; exposed
        loss = loss_sum / count                                          # f32[]{U:dp}
        loss_done = dist.all_reduce(loss, group=self.dp, async_op=True)  # f32[]
        d_div = torch.ones_like(loss) / count                            # f32[]
        d_head_reshape = cross_entropy_grad(d_div, log_softmax.exp_(), x_reshape, x_reshape, -100)  # f32[512@dp,2048]
        del log_softmax
        d_head = d_head_reshape.unflatten(0, (4, 64))                    # f32[8@dp,64,2048]
        del d_head_reshape
        grads = {self.head_weight: weight_grad(d_head, embed_x)}         # f32[2048,64]{U:dp}
        d_x = d_head @ head_weight                                       # f32[8@dp,64,64]
        grads[self.head_bias] = d_head.sum((0, 1))                       # f32[2048]{U:dp}
        del embed_x, head_weight, d_head, embed_x_done
        reduced.append(scatter_grads(grads, 2, self.dp))
        del grads
        for layer, following in zip(
            reversed(self.blocks), [*reversed(self.blocks), None][1:], strict=True):
            before, reduced = reduced, Reduced()
            if following is not None and not following.whole:
                following.regather()                                     # hidden behind this block's backward
            d_x = layer.backward(d_x, blocks_saved.pop(), reduced)       # f32[8@dp,64,64]
            before.finish()                                              # reduced behind this block's backward
        # embed
        d_embedding, d_embedding_done = exchange(d_x, 2, self.dp, 2)     # f32[8,64,64@dp]
        d_embedding_done.wait()                                          # exposed: its result is needed next
        add_grad(self.embed_weight, embedding_grad(d_embedding, x, 2048))  # f32[2048,64@dp]
        del d_x, d_embedding, d_embedding_done
        loss_done.wait()                                                 # hidden behind d_head_weight, d_x (4 B beside 134.22 MFLOP)
        reduced.finish()
        return loss


Step = WordsStep
