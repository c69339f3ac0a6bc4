"""Pipeline rank 0 of 2.  Written by partc 0.1.0 for Toy; change the plan, not this file.

mesh      pp=2
plan      ddp
schedule  dualpipe-v, 8 microbatches
stage     3 begins at head
inputs    ids dim 0 over mb
          labels dim 0 over mb
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from .helpers import (
    Inbox, Links, Nothing, Outbox, add_grad, add_weight_grad, cross_entropy_grad, embedding_grad,
    log_softmax_over,
)

MESH = {"pp": 2}
STAGE0_SHARDS = {"embed_weight": ("embed.weight", (14, 12), "float64", ())}  # of stage 0
STAGE3_SHARDS = {"head_weight": ("head.weight", (14, 12), "float64", ())}  # of stage 3
SHARDS = {  # attribute here: (name in the model, whole shape, dtype, cuts as (axis, dim, outer))
    **{f"stage0.{name}": row for name, row in STAGE0_SHARDS.items()},
    **{f"stage3.{name}": row for name, row in STAGE3_SHARDS.items()},
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
        self.kept, self.left = {}, {}
        self.ids = ids  # i64[24,10]

    def forward(self, i: int) -> tuple[Tensor, ...]:
        """Microbatch `i` through this stage."""
        ids_local = self.ids.chunk(8)[i]                       # i64[24@mb,10]
        embedding = F.embedding(ids_local, self.embed_weight)  # f64[24@mb,10,12]
        self.kept[i] = (ids_local,)
        return (embedding,)                                    # f64[24@mb,10,12]

    def backward(self, i: int, d_y: Tensor) -> tuple[Tensor, ...]:
        """The gradients of microbatch `i`."""
        self.left[i] = (d_y,)
        return ()

    def weights(self, i: int) -> None:
        """The weight gradients that `backward` left for later."""
        (ids_local,) = self.kept.pop(i)
        (d_y,) = self.left.pop(i)
        add_grad(self.embed_weight, embedding_grad(d_y, ids_local, 14))  # f64[14,12]{U:mb}


class Stage3(nn.Module):
    """Stage 3: head."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.head_weight = nn.Parameter(torch.empty(14, 12, dtype=torch.float64))  # f64[14,12]

    def begin(self, ids: Tensor, labels: Tensor) -> None:
        """Compute what all microbatches share."""
        self.saved = {}
        self.kept, self.left = {}, {}
        self.losses = []
        total = (labels.flatten() != -100).to(torch.float64).sum(0)  # f64[]
        self.labels = labels                                         # i64[24,10]
        self.total = total                                           # f64[]

    def forward(self, i: int, x: Tensor) -> tuple[Tensor, ...]:
        """Microbatch `i` through this stage."""
        head = F.linear(x, self.head_weight)                # f64[24@mb,10,14]
        labels_reshape = self.labels.chunk(8)[i].flatten()  # i64[240@mb]
        log_softmax = log_softmax_over(head.flatten(0, 1))  # f64[240@mb,14]
        del head
        loss_sum = F.nll_loss(log_softmax, labels_reshape, reduction="sum")  # f64[]{U:mb}
        loss = loss_sum / self.total                        # f64[]{U:mb}
        self.saved[i] = (labels_reshape, log_softmax, loss)
        self.kept[i] = (x,)
        self.losses.append(loss)
        return ()

    def backward(self, i: int) -> tuple[Tensor, ...]:
        """The gradients of microbatch `i`."""
        labels_reshape, log_softmax, loss = self.saved.pop(i)
        d_div = torch.ones_like(loss) / self.total     # f64[]
        d_head_reshape = cross_entropy_grad(
            d_div, log_softmax.exp(), labels_reshape, labels_reshape, -100)  # f64[240@mb,14]
        d_head = d_head_reshape.unflatten(0, (3, 10))  # f64[24@mb,10,14]
        del d_head_reshape
        d_x = d_head @ self.head_weight                # f64[24@mb,10,12]
        self.left[i] = (d_head,)
        return (d_x,)                                  # f64[24@mb,10,12]

    def weights(self, i: int) -> None:
        """The weight gradients that `backward` left for later."""
        (x,) = self.kept.pop(i)
        (d_head,) = self.left.pop(i)
        add_weight_grad(self.head_weight, d_head, x)  # f64[14,12]{U:mb}

    def finish(self) -> Tensor:
        """The loss, of all microbatches."""
        return torch.stack(self.losses).sum()


class ToyStep(nn.Module):
    """Pipeline rank 0 of 2: stages 0, 3 of 4."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.pp = mesh.get_group("pp")
        self.stage0 = Stage0(mesh)
        self.stage3 = Stage3(mesh)
        self.stages = {0: self.stage0, 3: self.stage3}
        # the rank of every stage, and the stages that receive from another rank
        self.links = Links(mesh, [0, 1, 1, 0], {"x": [1, 3], "d": [0, 2]})
        # by stage: where a forward's `x` comes from and goes to
        self.x_in = {0: Nothing(), 3: Inbox(self.links["x", 3], [((3, 10, 12), torch.float64)])}
        self.x_out = {0: Outbox(self.links["x", 1], bound=1), 3: Nothing()}
        # and a backward's `d`, the gradient of `x`
        self.d_in = {0: Inbox(self.links["d", 0], [((3, 10, 12), torch.float64)]), 3: Nothing()}
        self.d_out = {0: Nothing(), 3: Outbox(self.links["d", 2], bound=1)}

    def F(self, stage: int, i: int) -> None:
        """Forward of microbatch `i`: `x` from the stage before, the result to the stage behind."""
        x = self.x_in[stage].take()
        self.x_out[stage].put(self.stages[stage].forward(i, *x))

    def B(self, stage: int, i: int) -> None:
        """Backward of microbatch `i`: `d_y` from the stage behind, `d_x` to the stage before."""
        d_y = self.d_in[stage].take()
        self.d_out[stage].put(self.stages[stage].backward(i, *d_y))
        self.stages[stage].weights(i)

    @torch.no_grad()
    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Schedule dualpipe-v, 8 microbatches."""
        self.links.meet(ids.device)
        for stage in self.stages.values():
            stage.begin(ids, labels)
        for link in (self.x_in[3], self.d_in[0]):
            link.begin(8, ids.device)
        # warm-up
        for i in range(3):
            self.F(0, i)
        self.F(3, 0)
        self.B(3, 0)
        self.F(3, 1)
        # steady state: 2 forwards, 2 backwards
        for i in range(5):
            self.F(0, i + 3)
            self.B(3, i + 1)
            self.F(3, i + 2)
            self.B(0, i)
        # cool-down
        self.B(3, 6)
        self.F(3, 7)
        self.B(0, 5)
        self.B(3, 7)
        for i in range(6, 8):
            self.B(0, i)
        for link in (self.x_out[0], self.d_out[3]):
            link.wait()
        loss = self.stage3.finish()
        dist.broadcast(loss, group=self.pp, group_src=0)  # every rank learns the loss
        return loss


Step = ToyStep
