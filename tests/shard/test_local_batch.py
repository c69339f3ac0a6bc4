"""Programs whose steps take each rank's piece of the batch: right, readable, checked, replayed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import partc
from partc.audit.audit import audit
from partc.errors import CheckError, PlanError, ShardingError
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.sharding import Sharding, cut
from partc.program import load, load_edited
from partc.trace.arguments import Given
from partc.verification.pieces_of_ranks import whole_batch
from tests.batches import Case, bag, tokens, views, words

Golden = Callable[..., None]
LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("dp=2", "ddp", {}),
    ("dp=2", "zero2", {"microbatches": 2}),
    ("dp=2,tp=2", "fsdp+megatron-sp", {"microbatches": 2}),
    ("dp_replicate=2,dp_shard=2", "hsdp", {"microbatches": 2}),
    ("pp=2,dp=2", "fsdp", {"microbatches": 2, "stages": ["down"]}),
    ("pp=2,dp=2", "ddp", {"stages": ["down"]}),
    ("tp=2", "megatron", {}),
]


def piece_of(case: Case, num: int) -> Case:
    """The same model and loss with one rank's samples, by tests that know where these lie."""
    model, batch, loss = case
    return model, tuple(x.chunk(num)[0] for x in batch), loss


def compiled(case: Case, mesh: str, plan: str, **more: Any) -> partc.Program:
    """A program of each rank's own samples, compiled for the shapes of one rank's."""
    model, batch, loss = case
    return partc.compile(model, mesh, batch, loss=loss, plan=plan, batch="local", **more)


@pytest.mark.rows(2)
@pytest.mark.parametrize(("mesh", "plan", "more"), LAYOUTS)
def test_parity(mesh: str, plan: str, more: dict[str, Any]) -> None:
    whole = tokens(dropout=0.1)
    ranks = 8 // {"dp=2": 4, "tp=2": 8, "dp_replicate=2,dp_shard=2": 2}.get(mesh, 4)
    program = compiled(piece_of(whole, ranks), mesh, plan, **more)
    model, batch, loss = whole
    partc.verify(program, model, batch, loss=loss).check()
    audit(program)
    if mesh in ("dp=2", "pp=2,dp=2"):  # the whole batch replays: by one stage, and by two
        again = partc.compile(partc.Traced(model, batch, loss), mesh, plan=program.plan)
        assert (again.sources, again.plan) == (program.sources, program.plan)


@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [{}, {"batch_norm": "local"}], ids=["global", "local"])
def test_a_loss_over_the_whole_batch_gathers_it(more: dict[str, str]) -> None:
    program = compiled(piece_of(views(), 2), "dp=2", "ddp", **more)
    model, batch, loss = views()
    partc.verify(program, model, batch, loss=loss).check()


@pytest.mark.exhaustive
def test_sequence_first_pieces() -> None:
    for state, count in ((False, 2), (True, 1)):
        model, batch, loss = words(20, state=state)
        mine = [batch[0].chunk(2, 1)[0], batch[1].view(7, 20).chunk(2, 1)[0].reshape(-1)]
        mine += [x.chunk(2, 1)[0] for x in batch[2:]]
        program = compiled((model, tuple(mine), loss), "dp=2", "fsdp", microbatches=count)
        partc.verify(program, model, batch, loss=loss).check()
        first = program.role(0).pieces(batch, {"dp": 0})
        if count == 1:
            assert all(map(torch.equal, first, mine))


def test_what_is_no_batch_is_given_whole() -> None:
    model, (data, target, weight), loss = bag()
    mine = data.chunk(2, 1)[0], target.chunk(2)[0], weight
    program = compiled((model, mine, loss), "dp=2", "ddp")
    assert program.dealt == {"data": (("dp", 1, 1),), "target": (("dp", 0, 1),)}
    partc.verify(program, model, (data, target, weight), loss=loss).check()


@pytest.mark.exhaustive
def test_auto_takes_pieces() -> None:
    program = compiled(piece_of(tokens(), 2), "dp=2,tp=2", "auto")
    model, batch, loss = tokens()
    partc.verify(program, model, batch, loss=loss).check()
    assert set(program.dealt) == {"ids", "targets"}


def test_an_inference_program() -> None:
    model, (ids, _), _ = tokens()
    with torch.no_grad():
        program = partc.compile(model.eval(), "dp=2", (ids.chunk(2)[0],), plan="ddp", batch="local")
    partc.verify(program, model, (ids,)).check()


def test_text(golden: Golden) -> None:
    program = compiled(piece_of(tokens(), 2), "dp=2", "ddp", microbatches=2)
    golden(program.source(0), ".py")
    golden(program.plan, ".toml")


def test_one_ranks_piece_verifies() -> None:
    case = piece_of(tokens(), 2)
    program = compiled(case, "dp=2", "fsdp", microbatches=2)
    model, batch, loss = case
    partc.verify(program, model, batch, loss=loss).check()
    whole = whole_batch(program, Given.of(model, batch, loss)).tensors
    pieces = [program.role(0).pieces(whole, {"dp": rank}) for rank in (0, 1)]
    assert torch.equal(pieces[0][0], batch[0])
    assert not torch.equal(pieces[1][0], batch[0])


# saved -------------------------------------------------------------------------------------------
def test_saved_and_checked(tmp_path: Path) -> None:
    program = compiled(piece_of(tokens(), 2), "dp=2", "ddp")
    program.save(tmp_path / "build")
    again = load(tmp_path / "build")
    assert again.dealt == program.dealt
    assert "random" not in str(audit(again))
    file = tmp_path / "build" / again.role_of(0)
    text = file.read_text()
    file.write_text(text.replace('"int64", (("dp", 0, 1),)', '"int64", (("dp", 1, 1),)'))
    with pytest.raises(CheckError, match="INPUTS cut the batch otherwise"):
        audit(load_edited(tmp_path / "build"))


# refused -----------------------------------------------------------------------------------------
def test_an_open_mesh_is_refused() -> None:
    model, batch, loss = tokens()
    mesh = partc.Mesh.load("dgx-h100", devices=8)
    with pytest.raises(PlanError, match="its axes are open"):
        partc.compile(model, mesh, batch, loss=loss, batch="local")


def test_unknown_words_are_refused() -> None:
    model, batch, loss = tokens()
    with pytest.raises(PlanError, match="batch = 'mine' means nothing"):
        partc.compile(model, "dp=2", batch, loss=loss, plan="ddp", batch="mine")


@pytest.mark.exhaustive
@pytest.mark.parametrize("entry", ['"y" = {}', '"x" = { dp = 1 }', '"y" = {}\n"x" = { batch = 1 }'])
def test_an_entry_in_the_way_is_named(entry: str) -> None:
    batch, plan = (torch.ones(4, 6), torch.zeros(4, dtype=torch.long)), 'preset = "ddp"\n[inputs]\n'
    model, loss = torch.nn.Linear(6, 3), torch.nn.functional.cross_entropy

    def loss_of(model: Any, x: Any, y: Any) -> Any:
        return loss(model(x), y)

    names = ", ".join(line.partition(" =")[0] for line in entry.splitlines())
    with pytest.raises(PlanError, match=re.escape(f"Take {names} out of the plan's [inputs]")):
        partc.compile(model, "dp=2", batch, loss=loss_of, plan=plan + entry, batch="local")
    partc.compile(model, "dp=2", batch, loss=loss_of, plan="ddp", batch="local")
    wrong = f'{plan}"y" = {{ batch = 1 }}'
    with pytest.raises(ShardingError, match=r"y: int64.* has no dim 1"):
        partc.compile(model, "dp=2", batch, loss=loss_of, plan=wrong, batch="local")


def test_the_number_of_one_ranks_rows_is_named() -> None:
    def contrastive(model: Any, x: Any, num: int | None = None) -> Any:
        found = model(x)
        labels = torch.arange(len(found) if num is None else num)
        return torch.nn.functional.cross_entropy(found @ found.T, labels)

    model, x = torch.nn.Linear(6, 3), (torch.ones(4, 6),)
    said = re.escape("has 4, one rank's rows, as a number, take it from a tensor, len(x)")
    with pytest.raises(PlanError, match=said):
        partc.compile(model, "dp=2", (*x, 4), loss=contrastive, plan="ddp", batch="local")
    partc.compile(model, "dp=2", x, loss=contrastive, plan="ddp", batch="local")


def test_samples_that_do_not_join_are_refused() -> None:
    model, (data, target, weight), loss = bag(1)  # one sample: no dim tells that it is the batch
    with pytest.raises(PlanError, match="which dim is the batch"):
        compiled((model, (data, target, weight), loss), "dp=2", "ddp")
    pins = '[inputs]\n"data" = { batch = 1 }\n"target" = { batch = 0 }\n"weight" = {}\n'
    plan = Plan.parse(f'preset = "ddp"\nbatch = "local"\n{pins}')
    program = partc.compile(model, "dp=2", (data, target, weight), loss=loss, plan=plan)
    assert program.role(0).inputs["data"][0] == (7, 1)


# layouts -----------------------------------------------------------------------------------------
@pytest.mark.exhaustive
def test_a_mask_that_is_taken_for_samples_is_named() -> None:
    """It has as many rows as a rank has samples; with the entry that is advised it is right."""
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()

    def loss(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = model(x, x, x, attn_mask=mask)[0].square().mean()
        return mean

    given = torch.randn(4, 4, 8).double(), torch.zeros(4, 4).double()
    with pytest.raises(PlanError, match=r"mask along dim 0.*\[inputs\] \"mask\" = \{\}"):
        partc.compile(model, "dp=2", given, loss=loss, plan="ddp", batch="local")
    plan = 'preset = "ddp"\n[inputs]\n"mask" = {}'
    program = partc.compile(model, "dp=2", given, loss=loss, plan=plan, batch="local")
    partc.verify(program, model, given, loss=loss).check()


def test_pieces_without_an_axis_hold_the_same_rows() -> None:
    mesh = Mesh.of("dp=2,fsdp=3,tp=2")
    rows = torch.arange(2 * 3 * 2 * 6 * 5).view(72, 5)
    layouts = [{"dp": cut(0), "fsdp": cut(0), "tp": cut(0)}, {"dp": cut(0, 2), "tp": cut(0)},
               {"dp": cut(0, 6), "fsdp": cut(0), "tp": cut(0)}]  # fmt: skip
    for each, axes in itertools.product(layouts, (["tp"], ["dp"], ["fsdp", "tp"], ["dp", "tp"])):
        whole = Sharding.of(each, mesh)
        joint = whole.without(axes, mesh)
        assert not {axis for axis, _ in joint.layouts} & {*axes}
        for at in mesh.all_coords():
            places = itertools.product(*(range(mesh.size(axis)) for axis in axes))
            others = [{**at, **dict(zip(axes, place, strict=True))} for place in places]
            wanted = torch.cat([whole.local(rows, other, mesh) for other in others])
            assert set(joint.local(rows, at, mesh)[:, 0].tolist()) == set(wanted[:, 0].tolist())
