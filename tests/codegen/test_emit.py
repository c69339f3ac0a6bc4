"""Emitted programs: they compute what the model computes, are short, safe and always the same."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.codegen.safety import check_source
from partc.errors import CheckError
from partc.program.role import Role
from tests.codegen.emitted import check_ranks, check_single, emit, loaded, planned, traced
from tests.codegen.mlps import Toy, toy
from tests.short_models import short

EXACT = [
    "gpt2",
    "llama",
    "gpt_neox",
    "bert",
    "t5",
    "vit",
    "resnet",
]  # float64, up to casts of their own


# meaning ------------------------------------------------------------------------------------------
@pytest.mark.rows(1)
@pytest.mark.parametrize("name", EXACT)
def test_one_rank_equals_eager(name: str) -> None:
    case = short(name)
    check_single(case.model, case.inputs, case.loss, 1e-12)


@pytest.mark.exhaustive
def test_one_rank_equals_eager_with_experts() -> None:
    case = short("mixtral")
    check_single(case.model, case.inputs, case.loss, 2e-6)  # float32


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("mesh", "preset"),
    [
        ("dp=2", "ddp"),
        ("dp=2", "fsdp"),
        ("tp=2", "megatron"),
        ("tp=2", "megatron-sp"),
        ("dp=2,tp=2", "fsdp+megatron-sp"),
    ],
)
def test_ranks_equal_eager(mesh: str, preset: str) -> None:
    model, inputs = toy()
    check_ranks(model, inputs, None, mesh, preset, 1e-12)


def test_weights_may_be_cut_on_any_dim() -> None:
    """An odd number of rows stays whole, the columns are cut."""
    model, inputs = toy(inner=9)
    source = check_ranks(model, inputs, None, "dp=2", "fsdp", 1e-12)
    assert "w1_weight = join(w1_weight, 2, 1)" in source
    assert "= in_pieces(grads[self." in source


def test_gradients_add_up_as_autograd_does() -> None:
    model, inputs = toy()
    graph = traced(model, inputs)
    _, step = loaded(emit(graph, header=""), model, graph.constants)
    step.step(*inputs)
    once = {name: p.grad.clone() for name, p in step.named_parameters()}
    step.step(*inputs)
    for name, param in step.named_parameters():
        torch.testing.assert_close(param.grad, 2 * once[name], rtol=1e-12, atol=0)


def test_frozen_parameters_get_no_gradient() -> None:
    model, inputs = toy()
    model.get_parameter("embed.weight").requires_grad_(False)
    source = check_single(model, inputs, None, 1e-12)
    assert "requires_grad=False" in source


def test_buffers_are_updated_in_place() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)
    ).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = m(x).square().sum()
        return out

    graph = traced(model, (x,), loss)
    module, step = loaded(emit(graph, header=""), model, graph.constants)
    step.step(x)
    loss(model, x)
    for key, (name, *_) in module.BUFFERS.items():
        torch.testing.assert_close(step.get_buffer(key), model.get_buffer(name))


def test_buffers_of_equal_blocks_are_updated() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(3)]
    model = nn.Sequential(*blocks).double()
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = m(x).square().sum()
        return out

    source = check_single(model, (x,), loss, 1e-12)
    graph = traced(model, (x,), loss)
    module, step = loaded(source, model, graph.constants)
    step.step(x)
    loss(model, x)
    for key, (name, *_) in module.BUFFERS.items():
        torch.testing.assert_close(step.get_buffer(key), model.get_buffer(name))


def test_inference_gives_named_results() -> None:
    _, (ids, _) = toy()

    class Logits(Toy):
        def forward(self, ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"logits": self.head(self.blocks[0](self.embed(ids)))}

    whole = Logits().double()
    with torch.no_grad():
        graph = traced(whole, (ids,))
        _, step = loaded(emit(graph, header=""), whole, graph.constants)
        torch.testing.assert_close(step(ids)["logits"], whole(ids)["logits"])


# dropout ------------------------------------------------------------------------------------------
class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(6, 10, bias=False)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.w(x)).sum()
        return out


class Residual(nn.Module):
    """Adds what a dropout leaves of a branch, as blocks of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.dropout = nn.Linear(6, 6), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.dropout(self.w(x))
        out: Tensor = (y * y).sum()
        return out


def test_what_a_dropout_leaves_has_no_line_of_its_own() -> None:
    source = emit(traced(Residual(), (torch.randn(4, 6),)), header="")
    assert re.search(r"\by = x \+ w \* \w+_mask\b", source)


def test_dropout_follows_the_seed() -> None:
    torch.manual_seed(0)
    model, x = Dropped(), torch.randn(64, 6)
    graph = traced(model, (x,))
    _, step = loaded(emit(graph, header=""), model, graph.constants)

    def run(seed: int) -> float:
        step.seed(seed)
        return float(step.step(x))

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_pieces_draw_their_own_masks_and_copies_the_same() -> None:
    model, x = Dropped(), torch.randn(8, 6)
    source = emit(planned(traced(model, (x,)), "dp=2,tp=2", "ddp+megatron"), header="")
    check_source(source)
    assert 'dropout_mask(w, 0.25, self.rng("dropout", self.dp_rank))' in source


# length, determinism, safety ----------------------------------------------------------------------
@pytest.mark.exhaustive
def test_length_does_not_grow_with_layers() -> None:
    texts = []
    for num in (2, 8, 40):
        model, inputs = toy(num)
        texts.append(
            emit(planned(traced(model, inputs), "dp=2", "fsdp"), header="toy").splitlines()
        )
    two, eight, forty = texts
    assert len(two) == len(eight) == len(forty)
    differing = [a for a, b in zip(eight, forty, strict=True) if a != b]
    assert all("blocks.0 .. 7" in line or "range(8)" in line for line in differing)


def test_equal_compiles_give_equal_text() -> None:
    model, inputs = toy()
    texts = {
        emit(planned(traced(model, inputs), "dp=2,tp=2", "fsdp+megatron"), header="toy")
        for _ in range(2)
    }
    assert len(texts) == 1


HOSTILE = [
    'x"); import os #',
    "a\nimport os",
    "class",
    "{i}",
    "'''",
    'b"""',
    "F",
    "self",
    "weight",
    "training",
]


WORDS = ["torch", "input", "load", "system", "dist", "rank"]  # that mean something in a program


def test_hostile_names_stay_names() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in HOSTILE:
                self.register_module(f"m {name}", nn.Linear(4, 4, bias=False))
            for name in WORDS:
                self.register_parameter(name, nn.Parameter(torch.ones(4)))

        def forward(self, input: Tensor) -> Tensor:
            x = input
            for module in self.children():
                x = module(x)
            for name in WORDS:
                x = x * getattr(self, name)
            return x.sum()

    Named.__name__ = Named.__qualname__ = 'N"""\nimport os'
    torch.manual_seed(0)
    source = check_single(Named().double(), (torch.randn(3, 4, dtype=torch.float64),), None, 1e-12)
    role = Role.load(source, "hostile.py", helpers=source.helpers)
    assert {shard.name for shard in role.params} >= {f"m {name}.weight" for name in HOSTILE}


@pytest.mark.parametrize(
    "text",
    [
        "import os",
        "from os import system",
        "import torch\ntorch.load('x')",
        "().__class__",
        "eval('1')",
        "x = open('f')",
        "import torch\ntorch.os.system('ls')",
        "def f(",
        "with x: pass",
    ],
)
def test_unsafe_source_is_refused(text: str) -> None:
    with pytest.raises(CheckError, match="generated program, line"):
        check_source(text)


def test_a_name_that_a_backend_prints_and_nothing_defines_is_told() -> None:
    with pytest.raises(
        CheckError, match=r"it reads the name my_reduce, which no line sets"
    ) as told:
        check_source("reduced = 1\nmy_reduce(reduced)\n")
    assert "Did you mean" not in str(told.value)
    assert "If a backend or a pass of yours prints this line" in told.value.do
    with pytest.raises(CheckError, match=r"which no line sets\. Did you mean 'reduced'"):
        check_source("reduced = 1\nx = reduce\n", "stage0.py")


def test_tracebacks_show_generated_lines() -> None:
    model, inputs = toy()
    graph = traced(model, inputs)
    _, step = loaded(emit(graph, header=""), model, graph.constants)
    with pytest.raises(IndexError) as error:
        step.step(inputs[0] + 99, inputs[1])
    assert "F.embedding(ids, self.embed_weight)" in "".join(
        traceback.format_tb(error.value.__traceback__)
    )


# goldens ------------------------------------------------------------------------------------------
def test_golden_one_rank(golden: Callable[..., None]) -> None:
    model, inputs = toy()
    golden(emit(traced(model, inputs), header="toy on one device"), ".py")


@pytest.mark.parametrize(("mesh", "preset"), [("dp=2", "fsdp"), ("dp=2,tp=2", "ddp+megatron")])
def test_golden_ranks(golden: Callable[..., None], mesh: str, preset: str) -> None:
    model, inputs = toy()
    golden(check_ranks(model, inputs, None, mesh, preset, 1e-12), ".py")


class Table(nn.Module):
    """A model without inputs, which draws."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))

    def forward(self) -> Tensor:
        return F.dropout(self.w.tanh(), 0.5)


def test_a_program_without_inputs_draws_where_its_parameters_are() -> None:
    torch.manual_seed(0)
    model = Table()

    def loss(model: nn.Module) -> Tensor:
        total: Tensor = model().square().sum()
        return total

    with pytest.warns(UserWarning, match="cuts no input"):
        program = partc.compile(model, "dp=2", (), loss=loss, plan="ddp")
    partc.verify(program, model, (), loss=loss).check()
