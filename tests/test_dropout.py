"""Dropout on several ranks: pieces get masks of their own, copies equal ones, and the share is
right.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.mesh import Mesh
from partc.program import Program
from partc.threads import ThreadMesh, run_ranks

MESH = Mesh.of("dp=2,tp=2")
ROWS, WIDTH, P = 8, 512, 0.25


class Net(nn.Module):
    """Dropout on what tp cuts (hidden) and on what it does not (the result)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = nn.functional.dropout(self.up(x), P)
        return hidden, nn.functional.dropout(self.down(hidden), P)


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.no_grad():
        return partc.compile(Net(), MESH, (torch.ones(ROWS, WIDTH),), plan="ddp+megatron")


def results(program: Program, seed: int) -> list[dict[str, Tensor]]:
    """What each rank returns for weights under which nothing but a mask is zero."""

    def run(rank: int, dist: object) -> dict[str, Tensor]:
        role = program.role(rank)
        role.module.dist = dist  # type: ignore[attr-defined]
        step = role.module.Step(ThreadMesh(MESH, rank))
        with torch.no_grad():
            for param in step.parameters():
                param.fill_(1.0)
            step.seed(seed)
            found: dict[str, Tensor] = step(torch.ones(ROWS, WIDTH))
        return found

    return run_ranks(MESH.num_ranks, run)


def test_copies_are_equal_and_pieces_differ(program: Program) -> None:
    ranks = results(program, seed=1)
    for name in ranks[0]:
        assert all(torch.equal(r[name], ranks[0][name]) for r in ranks), name
    hidden, out = (mask != 0 for mask in ranks[0].values())
    half = ROWS // 2, WIDTH // 2
    assert not torch.equal(hidden[: half[0]], hidden[half[0] :])  # pieces over dp
    assert not torch.equal(hidden[:, : half[1]], hidden[:, half[1] :])  # pieces over tp
    assert not torch.equal(out[: half[0]], out[half[0] :])


def test_the_share_and_the_scale_are_right(program: Program) -> None:
    hidden, _ = results(program, seed=2)[0].values()
    kept = (hidden != 0).double().mean().item()
    deviation = (P * (1 - P) / hidden.numel()) ** 0.5
    assert abs(kept - (1 - P)) < 5 * deviation
    scaled = hidden[hidden != 0]
    torch.testing.assert_close(scaled, torch.full_like(scaled, WIDTH / (1 - P)))


def test_seeds_decide(program: Program) -> None:
    one, same, other = (results(program, seed)[0] for seed in (3, 3, 4))
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert not any(torch.equal(one[n], other[n]) for n in one)
