"""Time mixes, dilated convolutions, pointers, sets, memories, encoders with decoders."""
# mypy: disable-error-code="no-any-return, no-untyped-call, operator, index, arg-type, misc"
# (written as users write, who check no types)

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.styles import BATCH, Style, style
from tests.styles.attention import TIMES, WIDTH, WORDS, Language, next_word, tokens
from tests.styles.mixtures import features, mse


class TimeMix(nn.Module):
    """RWKV: a decayed weighted mean of the past, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(3, WIDTH))
        self.decay, self.first = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.k, self.v, self.r, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        last = F.pad(x, (0, 0, 1, -1))
        mixed = [x * m + last * (1 - m) for m in self.mix]
        k, v, r = self.k(mixed[0]), self.v(mixed[1]), self.r(mixed[2])
        w, out = -torch.exp(self.decay), []
        num = den = torch.zeros(len(x), WIDTH)
        for t in range(x.shape[1]):
            e = torch.exp(self.first + k[:, t])
            out.append((num + e * v[:, t]) / (den + e))
            num = torch.exp(w) * num + torch.exp(k[:, t]) * v[:, t]
            den = torch.exp(w) * den + torch.exp(k[:, t])
        return self.o(torch.sigmoid(r) * torch.stack(out, dim=1))


@style
def time_mix() -> Style:
    return Style(Language(TimeMix), tokens(), next_word)


class Gate(nn.Module):
    """Two causal convolutions, one of which gates the other; a residual and a skip."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.left = dilation
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=dilation)
        self.res, self.skip = nn.Conv1d(WIDTH, WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.conv(F.pad(x, (self.left, 0))).chunk(2, 1)
        y = a.tanh() * b.sigmoid()
        return x + self.res(y), self.skip(y)


class Wave(nn.Module):
    """Skips are summed outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Gate(2**i) for i in range(3))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(WIDTH, WORDS, 1))

    def forward(self, ids: Tensor) -> Tensor:
        x, skips = self.emb(ids).transpose(1, 2), []
        for block in self.blocks:
            x, skip = block(x)
            skips.append(skip)
        return self.head(sum(skips)).transpose(1, 2)


@style
def dilated_with_skips() -> Style:
    return Style(Wave(), tokens(), next_word)


class Pointer(nn.Module):
    """The answer is a place in the input; what was chosen is not chosen again."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.cell = nn.GRU(2, WIDTH, batch_first=True), nn.GRUCell(2, WIDTH)
        self.w1, self.w2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        keys, h = self.encode(x)
        h, one = h[0], torch.zeros(len(x), 2)
        taken, out = torch.zeros(x.shape[:2], dtype=torch.bool), []
        for t in range(order.shape[1]):
            h = self.cell(one, h)
            score = torch.tanh(self.w1(keys) + self.w2(h)[:, None]) @ self.v
            out.append(score.masked_fill(taken, -1e9))
            taken = taken | F.one_hot(order[:, t], x.shape[1]).bool()
            one = x[torch.arange(len(x)), order[:, t]]
        return torch.stack(out, 1)


@style
def pointers() -> Style:
    def loss(model: nn.Module, x: Tensor, order: Tensor) -> Tensor:
        return F.cross_entropy(model(x, order).flatten(0, 1), order.flatten())

    order = torch.stack([torch.randperm(4) for _ in range(BATCH)])
    return Style(Pointer(), (torch.randn(BATCH, 4, 2), order), loss)


class Translate(nn.Module):
    """An encoder and a decoder of torch, over a dict, with teacher forcing."""

    def __init__(self) -> None:
        super().__init__()
        self.src, self.tgt = nn.Embedding(WORDS, WIDTH, 0), nn.Embedding(WORDS, WIDTH, 0)
        self.body = nn.Transformer(WIDTH, 4, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        given, wanted = batch["tgt"][:, :-1], batch["tgt"][:, 1:]
        hidden = batch["src"] == 0
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        y = self.body(
            self.src(batch["src"]),
            self.tgt(given),
            tgt_mask=mask,
            src_key_padding_mask=hidden,
            memory_key_padding_mask=hidden,
        )
        logits = self.head(y)
        return {"loss": F.cross_entropy(logits.mT, wanted, ignore_index=0), "logits": logits}


@style
def teacher_forcing_over_a_dict() -> Style:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch)["loss"]

    src = torch.randint(1, WORDS, (BATCH, TIMES)).masked_fill(torch.arange(TIMES) > 4, 0)
    batch = {"src": src, "tgt": torch.randint(0, WORDS, (BATCH, 5))}
    return Style(Translate(), (batch,), loss)


class Pool(nn.Module):
    """Induced points look at a set, the set at them; a seed pools it."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, WIDTH)
        self.points, self.seed = (
            nn.Parameter(torch.randn(1, 2, WIDTH)),
            nn.Parameter(torch.randn(1, 1, WIDTH)),
        )
        self.attns = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x, num = self.into(x), len(x)
        h = self.attns[0](self.points.expand(num, -1, -1), x, x)[0]
        x = self.norm(x + self.attns[1](x, h, h)[0])
        return self.head(self.attns[2](self.seed.expand(num, -1, -1), x, x)[0]).squeeze(1)


@style
def transformer_of_sets() -> Style:
    return Style(Pool(), (torch.randn(BATCH, 5, 3), torch.randn(BATCH, 8)), mse)


class Memory(nn.Module):
    """End-to-end memory: bags of words are read in hops, with adjacent tables tied."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(WORDS, WIDTH, padding_idx=0) for _ in range(3))

    def forward(self, story: Tensor, query: Tensor) -> Tensor:
        u = self.tables[0](query).sum(1)
        for hop in range(2):
            m, c = self.tables[hop](story).sum(2), self.tables[hop + 1](story).sum(2)
            p = torch.einsum("bsd,bd->bs", m, u).softmax(-1)
            u = u + (p.unsqueeze(1) @ c).squeeze(1)
        return F.linear(u, self.tables[-1].weight)


@style
def memory_in_hops() -> Style:
    def loss(model: nn.Module, story: Tensor, query: Tensor, answer: Tensor) -> Tensor:
        return F.nll_loss(F.log_softmax(model(story, query), -1), answer)

    story, query = torch.randint(0, WORDS, (BATCH, 3, 4)), torch.randint(0, WORDS, (BATCH, 4))
    return Style(Memory(), (story, query, torch.randint(1, WORDS, (BATCH,))), loss)


@style
def stages_in_an_ordered_dict() -> Style:
    def block(into: int, out: int) -> nn.Sequential:
        return nn.Sequential(
            OrderedDict(fc=nn.Linear(into, out), norm=nn.LayerNorm(out), act=nn.SiLU())
        )

    parts = OrderedDict(stem=block(16, 12), one=block(12, 12), two=block(12, 12))
    return Style(nn.Sequential(parts | {"head": nn.Linear(12, 8)}), features(), mse)
