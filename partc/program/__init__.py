"""A compiled program (plan, cost, one source per role), saved to a folder, loaded, and run.

In: the printed sources of a compile, or a saved folder. Out: a `Program`; on a rank its `Stage`, an
nn.Module. Start: here; `stage/runtime.py` is the Stage, `role.py` reads a source; folders say what
they are. Never: codegen, or a pass but for new predictions (`basis.py`): a saved program runs
without the compiler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from partc.atomic import atomic_directory, atomic_write
from partc.collecting import no_collecting
from partc.errors import LoadError, UsageError
from partc.graph.draws import Draw
from partc.plan import Plan
from partc.plan.batch import Dealt
from partc.plan.mesh import PP, Mesh
from partc.program import manifest as manifests
from partc.program import reads_rows, shown
from partc.program.basis import Basis
from partc.program.choices import MOST_PROGRAMS, Pad, Partial, choices_of
from partc.program.expected import Expectation
from partc.program.fixed_text import FixedText
from partc.program.folders import CONSTANTS
from partc.program.helper_file import NAME as HELPERS
from partc.program.helper_file import helpers_of
from partc.program.hooks import read_hooks, write_hooks
from partc.program.manifest import OTHERS, Manifest, sha256, sha256_of
from partc.program.model.touched import check_touched, warn_of_model
from partc.program.not_a_stage import NotAStage
from partc.program.origin import Origin
from partc.program.ranks.farewell import tell_at_exit
from partc.program.recipes import recipe_of, with_others
from partc.program.role import Role, dtype_of
from partc.program.run_script import run_script
from partc.program.saved_cost import Cost, SavedCost
from partc.program.sources import Sources
from partc.program.step.forward_batch import ForwardBatch
from partc.program.tensorfile import TensorFile, write_tensors
from partc.program.tensors.pieces_of_one_rank import own_piece as own_piece  # for torch.load
from partc.program.user_lines import UserLines
from partc.program.wanted import Recipe, Wanted
from partc.program.written import written_files
from partc.quoting import docstring
from partc.trace.arguments import Arguments
from partc.trace.fingerprint import Fingerprint, table
from partc.trace.frozen_numbers import FrozenNumbers
from partc.trace.no_model import check_second_of_load
from partc.trace.record import Kind
from partc.trace.returns import extras_in
from partc.trace.trees import Tree
from partc.wrong_calls import as_path, check_whole_number, frozen, known_arguments

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from partc.program.stage.runtime import Stage

PLAN, RUN = "plan.toml", "run.py"
SCHEDULE = "schedule.csv"  # of a pipeline


@frozen
@dataclass(frozen=True)
class Program(NotAStage):
    """A compiled training step: what ``compile`` and ``load`` give.

    Attributes:
        plan: every decision, as the text of a plan.toml.
        mesh: the axes of ranks.
        sources: the text of each file, by its name; ranks that do the same share one.
        roles: which file each rank runs, run-length coded: ``((2, "a.py"), (2, "b.py"))`` says
            that ranks 0 and 1 run a.py and ranks 2 and 3 b.py.
        cost: predicted seconds, bytes and FLOPs; prints as a table.
        model: the name of the model's class.
        fingerprint: names, shapes and dtypes of the model's tensors.
        constants: tensors that were known when compiling, such as masks.
        decided: names of buffers whose values decided what was traced; they must keep them.
        inputs: shape of the global batch and dtype, by the input's name.
        dealt: how a rank's piece of an input is cut, as (axis, dim, outer), where a step takes
            pieces (``batch="local"``); empty where it takes the whole batch.
        arguments: where these stand in the arguments of a step.
        returns: what a step gives back, where that is more than its loss.
        results: how the extras and results are cut of which a rank gets its own rows alone, as
            (axis, dim, outer).
        schedule: of a pipeline its order as CSV, otherwise empty.
        basis: what predictions rest on.
        numbers: the numbers of the model's Python, in the process that compiled it.
        draws: every random draw by its site: the whole value's shape, and how it is cut.
        expected: the numbers of the single-device step, with which the text is compared.
        lines: for which of the model's calls each line of a source stands, as it was printed.
        fixed: the parts of the printed text that an edited one must have too.
        origin: the model that was compiled, in the process that compiled it, until ``module()``
            has taken its weights.
        made_for: whether it is a step, a loss or a forward, and in which mode; None: by its text.
        others: programs of other shapes and modes, over the same weights.
        hooks: the text of ``hooks.py``, which its sources call; None: their calls change nothing.
        recipe: what compiles more of them, in the process that compiled this one.
        target: how ``partc compile`` was told of the model, by option; empty where a script was.
        saved_in: the folder that it was loaded from; "" for one that was not.
    """

    plan: str
    mesh: Mesh
    sources: Mapping[str, str]
    roles: tuple[tuple[int, str], ...]
    cost: Cost = field(default_factory=SavedCost)
    model: str = ""
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    decided: tuple[str, ...] = ()
    inputs: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    dealt: Mapping[str, Dealt] = field(default_factory=dict)
    arguments: Arguments = field(default_factory=Arguments)
    returns: Tree | None = None
    results: Mapping[str, Dealt] = field(default_factory=dict)
    schedule: str = ""
    basis: Basis = field(default_factory=Basis, compare=False)
    numbers: FrozenNumbers = field(default_factory=FrozenNumbers, compare=False, repr=False)
    draws: Mapping[str, Draw] = field(default_factory=dict)
    expected: Expectation = field(default_factory=Expectation, compare=False)
    fixed: FixedText | None = field(default=None, compare=False, repr=False)
    lines: Mapping[str, UserLines] = field(default_factory=dict, compare=False, repr=False)
    origin: Origin = field(default_factory=Origin, compare=False, repr=False)
    made_for: Wanted | None = field(default=None, compare=False)
    others: tuple[Program, ...] = ()
    hooks: str | None = None
    recipe: Recipe | None = field(default=None, compare=False, repr=False)
    target: Mapping[str, str | int | bool] = field(default_factory=dict, compare=False, repr=False)
    saved_in: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", Sources(self.sources))
        if not self.arguments.each:
            object.__setattr__(self, "arguments", Arguments.of_names([*self.inputs]))
        if self.fixed is None:  # nobody has edited the sources yet
            object.__setattr__(self, "fixed", FixedText(None, self.sources, self.plan))

    @cached_property
    def wanted(self) -> Wanted:
        """Whether it is a step, a loss or a forward, in which mode, and for which batch."""
        typed = tuple((tuple(shape), dtype_of(dtype)) for shape, dtype in self.inputs.values())
        kind: Kind = "forward" if self.role(0).is_inference else "step"
        return self.made_for or Wanted(kind, "train", typed)

    @known_arguments
    def for_shapes(self, *batches: Sequence[Tensor], modes: Sequence[str] = ("train",)) -> Program:
        """This program with others for more batches, compiled now, over the same weights.

        Args:
            batches: tuples of example tensors, as for ``compile``. One whose rows data ranks cannot
                share is computed whole by every rank.
            modes: ``"train"`` for training steps, ``"eval"`` for the loss in eval mode,
                ``"forward"`` for what the model returns in eval mode.

        Raises:
            UsageError: a mode has another name.
            RunError: the program was loaded, and has no model to compile.

        Example::

            program = program.for_shapes((short, short), (long, long), modes=("train", "eval"))
        """
        return with_others(self, batches, modes)

    @known_arguments
    def also(self, *inputs: Any, loss: Callable[..., Any] | None = None) -> Program:
        """A step of another loss of the same model, for ``stage.share``.

        Its parameters are stored as this program stores them. RunError without a model.

        Args:
            inputs: example arguments for that loss, as ``compile`` takes them: a tuple by place, a
                dict by name, one tensor; or several tensors one by one.
            loss: ``loss(model, *inputs)``, as for ``compile``.

        Example::

            program.also((noise,), loss=maker_loss)
        """
        return recipe_of(self).also(inputs, loss, self)

    @known_arguments
    def role_of(self, rank: int) -> str:
        """The name of the file that a rank runs."""
        check_whole_number(rank, "rank", -self.mesh.num_ranks)
        first = 0
        for num, name in self.roles:
            if first <= rank < first + num:
                return name
            first += num
        raise UsageError(
            where=f"rank {rank}", what="there is no such rank",
            why=f"the mesh {self.mesh} has {self.mesh.num_ranks}",
            do=f"Give a rank from 0 to {self.mesh.num_ranks - 1}.",
        )  # fmt: skip

    @known_arguments
    def source(self, rank: int = 0) -> str:
        """The Python text that a rank runs; UsageError if the mesh has no such rank."""
        return self.sources[self.role_of(rank)]

    def role(self, rank: int = 0) -> Role:
        """The rank's source, executed as a Python module."""
        place, name = self.mesh.coords(rank).get(PP, 0), self.role_of(rank)
        text, printed = self.sources[name], self.fixed.sources if self.fixed else {}
        lines = self.lines.get(name, UserLines()).moved(printed.get(name, text), text)
        return Role.load(text, name, place, lines, self.hooks, helpers_of(self.sources))

    @known_arguments
    def module(
        self, device: str = "cpu", mesh: DeviceMesh | None = None, *,
        partial: Partial | None = None, pad: Pad | None = None, most_programs: int = MOST_PROGRAMS,
    ) -> Stage:  # fmt: skip
        """This rank's part of the step as an ``nn.Module``; all ranks call this together.

        Args:
            device: ``"cpu"`` with gloo, or ``"cuda"`` with NCCL.
            mesh: a DeviceMesh with the program's axes that exists already; None makes one.
            partial: what happens with a batch whose rows data ranks cannot share:
                ``"replicate"`` computes all of it on every rank, also where ranks were given
                different numbers of rows, ``"drop"`` leaves it out,
                ``"pad"`` fills it up with rows that the loss is shown to ignore. None: an error.
            pad: the number with which an input may be filled up, by the input's name
                (``{"ids": 0, "labels": -100}``): to the longest of all ranks, and for ``"pad"``.
            most_programs: how many programs for other shapes and modes a stage may have; with 1
                ranks do not ask one another before each step whether they have the same shapes.

        Returns:
            A Stage. It has this rank's pieces of the parameters, with the weights that the model
            has on rank 0 if it was compiled in this process, or given to ``load``. Otherwise they
            have no values until ``load_full`` or ``load_state_dict`` brings some.

        Raises:
            RunError: the world has another size than the mesh, or ranks have different programs.

        Example::

            stage = partc.load("build").module()  # torchrun --nproc-per-node 4 train.py
            stage.load_full(model)
            loss = stage.step(*batch)
        """
        from partc.program.start import start_stage

        choices = choices_of(partial, pad, most_programs, self.inputs)
        return start_stage(self, device, mesh, choices)

    forward_batch = cached_property(ForwardBatch)
    _repr_html_ = shown.program_html
    picture, report = shown.picture, shown.report
    data_world = property(reads_rows.data_world)
    data_rank = reads_rows.data_rank
    sampler = reads_rows.sampler

    def digests(self) -> dict[str, str]:
        """The sha256 of sources, plan and mesh, which must be equal on all ranks of a run."""
        sources = hashlib.sha256((self.hooks or "").encode())
        for name, text in sorted(self.sources.items()):
            sources.update(f"{name}\n{len(text)}\n{text}".encode())
        runs = "".join(f"{num} {name}\n" for num, name in self.roles)
        sources.update(runs.encode())
        mesh, plan = str(self.mesh).encode(), self.plan.encode()
        return {"sources": sources.hexdigest(), "plan": sha256(plan), "mesh": sha256(mesh)}

    @known_arguments
    @no_collecting()
    def save(self, path: str | Path) -> None:
        """Write the program into a folder, whole or not at all.

        The folder then has ``plan.toml``, one ``.py`` for each kind of rank, ``run.py`` for
        torchrun, constants, and ``program.json`` with a digest of each.

        Args:
            path: a new folder, or one with a program of an earlier ``save``, which is replaced.

        Raises:
            UsageError: the folder has files that the earlier program's ``program.json`` does not
                list, or nothing can be written there.
        """
        with atomic_directory(as_path(path, "save"), written_files) as folder:
            plan = Plan.parse(self.plan)
            run = run_script(
                docstring(self.model), self.mesh, compiles=self.role(0).compiles,
                extras=not self.role(0).is_inference and bool(extras_in(self.returns)),
                decided=self.decided, is_beside=bool(plan.servers and plan.servers.is_beside),
                backend=plan.backend if self.mesh.num_ranks > 1 else "",
                row_dims=[*map(plan.uneven.dim_of, self.inputs)] if plan.uneven else (),
            )  # fmt: skip
            texts = {**self.sources, PLAN: self.plan, RUN: run}
            texts |= {SCHEDULE: self.schedule} if self.schedule else {}
            for name, text in sorted(texts.items()):
                (folder / name).write_text(text, encoding="utf-8", newline="\n")
            write_tensors(folder / CONSTANTS, self.constants)
            names = [*texts, CONSTANTS]
            digests = {name: sha256((folder / name).read_bytes()) for name in names}
            for number, other in enumerate(self.others):
                other.save(folder / OTHERS / str(number))
            write_hooks(folder, Path(path), self.sources.values())
            text = self._manifest(digests).as_json()
            (folder / manifests.NAME).write_text(text, encoding="utf-8", newline="\n")

    def _manifest(self, digests: Mapping[str, str]) -> Manifest:
        return Manifest(
            model=self.model, mesh=self.mesh, roles=self.roles, inputs=self.inputs,
            dealt=self.dealt, arguments=self.arguments, returns=self.returns,
            results=self.results, fingerprint=self.fingerprint,
            cost={"text": str(self.cost), "data": self.cost.as_json()},
            basis=self.basis, draws=self.draws, decided=self.decided, expected=self.expected,
            fixed=self.fixed or FixedText(), lines=self.lines, wanted=self.wanted,
            others=tuple(map(str, range(len(self.others)))), files=digests, target=self.target,
        )  # fmt: skip


@known_arguments
def load(path: str | Path, model: nn.Module | None = None) -> Program:
    """Read a program that ``Program.save`` wrote.

    Args:
        path: the folder.
        model: if given, the model that the program must have been compiled from: its tensors have
            the same names, shapes and dtypes, and its modules the same hooks. ``module()`` then
            takes its weights.

    Raises:
        LoadError: there is no program, a file was changed since (``partc check --accept-edits``
            takes it as it is), another version of partc wrote it, or the model is another one.

    Example::

        program = partc.load("build", model)
    """
    tell_at_exit()
    folder = as_path(path, "load")
    if model is not None:
        check_second_of_load(model)
    manifest = Manifest.read(folder)
    if model is not None:
        check_model(folder, manifest.fingerprint, model, manifest.model)
        check_touched(folder, folder / PLAN, manifest.fingerprint, model)
        warn_of_model(manifest, model)
    return replace(_program(folder, manifest), origin=Origin(model))


def load_edited(path: str | Path) -> Program:
    """Read a saved program as ``load`` does, but take files that were edited since as they are.

    Nothing of them has been checked: ``partc.audit`` does that.
    """
    folder = Path(path)
    return _program(folder, Manifest.read(folder, edited=True))


def write_digests(path: str | Path) -> None:
    """Write the digests of a saved program's files as they are now into ``program.json``."""
    folder = Path(path)
    manifest = Manifest.read(folder, edited=True)
    digests = {name: sha256_of(folder / name) for name in manifest.files}
    atomic_write(folder / manifests.NAME, replace(manifest, files=digests).as_json())


def edited_files(path: str | Path) -> tuple[str, ...]:
    """The names of a saved program's files that are not as ``program.json`` says."""
    folder = Path(path)
    files = Manifest.read(folder, edited=True).files
    return tuple(n for n, digest in files.items() if sha256_of(folder / n) != digest)


def _program(folder: Path, manifest: Manifest) -> Program:
    roles = {name for _, name in manifest.roles}
    names = sorted(roles | ({HELPERS} & manifest.files.keys()))
    sources = {name: manifests.file_of(folder / name) for name in names}
    return Program(
        plan=manifests.file_of(folder / PLAN), mesh=manifest.mesh, sources=sources,
        roles=manifest.roles, cost=SavedCost(manifest.cost["text"], manifest.cost["data"]),
        model=manifest.model, fingerprint=manifest.fingerprint,
        constants=dict(TensorFile(folder / CONSTANTS)), inputs=manifest.inputs,
        dealt=manifest.dealt, arguments=manifest.arguments, returns=manifest.returns,
        results=manifest.results, basis=manifest.basis, draws=manifest.draws,
        schedule=manifests.file_of(folder / SCHEDULE) if SCHEDULE in manifest.files else "",
        decided=manifest.decided, expected=manifest.expected, fixed=manifest.fixed,
        lines=manifest.lines, made_for=manifest.wanted,
        others=tuple(_other(folder / OTHERS / name, manifest) for name in manifest.others),
        hooks=read_hooks(folder, sources.values()), target=manifest.target, saved_in=str(folder),
    )  # fmt: skip


def _other(folder: Path, first: Manifest) -> Program:
    """A program of another shape or mode; LoadError if it is one of another model or mesh."""
    other = load(folder)
    if (other.mesh, other.fingerprint) != (first.mesh, first.fingerprint):
        manifests.refuse(folder, "is a program of another model or mesh", "it shares no weights")
    return other


def check_model(
    folder: Path | None, fingerprint: Fingerprint, model: nn.Module, first: str = "model"
) -> None:
    """LoadError if the fingerprint of a program, saved in a folder, is not that of a model;
    ``first``: the class of the model that it was compiled for.
    """
    here = Fingerprint.of(model)
    differences = fingerprint.differences(here)
    if differences:
        again = "Compile again" + (f', with plan="{folder / PLAN}"' if folder else " for this one")
        if here.tensors.keys() != fingerprint.tensors.keys():  # the plan names tensors
            again = (
                f"Give the {first or 'model'} that it was compiled for (--model of a command); or "
                'compile this one by a plan of its own, such as plan="fsdp"'
            )
        raise LoadError(
            where=str(folder or "program"),
            what=f"this program was compiled for another model than {type(model).__name__}",
            why=f"{len(differences)} of its tensors differ", do=f"{again}:{table(differences)}",
        )  # fmt: skip
