"""In-place ops, and views of what they change, as new values: compared with eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partc.errors import TraceError
from partc.lowering import trace
from tests.compare import check


class Writes(nn.Module):
    """Applies a function that writes to its argument, between a weight and a loss."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return (self.write(x * self.weight) * x).sum()


def assign_row(y: Tensor) -> Tensor:
    y[0] = 1.0
    return y


def write_through_flat_view(y: Tensor) -> Tensor:
    flat = y.view(-1)
    flat[::2].mul_(2)
    return y + flat.view(4, 6)


def read_old_and_new(y: Tensor) -> Tensor:
    old = y * 1
    row = y.t()[1]
    y[:, 1] += y[:, 0] * 3
    return old + y + row[:, None]


def swap_halves(y: Tensor) -> Tensor:
    z = y.detach().clone()
    left, right = z.chunk(2, 1)
    kept = left.clone()
    left.copy_(right)
    right.copy_(kept)
    return y * z + left.sum()


def zero_one_of_many(y: Tensor) -> Tensor:
    z = y.detach().clone()
    z.unbind(0)[1].zero_()
    z.split([1, 5], 1)[1].mul_(2)
    return y * z


def diagonal_and_mask(y: Tensor) -> Tensor:
    y[:, :4].diagonal().fill_(0.5)
    y.masked_fill_(y > 0.9, 0.25)
    return y


def several_views(y: Tensor) -> Tensor:
    y.permute(1, 0).unsqueeze(0)[0, 2].neg_()
    return y.reshape(2, 2, 6).transpose(0, 1).reshape(4, 6)


def chain_of_writes(y: Tensor) -> Tensor:
    return y.clamp_(max=0.5).add_(1).exp_()


def overlapping_views(y: Tensor) -> Tensor:
    first, second = y[:, :4], y[:, 2:]
    first.mul_(2)
    second.add_(first[:, :1])
    return y + first.sum()


def indexed(y: Tensor) -> Tensor:
    y[torch.tensor([0, 2])] += 1
    y.index_add_(0, torch.tensor([1]), torch.ones(1, 6, dtype=torch.float64))
    return y


def counts(y: Tensor) -> Tensor:
    number = torch.zeros(3, dtype=torch.int64)
    number[1:].add_(2)
    number += 1
    return y * number.sum()


def turned_in_place(y: Tensor) -> Tensor:
    z = y.detach().clone()
    row = z[1]
    z.t_().mul_(2)
    z.unsqueeze_(0)[0, 2].add_(1)
    z.squeeze_(0).t_()
    return y * z + row


def into_another(y: Tensor) -> Tensor:
    z = torch.zeros(6, 4, dtype=torch.float64)
    torch.div(y.detach(), 2, out=z.transpose_(0, 1))
    return y * z


def made_in_another(y: Tensor) -> Tensor:
    z = torch.eye(4, 6, out=torch.empty_like(y.detach()))
    row = torch.arange(0, 6, out=torch.empty(6, dtype=torch.float64))
    ones = torch.ones(4, 6, out=z.new_empty(4, 6))
    return y * z + row - torch.full((4, 6), 0.5, out=ones)


def some_of_many(y: Tensor) -> Tensor:
    y[y > 0.9] = 0.25
    y[torch.tensor([True, False, False, True])] = -1.0
    return y


WRITES = [
    into_another,
    made_in_another,
    some_of_many,
    assign_row,
    write_through_flat_view,
    read_old_and_new,
    swap_halves,
    zero_one_of_many,
    diagonal_and_mask,
    several_views,
    chain_of_writes,
    overlapping_views,
    indexed,
    counts,
    turned_in_place,
]


@pytest.mark.rows(3)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: str(write.__name__))
def test_writes_equal_eager(write: Callable[[Tensor], Tensor]) -> None:
    graph = check(Writes(write), (torch.linspace(0, 2, 24, dtype=torch.float64).reshape(4, 6),))
    schemas = [n.target._schema for n in graph.calls() if hasattr(n.target, "_schema")]
    assert not any(schema.is_mutable for schema in schemas)


def write_both(y: Tensor) -> Tensor:
    values, places = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    torch.max(y.detach(), 1, out=(values, places))
    return y * values[:, None]


def write_bits(y: Tensor) -> Tensor:
    z = torch.zeros(4, 6, dtype=torch.float64)
    z.view(torch.int64).add_(1)
    return y * z


def resize(y: Tensor) -> Tensor:
    z = torch.zeros(2, 3, dtype=torch.float64)
    return y * z.resize_(4, 6)


def resize_trained(y: Tensor) -> Tensor:
    return (y * 2).resize_(6, 4)


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (resize, "changes how memory is read"),
        (resize_trained, "resize_ is called on what a gradient flows through"),
        (write_both, "writes to max, max_values"),
        (write_bits, "in-place op writes through"),
    ],
)
def test_what_cannot_be_rewritten_is_refused(write: Callable[[Tensor], Tensor], what: str) -> None:
    with pytest.raises(TraceError, match=what) as caught:
        trace(Writes(write), (torch.ones(4, 6, dtype=torch.float64),))
    assert "test_functionalize.py" in caught.value.where
    if write in (resize, resize_trained):
        assert "y = x.reshape(4, 6)" in caught.value.do
