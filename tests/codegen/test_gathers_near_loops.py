"""Where the weights of a loop's first block start to be gathered, and what comments say of that."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partc
from tests.patience import patience


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    """Two towers of equal blocks, and between them wide layers or many small calls."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8)
        self.first = nn.ModuleList(Block() for _ in range(2))
        wide = [nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)]
        self.wide = nn.Sequential(*wide) if between == "wide" else None
        self.second = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for block in self.first:
            x = block(x)
        if self.wide is not None:
            x = self.wide(x)
        else:
            for power in range(20):
                x = torch.tanh(x * (1 + 2.0**-power)).cos()
        for block in self.second:
            x = block(x)
        y: torch.Tensor = self.head(x.mean(1))
        return y


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The step under ``fsdp``, by what stands between the towers; it is proved to be right."""
    found = {}
    for between in ("wide", "small"):
        torch.manual_seed(0)
        model = Net(between).double()
        batch = torch.randint(32, (8, 6)), torch.arange(8) % 4
        program = partc.compile(model, "dp=2", batch, loss=loss_of, plan="fsdp")
        partc.verify(program, model, batch, loss=loss_of, timeout=patience()).check()
        source = program.source()
        found[between] = source[source.index("def step") :]
    return found


def lines_before(text: str, start: str, end: str) -> list[str]:
    """The lines from the one with ``start`` on to the one with ``end``."""
    rest = text[text.index(start) :]
    return rest[: rest.index(end)].splitlines()


@pytest.mark.exhaustive
def test_a_gather_starts_where_a_block_of_work_is_left(sources: dict[str, str]) -> None:
    between = lines_before(sources["wide"], "first_saved.append", "in zip(self.second")
    at = next(i for i, line in enumerate(between) if "self.second[0].gather()" in line)
    products = [i for i, line in enumerate(between) if "F.linear(" in line]
    assert products[0] < at < products[-1]
    assert "early" not in between[at]


@pytest.mark.exhaustive
def test_a_comment_says_why_a_gather_is_early(sources: dict[str, str]) -> None:
    between = lines_before(sources["small"], "first_saved.append", "in zip(self.second")
    at = next(i for i, line in enumerate(between) if "self.second[0].gather()" in line)
    assert "# for the next loop; early, as little is computed" in between[at]
    assert not any("torch." in line for line in between[:at])


def test_the_last_sum_says_what_hides_it(sources: dict[str, str]) -> None:
    for source in sources.values():
        (line,) = [x for x in source.splitlines() if x.strip().startswith("reduced.finish()")]
        assert "# the last sum: " in line


def test_a_mean_begins_with_its_share(sources: dict[str, str]) -> None:
    for source in sources.values():
        assert " = 1 / count " in source
        assert "ones_like" not in source
