"""Load a role's source text: its tables of plain data, and its ``Step`` class.

Every source has the tables ``MESH``, ``SHARDS``, ``BUFFERS``, ``ALIASES`` and ``INPUTS``, and the
nn.Module ``Step``. Loading executes the source, so a caller has to check the file's digest before.
"""

from __future__ import annotations

import ast
import marshal
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from traceback import extract_tb
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from partc.errors import LoadError
from partc.plan.batch import Dealt
from partc.plan.mesh import ISLAND, Mesh
from partc.plan.sharding import cut, join_pieces, take_piece
from partc.program import helper_file
from partc.program.helper_file import without_import
from partc.program.hooks import set_hooks
from partc.program.step.given_out import whole_step
from partc.program.step.step_failures import naming_calls
from partc.program.user_lines import UserLines, show_lines

COMPILES = "@torch.compile"  # the line before a function that torch.compile compiles
TABLES = ("MESH", "SHARDS", "BUFFERS", "ALIASES", "INPUTS")
OUTER_TABLE = "ISLAND_BUFFERS"  # where islands keep something from one meeting to the next
WORKERS, SERVERS = "WORKERS", "SERVERS"  # islands that compute, and that own parameters
RANKS = "PIPELINE_RANKS"  # where several run the file: SHARDS and BUFFERS have a table for each


class RankMesh(Protocol):
    """What a Step needs of a mesh: a torch DeviceMesh, or a stand-in where ranks are threads."""

    @property
    def mesh(self) -> Tensor: ...

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    def size(self, mesh_dim: int) -> int: ...

    def get_group(self, mesh_dim: Any = None) -> Any: ...

    def get_local_rank(self, mesh_dim: Any = None) -> int: ...


def rank_table(mesh: Mesh) -> Tensor:
    """The ranks of a mesh, one dim for each axis, as ``DeviceMesh.mesh`` has them."""
    return torch.arange(mesh.num_ranks, dtype=torch.int).view([size for _, size in mesh.axes])


@dataclass(frozen=True)
class MeshView:
    """One rank's view of a mesh, as a DeviceMesh gives it, without process groups."""

    layout: Mesh
    rank: int

    @property
    def mesh(self) -> Tensor:
        return rank_table(self.layout)

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return self.layout.names

    def size(self, mesh_dim: int) -> int:
        return self.layout.axes[mesh_dim][1]

    def get_local_rank(self, mesh_dim: Any = None) -> int:
        return self.layout.coords(self.rank)[mesh_dim]


@dataclass(frozen=True)
class Shard:
    """One parameter or buffer of a role: its names, its whole shape, and how it is sharded."""

    key: str  # in the Step's state dict
    name: str  # in the user's model
    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    cuts: Dealt

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of one rank's shard."""
        shape = [*self.shape]
        for axis, dim, _ in self.cuts:
            shape[dim] //= mesh.size(axis)
        return tuple(shape)

    def take(self, whole: Tensor, mesh: Mesh, coords: Mapping[str, int]) -> Tensor:
        """The shard of a whole tensor that the rank at ``coords`` holds."""
        for axis, dim, outer in self.cuts:
            whole = take_piece(whole, dim, outer, mesh.size(axis), coords[axis])
        return whole

    def join(self, piece: Tensor, gather: Callable[[Tensor, str], list[Tensor]]) -> Tensor:
        """The whole tensor; ``gather(x, axis)`` has to return the x of every rank along an axis."""
        for axis, dim, outer in reversed(self.cuts):
            piece = join_pieces(gather(piece, axis), cut(dim, outer), outer)
        return piece

    def is_first_copy(self, coords: Mapping[str, int]) -> bool:
        """Whether the rank at ``coords`` is the first of those that hold the same shard."""
        cut_axes = {axis for axis, _, _ in self.cuts}
        return all(index == 0 for axis, index in coords.items() if axis not in cut_axes)


@dataclass(frozen=True)
class Role:
    """A loaded role file: the Python module, and its tables."""

    module: ModuleType
    mesh: Mesh
    params: tuple[Shard, ...]
    buffers: tuple[Shard, ...]
    aliases: dict[str, str]  # second name of a tied tensor -> first name
    batch: tuple[Shard, ...]  # the inputs in the global batch, and how a rank's piece is cut
    compiles: bool = False  # whether torch.compile compiles its functions
    is_half: bool = False  # whether it computes in float16
    file: str = ""
    lines: UserLines = field(default_factory=UserLines)

    @classmethod
    def load(
        cls, source: str, file_name: str, pipeline_rank: int = 0, lines: UserLines | None = None,
        hooks: str | None = None, helpers: str = "",
    ) -> Role:  # fmt: skip
        """Execute a source as a module, whose lines tracebacks and debuggers can show.

        ``pipeline_rank``: whose tables to take where several pipeline ranks run the file.
        ``lines``: which of the user's calls they stand for. ``hooks``: the text of ``hooks.py``;
        None: its functions change nothing. ``helpers``: the text of ``helpers.py``, from which the
        source imports. LoadError if the source is no rank program.
        """
        lines = lines or UserLines()
        shown = show_lines(file_name, source, lines)
        module = ModuleType(file_name.removesuffix(".py"))
        _run_helpers(helpers, module)
        try:
            _check_imports(source, module)
            exec(marshal.loads(_compiled(source, shown)), module.__dict__)
            tables = {name: getattr(module, name) for name in TABLES}
            module.Step  # noqa: B018 - part of the contract
            outer = getattr(module, OUTER_TABLE, {})
            if hasattr(module, RANKS):
                tables |= {name: tables[name][pipeline_rank] for name in ("SHARDS", "BUFFERS")}
                outer = outer.get(pipeline_rank, {})
            read: dict[str, Any] = {
                "mesh": Mesh.of(tables["MESH"]),
                "params": _shards(tables["SHARDS"]),
                "buffers": _shards({**tables["BUFFERS"], **outer}),
                "aliases": dict(tables["ALIASES"]),
                "batch": _batch(tables["INPUTS"]),
            }
        except Exception as error:  # the text may be anything, such as a name that is called
            raise _malformed(file_name, _said(error, shown)) from error
        set_hooks(module, source, hooks)
        return cls(
            module=module,
            **read,
            compiles=f"\n{COMPILES}\n" in source,
            is_half=re.search(r"\bfloat16\b", source + helpers) is not None,
            file=file_name,
            lines=lines,
        )

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Parameters, then buffers."""
        return self.params + self.buffers

    @cached_property
    def inputs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """What a rank passes to a step: shape and dtype of each input, or of the rank's piece."""
        return {each.name: (each.local_shape(self.mesh), each.dtype) for each in self.batch}

    def pieces(self, batch: Sequence[Tensor], coords: Mapping[str, int]) -> list[Tensor]:
        """What the rank at ``coords`` passes to a step, of a global batch."""
        pairs = zip(self.batch, batch, strict=True)
        return [each.take(whole, self.mesh, coords) for each, whole in pairs]

    @property
    def is_inference(self) -> bool:
        """Whether the role is a forward program, without gradients: its Step has no ``step``."""
        return not hasattr(self.module.Step, "step")

    def build(self, mesh: RankMesh | None, device: torch.device | str = "cpu") -> nn.Module:
        """This rank's Step; its parameters and buffers have no values yet."""
        with torch.device(device):
            step: nn.Module = self.module.Step(mesh)
        return step

    def run(
        self, step: Any, inputs: Sequence[Tensor]
    ) -> tuple[Tensor | None, Mapping[str, Tensor]]:
        """Run a Step on the global batch: the loss, None of a forward program, and what is
        returned beside it by name. An island takes the step alone.
        """
        with naming_calls(self, step, inputs):
            result = step(*inputs) if self.is_inference else whole_step(
                step, partial(self.alone(step).step, step), inputs
            )  # fmt: skip
        if self.is_inference:
            return None, result
        return result if isinstance(result, tuple) else (result, {})

    def drain(self, step: Any) -> None:
        """Wait for what an island's step leaves under way, gradients that later steps apply."""
        if hasattr(step, "drain"):
            step.drain()

    def take_one_microbatch(self, step: Any) -> None:
        """Let an island's step take one microbatch, as INPUTS has it, and not several at once."""
        if hasattr(step, "island_rank") and hasattr(step, "microbatches"):
            step.microbatches = 1

    def alone(self, step: Any) -> Any:
        """The class of a Step without other islands, which draws and computes as any of them."""
        made = type(step)
        return made.__mro__[1] if hasattr(step, "island_rank") else made

    def computes(self, coords: Mapping[str, int]) -> bool:
        """Whether the rank at ``coords`` computes; an island that owns parameters may not."""
        workers = getattr(self.module, WORKERS, None)
        return workers is None or coords[ISLAND] in workers

    def owners(self, step: nn.Module) -> dict[str, int]:
        """By trained parameter the island that owns it; empty without servers."""
        if not hasattr(self.module, SERVERS):
            return {}
        names = {id(x): name for name, x in self.tensors(step).items()}
        trained = [p for p in step.parameters() if p.requires_grad]
        served = self.module.served_by(trained, self.module.SERVERS)
        return {
            names[id(x)]: server
            for server, buckets in served.items() for bucket in buckets for x in bucket
        }  # fmt: skip

    def tensors(self, step: nn.Module) -> dict[str, Tensor]:
        """Every parameter and buffer of a Step by its name in the user's model."""
        held = {**dict(step.named_parameters()), **dict(step.named_buffers())}
        return {shard.name: held[shard.key] for shard in self.shards}


def dtype_of(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(
            where="role file",
            what=f"{name!r} is no dtype of torch",
            why=f"torch is {torch.__version__}",
            do="Compile the program again.",
        )
    return dtype


def _shards(table: Mapping[str, tuple[Any, ...]]) -> tuple[Shard, ...]:
    return tuple(
        Shard(key, name, tuple(shape), dtype_of(dtype), tuple(map(tuple, cuts)))
        for key, (name, shape, dtype, cuts) in table.items()
    )


def _batch(table: Mapping[str, tuple[Any, ...]]) -> tuple[Shard, ...]:
    """The inputs; an entry without cuts is passed whole."""
    return _shards({name: (name, *(*entry, ())[:3]) for name, entry in table.items()})


@lru_cache(maxsize=32)
def _compiled(source: str, shown: str) -> bytes:
    """A text's code, compiled once under the name that is shown, as a text is loaded again and
    again; as bytes, since torch.compile counts what it compiled of each code object.
    """
    tree = without_import(ast.parse(source, shown))
    return marshal.dumps(compile(tree, shown, "exec"))


@lru_cache(maxsize=32)
def _imports(source: str) -> frozenset[str]:
    return helper_file.imported(ast.parse(source))


def _run_helpers(text: str, module: ModuleType) -> None:
    """Execute the functions that a role imports in its own module; LoadError if they fail."""
    if not text:
        return
    shown = show_lines(helper_file.NAME, text, UserLines())
    try:
        exec(marshal.loads(_compiled(text, shown)), module.__dict__)
    except Exception as error:  # as above
        raise _malformed(helper_file.NAME, _said(error, shown)) from error


def _check_imports(source: str, module: ModuleType) -> None:
    """ImportError for a function that a role imports and the file beside it has not got."""
    lacking = sorted(_imports(source) - vars(module).keys())
    if lacking:
        raise ImportError(f"it imports {lacking[0]}, which {helper_file.NAME} does not define")


def _said(error: Exception, shown: str) -> str:
    """An exception of a text, with the last of its lines that was reached."""
    reached = [line for file, line, *_ in extract_tb(error.__traceback__) if file == shown]
    at = f"line {reached[-1]}: " if reached else ""
    return f"{at}{type(error).__name__}: {error}" if reached else str(error)


def _malformed(file_name: str, why: str) -> LoadError:
    return LoadError(
        where=file_name,
        what="is not a rank program",
        why=why,
        do="Compile the program again, or undo your edits.",
    )
