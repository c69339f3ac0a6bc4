"""What the rank programs beside this file call: transfers, and computing that no model has alone.

Written by partc 0.1.0; every function is torch's own calls, and knows nothing of a model.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

Link = tuple[dist.ProcessGroup, int, int]  # a group of its own, from rank, to rank


class Reduced(list[tuple[dict[nn.Parameter, Tensor], dist.Work]]):
    def finish(self) -> None:
        """Wait for gradients that ranks are summing, and add them to those of the parameters."""
        while self:
            self[0][1].wait()
            for param, grad in self.pop(0)[0].items():  # the handle holds what was sent
                grad = grad.sum(0) if grad.dim() > param.dim() else grad  # all ranks' pieces
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


def gather_weights(shards: list[Tensor], num: int, group: dist.ProcessGroup) -> Gathered:
    """Start one transfer of all ranks' pieces of weights."""
    mine = torch.cat([x.flatten() for x in shards]) if len(shards) > 1 else shards[0].flatten()
    flat = mine.new_empty(num * mine.numel())
    done = dist.all_gather_single(flat, mine, group=group, async_op=True)
    parts = zip(flat.view(num, -1).split([x.numel() for x in shards], 1), shards, strict=True)
    return Gathered([([part.view(num, *x.shape) for part, x in parts], done)])


def scatter_grads(grads: dict[nn.Parameter, Tensor], num: int,
                  group: dist.ProcessGroup) -> tuple[dict[nn.Parameter, Tensor], dist.Work]:
    """Start to sum gradients in one transfer, of which this rank keeps its pieces."""
    pieces = [x.reshape(num, -1) for x in grads.values()]
    sent = torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]
    arrived = torch.empty_like(sent)  # gloo's reduce_scatter sends twice as much
    done = dist.all_to_all_single(arrived, sent, group=group, async_op=True)
    parts = zip(grads.items(), arrived.split([x.shape[1] for x in pieces], 1), strict=True)
    return {p: part.unflatten(1, (len(x) // num, *x.shape[1:])) for (p, x), part in parts}, done


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


class Links(dict[tuple[str, int], Link]):
    """This rank's links by what they carry (`x` or `d`) and the stage to which they lead."""

    def __init__(
        self, mesh: DeviceMesh, rank_of: range | list[int], to: dict[str, range | list[int]]
    ) -> None:
        """Make a group for every link of every pipeline, on all ranks in one order, as torch asks.

        `rank_of`: the pipeline rank of every stage; `to`: the stages that receive `x`, or `d`.
        """
        super().__init__()
        self.device: torch.device | None = None
        dim = mesh.mesh_dim_names.index("pp")
        pipelines = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
        # every second stage first: links that share no rank are then made at the same time
        order = [(what, i) for odd in (0, 1) for what in to for i in to[what] if i % 2 == odd]
        for what, stage in order:
            sender = rank_of[stage - 1 if what == "x" else stage + 1]
            for ranks in pipelines:
                ends = ranks[sender], ranks[rank_of[stage]]
                group = dist.new_group([*ends])
                if dist.get_rank() in ends:
                    self[what, stage] = (group, *ends)

    def meet(self, device: torch.device) -> None:
        """Before the first step, pass one element over every link, in the order of all ranks.

        NCCL connects two ranks at their first transfer, and there each waits for the other.
        """
        if device != self.device:
            for group, source, target in self.values():
                x = torch.zeros(1, device=device)
                if dist.get_rank() == source:
                    dist.isend(x, target, group=group).wait()
                else:
                    dist.irecv(x, source, group=group).wait()
            self.device = device


class Inbox:
    """Receives a stage's tensors, microbatch after microbatch, one ahead of what is taken."""

    def __init__(self, link: Link, likes: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.group, self.source, _ = link
        self.likes = likes

    def begin(self, num: int, device: torch.device) -> None:
        """Begin a step of `num` microbatches."""
        self.left, self.device = num, device
        self.posted: list[list[tuple[Tensor, dist.Work]]] = []
        self.post()

    def post(self) -> None:
        """Start to receive one microbatch's tensors, if any are left."""
        if self.left:
            self.left -= 1
            new = [torch.empty(s, dtype=d, device=self.device) for s, d in self.likes]
            self.posted.append([(x, dist.irecv(x, self.source, group=self.group)) for x in new])

    def take(self) -> list[Tensor]:
        """The next microbatch's tensors; those after it start to arrive."""
        here = self.posted.pop(0)
        for _, done in here:
            done.wait()
        self.post()
        return [x for x, _ in here]


class Outbox:
    """Sends a stage's tensors; at most `bound` microbatches are under way at a time."""

    def __init__(self, link: Link, bound: int) -> None:
        self.group, _, self.target = link
        self.bound = bound
        self.sent: list[list[tuple[Tensor, dist.Work]]] = []

    def put(self, tensors: tuple[Tensor, ...]) -> None:
        """Start to send one microbatch's tensors."""
        whole = [x.contiguous() for x in tensors]
        self.sent.append([(x, dist.isend(x, self.target, group=self.group)) for x in whole])
        self.wait(self.bound)

    def wait(self, bound: int = 0) -> None:
        """Wait until no more than `bound` microbatches are under way."""
        while len(self.sent) > bound:
            for _, done in self.sent.pop(0):
                done.wait()


class Nothing:
    """Where the pipeline begins and ends."""

    def put(self, tensors: tuple[Tensor, ...]) -> None:
        """There is no stage behind."""

    def take(self) -> tuple[Tensor, ...]:
        return ()


def layer_norm_backward(d_y: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, *,
                        d_x: bool = True, d_weight: bool = True,
                        d_bias: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x`, weight and bias; of the bias itself the kernel reads no number."""
    given = (d_y, x, weight.shape, mean, rstd, weight, weight)
    return torch.ops.aten.native_layer_norm_backward(*given, (d_x, d_weight, d_bias))


def embedding_grad(d_y: Tensor, ids: Tensor, rows: int, padding_idx: int = -1) -> Tensor:
    """Gradient of a table of `rows` rows, of which `ids` were read."""
    return torch.ops.aten.embedding_dense_backward(d_y, ids, rows, padding_idx, False)
