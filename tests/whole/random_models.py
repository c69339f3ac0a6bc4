"""Models of drawn calls in drawn layouts, for what nobody thinks of by himself.

``python -m tests.whole.random_models 0 500`` runs the drawn cases 0 to 499 and prints what is
refused and what is wrong; calls that look at the whole batch may be refused with microbatches.
"""
# mypy: disable-error-code="no-any-return"
# (what torch's modules and calls give is Any)

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import PartcError

BATCH, STEPS, WIDTH, HEADS, WORDS = 12, 6, 12, 3, 30
TOLERANCE = 1e-8


class Block(nn.Module):
    """The modules that a call may use, and the call: ``[B,S,D] -> [B,S,D]``."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.flat, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.back, self.norm = nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.conv, self.groups = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(3, WIDTH)
        self.image, self.words = nn.Conv2d(1, 2, 3, padding=1), nn.Embedding(7, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("table", torch.linspace(-1, 1, STEPS * WIDTH).view(STEPS, WIDTH))
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.call(self, x)


Call = Callable[[Block, Tensor], Tensor]


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attention(m: Block, x: Tensor) -> Tensor:
    q, k = m.wide(x).chunk(2, -1)
    y = F.scaled_dot_product_attention(heads(q), heads(k), heads(x), is_causal=True)
    return m.flat(y.transpose(1, 2).flatten(2))


def masked_attention(m: Block, x: Tensor) -> Tensor:
    q, k = (y.unflatten(-1, (HEADS, -1)) for y in m.wide(x).chunk(2, -1))
    later = torch.ones(STEPS, STEPS, dtype=torch.bool).triu(1)
    scores = torch.einsum("bshd,bthd->bhst", q, k).masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("bhst,bthd->bshd", scores, x.unflatten(-1, (HEADS, -1))).flatten(2)


def linear_attention(m: Block, x: Tensor) -> Tensor:
    q, k = (F.elu(y) + 1 for y in m.wide(x).chunk(2, -1))
    return q @ (k.transpose(1, 2) @ x) / (q @ k.sum(1, keepdim=True).transpose(1, 2))


def experts(m: Block, x: Tensor) -> Tensor:
    tokens = x.flatten(0, 1)
    weight, best = (tokens @ m.flat.weight[:3].T).softmax(-1).max(-1)
    each = torch.stack([m.flat(tokens), F.relu(m.flat(tokens)), torch.tanh(m.flat(tokens))], 1)
    return (each[torch.arange(len(tokens)), best] * weight[:, None]).view_as(x)


def recurrent(m: Block, x: Tensor) -> Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for step in range(STEPS):
        state = torch.tanh(m.flat(x[:, step]) + state * m.scale)
        states.append(state)
    return torch.stack(states, 1)


def few(m: Block, x: Tensor) -> Tensor:
    weights = m.flat(x).softmax(-1)
    best, where = weights.topk(2, -1)
    return x * torch.zeros_like(weights).scatter(-1, where, best)


def turned(m: Block, x: Tensor) -> Tensor:
    half = WIDTH // 2
    (a, b), cos, sin = x.chunk(2, -1), m.table[:, :half].cos(), m.table[:, :half].sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def between_least_and_most(m: Block, x: Tensor) -> Tensor:
    least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return (x - least) / (most - least + 1)


def triangle(m: Block, x: Tensor) -> Tensor:
    return torch.ones(STEPS, STEPS, dtype=x.dtype).tril() @ m.flat(x) / STEPS


def of_all(m: Block, x: Tensor) -> Tensor:
    spread, mean = torch.var_mean(x, dim=(1, 2), keepdim=True)
    return (x - mean) / (spread + 1e-3).sqrt()


CALLS: dict[str, Call] = {
    call.__name__: call
    for call in (
        attention, masked_attention, linear_attention, experts, recurrent, few, turned,
        between_least_and_most, triangle, of_all,
    )
} | {
    "mlp": lambda m, x: m.back(F.gelu(m.wide(x))),
    "glu": lambda m, x: F.glu(m.wide(x), -1),
    "norm": lambda m, x: m.norm(x),
    "conv": lambda m, x: m.conv(x.transpose(1, 2)).transpose(1, 2),
    "groups": lambda m, x: m.groups(x.transpose(1, 2)).transpose(1, 2),
    "image": lambda m, x: F.gelu(m.image(x.unsqueeze(1))).mean(1),
    "words": lambda m, x: m.words((x.detach().abs().sum(-1) * 3).long() % 7),
    "unit_rows": lambda m, x: F.linear(x, F.normalize(m.flat.weight, dim=1)) * m.scale,
    "squeeze": lambda m, x: x * torch.sigmoid(m.back(m.wide(x.mean(1))))[:, None],
    "half_as_long": lambda m, x: F.interpolate(
        F.avg_pool1d(x.transpose(1, 2), 2), scale_factor=2).transpose(1, 2),
    "most_of_three": lambda m, x: F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "sorted": lambda m, x: x.sort(1).values * m.scale,
    "running_mean": lambda m, x: x.cumsum(1) / torch.arange(1, STEPS + 1)[:, None],
    "running_most": lambda m, x: torch.tanh(x).cummax(1).values + m.scale,
    "product": lambda m, x: (1 + 0.1 * torch.tanh(x)).prod(1, keepdim=True) * x,
    "rolled": lambda m, x: torch.roll(x, 1, 1) - x.flip(2),
    "windows": lambda m, x: F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1) * m.scale,
    "repeated": lambda m, x: m.flat(x[:, :2].repeat_interleave(3, 1)),
    "reordered": lambda m, x: m.flat(x)[:, [5, 3, 1, 0, 2, 4]],
    "own_order": lambda m, x: x.gather(1, x.detach().argsort(1)),
    "added_rows": lambda m, x: torch.zeros_like(x).index_add(
        1, torch.tensor([0, 2, 2, 5, 1, 3]), m.flat(x)),
    "across": lambda m, x: m.flat(x.transpose(1, 2).reshape(-1, STEPS, WIDTH)),
    "batched": lambda m, x: torch.baddbmm(x, m.flat(x), torch.bmm(x.transpose(1, 2), x) * 0.1),
    "distances": lambda m, x: m.flat(
        F.pad(torch.cdist(x, m.table + 0 * x), (0, WIDTH - STEPS))),
    "picked": lambda m, x: torch.where(x > m.scale, m.flat(x), x * 0.5),
    "of_batch": lambda m, x: x / (1 + x.std(0, keepdim=True)),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, calls: tuple[str, ...], tied: bool, frozen: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(CALLS[name]) for name in calls)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight
        if frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x))
        return y


def cross_entropy(m: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(m(ids).flatten(0, 1), targets.flatten())


def smoothed(m: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    known = targets.masked_fill(targets % 5 == 0, -100)
    return F.cross_entropy(m(ids).transpose(1, 2), known, label_smoothing=0.1)


def next_word(m: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(m(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def of_samples(m: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(m(ids).mean(1), targets[:, 0])


def weighted(m: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    each = F.cross_entropy(m(ids).flatten(0, 1), targets.flatten(), reduction="none")
    weight = (targets.flatten() % 3).to(each) + 0.5
    return (each * weight).sum() / weight.sum()


def with_penalties(m: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    logits = m(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    norms = logits.logsumexp(-1).square().mean()
    return loss + 1e-2 * norms + 1e-3 * m.get_parameter("head.weight").square().sum()


def squared(m: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return (m(ids).softmax(-1) - F.one_hot(targets, WORDS)).square().mean()


LOSSES = (
    cross_entropy, smoothed, next_word, of_samples, weighted, with_penalties, squared,
)  # fmt: skip
DATA = ("ddp", "zero1", "zero2", "fsdp")
LAYOUTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("dp=2", DATA),
    ("dp=3", DATA),
    ("dp=2", ("auto",)),
    ("dp_replicate=2,dp_shard=3", ("hsdp",)),
    ("tp=2", ("megatron", "megatron-sp")),
    ("tp=3", ("megatron",)),
    ("dp=2,tp=2", ("fsdp+megatron", "ddp+megatron-sp", "zero1+megatron")),
    ("dp=2,tp=3", ("fsdp+megatron-sp",)),
    ("pp=2", ("ddp",)),
    ("pp=2,dp=2", DATA),
    ("pp=2,tp=2", ("megatron",)),
)
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


@dataclass(frozen=True)
class Drawn:
    """A model and a layout."""

    calls: tuple[str, ...]
    mesh: str
    plan: str
    loss: Callable[..., Tensor] = cross_entropy
    microbatches: int = 1
    schedule: str | None = None
    tied: bool = False
    frozen: bool = False

    @classmethod
    def of(cls, seed: int) -> Drawn:
        draw = random.Random(seed)
        mesh, plans = draw.choice(LAYOUTS)
        calls = draw.choices(list(CALLS), k=draw.randint(2, 4))
        if draw.random() < 0.4:
            calls = calls[:2] * 2  # equal blocks
        piped = "pp" in mesh
        return cls(
            tuple(calls), mesh, draw.choice(plans), draw.choice(LOSSES),
            draw.choice((2, 3) if piped else (1, 2)),
            draw.choice(SCHEDULES) if piped else None,
            draw.random() < 0.25, draw.random() < 0.15,
        )  # fmt: skip

    def check(self) -> None:
        """PartcError if it is refused, or if the program does not compute what the model does."""
        torch.manual_seed(0)
        model = Net(self.calls, self.tied, self.frozen).double()
        batch = torch.randint(WORDS, (BATCH, STEPS)), torch.randint(WORDS, (BATCH, STEPS))
        program = partc.compile(
            model, self.mesh, batch, loss=self.loss, plan=self.plan,
            microbatches=self.microbatches, schedule=self.schedule,
        )  # fmt: skip
        partc.verify(program, model, batch, self.loss).check(TOLERANCE)


def main(first: int, last: int) -> None:
    """Run drawn cases and print those that are not right."""
    for seed in range(first, last):
        try:
            Drawn.of(seed).check()
        except PartcError as error:
            print(f"{seed} {Drawn.of(seed)}\n    {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
