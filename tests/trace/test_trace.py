"""Traced graphs against eager PyTorch: every family, and what a trace must not lose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from partc.errors import TraceError
from partc.graph import Graph, ops, value
from partc.lowering import trace
from tests.compare import check, distance, run
from tests.short_models import short
from tests.zoo import FAMILIES, MODELS

aten = torch.ops.aten


def targets(graph: Graph) -> set[Any]:
    return {node.target for node in graph.calls()}


# the zoo -------------------------------------------------------------------------------------
@pytest.mark.rows(2)
@pytest.mark.parametrize("name", MODELS)
def test_family_equals_eager(name: str) -> None:
    case = short(name)
    before = {key: tensor.clone() for key, tensor in case.model.state_dict().items()}
    graph = check(case.model, case.inputs, case.loss)
    known = [value(node) for node in graph.calls()]
    assert sum(bool(v.module or v.source) for v in known) > 0.95 * len(known)
    assert all(v.source.count(":") and not v.source.startswith("/") for v in known if v.source)
    schemas = [getattr(target, "_schema", None) for target in targets(graph)]
    assert not [schema for schema in schemas if schema is not None and schema.is_mutable]
    changed = set(graph.outputs.buffers)
    for key, tensor in case.model.state_dict().items():
        assert torch.equal(tensor, before[key]) or key in changed  # eager moved it, not the trace


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_family_with_dropout_equals_eager(name: str) -> None:
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    if name == "bert":
        names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
    family = FAMILIES[name]
    case = replace(family, config={**family.config, **dict.fromkeys(names, 0.1)}).case(name)
    graph = check(case.model, case.inputs, case.loss)
    masks = [value(n) for n in graph.calls() if n.target is ops.dropout_mask]
    assert len(masks) == 7  # the embedding's, and three in each layer
    assert {v.phase for v in masks} == {"F"}


@pytest.mark.exhaustive
def test_family_with_checkpoints_equals_eager() -> None:
    case = MODELS["llama"]()
    model: Any = case.model
    model.activation_checkpointing_enable()
    graph = check(model, case.inputs, case.loss)
    recomputed = [n for n in graph.calls() if n.target == aten.silu.default]
    assert sorted(value(n).phase for n in recomputed) == ["B", "B", "F", "F"]
    assert all(value(n).module.endswith("mlp.act_fn") for n in recomputed)


# parameters and buffers ----------------------------------------------------------------------
class Tied(nn.Module):
    """An embedding that is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            self.head(self.embed(ids) * self.scale).flatten(0, 1), labels.flatten()
        )


def ids(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % 12


def test_tied_weights_are_one_parameter() -> None:
    graph = check(Tied(), (ids(2, 5), ids(2, 5)))
    assert list(graph.params) == ["embed.weight"]
    assert graph.aliases == {"head.weight": "embed.weight"}
    assert list(graph.inputs) == ["ids", "labels"]
    assert graph.constants["scale"].tolist() == [2.0] * 6


@pytest.mark.exhaustive
def test_tracing_twice_gives_one_text() -> None:
    case = MODELS["swin"]()
    first = trace(case.model, case.inputs, case.loss)
    second = trace(case.model, case.inputs, case.loss)
    assert str(first) == str(second)
    assert [value(n) for n in first.calls()] == [value(n) for n in second.calls()]


def test_model_on_meta() -> None:
    real, model = trace(Tied(), (ids(2, 5), ids(2, 5))), Tied().to("meta")
    model.head.weight = model.embed.weight
    inputs = (torch.empty(2, 5, dtype=torch.long, device="meta"),) * 2
    graph = trace(model, inputs)
    assert [n.target for n in graph.calls()] == [n.target for n in real.calls()]
    assert graph.aliases == real.aliases
    assert graph.constants == {}
    assert all(p.is_meta for p in model.parameters())


class Counting(nn.Module):
    """Writes to a buffer through a view of it, twice, and reads it in between."""

    seen: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(3, 4))
        self.register_buffer("total", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        row = self.seen[1]
        row += x.detach().sum(0)
        self.seen.t()[2].mul_(3)
        self.total = self.total + 1
        loss: Tensor = (self.linear(x) * row).sum()
        return loss


def test_written_buffers_are_outputs() -> None:
    graph = check(Counting(), (torch.randn(2, 4, dtype=torch.float64),))
    assert set(graph.outputs.buffers) == {"seen", "total"}
    assert graph.constants == {}


def test_frozen_and_unused_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    model[0].requires_grad_(False)
    x = torch.randn(3, 4, dtype=torch.float64)
    graph = check(model, (x,), lambda m, x: m(x).sum())
    assert set(graph.grads) == {"1.weight", "1.bias"}
    model.register_parameter("spare", nn.Parameter(torch.zeros(2)))
    graph = trace(model, (x,), lambda m, x: m[1](m[0](x)).sum())
    assert set(graph.grads) == {"1.weight", "1.bias"}
    assert graph.untrained == ("spare",)
    with pytest.raises(TraceError, match=r"no trainable parameter.*without detach"):
        trace(model, (x,), lambda m, x: m[1](m[0](x)).detach().sum())


class Steps(nn.Module):
    """Reads a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.table = torch.arange(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.linear(x) * self.table * torch.tensor(0.5)).sum()
        return loss


def test_plain_tensors_are_constants() -> None:
    model = Steps()
    graph = check(model, (torch.randn(2, 4, dtype=torch.float64),))
    assert [c.tolist() for c in graph.constants.values()] == [[0.0, 1.0, 2.0, 3.0]]
    assert type(model.table) is Tensor


class Converts(nn.Module):
    """Asks for the dtype that it has, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(torch.float32)
        y: Tensor = self.router(x)
        return y.sum()


def test_a_module_may_be_converted_to_what_it_is() -> None:
    model = Converts()
    weight = model.router.weight
    assert set(trace(model, (torch.randn(2, 4),)).grads) == {"router.weight", "router.bias"}
    assert model.router.weight is weight


# what autograd alone knows -------------------------------------------------------------------
class Triple(torch.autograd.Function):
    """Doubles, and says that its gradient is three times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *d_y: Tensor) -> Tensor:
        return d_y[0] * 3


def test_custom_function_keeps_its_backward() -> None:
    model = nn.Linear(4, 4).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    triple: Any = Triple.apply
    graph = check(model, (x,), lambda m, x: triple(m(x)).sum())
    tripled = [n for n in graph.calls() if n.args[1:] == (3,)]
    assert [value(n).phase for n in tripled] == ["B"]
    assert "d_y[0] * 3" in value(tripled[0]).source


class Block(nn.Module):
    """Two layers with dropout, recomputed in the backward."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.dropout = nn.Dropout(p)
        self.double()

    def inner(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.dropout(F.gelu(self.up(x))))
        return x + y

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=False)
        return x.square().mean()


def test_checkpoint_recomputes() -> None:
    graph = check(Block(0.0), (torch.randn(3, 4, dtype=torch.float64),))
    gelus = [value(n).phase for n in graph.calls() if n.target == aten.gelu.default]
    assert sorted(gelus) == ["B", "B", "F", "F"]


def test_checkpoint_replays_its_dropout() -> None:
    graph = check(Block(0.5), (torch.randn(3, 4, dtype=torch.float64),))
    masks = [value(n).phase for n in graph.calls() if n.target is ops.dropout_mask]
    assert masks == ["F", "F"]


def test_tracing_leaves_the_random_generator() -> None:
    model = Block(0.5)
    state = torch.get_rng_state()
    trace(model, (torch.ones(3, 4, dtype=torch.float64),))
    assert torch.equal(state, torch.get_rng_state())


def test_dropout_mask_keeps_its_share() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Dropout(0.25)).double()
    graph = check(model, (torch.ones(50, 100, dtype=torch.float64),), lambda m, x: m(x).sum())
    (node,) = [n for n in graph.calls() if n.target is ops.dropout_mask]
    assert node.args[1] == 0.25
    mask = ops.dropout_mask(torch.ones(200, 200), 0.25)
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(float(mask.mean()) - 1) < 0.02


def test_autocast_casts_are_kept() -> None:
    model = nn.Linear(4, 4)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = m(x)
        return y.float().square().sum()

    graph = check(model, (torch.randn(3, 4),), loss)
    (linear,) = [n for n in graph.calls() if n.target == aten.linear.default]
    assert value(linear).dtype == torch.bfloat16
    assert value(graph.grads["weight"]).dtype == torch.float32


def test_inference_gives_named_results() -> None:
    case = MODELS["llama"]()
    with torch.no_grad():
        graph = trace(case.model, case.inputs[:1])
        expected = case.model(*case.inputs[:1])
    assert list(graph.outputs.results) == ["logits"]
    assert graph.loss is None
    assert not graph.grads
    got = run(graph, case.model, case.inputs[:1])
    assert distance(got["results"]["logits"], expected.logits, 0.0) < 1e-12


# custom ops ----------------------------------------------------------------------------------
@torch.library.custom_op("partc_test::scaled", mutates_args=())
def scaled(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    y = x.clone()
    y.mul_(by)
    return y, x.sum(0)


@scaled.register_fake
def _(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[1:])


@torch.library.custom_op("partc_test::asks", mutates_args=())
def asks(x: Tensor) -> Tensor:
    return x * x.sum().item()


@asks.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_custom_ops_become_torch_ops() -> None:
    model = nn.Linear(4, 4).double()

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        y, total = scaled(x, 3.0)
        result: Tensor = (m(y) * total).sum()
        return result

    graph = check(model, (torch.randn(2, 4, dtype=torch.float64),), loss)
    assert not [t for t in targets(graph) if "partc_test" in str(t)]
    with pytest.raises(TraceError, match=r"partc_test.asks.* is no op of torch"):
        trace(model, (torch.randn(2, 4, dtype=torch.float64),), lambda m, x: m(asks(x)).sum())
