"""A program of a rank, written by hand as partc prints them, for tests of loading and running.

The model is a gated MLP with every case that loading distinguishes: a weight whose two halves are
sharded each (outer 2), one sharded over two axes, a replicated one, a frozen one, a tied name, a
buffer that a step changes, and a buffer that checkpoints leave out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partc.plan.mesh import Mesh
from partc.program import Program
from partc.trace.fingerprint import Fingerprint

BATCH, WIDTH, HIDDEN = 12, 8, 12

SOURCE = '''\
"""GatedMLP, {mesh}: hidden is cut by tp, the batch by dp; down.weight is gathered over dp."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

MESH = {{"dp": {dp}, "tp": {tp}}}
SHARDS = {{
    "up_weight": ("up.weight", (24, 8), "float32", (("tp", 0, 2),)),
    "up_bias": ("up.bias", (24,), "float32", (("tp", 0, 2),)),
    "down_weight": ("down.weight", (8, 12), "float32", (("tp", 1, 1), ("dp", 1, 1))),
    "down_bias": ("down.bias", (8,), "float32", ()),
    "shift": ("shift", (8,), "float32", ()),
}}
BUFFERS = {{
    "rows": ("rows", (), "float32", ()),
    "scale": ("scale", (8,), "float32", ()),
}}
ALIASES = {{"twin.weight": "up.weight", "twin.bias": "up.bias"}}
INPUTS = {{"x": ((12, 8), "float32"), "y": ((12, 8), "float32")}}


class GatedMLPStep(nn.Module):
    def __init__(self, mesh) -> None:
        super().__init__()
        self.dp, self.tp = mesh.get_group("dp"), mesh.get_group("tp")
        self.dp_rank = mesh.get_local_rank("dp")
        self.up_weight = nn.Parameter(torch.empty({up}, 8))            # f32[(2 12@tp),8]
        self.up_bias = nn.Parameter(torch.empty({up}))                 # f32[(2 12@tp)]
        self.down_weight = nn.Parameter(torch.empty(8, {down}))        # f32[8,12@tp+dp]
        self.down_bias = nn.Parameter(torch.empty(8))                  # f32[8]
        self.shift = nn.Parameter(torch.empty(8), requires_grad=False)
        self.register_buffer("rows", torch.empty(()))
        self.register_buffer("scale", torch.empty(8))

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor) -> Tensor:
        gathered = self.down_weight.new_empty({dp} * {down}, 8)
        gathered_done = dist.all_gather_single(
            gathered, self.down_weight.T.contiguous(), group=self.dp, async_op=True
        )                                                              # hidden by up
        x = x.chunk({dp}, 0)[self.dp_rank]                             # f32[12@dp,8]
        y = y.chunk({dp}, 0)[self.dp_rank]
        up = F.linear(x, self.up_weight, self.up_bias)                 # f32[12@dp,(2 12@tp)]
        a, b = up.chunk(2, -1)
        gate = F.gelu(b)
        mul = a * gate                                                 # f32[12@dp,12@tp]
        gathered_done.wait()
        down_weight = gathered.T                                       # f32[8,12@tp]
        down = mul @ down_weight.T                                     # f32[12@dp,8]{{U:tp}}
        down_done = dist.all_reduce(down, group=self.tp, async_op=True)
        self.rows += x.shape[0] * {dp}
        down_done.wait()                                               # exposed: sub is next
        sub = (down + self.down_bias + self.shift) * self.scale - y
        loss = sub.pow(2).sum() / 96                                   # f32[]{{U:dp}}
        loss_done = dist.all_reduce(loss, group=self.dp, async_op=True)
        d_down = sub * (2 / 96) * self.scale
        d_down_bias = d_down.sum(0)                                    # f32[8]{{U:dp}}
        d_down_bias_done = dist.all_reduce(d_down_bias, group=self.dp, async_op=True)
        d_down_weight = mul.T @ d_down                                 # f32[12@tp,8]{{U:dp}}
        d_down_piece = d_down_weight.new_empty({down}, 8)
        d_down_done = dist.reduce_scatter_single(
            d_down_piece, d_down_weight, group=self.dp, async_op=True
        )                                                              # hidden by d_up
        d_mul = d_down @ down_weight
        d_up = torch.cat([d_mul * gate, torch.ops.aten.gelu_backward(d_mul * a, b)], -1)
        d_up_weight = d_up.T @ x                                       # f32[(2 12@tp),8]{{U:dp}}
        d_up_weight_done = dist.all_reduce(d_up_weight, group=self.dp, async_op=True)
        d_up_bias = d_up.sum(0)
        d_up_bias_done = dist.all_reduce(d_up_bias, group=self.dp, async_op=True)
        loss_done.wait()
        d_down_bias_done.wait()
        add_grad(self.down_bias, d_down_bias)
        d_down_done.wait()
        add_grad(self.down_weight, d_down_piece.T)
        d_up_weight_done.wait()
        add_grad(self.up_weight, d_up_weight)
        d_up_bias_done.wait()
        add_grad(self.up_bias, d_up_bias)
        return loss


def add_grad(param: nn.Parameter, grad: Tensor) -> None:
    """Accumulate as autograd does."""
    param.grad = grad if param.grad is None else param.grad.add_(grad)


Step = GatedMLPStep
'''


class GatedMLP(nn.Module):
    """The single-device model whose training step the program above computes."""

    rows: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * HIDDEN)
        self.twin = self.up
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("rows", torch.zeros(()))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.twin(x).chunk(2, -1)
        self.rows += x.shape[0]
        result: Tensor = (self.down(a * F.gelu(b)) + self.shift) * self.scale
        return result


def example_model(seed: int = 0) -> GatedMLP:
    """The model with weights drawn from a seed; other random numbers of the test do not change."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GatedMLP()


def example_batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    """The global batch ``(x, y)``, both of shape (12, 8)."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, BATCH, WIDTH, generator=generator)
    return x, y


def example_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean squared error, as the program computes it."""
    loss: Tensor = (model(x) - y).pow(2).mean()
    return loss


def example_source(dp: int = 2, tp: int = 2) -> str:
    """The text of the program for a mesh of these sizes."""
    local = {"up": 2 * HIDDEN // tp, "down": HIDDEN // tp // dp}
    return SOURCE.format(mesh=f"dp={dp} tp={tp}", dp=dp, tp=tp, **local)


def example_program(dp: int = 2, tp: int = 2) -> Program:
    """The program for a mesh; dp * tp has to divide 12, the hidden size and the batch."""
    model = example_model()
    return Program(
        plan=f"[mesh]\ndp = {dp}\ntp = {tp}\n",
        mesh=Mesh((("dp", dp), ("tp", tp))),
        sources={"role0.py": example_source(dp, tp)},
        roles=((dp * tp, "role0.py"),),
        model="GatedMLP",
        fingerprint=Fingerprint.of(model),
        constants={"scale": model.scale, "rows": model.rows},
        inputs={"x": ((BATCH, WIDTH), "float32"), "y": ((BATCH, WIDTH), "float32")},
    )


def cli_target() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    """The model, batch and loss that ``tests.example_program:cli_target`` names for commands."""
    return example_model(), example_batch(), example_loss


def other_target() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    """As ``cli_target``, with a model that the program was not made for: to be refused."""
    return nn.Linear(WIDTH, WIDTH), example_batch(), example_loss
