"""What a trace refuses: where in the user's code, and why; what looks like it and is right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal, kl_divergence
from torch.utils.checkpoint import checkpoint

import partc
from partc.errors import TraceError
from partc.lowering import trace


class Asks(nn.Module):
    """Does with its activations what the given function does."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.ask(y)
        return y.sum()


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda y: 1 if y.sum() > 0 else 2, "value of a tensor"),
        (lambda y: y.sum().item(), "value of a tensor"),
        (lambda y: y.detach().numpy(), "value of a tensor"),
        (lambda y: y[y > 0], "size of a result depends"),
        (lambda y: y.nonzero(), "size of a result depends"),
    ],
)
def test_data_dependence_is_refused(ask: Callable[[Tensor], Any], what: str) -> None:
    with pytest.raises(TraceError, match=what) as caught:
        trace(nn.Sequential(Asks(ask)), (torch.randn(2, 4),))
    assert caught.value.where.startswith("0 (")
    assert "lambda y:" in caught.value.where
    assert "test_trace_refusals.py:" in caught.value.where
    assert caught.value.do


@pytest.mark.parametrize(
    ("ask", "do"),
    [
        (lambda y: torch.unique(y, return_inverse=True), "index_add(0, numbers, x)"),
        (lambda y: y.unique_consecutive(), "index_add(0, numbers, x)"),
        (lambda y: y.long().flatten().bincount(minlength=4), "F.one_hot(y, classes).sum(0)"),
        (lambda y: y.repeat_interleave(y[:, 0].long(), 0), "x[indices]"),
        (
            lambda y: nn.utils.rnn.pack_padded_sequence(y[..., None], y[0].long(), True, False),
            "out[torch.arange(len(lengths)), lengths - 1]",
        ),
    ],
)
def test_ops_of_such_sizes_are_told_what_stands_in_their_place(
    ask: Callable[[Tensor], Any], do: str
) -> None:
    with pytest.raises(TraceError, match="size of a result depends") as caught:
        trace(nn.Sequential(Asks(ask)), (torch.randn(4, 4),))
    assert do in caught.value.do
    assert "mask.sum()" not in caught.value.do


@pytest.mark.parametrize(
    "pick", [lambda y: y[y > 0].mean(), lambda y: y.masked_select(y > 0).mean()]
)
def test_a_mask_is_counted_with(pick: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TraceError) as caught:
        trace(nn.Linear(4, 4), (torch.randn(2, 4),), lambda m, x: pick(m(x)))
    assert "(loss * mask).sum() / mask.sum() in place of loss[mask].mean()" in caught.value.do


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda y: y * y.norm().item(), "Compute with the tensor itself, without .item()"),
        (lambda y: float(y.sum()), "return loss, {"),
        (lambda y: print(y.sum().item()), "Leave it out of the step; to print or log it"),
        (lambda y: y.sum().item() if y.sum() > 0 else y, "torch.where instead of a branch"),
    ],
)
def test_a_number_that_is_asked_for_is_returned(ask: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(nn.Sequential(Asks(ask)), (torch.randn(2, 4),))
    assert words in caught.value.do


def test_other_refusals() -> None:
    x, outside = torch.randn(2, 4), nn.Linear(4, 4)
    with pytest.raises(TraceError, match="the loss is a tensor"):
        trace(nn.Linear(4, 4), (x,))
    with pytest.raises(TraceError, match="writes to it in place"):
        trace(nn.Linear(4, 1), (x,), lambda m, x: m(x.mul_(2)).sum())
    with pytest.raises(TraceError, match="no parameter of the model"):
        trace(nn.Linear(4, 4), (x,), lambda m, x: outside(m(x)).sum())
    with pytest.raises(TraceError, match="with use_reentrant=False"):
        trace(nn.Linear(4, 4), (x,), lambda m, x: checkpoint(m, m(x), use_reentrant=True).sum())
    with pytest.raises(TraceError, match=r"too many positional arguments \(it takes \(input\)\)"):
        trace(nn.Linear(4, 4), (x, 3))


class Grouped(nn.Module):
    """Calls an op that fails in its backward, where no line of the user's is running."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        grouped: Tensor = torch._grouped_mm(x, self.weight, None)
        return grouped.sum()


def test_a_failure_in_the_backward_names_the_line_of_its_forward() -> None:
    with pytest.raises(TraceError) as caught:
        trace(Grouped(), (torch.randn(3, 8),))
    assert caught.value.where.startswith("Grouped (")
    assert "grouped: Tensor = torch._grouped_mm(" in caught.value.where


def test_what_follows_from_constants_alone_is_known() -> None:
    """``nn.Transformer`` asks whether its mask is causal; writes through views are seen."""

    def asks(y: Tensor) -> None:
        mask = torch.full((4, 4), float("-inf")).triu(1)
        assert bool((mask == nn.Transformer.generate_square_subsequent_mask(4)).all())
        mask[0].fill_(3)
        assert mask.sum(1)[0].item() == 12

    def overwritten(y: Tensor) -> None:
        mask = torch.zeros(4, 4)
        mask[1].copy_(y.detach()[0])
        mask.sum().item()

    trace(nn.Sequential(Asks(asks)), (torch.randn(2, 4),))
    with pytest.raises(TraceError, match=r"asks for the value of a tensor"):
        trace(nn.Sequential(Asks(overwritten)), (torch.randn(2, 4),))


def suppressed(ask: Callable[[Tensor], object]) -> Callable[[Tensor], None]:
    """What asks for values, and goes on without them."""

    def asks(y: Tensor) -> None:
        with suppress(Exception):
            ask(y)

    return asks


@pytest.mark.parametrize(
    "ask",
    [
        lambda y: float(y.max()), lambda y: bool(y.max() > 0), lambda y: y.nonzero(),
        lambda y: y.detach().numpy(), lambda y: y.tolist(), lambda y: f"{y.sum():.3f}",
        lambda y: y[y > 0],
    ],
)  # fmt: skip
def test_a_value_that_was_asked_for_in_a_try_is_refused(ask: Callable[[Tensor], object]) -> None:
    with pytest.raises(TraceError, match=r"asks for the value of a tensor, and catches"):
        trace(nn.Sequential(nn.Linear(4, 4), Asks(suppressed(ask))), (torch.randn(2, 4),))


def test_a_caught_error_of_other_kinds_is_the_models_own_affair() -> None:
    def tries(y: Tensor) -> None:
        with suppress(RuntimeError):
            y @ y.new_zeros(7, 7)
        with suppress(AttributeError):
            getattr(y, "nothing")  # noqa: B009

    trace(nn.Sequential(nn.Linear(4, 4), Asks(tries)), (torch.randn(2, 4),))


class Latent(nn.Module):
    """Draws from a distribution, and asks others for densities and a divergence."""

    def __init__(self, **checks: bool) -> None:
        super().__init__()
        self.mean, self.scale, self.checks = nn.Linear(4, 4), nn.Linear(4, 4), checks

    def forward(self, x: Tensor) -> Tensor:
        scale = nn.functional.softplus(self.scale(x))
        drawn = Normal(self.mean(x), scale, **self.checks)
        far = kl_divergence(drawn, Normal(0.0, 1.0)).mean()
        first = Categorical(logits=drawn.rsample()).log_prob(torch.zeros(2).long())
        result: Tensor = far - first.mean()
        return result


def test_distributions_look_at_no_value_unless_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch.compile switches it off
    x = (torch.randn(2, 4),)
    trace(Latent(), x)
    assert Distribution._validate_args
    with pytest.raises(TraceError, match=r"Leave validate_args=True out") as caught:
        trace(Latent(validate_args=True), x)
    assert "drawn = Normal(" in caught.value.where
    assert Distribution._validate_args


def add_in_place(y: Tensor) -> Tensor:
    kept = y.tanh()
    twice = kept * 2
    kept[0].add_(1)
    result: Tensor = twice + kept
    return result


def write_a_weight(y: Tensor) -> Tensor:
    weight = torch.ones(4)
    result = y.sin() * y * weight
    y.mul_(2)
    return result


@pytest.mark.parametrize(
    ("function", "line"), [(add_in_place, "kept[0].add_(1)"), (write_a_weight, "y.mul_(2)")]
)
def test_a_write_over_what_a_gradient_needs_is_named(function: Any, line: str) -> None:
    with pytest.raises(TraceError, match="writes in place over what a gradient needs") as caught:
        trace(nn.Linear(4, 4), (torch.randn(2, 4),), lambda m, x: function(m(x)).sum())
    assert caught.value.where.endswith(line)


class Halves(nn.Module):
    def __init__(self, pick: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pick, self.last = pick, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.pick(x))
        return result


@pytest.mark.parametrize(
    "pick", [lambda x: x.chunk(2, -1)[0], lambda x: x.max(0).values[:4], lambda x: x[..., :4]]
)
def test_a_part_of_an_input_of_another_dtype_is_named(pick: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(8, 8, dtype=torch.float64)
    with pytest.raises(TraceError, match=r"x is float64, last.weight is float32.*x\.float\(\)"):
        partc.compile(Halves(pick), "dp=2", (x,), loss=lambda m, x: m(x).sum(), plan="ddp")
