"""What scripts do to the parts of a stage, and to its parameters, is right or refused at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partc.api import compile
from partc.errors import PlanError, RunError
from tests.mistakes.things import one_rank


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(8, 4)
        self.blocks = nn.ModuleList([nn.LayerNorm(8) for _ in range(2)])
        self.temperature, self.epoch = 1.0, 0
        self.scale, self.rates, self.act = torch.ones(8), [1.0], torch.relu

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(self.norm(self.first(x)))) * self.scale * self.rates[0]
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x) / self.temperature
        return result


class Frozen(nn.BatchNorm1d):
    """A batch norm that stays in eval mode, as detection models have it."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(False)
        return self


class WithFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Frozen(8)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    mean: Tensor = model(x).square().mean()
    return mean


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


def stage(kind: type[nn.Module] = Net, before: Callable[[Any], object] = lambda m: None) -> Any:
    torch.manual_seed(0)
    model = kind()
    before(model)
    return compile(model, "dp=1", (X,), loss=loss).module()


def replaced(part: Any) -> None:
    part.forward = lambda x: x


EDITS: dict[str, tuple[Callable[[Any], object], str]] = {
    "eval of a part": (lambda s: s.norm.eval(), "norm: it is in eval mode"),
    "train, then eval of a part": (lambda s: (s.train(), s.drop.eval()), "drop: it is in eval"),
    "flag of a part": (lambda s: setattr(s.norm, "training", False), "norm: it is in eval mode"),
    "flag of the whole": (lambda s: setattr(s, "training", False), "stage: it is in eval mode"),
    "number of the whole": (lambda s: setattr(s, "temperature", 0.5), "temperature: was 1.0"),
    "number of a part": (lambda s: setattr(s.drop, "p", 0.1), "drop.p: was 0.5"),
    "tensor of the whole": (lambda s: setattr(s, "scale", torch.zeros(8)), "scale: it is not"),
    "numbers of a tensor": (lambda s: s.scale.mul_(2), "scale: it is not what it was"),
    "number in a list": (lambda s: s.rates.__setitem__(0, 2.0), "rates: it is not what it was"),
    "function of the whole": (lambda s: setattr(s, "act", torch.tanh), "act: it is not what it"),
    "hook on a gradient": (
        lambda s: s.last.weight.register_hook(lambda g: g * 0), "last.weight: it has a gradient"
    ),
    "hook behind a gradient": (
        lambda s: s.last.weight.register_post_accumulate_grad_hook(lambda p: None),
        "last.weight: it has a gradient",
    ),
    "forward of a part": (lambda s: replaced(s.last), "forward of last: it was taken away"),
    "forward of the whole": (replaced, "stage.forward: it was taken away"),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", [0, 7], ids=["first step", "later"])
@pytest.mark.parametrize("name", EDITS)
def test_what_the_program_would_ignore_is_refused_in_the_next_step(name: str, steps: int) -> None:
    edit, said = EDITS[name]
    one = stage()
    for _ in range(steps):
        one.step(X)
    edit(one)
    with pytest.raises(RunError) as error:
        one.step(X)
    assert str(error.value).startswith(said)


def test_a_part_that_is_to_be_taken_away_stays() -> None:
    one = stage()
    with pytest.raises(RunError, match="1 of a stage's module: it was to be taken away"):
        del one.blocks[1]
    one.step(X)


def test_monte_carlo_dropout_is_refused() -> None:
    one = stage()
    one.eval()
    one(X)
    one.drop.train()
    with pytest.raises(RunError, match="drop: it is in train mode"):
        one(X)


def test_a_part_in_the_mode_in_which_it_was_compiled_is_right() -> None:
    frozen = stage(before=lambda model: model.norm.eval())
    frozen.step(X)
    frozen.train()
    with pytest.raises(RunError, match=r"norm: it is in train mode.*stage\.get_submodule"):
        frozen.step(X)
    frozen.norm.eval()
    frozen.step(X)
    frozen.eval()
    frozen(X)
    frozen.train()
    frozen.norm.eval()
    frozen.step(X)


def test_a_part_that_stays_in_eval_mode_by_itself_is_right() -> None:
    one = stage(WithFrozen, lambda model: model.train())
    for mode in (True, False, True):
        one.train(mode)
        (one.step if mode else one)(X)


def test_a_model_that_was_compiled_in_eval_mode_is_trained_in_either() -> None:
    one = stage(before=lambda model: model.eval())
    before = one.step(X)
    one.train()
    assert one.step(X) != before
    one.norm.eval()
    with pytest.raises(RunError, match="norm: it is in eval mode"):
        one.step(X)


def test_what_no_forward_reads_is_free() -> None:
    one = stage()
    one.epoch = 3
    one.first.eval()
    one.blocks[0].eval()
    one.step(X)


def test_gradient_hooks_run_where_backward_does() -> None:
    one = stage()
    seen: list[Tensor] = []
    one.last.bias.register_hook(seen.append)
    one(X).backward()
    assert len(seen) == 1


class Hidden(nn.Module):
    """Keeps a hidden state, of the rows of a batch, in a buffer."""

    h0: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.cell = nn.RNNCell(4, 6)
        self.register_buffer("h0", torch.zeros(rows, 6))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.cell(x, self.h0)
        self.h0 = h.detach().clone()
        return h


@pytest.mark.exhaustive
def test_a_hidden_state_of_one_ranks_rows_is_named() -> None:
    def compiled(rows: int) -> Any:
        return compile(
            Hidden(rows), "dp=2", (torch.ones(4, 4),), plan='preset = "ddp"\nbatch = "local"',
            loss=lambda model, x: model(x).square().mean(),
        )  # fmt: skip

    with pytest.raises(PlanError, match=r"buffer h0 float32\[4, 6\] .* 8 in place of 4, the same"):
        compiled(4)
    compiled(8)
