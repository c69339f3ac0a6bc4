"""The plan: every decision of a compile, as a TOML text that a person can read, edit and replay.

In: a plan.toml, or the decisions of a preset or of the search. Out: a `Plan`, which passes read.
Start: here; `plan_text.py` has the text form, `mesh.py` the device mesh, `sharding.py` layouts.
Never: a graph or a pass, since a plan can be read without the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from partc.file_text import Unreadable, file_text, if_of_another_rank
from partc.plan.allowed import OWN_TABLES
from partc.plan.coded import Coded
from partc.plan.compress import Compress
from partc.plan.decided import Sends, Sizes, decided_lines, number_text
from partc.plan.field_kinds import plan_error
from partc.plan.local_steps import LocalSteps
from partc.plan.mesh import MICROBATCH_AXIS, Mesh, layout_mesh
from partc.plan.plan_html import plan_html
from partc.plan.plan_text import (
    escape,
    list_lines,
    pass_lines,
    quote,
    read_fields,
    section_lines,
    sums_each_microbatch,
    word_lines,
    write_cuts,
)
from partc.plan.plan_values import PlannedLayout, Values, write_value
from partc.plan.servers import Servers
from partc.plan.sharding import Layout, R, Sharding
from partc.plan.stale import Stale
from partc.plan.uneven import Uneven
from partc.schedules.csv_form import CSV, load_csv, write_csv
from partc.schedules.named import is_of_partc
from partc.wrong_calls import as_path, known_arguments, known_fields, quoted

T = TypeVar("T")
Cuts = Mapping[str, Layout]  # mesh axis -> shard, for one tensor


@known_fields
@dataclass(frozen=True)
class Plan:
    """The decisions of a compile; those that a partial plan leaves out come from ``preset``.

    Sharding: ``params`` and ``inputs`` map names, or patterns with ``*``, to shards as they are
    stored. ``gather`` has the axes along which stored shards are gathered before use, and how long
    the whole tensor lives: ``"use"`` (until its block is done, ZeRO-3) or ``"step"`` (ZeRO-1 and
    2). ``scatter`` has, per axis, the dim along which unfinished activations are reduce-scattered
    (sequence parallelism). ``values`` has the layouts of calls' results that do not follow from
    these, and the layouts of single parameters in use (``plan_values.py``).

    Recomputation: ``recompute`` says what the backward computes again instead of saving.
    ``"cheap"``: sums, products and views of values that are saved anyway. ``"attention"``: also the
    calls between an attention's projections that take few FLOPs per byte. ``"block"``: all calls of
    a stack's blocks, which save only their inputs. ``"none"``: nothing. A tuple of module paths, or
    patterns with ``*``: these modules save only their inputs, and the rest is as with ``"cheap"``.

    Communication: ``bucket_mb`` is the size limit of a bucket of weights or gradients, in megabytes
    (0: no buckets). Larger buckets save start times, but their tensors are copied, and the bucket
    leaves only when its last tensor is there. ``bucket_copy_mb``: by axis and kind of transfer, the
    megabytes of copies from which on a tensor goes alone. ``grad_parts``: by axis, in how many
    parts the gradients of a block leave. ``hierarchical``: by inner and outer axis, the megabytes
    of a block's gradients from which on an all-reduce over both is hierarchical. ``backend``: what
    carries tensors between ranks (empty: that of the mesh's machines). ``messages``: with gloo,
    ranks send messages instead of an all_gather or reduce_scatter, which copies less (None: where
    these copies take a measurable part of the step). ``prefetch``: between two loops over blocks
    (over the head and the loss), the weights of so many blocks are gathered ahead (0: two if the
    step is faster and fits into memory, else one). Pipelines gather one block ahead.
    ``overlap_pieces``: blocks that wait for sums of activations are computed in so many pieces, so
    that the sums of one piece overlap the computing of the next (1: not in pieces; 0: the fastest
    number, if it saves much). ``flops_per_byte``: how long transfers of such blocks take, as FLOPs
    that a rank computes while one byte crosses an axis, or goes to memory. ``reduce``: gradients
    are summed over ranks once per ``"step"``, or once per ``"microbatch"`` (ZeRO-2 and 3).

    Pipelines: ``schedule`` is the name of a schedule, or of a CSV file whose rows ``order`` has, so
    that the plan replays without the file; empty is 1f1b for training and forward-only for
    inference. ``order`` also has the rows of the schedule ``auto`` and of those that do not come
    with partc, once they are made. ``sends``: by way, how many messages of a link may be under way.
    ``early_sums``: the stages that begin to sum their blocks' gradients in the last backward.
    ``stages`` has the module path at which each pipeline stage but the first begins. If ``stages``
    is empty the compiler cuts the model into ``virtual_stages`` per pipeline rank (0: the
    schedule's usual number).

    Arithmetic: ``compress`` says in which narrow numbers gradients are summed over data ranks
    (None: in their own), ``compress_weights`` in which weights are gathered. ``local_steps`` says
    how often islands, copies of the model that train apart along the mesh axis ``island``, meet,
    and ``stale`` how many steps late islands of one model apply their gradients; ``uneven`` says
    how many microbatches each island computes of one step, and ``servers`` which islands own
    parameters and their optimizer. ``allow`` names what may change a step's numbers:
    ``"compress"``, ``"local_steps"``, ``"stale"``, ``"servers"``.

    Batch: with ``batch="local"`` a step is given each rank's piece of the batch, as under DDP, with
    ``"global"`` the whole batch on every rank.

    Others: ``compile="inductor"`` gives the computing between transfers to torch.compile, each
    block once. ``profiler_ranges`` puts blocks and transfers into ranges of torch.profiler.
    ``hooks`` names modules whose results, or gradients, go through functions of ``hooks.py``.
    ``memory_bytes`` is the most memory that a rank may need (0: no limit). ``apart``
    has names of values that no written pattern may fit, since their layouts differ from those of
    the values that the pattern stands for. ``of_another``: the plan is that of another program of
    the model, and entries for what this one does not have are left out; ``homes`` has the
    stage of that program on which each parameter lies. ``other_passes`` are passes of users'
    packages that took part in the compile which wrote the plan, and ``left_out`` passes of partc
    that did not; both are comments at the head of the text.
    """

    mesh: Mesh | None = None
    preset: str = ""
    params: Mapping[str, Cuts] = field(default_factory=dict)
    inputs: Mapping[str, Cuts] = field(default_factory=dict)
    gather: Mapping[str, Literal["use", "step"]] = field(default_factory=dict)
    scatter: Mapping[str, int] = field(default_factory=dict)
    values: Values = field(default_factory=dict)
    batch: Literal["global", "local"] = "global"
    batch_norm: Literal["global", "local"] = "global"
    random: Literal["pieces", "single-device"] = "pieces"
    recompute: Literal["cheap", "none", "attention", "block"] | tuple[str, ...] = "cheap"
    compile: Literal["none", "inductor"] = "none"
    profiler_ranges: bool = False
    bucket_mb: float = 100.0  # as DDP's buckets; at 10 GB/s they take 100 times what a start takes
    bucket_copy_mb: Sizes | None = None
    grad_parts: Mapping[str, int] | None = None
    hierarchical: Sizes | None = None
    backend: Literal["", "gloo", "nccl"] = ""
    messages: bool | None = None
    prefetch: int = 0
    overlap_pieces: int = 0
    flops_per_byte: Mapping[str, float] | None = None
    microbatches: int = 1
    schedule: str = ""
    order: str = ""
    sends: Sends | None = None
    early_sums: tuple[int, ...] | None = None
    virtual_stages: int = 0
    memory_bytes: int = 0
    stages: tuple[str, ...] = ()
    reduce: Literal["step", "microbatch"] = "step"
    notes: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    compress: Compress | None = None
    compress_weights: Coded | None = None
    local_steps: LocalSteps | None = None
    stale: Stale | None = None
    uneven: Uneven | None = None
    servers: Servers | None = None
    apart: frozenset[str] = field(default=frozenset(), compare=False)
    of_another: bool = field(default=False, compare=False)
    homes: Mapping[str, int] = field(default_factory=dict, compare=False)
    other_passes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.mesh, str):
            preset = self.preset or ("fsdp" if "=" in self.mesh else self.mesh)
            do = f"Write Plan(preset={preset!r}); the mesh is an argument of compile."
            raise plan_error("Plan(...)", f"mesh is {quoted(self.mesh)}", "it comes first", do)

    @classmethod
    @known_arguments
    def parse(cls, text: str, where: str = "plan") -> Plan:
        """Read a plan from its text, the TOML that ``str(plan)`` gives.

        Args:
            text: the TOML; keys that are missing leave their decision to the preset.
            where: what errors call the text.

        Raises:
            PlanError: this is not TOML, or an entry is unknown or has a wrong value.

        Example::

            partc.Plan.parse('preset = "fsdp"\\nmicrobatches = 4')
        """
        if not isinstance(text, str):
            do = "Give the text of a plan.toml; Plan.load takes its path, Plan(...) fields."
            raise plan_error(where, f"{quoted(text)} is no text", "a plan is read from TOML", do)
        if text.endswith(".toml") and "=" not in text:
            do = f"Read the file: Plan.load({quoted(text)}), or plan={quoted(text)} itself."
            what = f"{quoted(text)} is a path, and no plan"
            raise plan_error(where, what, "parse takes TOML", do)
        return cls(**read_fields(text, where))

    @classmethod
    @known_arguments
    def load(cls, path: str | Path) -> Plan:
        """Read a plan.toml.

        Args:
            path: the file; a CSV file that it names as its ``schedule`` is looked for beside it.

        Raises:
            PlanError: a file cannot be read, or as for ``parse``.
        """
        try:
            text = file_text(as_path(path, "Plan.load"))
        except Unreadable as error:
            do = "Name a plan.toml, as program.save writes it." + if_of_another_rank(path)
            if Path(path).name == str(path) and not Path(path).suffix:
                do += f" A preset is no file: compile(plan={str(path)!r}), or Plan(preset=...)."
            if Path(path).is_dir():
                do = f"Name the plan in it: {Path(path) / 'plan.toml'}."
            raise plan_error(str(path), "the plan cannot be read", str(error), do) from None
        return cls.parse(text, str(path)).with_order(Path(path).parent)

    def with_order(self, folder: Path = Path()) -> Plan:
        """The plan with the rows of the CSV file that ``schedule`` names, if it names a file.

        The file also gives the number of microbatches, unless the plan asks for more than one.
        PlanError if the file cannot be read, or if the plan has an ``order`` without a name, or
        with one of partc's schedules.
        """
        if self.order and (not self.schedule or is_of_partc(self.schedule)):
            why = f"the order is that of another schedule, and the schedule is {self.schedule!r}"
            do = f'Delete the order, or give its name: schedule = "own{CSV}".'
            what = f'without schedule = "own{CSV}" it has no name'
            raise plan_error("plan, order", what, why, do)
        if self.order or not self.schedule.endswith(CSV):
            return self
        own = load_csv(folder / self.schedule)
        return replace(
            self, schedule=own.name, order=write_csv(own),
            microbatches=own.microbatches if self.microbatches == 1 else self.microbatches,
        )  # fmt: skip

    def stored(self, name: str, table: Mapping[str, Cuts] | None = None) -> Cuts:
        """The stored shards of one parameter, by its name or by the first pattern that fits."""
        table = self.params if table is None else table
        name = name.partition("#")[0]  # a tied parameter's copy on another stage has its layout
        if name in table:
            return table[name]
        return next((cuts for pattern, cuts in table.items() if fits(pattern, name)), {})

    def used(self, name: str) -> Cuts:
        """The shards of one parameter in use, after the gathers of ``gather``."""
        stored = {axis: x for axis, x in self.stored(name).items() if axis not in self.gather}
        entry = self.planned(name)
        if entry is None:
            return stored
        named = {axis: each.out for axis, each in entry.items()}
        every = {**stored, **named} if entry else {}  # an empty entry: "whole" on every axis
        return {axis: layout for axis, layout in every.items() if layout != R}

    def planned(self, name: str) -> Mapping[str, PlannedLayout] | None:
        """The entry of ``values`` for a name, by mesh axis; None if no name or pattern fits."""
        if name in self.values:
            return self.values[name]
        return next((entry for pattern, entry in self.values.items() if fits(pattern, name)), None)

    @property
    def batch_axes(self) -> set[str]:
        """The mesh axes that shard inputs, without the axis of microbatches."""
        return {axis for cuts in self.inputs.values() for axis in cuts} - {MICROBATCH_AXIS}

    @property
    def recompute_paths(self) -> tuple[str, ...]:
        """The modules that ``recompute`` names; empty if ``recompute`` is a word."""
        return () if isinstance(self.recompute, str) else self.recompute

    @property
    def names_blocks(self) -> bool:
        """Whether the plan treats single blocks of a stack differently: a name has a number."""
        # A part of a path is a number, or mixes digits and "*"; a plain "*" means all blocks alike.
        values = (name.partition(":")[0] for name in self.values)
        names = (*self.params, *self.stages, *self.recompute_paths, *values)
        return any(
            re.fullmatch(r"\d+|.*\d.*\*.*|.*\*.*\d.*", p) for n in names for p in n.split(".")
        )

    def says(self, name: str) -> bool:
        """Whether the plan decides a field; what it leaves out has the value of an empty plan."""
        return bool(getattr(self, name) != getattr(_NOTHING, name))

    def sharding(self, cuts: Cuts) -> Sharding:
        assert self.mesh is not None
        return Sharding.of(cuts, layout_mesh(self.mesh, self.microbatches))

    def _repr_html_(self) -> str:
        return plan_html(str(self))

    def __str__(self) -> str:
        """The TOML form; ``Plan.parse`` reads it back to an equal plan."""
        lines = pass_lines("other_passes", self.other_passes)
        lines += pass_lines("left_out", self.left_out)
        lines += [f'preset = "{self.preset}"'] if self.preset else []
        lines += [f"microbatches = {self.microbatches}", f'batch_norm = "{self.batch_norm}"']
        lines += word_lines("batch", self.batch) if self.batch != "global" else []
        lines += word_lines("random", self.random) if self.random != "pieces" else []
        lines += word_lines("recompute", self.recompute)
        lines += word_lines("compile", self.compile) if self.compile != "none" else []
        lines += ["profiler_ranges = true"] if self.profiler_ranges else []
        lines += [f"bucket_mb = {number_text(self.bucket_mb)}"]
        lines += word_lines("backend", self.backend) if self.backend else []
        if self.messages is not None:
            lines += [f"messages = {str(self.messages).lower()}"]
        left_to_preset = self.reduce == "step" and sums_each_microbatch(self.preset)
        if self.microbatches > 1 and not left_to_preset:
            lines += [f'reduce = "{self.reduce}"']
        if self.schedule:
            lines += [f"schedule = {quote(self.schedule)}"]
        if self.order:
            lines += ['order = """', *(escape(row) for row in self.order.splitlines()), '"""']
        counts = ("prefetch", "overlap_pieces", "virtual_stages", "memory_bytes")
        lines += [f"{name} = {getattr(self, name)}" for name in counts if getattr(self, name)]
        lines += decided_lines(self)
        lines += word_lines("allow", self.allow) if self.allow else []
        lines += list_lines("hooks", self.hooks)
        lines += list_lines("stages", self.stages) + list_lines("notes", self.notes)
        if self.mesh is not None:
            lines += ["", "[mesh]", *(f"{name} = {size}" for name, size in self.mesh.axes)]
        lines += section_lines("gather", {axis: f'"{life}"' for axis, life in self.gather.items()})
        lines += section_lines("scatter", {axis: str(dim) for axis, dim in self.scatter.items()})
        for name in OWN_TABLES:
            made = getattr(self, name)
            lines += section_lines(name, made.lines() if made else {})
        for name, table in (("inputs", self.inputs), ("params", self.params)):
            lines += section_lines(
                name, {quote(k): write_cuts(v) for k, v in fold_names(table).items()}
            )
        values = fold_names(self.values, self.apart).items()
        lines += section_lines("values", {quote(k): write_value(v) for k, v in values})
        return "\n".join(lines) + "\n"

    def replanned(self, **given: Any) -> Plan:
        """The plan with other entries, and without what was decided for the ones before."""
        of_order = ("schedule", "microbatches", "stages", "virtual_stages")
        changed = {
            name for name in of_order if name in given and given[name] != getattr(self, name)
        }
        if changed:
            given = {"sends": None, "early_sums": None, **given}
        # The rows of a file are all that there is; those of another schedule are made anew.
        if "schedule" in given or (changed and not self.schedule.endswith(CSV)):
            given = {"order": "", **given}
        return self.changed(**given)

    def changed(self, **changes: Any) -> Plan:
        return replace(self, **changes)


_NOTHING = Plan()


def fits(pattern: str, name: str) -> bool:
    """Whether a pattern fits a name: ``layers.*.w`` fits ``layers.0.w``, not ``layers.0.mlp.w``.

    ``*`` between dots (or a dot and a colon) is one part of a path; elsewhere it is any text.
    """
    if "*" not in pattern:
        return pattern == name
    return _regex(pattern).fullmatch(name) is not None


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(?<=\.)(\*)(?=[.:])", pattern)
    texts = (
        r"[^.:]+" if i % 2 else ".*".join(map(re.escape, part.split("*")))
        for i, part in enumerate(parts)
    )
    return re.compile("".join(texts))


def fold_names(
    table: Mapping[str, Mapping[str, T]], apart: Iterable[str] = ()
) -> dict[str, Mapping[str, T]]:
    """Join equal entries that differ only in layer numbers: ``layers.0.w, layers.1.w ->
    layers.*.w``. No pattern may fit a name in ``apart``.
    """
    folds: dict[str, bool] = {}  # pattern -> whether all names that fit it have the same cuts

    def fold(name: str) -> str:
        for pattern in _patterns(name):
            if pattern not in folds:
                folds[pattern] = all(
                    dict(table[n]) == dict(table[name]) for n in table if fits(pattern, n)
                ) and not any(fits(pattern, n) for n in apart)
            if folds[pattern]:
                return pattern
        return name

    return {fold(name): cuts for name, cuts in table.items()}


def widest_pattern(name: str) -> str:
    """A name with ``*`` for all its numbers: ``layers.0.experts.1.w -> layers.*.experts.*.w``."""
    return next(_patterns(name))


def _patterns(name: str) -> Iterator[str]:
    """The patterns to try for a name: ``*`` for all its numbers, then for the first one only."""
    numbers = list(re.finditer(r"(?<=\.)\d+(?=[.:])", name))
    for taken in (numbers, numbers[:1]):
        parts = list(name)
        for number in reversed(taken):
            parts[number.start() : number.end()] = "*"
        yield "".join(parts)
