"""What follows from constants alone has its values while a step is traced; nothing else has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import TraceError
from partc.lowering import trace
from partc.trace.known_values import KnownValues
from partc.trace.scan_blocks import spare_blocks


class Masked(nn.Module):
    """Does something with the result of a layer, ``f32[rows,4]``, and with masks of its own."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.use = nn.Linear(8, 4), use
        self.plain = torch.tensor([True, False, True, True])
        self.keep: Tensor
        self.times: Tensor
        self.count: Tensor
        self.register_buffer("keep", torch.tensor([1, 0, 1, 1], dtype=torch.bool))
        self.register_buffer("times", torch.tensor([1, 0, 2, 1]))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.inner(x))


def square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def selects(m: Any, h: Tensor) -> Tensor:
    found = [h[:, m.keep], h[:, ~m.plain], h.masked_select(m.keep), h[:, m.times > 5]]
    places = m.times.unique(), m.keep.nonzero().flatten(), torch.where(m.times)[0]
    found += [h[:, each] for each in places]
    return torch.cat([each.flatten() for each in found])


def puts(m: Any, h: Tensor) -> Tensor:
    out = h.new_zeros(6, len(h))
    out[torch.tensor([1, 0, 1, 0, 1, 1]).bool()] = h.T
    return out.T


def asks(m: Any, h: Tensor) -> Tensor:
    h = h * 2 if m.keep.any() else h
    assert m.times.tolist() == [1, 0, 2, 1]
    return h.repeat_interleave(m.times, 1)[:, : int(m.keep.sum().item())]


def writes(m: Any, h: Tensor) -> Tensor:
    """Through a view, behind a first look at it."""
    mask = torch.zeros(4, dtype=torch.bool)
    before = mask.clone()
    mask.view(2, 2)[1].fill_(True)
    assert not before.any()
    return h[:, mask]


def contrast(m: Any, h: Tensor) -> Tensor:
    """SimCLR's: the pairs of two views of the same images beside all others."""
    n, h = len(h), F.normalize(h, dim=1)
    same = torch.cat([torch.arange(n // 2) for _ in range(2)])
    labels, likeness = (same[None] == same[:, None]).float(), h @ h.T
    mask = torch.eye(n, dtype=torch.bool)
    labels, likeness = labels[~mask].view(n, -1), likeness[~mask].view(n, -1)
    positive = likeness[labels.bool()].view(n, -1)
    negative = likeness[~labels.bool()].view(n, -1)
    return F.log_softmax(torch.cat([positive, negative], 1), 1)[:, 0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("use", [selects, puts, asks, writes, contrast])
def test_what_follows_from_constants_is_computed(use: Callable[[Any, Tensor], Tensor]) -> None:
    model, batch = Masked(use), (torch.randn(8, 8),)
    program = partc.compile(model, "dp=2", batch, loss=square, plan="ddp")
    partc.verify(program, model, batch, loss=square).check()
    by_buffers = use in (selects, asks)
    assert program.decided == (("keep", "times") if by_buffers else ())
    assert ("the value of buffer keep" in program.plan) == by_buffers


def on_average(m: Any, h: Tensor) -> Tensor:
    m.count += 1
    return h / float(m.count)


def test_a_buffer_that_decides_and_changes_is_refused() -> None:
    with pytest.raises(TraceError, match="asks for the value of this buffer, and changes") as got:
        trace(Masked(on_average), (torch.randn(2, 8),), square)
    assert "count (" in got.value.where
    assert "return h / float(m.count)" in got.value.where


def test_a_norm_without_a_momentum_is_told_of_it() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(TraceError, match="Give the BatchNorm1d a momentum"):
        trace(model, (torch.randn(2, 8),), square)


def drawn(m: Any, h: Tensor) -> Tensor:
    return h[:, torch.rand(4) > 0.5]


def overwritten(m: Any, h: Tensor) -> Tensor:
    mask = torch.zeros(4)
    mask.copy_(h.detach()[0])
    return h[:, mask > 0]


def in_backward(m: Any, h: Tensor) -> Tensor:
    return torch.ones_like(h).index_put((h.sum(1) > 0,), h[:1])


@pytest.mark.parametrize(
    ("use", "line"),
    [(drawn, "torch.rand"), (overwritten, "mask > 0"), (in_backward, "index_put")],
)
def test_the_refusal_of_unknown_values_names_the_line(
    use: Callable[[Any, Tensor], Tensor], line: str
) -> None:
    with pytest.raises(TraceError, match="size of a result depends on the values") as caught:
        trace(Masked(use), (torch.randn(2, 8),), square)
    assert "test_known_values.py:" in caught.value.where
    assert line in caught.value.where


def test_a_mask_of_another_shape_is_refused_as_by_torch() -> None:
    with pytest.raises(TraceError, match=r"shape of the mask \[4\] at index 0 does not match"):
        trace(Masked(lambda m, h: h[m.keep]), (torch.randn(2, 8),), square)


def test_a_buffer_without_values_is_not_known() -> None:
    with torch.device("meta"):
        model = Masked(lambda m, h: h[:, m.keep])
    with pytest.raises(TraceError, match="size of a result depends on the values"):
        trace(model, (torch.randn(2, 8),), square)


class Selecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.keep = nn.Linear(4, 8), nn.Buffer(torch.arange(8) % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        assert self.keep.any()
        y: Tensor = self.inner(x)
        return y[:, self.keep]


def test_blocks_that_select_alike_are_equal() -> None:
    model = nn.ModuleDict({"blocks": nn.Sequential(*[Selecting() for _ in range(7)])})
    batch = (torch.randn(2, 4),)

    def loss_of(model: Any, x: Tensor) -> Tensor:
        return square(model["blocks"], x)

    (fold,) = spare_blocks(model, batch, loss_of, True)
    assert fold.num == 3
    graph = trace(model, batch, loss_of, fold=True)
    assert graph.folds == (fold,)
    assert sorted(graph.decided) == [f"blocks.{i}.keep" for i in range(7)]
    other: Any = model["blocks"][3]  # type: ignore[index]
    other.keep[:2] = torch.tensor([False, True])
    assert spare_blocks(model, batch, loss_of, True) == ()


def test_nothing_is_computed_where_nothing_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(known: KnownValues, tensor: Tensor) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(KnownValues, "value", never)
    model = Masked(lambda m, h: h.masked_fill(~m.keep & torch.eye(4, dtype=torch.bool)[0], 0))
    assert trace(model, (torch.randn(2, 8),), square).grads
