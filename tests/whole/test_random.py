"""Random numbers have one meaning: seed, step, microbatch, site and place decide them.

Every op of torch that draws is drawn right, as ``verify`` shows in float64, or refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import TraceError
from partc.graph.draws import takes_numbers
from partc.lowering import trace
from partc.program import Program
from partc.verification.report import Report
from partc.verification.threads import ThreadMesh, run_ranks
from partc.verification.verification import verify

ROWS, WIDTH = 8, 16
Op = Callable[[Tensor], Tensor]


def chances(x: Tensor) -> Tensor:
    return torch.sigmoid(x.detach())


def per_row(drawn: Tensor, x: Tensor) -> Tensor:
    return drawn.sum(1, keepdim=True).to(x.dtype).expand_as(x) / 8


def attention(x: Tensor) -> Tensor:
    heads = x.view(x.shape[0], 1, 2, -1)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).reshape(x.shape)


# What `f32[8,16]` is drawn of `f32[8,16]`. Ops of WHOLE are not cut: their elements depend on one
# another. Ops of ROWS_ALONE are cut by row: a row's elements do.
ELEMENTWISE: dict[str, Op] = {
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "randn": lambda x: torch.randn(x.shape),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(9, x.shape).to(x.dtype),
    "randint_low": lambda x: torch.randint(2, 9, x.shape).to(x.dtype),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randint_like_low": lambda x: torch.randint_like(x, 2, 9),
    "bernoulli": lambda x: torch.bernoulli(chances(x)),
    "bernoulli_p": lambda x: torch.bernoulli(x.detach(), 0.3),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "bernoulli_tensor": lambda x: torch.empty_like(x).bernoulli_(chances(x)),
    "normal_means": lambda x: torch.normal(x.detach(), 0.5),
    "normal_deviations": lambda x: torch.normal(0.5, chances(x)),
    "normal_both": lambda x: torch.normal(x.detach(), chances(x)),
    "normal_sizes": lambda x: torch.normal(0.5, 2.0, x.shape),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: torch.empty(x.shape).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.4),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_().clamp(-3, 3),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_().clamp(-3, 3),
    "random_": lambda x: torch.empty_like(x).random_(7),
    "random_from": lambda x: torch.empty_like(x).random_(2, 7),
    "random_all": lambda x: torch.empty(x.shape, dtype=torch.int64).random_() % 5 / 5,
    "poisson": lambda x: torch.poisson(chances(x) * 4),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 5), chances(x)),
    "_standard_gamma": lambda x: torch._standard_gamma(torch.sigmoid(x) + 0.5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "dropout": lambda x: F.dropout(x, 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "transposed_dropout": lambda x: F.dropout(x.t(), 0.3).t(),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "distribution": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
}
ROWS_ALONE: dict[str, Op] = {
    "multinomial": lambda x: per_row(torch.multinomial(chances(x), 3), x),
    "multinomial_again": lambda x: per_row(torch.multinomial(chances(x), 3, replacement=True), x),
    "_sample_dirichlet": lambda x: torch._sample_dirichlet(chances(x) + 0.5),
    "feature_dropout": lambda x: F.dropout1d(x.unsqueeze(1).expand(-1, 4, -1), 0.3).mean(1),
    "attention": attention,
}
WHOLE: dict[str, Op] = {
    "randperm": lambda x: x[:, torch.randperm(WIDTH)],
    "multinomial_vector": lambda x: x * torch.multinomial(torch.ones(5), 2).sum() / 8,
}
OPS = ELEMENTWISE | ROWS_ALONE | WHOLE


class Draw(nn.Module):
    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.op(x))


class Block(nn.Module):
    """Every op once, the elementwise ones on what tensor parallelism cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.draws = nn.ModuleDict({name: Draw(op) for name, op in OPS.items()})
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        for name in ELEMENTWISE:
            h = self.draws[name](h)
        x = x + self.down(torch.tanh(h))
        for name in (*ROWS_ALONE, *WHOLE):
            x = self.draws[name](x)
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def batch(rows: int = ROWS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, rows, width, generator=generator)
    return x, y


LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ddp": ("dp=2", "ddp", {}),
    "fsdp, recomputed": ("dp=2", "fsdp", {"recompute": "block"}),
    "megatron": ("tp=2", "megatron", {}),
    "pipeline": ("pp=2,dp=2", "ddp", {"microbatches": 2}),
}


@cache
def compiled(layout: str) -> Program:
    mesh, plan, options = LAYOUTS[layout]
    return partc.compile(step(), mesh, plan=plan, **options)


@cache
def step() -> partc.Traced:
    return partc.Traced(net(), batch(), loss_of)


@cache
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@cache
def report(layout: str) -> Report:
    return verify(compiled(layout), net(), batch(), loss_of)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_draws_the_numbers_of_the_pieces(layout: str) -> None:
    report(layout).check()


Key = tuple[Any, ...]


def keys(program: Program, steps: int = 1, inputs: Any = None) -> list[Counter[Key]]:
    """Per rank how often each key was drawn from; a key decides the numbers."""

    def run(rank: int, dist: object) -> Counter[Key]:
        role = program.role(rank)
        role.module.dist = dist  # type: ignore[attr-defined]
        step: Any = role.build(ThreadMesh(program.mesh, rank))
        found: Counter[Key] = Counter()
        keyed = step.rng.keyed

        def noted(*key: Any) -> torch.Generator:
            found[step.rng.step, *key] += 1
            drawn: torch.Generator = keyed(*key)
            return drawn

        step.rng.keyed = noted
        for param in step.parameters():
            param.data.fill_(0.01)
        for _ in range(steps):
            step.step(*(inputs or batch()))
        return found

    return run_ranks(program.mesh.num_ranks, run)


@cache
def keys_of(layout: str) -> list[Counter[Key]]:
    return keys(compiled(layout))


@pytest.mark.parametrize("name", OPS)
def test_pieces_differ_and_copies_agree(name: str) -> None:
    """For every op: what cuts its values, and that ranks' keys differ there and nowhere else."""
    rows = set() if name in WHOLE else {"dp", "mb"}
    cut = {"megatron": {"tp"} if name in ELEMENTWISE else set()}
    for layout in LAYOUTS:
        program = compiled(layout)
        site = f"blocks.1.draws.{name}"
        axes = {axis for axis, *_ in program.draws[site].cuts}
        wanted = cut.get(layout, rows)
        assert axes == wanted & {*program.mesh.names, *(["mb"] if layout == "pipeline" else [])}
        places: dict[tuple[int, ...], set[Any]] = {}
        for rank, found in enumerate(keys_of(layout)):
            mine = {key for key in found if key[2] == site}
            coords = program.mesh.coords(rank)
            if mine:
                assert len(mine) == (2 if "mb" in axes else 1)
                place = tuple(coords[axis] for axis in program.mesh.names if axis in axes)
                assert places.setdefault(place, mine) == mine  # a replica draws the same
        first, *others = places.values()
        assert len(places) == 2 ** len(axes - {"mb"})
        assert all(first.isdisjoint(other) for other in others)


def test_a_recomputation_draws_again_from_the_same_key() -> None:
    (found, _) = keys_of("fsdp, recomputed")
    assert found[1, None, "blocks.1.draws.dropout", (0,)] == 2
    assert found[1, None, "blocks.1.draws.uniform_", ()] + found[
        1, None, "blocks.1.draws.uniform_", (0,)
    ] == 2  # fmt: skip
    assert found[1, None, "blocks.1.draws.bernoulli", (0,)] == 1  # of chances: its result is kept


def test_blocks_of_the_model_itself_draw_under_their_own_names() -> None:
    """The blocks of a bare nn.Sequential have no list around them: "1", and not ".1"."""
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(4))
    model, given = nn.Sequential(*blocks), (torch.randn(4, 8), torch.randn(4, 8))
    program = partc.compile(model, "dp=2", given, loss=loss_of, plan="ddp")
    assert "for layer in self.blocks" in program.source()
    verify(program, model, given, loss=loss_of).check()


def test_every_step_draws_others() -> None:
    (found, _) = keys(compiled("ddp"), steps=2)
    assert {step for step, *_ in found} == {1, 2}


# refused ------------------------------------------------------------------------------------------
OWN = torch.Generator()


@torch.library.custom_op("partc_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


noisy.register_autograd(lambda ctx, d_y: d_y)


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return torch.rand(x.shape)


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return torch.rand(x.shape)


def fused(x: Tensor) -> Tensor:
    heads = x.view(x.shape[0], 1, 2, -1)
    given = (heads, heads, heads, None, False, 0.3)
    drawn: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(*given)[0]
    return drawn.reshape(x.shape)


REFUSED: dict[str, tuple[Op, str]] = {
    "own generator": (
        lambda x: torch.rand(x.shape, generator=OWN),
        "rand draws from a torch.Generator of the model's own",
    ),
    "manual_seed": (seeded, "torch's random generator was set while the model ran"),
    "fork_rng": (forked, "torch's random generator was set while the model ran"),
    "fused attention": (fused, "efficient_attention.default draws random numbers inside"),
    "fused dropout": (
        lambda x: torch.ops.aten._fused_dropout(x, 0.5)[0],
        "aten._fused_dropout.default draws random numbers inside",
    ),
    "custom op": (noisy, "its implementation draws random numbers, which nothing seeds"),
    "out": (lambda x: torch.rand(x.shape, out=torch.empty(x.shape)), "has no out-of-place form"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(name: str) -> None:
    op, words = REFUSED[name]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Draw(op))
    with pytest.raises(TraceError, match=words):
        trace(model, batch(), loss_of)


def test_every_op_that_torch_says_draws_is_known() -> None:
    """An op with torch's tag, or with a generator, is a draw: it is drawn right or refused."""
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    ops = [getattr(p, o) for p in packets if hasattr(p, "overloads") for o in p.overloads()]
    without = {"dropout_p", "train", "training"}
    for op in ops:
        names = {argument.name for argument in op._schema.arguments}
        tagged = torch.Tag.nondeterministic_seeded in op.tags
        if (tagged or "generator" in names) and not names & without:
            assert takes_numbers(op, (), {}), op
