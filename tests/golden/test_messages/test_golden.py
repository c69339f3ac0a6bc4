"""What the rank programs beside this file call: transfers, and computing that no model has alone.

Written by partc 0.1.0; every function is torch's own calls, and knows nothing of a model.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


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


def all_to_all(x: Tensor, num: int, group: dist.ProcessGroup, dim: int, to_dim: int, outer: int = 1,
               to_outer: int = 1) -> Tensor:
    """A tensor that is cut on `dim`, cut on `to_dim` instead."""
    arrived, done = exchange(x, num, group, to_dim, to_outer)
    done.wait()
    return join(arrived, num, dim, outer)


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


def nll_loss_and_count(log_p: Tensor, target: Tensor, weight: Tensor | None = None,
                       ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """`F.nll_loss`, a sum, and the number of targets in it, each times its class's weight."""
    return torch.ops.aten.nll_loss_forward(log_p, target, weight, 2, ignore_index)
