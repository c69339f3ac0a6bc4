"""A key of a plan that changes nothing is told, and one that changes something is not."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partc.api import compile
from partc.errors import PartcError
from partc.idle_keys import ALWAYS, KEYS
from partc.passes.shard.preset_words import said_by
from partc.plan import Plan
from partc.plan.allowed import OWN_TABLES
from partc.plan.decided import KINDS, MEMORY
from partc.plan.field_kinds import ALLOWED
from partc.plan.mesh import Mesh
from partc.traced import Traced

TOLD = "says nothing here"
WIDTH = 8


class Block(nn.Module):
    """Attention of one head by hand, and two products around a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        x = x + self.o((q @ k.transpose(-1, -2)).softmax(-1) @ k)
        result: Tensor = x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)
        return result


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for block in self.blocks:
            y = block(y)
        loss: Tensor = self.head(y).square().mean()
        return loss


class Two(nn.Module):
    """Two products: no blocks, no draws, no third dim."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.w2(F.gelu(self.w1(x))).square().mean()
        return loss


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.norm(self.conv(x)).relu().mean((2, 3))).square().mean()
        return loss


def called(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x)
    return result


STEPS: dict[str, Callable[[], Traced]] = {
    "blocks": lambda: Traced(Blocks(), (torch.ones(8, 4, WIDTH),), called),
    "odd": lambda: Traced(Blocks(), (torch.ones(8, 5, WIDTH),), called),
    "two": lambda: Traced(Two(), (torch.ones(8, WIDTH),), called),
    "images": lambda: Traced(Images(), (torch.ones(8, 1, 6, 6),), called),
}


@cache
def step(name: str) -> Traced:
    return STEPS[name]()


@dataclass(frozen=True)
class Laid:
    """A model on a mesh with a preset."""

    model: str
    preset: str
    mesh: str
    microbatches: int = 1
    rows: tuple[str, ...] = ()  # the keys to try, of a layout in which others say nothing new

    def __str__(self) -> str:
        return f"{self.model}-{self.preset}-{self.mesh}-{self.microbatches}"

    @property
    def plan(self) -> Plan:
        return Plan(preset=self.preset, microbatches=self.microbatches)


LAID = [
    Laid("two", "ddp", "dp=2"), Laid("two", "fsdp", "dp=2"), Laid("two", "megatron", "tp=2"),
    Laid("two", "ddp", "dp=1"), Laid("two", "zero1", "dp=2", 2), Laid("two", "ddp", "dp=2", 2),
    Laid("two", "ddp", "dp_replicate=2,dp_shard=2"), Laid("two", "ddp", "pp=2,dp=2", 2),
    Laid("two", "hsdp", "dp_replicate=2,dp_shard=2"), Laid("images", "ddp", "dp=2"),
    Laid("images", "fsdp", "dp=2", 2), Laid("blocks", "fsdp", "dp=2"),
    Laid("blocks", "megatron-sp", "tp=2"), Laid("blocks", "fsdp", "pp=2,dp=2", 2),
    Laid("blocks", "megatron", "pp=2,tp=2", 2, (
        "scatter.*", "overlap_pieces", "flops_per_byte.*", "recompute", "grad_parts.*",
        "virtual_stages", "early_sums", "sends.*",
    )),
    Laid("odd", "fsdp+megatron", "dp=2,tp=2", 1, (
        "gather.*", "scatter.*", "random", "recompute", "hierarchical.*.*", "prefetch",
        "overlap_pieces", "flops_per_byte.*",
    )),
]  # fmt: skip

VALUES: dict[str, list[Any]] = {
    "preset": [],  # which is what is varied around the other keys
    "gather.*": ["step", "use"], "scatter.*": [1, 0, 7], "batch_norm": ["local"],
    "random": ["single-device"], "recompute": ["block", "attention"], "bucket_mb": [0],
    "bucket_copy_mb.*.*": [0, 1e3], "grad_parts.*": [2], "hierarchical.*.*": [0],
    "messages": [True, False], "prefetch": [2], "overlap_pieces": [2],
    "flops_per_byte.*": [1e9, 1], "schedule": ["gpipe"], "virtual_stages": [2],
    "early_sums": [(0,)], "sends.*": [2], "reduce": ["microbatch"], "allow": [("compress",)],
}  # fmt: skip


def names(row: str, mesh: Mesh) -> Iterator[tuple[str, ...]]:
    """What may stand for the ``*`` of a key."""
    axes = [axis for axis, size in mesh.cutting_axes().axes if size > 1]
    if row == "hierarchical.*.*":
        yield from ((a, b) for a in axes for b in axes if a != b)
    elif row == "bucket_copy_mb.*.*":
        yield from ((axis, kind) for axis in axes for kind in KINDS)
    elif row == "sends.*":
        yield from (("forward",), ("backward",))
    elif "*" in row:
        yield from ((axis,) for axis in axes)
        yield from [(MEMORY,)] * (row == "flops_per_byte.*")
    else:
        yield ()


def nested(stars: tuple[str, ...], given: Any) -> Any:
    for name in reversed(stars):
        given = {name: given}
    return given


@dataclass(frozen=True)
class Made:
    """What a compile gave: programs without words for people, the plan, and what was told."""

    programs: list[str]
    plan: str
    told: list[str]


def made(laid: Laid, plan: Plan) -> Made:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = compile(step(laid.model), laid.mesh, plan=plan)
    told = [text for each in caught if TOLD in (text := str(each.message))]
    return Made([*map(_calls, program.sources.values())], program.plan, told)


def _calls(source: str) -> str:
    """A program without its docstring, and without functions that only gloo's messages change."""
    tree = ast.parse(source)
    helpers = (ast.FunctionDef, ast.Expr)
    tree.body = [each for each in tree.body if not isinstance(each, helpers)]
    tree.body = [each for each in tree.body if getattr(each, "name", "") != "Reduced"]
    return ast.unparse(tree)


def changes(laid: Laid, usual: Made, field: str, given: Any) -> tuple[bool, list[str]]:
    """Whether a key changes the programs, or is refused by name, and what is told of it."""
    try:
        other = made(laid, laid.plan.changed(**{field: given}))
    except PartcError:
        return True, []
    return other.programs != usual.programs, [x for x in other.told if x.startswith(field)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("laid", LAID, ids=str)
def test_a_key_changes_the_programs_or_is_told(laid: Laid) -> None:
    usual, mesh = made(laid, laid.plan), Mesh.of(laid.mesh)
    of_preset = said_by(laid.plan, mesh.cutting_axes())
    wrong = []
    for row in laid.rows or VALUES:
        values = VALUES[row]
        field, *_ = row.split(".")
        if field in of_preset and (field == "reduce" or of_preset[field]):
            continue  # the preset says the same, or has said more
        for stars in names(row, mesh):
            found = []
            for each in values:
                changed, told = changes(laid, usual, field, nested(stars, each))
                found.append((each, changed, told))
                if changed and not told:
                    break  # the key is read, whatever its other values do
            wrong += [
                f"{field} {stars} = {each}: it changes the programs, and {told}"
                for each, changed, told in found if changed and told
            ]  # fmt: skip
            written = getattr(Plan.parse(usual.plan), field) != getattr(laid.plan, field)
            if written or any(changed for _, changed, _ in found):
                continue
            wrong += [
                f"{field} {stars} = {each}: it changes nothing, and nothing is told"
                for each, _, told in found if not told
            ]  # fmt: skip
    assert wrong == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("laid", LAID, ids=str)
def test_a_printed_plan_has_no_idle_keys(laid: Laid) -> None:
    usual = made(laid, laid.plan)
    again = made(laid, Plan.parse(usual.plan))
    assert (again.told, again.programs) == ([], usual.programs)


def test_gather_by_hand_is_read() -> None:
    """Of a plan without a preset: shards that are gathered, and shards that are computed with."""
    laid = Laid("two", "fsdp", "dp=2")
    own = Plan.parse(made(laid, laid.plan).plan).changed(preset="")
    without = own.changed(gather={}, params={})
    assert made(laid, own).told == []
    told, *_ = made(laid, without.changed(gather={"dp": "use"})).told
    assert told.startswith("gather.dp says nothing here: no weight is stored in shards over dp")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [("ddp", "fsdp", "keep every weight whole"), ("fsdp", "ddp", "store weights in shards")],
)
def test_a_preset_written_over_that_of_a_finished_plan_is_told(
    old: str, new: str, why: str
) -> None:
    laid = Laid("two", old, "dp=2")
    edited = Plan.parse(made(laid, laid.plan).plan).changed(preset=new)
    (told,) = made(laid, edited).told
    assert told.startswith(f'preset = "{new}" says nothing here: ')
    assert why in told
    remedied = made(laid, edited.changed(params={}, gather={}))
    assert [text for text in remedied.told if text.startswith("preset")] == []
    assert remedied.programs == made(laid, laid.plan.changed(preset=new, gather={})).programs


@pytest.mark.parametrize(
    ("mesh", "word", "entry"),
    [
        ("dp=2", "compress", 'wire = "int8"'), ("island=2", "local_steps", "period = 2"),
        ("island=2", "stale", "steps = 1"), ("island=2", "uneven", "microbatches = [2, 1]"),
        ("island=2", "servers", "count = 1"),
    ],
)  # fmt: skip
def test_what_is_done_to_gradients_says_nothing_without_them(
    mesh: str, word: str, entry: str
) -> None:
    allow = f'allow = ["{word}"]' if word in ALLOWED else ""
    plan = f'preset = "ddp"\n{allow}\n[{word}]\n{entry}\n'
    with torch.no_grad(), pytest.warns(UserWarning, match=f"{word} says nothing here: the step co"):
        compile(Two(), mesh, (torch.ones(8, WIDTH),), plan=plan)


def test_a_search_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile(step("two"), "dp=2", plan="auto")


def test_every_field_of_a_plan_is_read_somewhere() -> None:
    of_rows = [row.split(".")[0] for row in KEYS]
    assert sorted([*of_rows, *ALWAYS]) == sorted(each.name for each in fields(Plan))
    assert {*VALUES} == {*KEYS} - {*OWN_TABLES}  # which need meshes and words of their own
    assert all(ALWAYS.values())
