"""Roles: a row of the table says the same piece as the sharding it was written from."""

from __future__ import annotations

import random
from dataclasses import replace
from inspect import unwrap

import pytest
import torch
from torch import Tensor

from partc.errors import LoadError
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, Sharding, cut
from partc.program.role import Role, Shard, dtype_of
from tests.example_program import example_program

MESH = Mesh((("dp", 2), ("cp", 3), ("tp", 2)))


def random_sharding(seed: int) -> Sharding:
    """Each axis cuts some dim of [24, 12, 36], or none; outer factors too."""
    choose = random.Random(seed)
    layouts: dict[str, Layout] = {}
    for axis in MESH.names:
        if choose.random() < 0.8:
            layouts[axis] = cut(choose.randrange(3), choose.choice([1, 1, 1, 2, 3]))
    return Sharding.of(layouts, MESH)


@pytest.mark.parametrize("seed", range(60))
def test_pieces_are_those_of_the_sharding_and_join_again(seed: int) -> None:
    whole, sharding = torch.arange(24 * 12 * 36).view(24, 12, 36), random_sharding(seed)
    if sharding.local_shape(whole.shape, MESH) is None:
        return  # such a cut is never planned
    cuts = tuple((a, lay.dim, sharding.local_outer(a, MESH)) for a, lay in sharding.cuts())
    shard = Shard("w", "w", tuple(whole.shape), whole.dtype, cuts)
    pieces = [shard.take(whole, MESH, at) for at in MESH.all_coords()]
    for piece, at in zip(pieces, MESH.all_coords(), strict=True):
        assert torch.equal(piece, sharding.local(whole, at, MESH))
    firsts = [p for p, at in zip(pieces, MESH.all_coords(), strict=True) if shard.is_first_copy(at)]
    assert sum(piece.numel() for piece in firsts) == whole.numel()
    assert all(torch.equal(joined, whole) for joined in join_all(shard, pieces))


def join_all(shard: Shard, held: list[Tensor]) -> list[Tensor]:
    """What every rank gets from ``Shard.join``, one cut at a time for all of them."""
    for single in reversed(shard.cuts):
        one = replace(shard, cuts=(single,))

        held = [_joined(one, held, rank) for rank in range(len(held))]
    return held


def _joined(shard: Shard, held: list[Tensor], rank: int) -> Tensor:
    return shard.join(held[rank], lambda _, axis: [held[p] for p in MESH.peers(rank, axis)])


def test_a_file_that_is_no_role_is_refused() -> None:
    for text in ("MESH = {}", "x = (", "import nowhere_at_all"):
        with pytest.raises(LoadError, match=r"role0\.py: is not a rank program"):
            Role.load(text, "role0.py")
    for text in ('name = "a"\nname("b")', "1 / 0", "import sys\nint('many')", "raise OSError"):
        with pytest.raises(LoadError, match=r"is not a rank program \(line \d: \w+Error"):
            Role.load(text, "role0.py")
    text = example_program().source().replace("INPUTS = {", "INPUTS = {'n': 5, ")
    with pytest.raises(LoadError, match=r"role0\.py: is not a rank program"):
        Role.load(text, "role0.py")
    with pytest.raises(LoadError, match="'float31' is no dtype"):
        dtype_of("float31")
    with pytest.raises(LoadError, match="'load' is no dtype"):
        dtype_of("load")


def test_each_load_has_code_of_its_own() -> None:
    """torch.compile counts how often it has compiled a code object, and gives up on it."""
    steps = [unwrap(example_program().role().module.Step.step) for _ in range(2)]
    one, other = (step.__code__ for step in steps)
    assert one == other
    assert one is not other


def test_a_role_names_its_tensors_as_the_model_does() -> None:
    role = example_program().role()
    assert [shard.name for shard in role.params][:2] == ["up.weight", "up.bias"]
    assert role.aliases["twin.weight"] == "up.weight"
    assert not role.is_inference
