"""Check that the tables of every text are those of the saved model and mesh."""

from __future__ import annotations

from collections.abc import Iterator

from partc.errors import CheckError
from partc.plan import Plan
from partc.plan.local_steps import is_outer, kept
from partc.plan.mesh import Mesh
from partc.plan.sharding import dtype_name
from partc.plan.wires import ALIKE, MARK, is_residual, whose
from partc.program import Program
from partc.program.role import Role, Shard
from partc.program.tensors.holders import roles_of


def check_tables(program: Program) -> None:
    """CheckError if MESH, INPUTS, SHARDS, BUFFERS or ALIASES contradict program.json."""
    for role in roles_of(program):
        for what, why in _differences(role, program):
            raise CheckError(
                where=role.file,
                what=what,
                why=why,
                do="Undo the edit of the table, or compile for what you want.",
            )


def _differences(role: Role, program: Program) -> Iterator[tuple[str, str]]:
    if role.mesh.axes != program.mesh.axes:
        yield f"MESH is {role.mesh}", f"the program is for {program.mesh}"
    inputs = {x.name: (x.shape, dtype_name(x.dtype)) for x in role.batch}
    if program.inputs and inputs != {n: (tuple(s), d) for n, (s, d) in program.inputs.items()}:
        yield "INPUTS are not those of the program", f"program.json has {dict(program.inputs)}"
    cuts = {x.name: x.cuts for x in role.batch if x.cuts}
    if program.inputs and cuts != dict(program.dealt):
        yield "INPUTS cut the batch otherwise", f"program.json has {dict(program.dealt)}"
    known = program.fingerprint.tensors
    for shard in role.shards:
        if known and shard.name in known and known[shard.name].shape != shard.shape:
            yield (
                f"{shard.key} is a piece of a {list(shard.shape)}",
                f"{shard.name} of the model is {list(known[shard.name].shape)}",
            )
        if known and shard.name in known and known[shard.name].dtype != dtype_name(shard.dtype):
            yield (
                f"{shard.key} is {dtype_name(shard.dtype)}",
                f"{shard.name} of the model is {known[shard.name].dtype}",
            )
        own = shard.name in program.constants or is_residual(shard.name)
        if known and shard.name not in known and not own:
            yield f"{shard.key} is a piece of {shard.name}", "the model has no such tensor"
        if is_residual(shard.name):
            yield from _other_residual(shard, program)
        yield from _impossible(shard, role.mesh)


def _other_residual(shard: Shard, program: Program) -> Iterator[tuple[str, str]]:
    """What is wrong with a buffer for what sums have not sent: a row belongs to each data rank."""
    if is_outer(shard.name):
        yield from _other_outer(shard, program)
        return
    how, axis = Plan.parse(program.plan).compress, shard.name.rpartition(MARK)[2]
    alike = whose(shard.name) == ALIKE
    kept = how is not None and (how.keeps_rest or alike)
    if not kept:
        yield f"{shard.key} is what sums have left over", "the plan's [compress] keeps none"
    wanted = set() if alike else {(axis, 0, 1)}
    others = {(each, 0 if alike else 1, 1) for each in program.mesh.names if each != axis}
    if not wanted <= {*shard.cuts} <= wanted | others:
        yield f"{shard.key} is cut as {shard.cuts}", f"every rank of {axis} has a part of its own"


def _other_outer(shard: Shard, program: Program) -> Iterator[tuple[str, str]]:
    """What is wrong with a buffer that islands keep of a parameter."""
    plan = Plan.parse(program.plan)
    how = plan.local_steps or plan.stale
    words = how.keeps if how is not None else ()
    params = {x.name: x for role in roles_of(program) for x in role.params}
    of = next((x for name, x in params.items() for w in words if shard.name == kept(name, w)), None)
    if of is None:
        yield f"{shard.key} is what islands keep of a parameter", "the plan's islands keep no such"
    elif (of.shape, of.dtype, of.cuts) != (shard.shape, shard.dtype, shard.cuts):
        yield f"{shard.key} is cut as {shard.cuts}", f"{of.name} is cut as {of.cuts}"


def _impossible(shard: Shard, mesh: Mesh) -> Iterator[tuple[str, str]]:
    """Cuts of a tensor that the mesh does not allow."""
    for axis, dim, _ in shard.cuts:
        if axis not in mesh.names or not 0 <= dim < len(shard.shape):
            yield f"{shard.key} is cut at dim {dim} by {axis}", f"the mesh is {mesh}"
