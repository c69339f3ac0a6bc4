"""Compile more programs of a model, for other shapes, modes and losses, over the same weights."""

from __future__ import annotations

import copy
import inspect
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partc.collecting import no_collecting
from partc.compile_cache import CompileCache, Request, cache_of
from partc.errors import RunError, TraceError, UsageError
from partc.further_plans import kept, plan_of, varied
from partc.given_plan import read_plan
from partc.graph import Graph
from partc.lowering import table
from partc.other_inputs import plan_for
from partc.passes.shard.find_batch import batch_of_forward
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, R
from partc.program import Program, check_model
from partc.program.model.likeness import point_at_twins
from partc.program.model.parametrized import give_own_classes
from partc.program.model.touched import warn_of_model
from partc.program.step.autocast import within
from partc.program.step.forward_batch import example_of, guessed
from partc.program.wanted import Mode, Wanted
from partc.same_step import check_same_step
from partc.trace.arguments import Arguments, Given
from partc.trace.default_dtype import float32_default
from partc.trace.fingerprint import Fingerprint
from partc.trace.forward_code import changed_code, forward_code
from partc.trace.inputs_refused import check_loss
from partc.trace.no_model import check_model as check_given
from partc.trace.record import kind_of
from partc.trace.trees import tensors_of
from partc.traced import Traced
from partc.verification.ignored_rows import why_not_ignored
from partc.whole_batch import step_of
from partc.wrong_calls import known_arguments, quoted

Compile = Callable[[Traced, Mesh, Plan], Program]


@dataclass(frozen=True, eq=False)
class Recipe:
    """A model and its loss as they were when they were compiled, and what compiles them.

    The model is the script's: when nothing else holds it, its memory is freed. ``twin`` is then in
    its place, a copy without weights. ``training``: the mode of every module then, in the order of
    ``modules()``. ``trained``: which parameters had gradients, in the order of ``parameters()``.
    ``pinned``: the entries of ``[inputs]`` in the plan that the script gave.
    """

    held: Callable[[], nn.Module | None]
    loss: Callable[..., Any] | None
    compile: Compile
    training: tuple[bool, ...]
    trained: tuple[bool, ...]
    twin: list[nn.Module] = field(default_factory=list)
    pinned: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, model: nn.Module, loss: Callable[..., Any] | None, compile: Compile
    ) -> Recipe:  # fmt: skip
        training = tuple(module.training for module in model.modules())
        return cls(
            weakref.ref(model), loss, compile, training,
            tuple(p.requires_grad for p in model.parameters()),
        )  # fmt: skip

    @property
    def model(self) -> nn.Module:
        """The model, or its twin; RunError where it is gone and could not be copied."""
        model = self.held() or next(iter(self.twin), None)
        if model is None:
            raise RunError(
                where="a further program of a stage",
                what="the model is no longer there to compile it",
                why="the script has deleted it, or never had it in a variable",
                do="Keep the model (model.to('meta') frees its weights), compile ahead by "
                "program.for_shapes(...), or give one by partc.with_model(program, model, loss).",
            )
        return model

    def keep_twin(self) -> None:
        """Copy the model without its weights, for a script that lets it go."""
        model = self.held()
        if model is not None and not self.twin:
            bare: dict[int, Any] = {
                id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
                for p in model.parameters()
            }
            with suppress(Exception):  # of a model that cannot be copied
                bare |= {id(x): torch.empty_like(x, device="meta") for x in _computed(model)}
                twin = copy.deepcopy(model, bare)
                give_own_classes(twin)
                point_at_twins(dict(zip(model.modules(), twin.modules(), strict=True)))
                self.twin.append(twin)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as None: another process has not got the model."""
        return _nothing, ()

    @float32_default()
    def program(self, wanted: Wanted, first: Program) -> Program:
        """A program whose parameters are stored as those of ``first``.

        RunError if the model is not what it was.
        """
        plan = plan_of(first, wanted)
        with _beside(wanted, first), self.as_wanted(wanted.mode, first):
            given = self._given(wanted, first)
            cuts = first.forward_batch.entries(given.names, wanted)
            step = Traced(self.model, given, self.loss, wanted.kind)
            if cuts is not None:
                plan = plan.changed(inputs=cuts)
            elif not wanted.replicated:
                shapes = (shape for shape, _ in wanted.inputs)
                now = dict(zip(given.names, shapes, strict=True))
                plan = plan_for(step, plan, first, now, self.pinned)
            made = self.compile(step, first.mesh, plan)
        return replace(made, made_for=wanted, recipe=self, hooks=first.hooks)

    def variant(self, wanted: Wanted, plan: Any, first: Program) -> Program:
        """The step of ``first`` by another plan, which says how and what ranks send."""
        plan = varied(read_plan(plan), first)
        with self.as_wanted(wanted.mode, first):
            step = Traced(self.model, self._given(wanted, first), self.loss, wanted.kind)
            made = self.compile(step, first.mesh, plan)
        return replace(made, made_for=wanted, recipe=self, hooks=first.hooks)

    def step_of(self, first: Program) -> Traced:
        """The step of the first program, to be compiled by another plan; within ``as_wanted``."""
        wanted = first.wanted
        return Traced(self.model, self._given(wanted, first), self.loss, wanted.kind)

    def also(
        self, given: tuple[Any, ...], loss: Callable[..., Any] | None, first: Program
    ) -> Program:
        """A step of another loss, whose parameters are stored as those of ``first``.

        ``given``: the batch, as ``compile`` has it, or its arguments one by one.
        """
        mode = first.wanted.mode
        with self.as_wanted(mode, first):
            plan = kept(first).changed(inputs={})
            inputs = _batch(self.model, given, loss)
            step, plan = step_of(self.model, inputs, loss, first.mesh, plan, table())
            made = self.compile(step, first.mesh, plan)
        mine = replace(self, loss=loss, pinned=())
        asked = replace(made.wanted, kind="step", mode=mode)
        return replace(made, made_for=asked, recipe=mine, hooks=first.hooks)

    def graph(self, first: Program, *, fold: bool = True) -> Graph:
        """The joint graph of the first program's step before any plan; ``fold``: without what
        repeats.
        """
        with self.as_wanted(first.wanted.mode, first):
            given = self._given(first.wanted, first)
            return Traced(self.model, given, self.loss, first.wanted.kind).graph(fold=fold)

    def given(self, args: Sequence[Any], named: Mapping[str, Any]) -> Given:
        """What the model's forward is given by a call."""
        return Given.of_call(self.model, args, named)

    def batch_of(
        self, wanted: Wanted, first: Program, steps: Mapping[str, Layout]
    ) -> Sequence[Layout]:
        """Along which dim each input of a forward has the batch, R for none."""
        with self.as_wanted(wanted.mode, first):
            names = self._given(wanted, first).names
            guess = guessed(names, wanted, steps)
            try:
                graph = self._forward(example_of(names, wanted, guess), first)
            except TraceError:  # the guess is wrong
                graph = self._forward(wanted, first)
        found = batch_of_forward(graph, guess)
        return [found.get(name, R) for name in names]

    def _forward(self, wanted: Wanted, first: Program) -> Graph:
        return Traced(self.model, self._given(wanted, first), self.loss, "forward").graph()

    def _given(self, wanted: Wanted, first: Program) -> Given:
        """The arguments of the first program's loss, or of a forward, with tensors of a batch."""
        given = self._plain(wanted, first)
        return replace(given, call=within(given.call, wanted.autocast))

    def _plain(self, wanted: Wanted, first: Program) -> Given:
        forward = wanted.kind == "forward"
        arguments = Arguments.of_json(json.loads(wanted.form)) if wanted.form else first.arguments
        if forward and not wanted.form and first.wanted.kind != "forward":
            return Given.of_call(self.model, _meta(wanted), {})
        tensors = dict(zip(arguments.names, _meta(wanted), strict=True))
        args, named = arguments.call(tensors, alike=False)
        return Given.of_call(self.model, args, named, None if forward else self.loss)

    @float32_default()
    def ignores(
        self, wanted: Wanted, to: Wanted, first: Program, values: Sequence[float | None]
    ) -> str:
        """Why rows that fill up a batch would change loss or gradients; empty if they do not."""
        with self.as_wanted(wanted.mode, first):
            whole, filled = (
                Traced(self.model, self._given(each, first), self.loss, wanted.kind).graph()
                for each in (wanted, to)
            )
        return why_not_ignored(whole, filled, values)

    @contextmanager
    def as_wanted(self, mode: Mode, first: Program) -> Iterator[None]:
        """The model in a mode, with gradients of the parameters that had them when compiled."""
        modules, params = list(self.model.modules()), list(self.model.parameters())
        before = [m.training for m in modules], [p.requires_grad for p in params]
        self._check_unchanged(first)
        try:
            self._set(self.training, self.trained)
            if (mode == "train") != self.model.training:
                self.model.train(mode == "train")
            with torch.enable_grad():
                yield
        finally:
            self._set(*before)

    def _set(self, training: Sequence[bool], trained: Sequence[bool]) -> None:
        for module, flag in zip(self.model.modules(), training, strict=True):
            module.training = flag
        for param, flag in zip(self.model.parameters(), trained, strict=True):
            param.requires_grad_(flag)

    def _check_unchanged(self, first: Program) -> None:
        changes = first.fingerprint.differences(Fingerprint.of(self.model))
        if len(list(self.model.modules())) != len(self.training):
            changes.append("it has other modules")
        if not changes:
            with self._modes_of_first():
                changes = first.numbers.all_changes()
        if changes:
            raise RunError(
                where=type(self.model).__name__,
                what="the model is not what it was when the stage's first program was compiled",
                why="; ".join(changes[:4]),
                do="Compile it again, or leave it as it was until all shapes are compiled.",
            )

    @contextmanager
    def _modes_of_first(self) -> Iterator[None]:
        """The modes of all modules as they were: they are no change."""
        now = [module.training for module in self.model.modules()]
        trained = [p.requires_grad for p in self.model.parameters()]
        try:
            self._set(self.training, trained)
            yield
        finally:
            self._set(now, trained)


@contextmanager
def _beside(wanted: Wanted, first: Program) -> Iterator[None]:
    """Say of other shapes that cannot be traced what the program was compiled for."""
    try:
        yield
    except TraceError as error:
        if wanted.kind != first.wanted.kind or wanted.inputs == first.wanted.inputs:
            raise
        took = ", ".join(f"{n} {dtype}{[*shape]}" for n, (shape, dtype) in first.inputs.items())
        raise TraceError(
            where=error.where, what=error.what, why=error.why,
            do=f"{error.do} It was compiled for {took}: is an input in the place of another?",
        ) from error  # fmt: skip


def made_by(
    step: Traced, left_out: Iterable[str], strict: bool, cache: CompileCache | None,
    program: Program, pinned: Iterable[str] = (),
) -> Program:  # fmt: skip
    """A program with the recipe for others of its model, which keep its weights where they are."""
    mode: Mode = "train" if step.model.training else "eval"
    made_for = replace(program.wanted, kind=step.kind or kind_of(step.loss), mode=mode)
    recipe = Recipe.of(step.model, step.loss, compile_again(left_out, cache, strict=strict))
    recipe = replace(recipe, pinned=(*pinned,))
    return replace(program, made_for=made_for, recipe=recipe)


def compile_again(
    left_out: Iterable[str], cache: CompileCache | None = None, *, strict: bool
) -> Compile:
    """What compiles a step of a model by a whole plan, without these passes, or takes its program
    from a cache; nothing is searched or dumped.
    """

    def again(step: Traced, mesh: Mesh, plan: Plan) -> Program:
        from partc.api import Job

        rows = table(left_out=tuple(left_out))

        def made() -> Program:
            with no_collecting():
                return Job(step, rows, strict).with_plan(mesh, plan)

        if cache is None:
            return made()
        return cache.program(Request(step, None, mesh, plan, rows, ("again", strict)), made)

    return again


@known_arguments
def with_model(
    program: Program, model: nn.Module, loss: Callable[..., Any] | None = None,
    cache: str | Path | None = None,
) -> Program:  # fmt: skip
    """A loaded program with its model, to compile programs for other shapes and modes when needed.

    Args:
        program: what ``load`` gave.
        model: the model from which it was compiled, in the mode that it had; may be on ``meta``.
        loss: the ``loss`` of ``compile``.
        cache: the folder of ``compile``'s ``cache``, for these programs.

    Raises:
        LoadError: the program was compiled from another model.
        UsageError: it computes another step than this loss: they are compared by the numbers that a
            saved program has of its step, if the step is a small one.

    Example::

        program = partc.with_model(partc.load("build"), model, loss_of)
    """
    if not isinstance(program, Program):
        raise UsageError(
            where="with_model", what=f"the program is {quoted(program)}",
            why="it is given a model", do="Load it first: partc.with_model(partc.load(folder), "
            "model, loss)." if isinstance(program, str | Path) else
            "Pass with_model(program, model, loss).",
        )  # fmt: skip
    check_given(model, "with_model")
    check_model(None, program.fingerprint, model, program.model)
    check_loss(loss)
    _check_takes(program, model, loss)
    again = compile_again(Plan.parse(program.plan).left_out, cache_of(cache, model), strict=False)
    warn_of_model(program, model)
    recipe = Recipe.of(model, loss, again)
    if not changed_code(program.fingerprint.code, forward_code(model)):  # which was told of
        check_same_step(program, lambda: recipe.graph(program, fold=False))
    return replace(program, recipe=recipe)


def _check_takes(program: Program, model: nn.Module, loss: Callable[..., Any] | None) -> None:
    """UsageError for a loss, or for none, that does not take what the program's takes."""
    wanted = [each.name for each in program.arguments.each]
    each = [*inspect.signature(model.forward if loss is None else loss).parameters.values()]
    takes = each if loss is None else each[1:]
    takes_any = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in takes)
    if takes_any or {*wanted} <= {p.name for p in takes}:
        return
    listed = ", ".join(p.name for p in takes)
    trains = program.wanted.kind == "step"
    raise UsageError(
        where="with_model", what="no loss= is given" if loss is None and trains
        else f"the {'model' if loss is None else 'loss'} takes ({listed})",
        why=f"the program was compiled for the inputs ({', '.join(wanted)})"
        + (f", and {type(model).__name__}.forward takes ({listed})" if loss is None else ""),
        do="Pass the loss that was compiled: partc.with_model(program, model, loss)." if trains
        else "Pass the model that was compiled, and no loss.",
    )  # fmt: skip


def _computed(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules keep from a forward, as ``weight_norm`` its weight: no copy of them can
    be made, and the next forward makes them anew.
    """
    held = (each for module in model.modules() for each in vars(module).values())
    for each in held:
        if isinstance(each, Tensor | list | tuple | dict):
            yield from (tensor for tensor in tensors_of(each) if tensor.grad_fn is not None)


def _nothing() -> None:
    return None


def _batch(model: nn.Module, given: tuple[Any, ...], loss: Callable[..., Any] | None) -> Any:
    """The batch among the arguments of ``also``: the only one of them, if the loss takes it so."""
    if len(given) != 1:
        return given
    try:
        Given.of(model, given[0], loss)
    except TraceError:
        with suppress(TraceError):
            Given.of(model, given, loss)
            return given
        raise
    return given[0]


def _meta(wanted: Wanted) -> tuple[Tensor, ...]:
    return tuple(torch.empty(s, dtype=d, device="meta") for s, d in wanted.inputs)
