"""What --dump writes after every pass: a text of the graph that reads back to the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.graph import value
from partc.graph.graph_parse import parse_graph
from partc.plan import Plan
from tests.pipelines import toy
from tests.zoo import FAMILIES, Case

STAGE = """\
local graph Part  mesh dp=2 mb=2
param tied.weight#1 : f32[4@dp,4]
param heads.odd-name.bias : f32[4]
buffer 0.mask : f32[2] = [0.0, -inf]
input *rest[0] : f32[8,4]
received hidden : f32[8@mb+dp,4]
start tied
  all_gather = all_gather(tied.weight#1, axis='dp', num=2, dim=0) : f32[4,4]
forward tied
  linear = linear(hidden, all_gather, %`heads.odd-name.bias`) : f32[8@mb+dp,4]
  clone = clone(linear, memory_format=torch.contiguous_format) : f32[8@mb+dp,4]
weights tied
  new_zeros = new_zeros(%`*rest[0]`, [4, 4], device=device(type='cpu'), layout=torch.strided) : f32[4,4]
end tied
  accumulate = accumulate(new_zeros, axis='mb', num=2) : f32[4,4]
outputs
  grad tied.weight#1 = accumulate
  buffer 0.mask = %0.mask
  sent clone = clone
"""  # noqa: E501


@torch.library.custom_op("partc_dumps::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x + x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, grad: doubled(grad))


class Mixed(nn.Module):
    """An op that torch does not have, a recurrence, a convolution and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.parts = nn.ModuleDict({"odd-name": nn.Conv1d(6, 6, 3, padding=1)})
        self.norm = nn.BatchNorm1d(6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.table.weight
        later = torch.ones(2, 2).triu(1) > 0
        self.register_buffer("mask", torch.zeros(2, 2).masked_fill(later, -torch.inf))

    def forward(self, ids: Tensor) -> Tensor:
        x = doubled(self.table(ids))
        x = self.norm(self.parts["odd-name"](x.transpose(1, 2))).transpose(1, 2)
        scores = (x @ x.transpose(1, 2) + self.mask).softmax(-1)
        logits: Tensor = self.head(self.lstm(scores @ x)[0])
        return logits


def mixed() -> Case:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    return Case(Mixed(), (torch.arange(16).reshape(8, 2) % 12,), loss)


def tower() -> Case:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.down(self.up(x).relu_())
            return out

    model = nn.Sequential(*(Block() for _ in range(2)))
    inputs = torch.randn(8, 4, 8), torch.randn(8, 4, 8)
    return Case(model, inputs, lambda m, x, y: nn.functional.mse_loss(m(x), y))


def small(name: str, **sizes: int) -> Case:
    return FAMILIES[name].case(name, **sizes)


@dataclass(frozen=True)
class Compile:
    """A model under a plan, and what must stand in a text of its dump, so that it is tried."""

    case: Callable[[], Case]
    mesh: str
    plan: str | Plan
    shows: str
    options: dict[str, Any] = field(default_factory=dict)


MICROBATCHES = {"microbatches": 2}
COMPILES = {
    "one-stage": Compile(tower, "dp=2", "ddp", "all_reduce_joined("),
    "zero": Compile(
        mixed, "dp=2", "zero2", " = partc_dumps::doubled(", {"recompute": "block"}
    ),
    "microbatches": Compile(tower, "dp=2", "zero1", "\nend ", MICROBATCHES),
    "fsdp": Compile(tower, "dp=2", "fsdp", "all_gather_joined("),
    "pieces": Compile(
        partial(small, "llama", num_hidden_layers=1), "dp=2,tp=2",
        Plan(preset="fsdp+megatron-sp", overlap_pieces=2), "  # of a block's pieces",
    ),
    "hsdp": Compile(tower, "dp_replicate=2,dp_shard=2", "hsdp", "@dp_shard"),
    "1f1b": Compile(
        tower, "pp=2,tp=2", "megatron", "\nreceived ", {**MICROBATCHES, "schedule": "1f1b"}
    ),
    "zb-h1": Compile(
        partial(small, "gpt2"), "pp=2,dp=2", "zero2", "memory_format=torch.contiguous_format",
        {**MICROBATCHES, "schedule": "zb-h1"},
    ),
}  # fmt: skip


@pytest.mark.rows(1)
@pytest.mark.filterwarnings("ignore:recompute says nothing here")  # of a model without blocks
@pytest.mark.parametrize("name", COMPILES)
def test_a_dump_reads_back(name: str, tmp_path: Path) -> None:
    each = COMPILES[name]
    case = each.case()
    partc.compile(
        case.model, each.mesh, case.inputs, loss=case.loss, plan=each.plan, dump=tmp_path,
        **each.options,
    )  # fmt: skip
    texts = dict(_dumped(tmp_path))
    assert any(each.shows in text for text in texts.values())
    for file, text in texts.items():
        assert str(parse_graph(text)) == text, file


def _dumped(folder: Path) -> Iterator[tuple[str, str]]:
    """The first file of each text, and the text without its comment."""
    seen = set()
    for path in sorted(folder.iterdir()):
        comment, _, text = path.read_text("utf-8").partition("\n")
        assert comment.startswith("# after ")
        if text not in seen:
            seen.add(text)
            yield path.name, text


def test_a_stage_reads_back() -> None:
    graph = parse_graph(STAGE)
    assert str(graph) == STAGE
    assert [value(node).phase for node in graph.calls()] == ["S", "F", "F", "W", "E"]
    assert list(graph.outputs.sent) == ["clone"]
    assert graph.constants["0.mask"].tolist() == [0.0, -torch.inf]


@pytest.mark.exhaustive
def test_calls_keep_their_names_and_transfers_are_named_after_what_they_move(
    tmp_path: Path,
) -> None:
    partc.compile(toy().step, "tp=2", plan=Plan(preset="megatron"), dump=tmp_path / "dump")
    before, after = (
        {node.name for node in parse_graph(one(tmp_path / "dump", name)).calls()}
        for name in ("propagate", "insert_collectives")
    )
    new = after - before
    assert len(before - after) <= len(before) // 10  # what nothing reads
    assert any(name.endswith("_all_reduce") for name in new)
    moved = {name.removesuffix("_all_reduce") for name in new if name.endswith("_all_reduce")}
    assert moved <= before


@pytest.mark.exhaustive
def test_a_bucket_has_the_types_of_its_parts_behind_its_wait_too(tmp_path: Path) -> None:
    case = small("llama", num_hidden_layers=1)
    partc.compile(
        case.model, "dp=2,tp=2", case.inputs, loss=case.loss, plan="fsdp+megatron", dump=tmp_path
    )
    for name in ("bucket_collectives", "place_waits", "tidy"):
        lines = one(tmp_path, name).splitlines()
        buckets = [line for line in lines if " = all_gather_joined(" in line]
        assert any("@tp" in line.rpartition(" : ")[2] for line in buckets), name


def one(folder: Path, name: str) -> str:
    """The text that a pass has left."""
    (file,) = folder.glob(f"[0-9][0-9]-{name}.txt")
    return file.read_text(encoding="utf-8").partition("\n")[2]


def test_a_dump_says_where_a_pass_has_left_the_text_alone(tmp_path: Path) -> None:
    partc.compile(toy().step, "dp=2", plan=Plan(preset="ddp"), dump=tmp_path / "dump")
    texts = [path.read_text("utf-8").partition("\n") for path in sorted(tmp_path.glob("dump/*"))]
    alike = [False, *(a[2] == b[2] for a, b in pairwise(texts))]
    assert [text[0].endswith(" calls; text unchanged)") for text in texts] == alike
    assert {True, False} == {*alike}


def test_a_stage_counts_its_own_calls(tmp_path: Path) -> None:
    plan = Plan(preset="ddp", microbatches=4)
    partc.compile(toy().step, "pp=2", plan=plan, dump=tmp_path / "dump")
    files = [*(tmp_path / "dump").glob("*-tidy-stage*.txt")]
    assert len(files) == 2
    for file in files:
        header, _, text = file.read_text(encoding="utf-8").partition("\n")
        assert f" -> {len(list(parse_graph(text).calls()))} calls" in header
