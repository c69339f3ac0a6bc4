"""The programs of one stage: several shapes and modes over one set of weights.

In eval mode, and for a batch of another shape than the first one, a stage runs another program. It
was compiled ahead (``Program.for_shapes``), or is compiled when it is first needed, with parameters
stored as the first program stores them. All ranks agree on the program before they run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from partc.errors import PartcError
from partc.plan import Plan
from partc.program import Program
from partc.program.choices import Choices
from partc.program.model.habits import tell_first, tell_of_input_grads
from partc.program.optimizer.same_steps import number_by_now
from partc.program.ranks.handshake import check_agreement
from partc.program.ranks.other_ranks import of_other_ranks
from partc.program.ranks.waiting import waiting
from partc.program.stage.calls_of_stage import Calls
from partc.program.stage.common_batch import CommonBatch
from partc.program.stage.counted_runs import CountedRuns
from partc.program.stage.family_errors import (
    REFUSED,
    alone_by_choice,
    check_numbers,
    inside_autocast,
    loss_is_scripts,
    no_gradients,
    no_input_gradient,
    no_recipe,
    step_in_eval,
    too_many,
)
from partc.program.stage.island_turns import IslandTurns
from partc.program.stage.members import Member
from partc.program.stage.run_state import Guard
from partc.program.stage.same_calls import SameCalls
from partc.program.step.autocast import autocast_now, run_without, without
from partc.program.step.batch_fit import fill
from partc.program.step.given import plain_inputs
from partc.program.step.given_out import waits
from partc.program.step.loss_backward import check_scale
from partc.program.step.microbatches_of_island import MicrobatchesOfIsland
from partc.program.step.results import results_of
from partc.program.step.script_backward import Halfway
from partc.program.step.step_loss import evaluated
from partc.program.step.uneven_rows import Results
from partc.program.wanted import NO_GRAD, Mode, Wanted, other_loss
from partc.trace.record import Kind
from partc.trace.returns import EXTRA, gradient_of

Run = Callable[[], Any]
_CALLED: Mapping[Kind, str] = {"step": "step", "loss": "eval_step", "forward": "forward"}


@dataclass(frozen=True)
class Ready:
    """A training step that is ready to run: ``run`` gives its loss, ``whole`` what it returns."""

    run: Run
    whole: Callable[[Tensor], Any]
    is_half: bool  # whether it computes in float16


class Family:
    """The programs of one loss on this rank, and the choice between them."""

    def __init__(
        self, first: Member, mesh: DeviceMesh | None, choices: Choices, guard: Guard,
        number: int = 0,
    ) -> None:  # fmt: skip
        """``number``: of a stage's losses, which all ranks number alike."""
        self.first, self.choices, self.guard = first, choices, guard
        self._told = other_loss(number) if number else ""
        self.state, self._tensors, self._mesh = guard.state, guard.tensors, mesh
        program = first.program
        self.programs = {each.wanted: each for each in (program, *program.others)}
        self.members = {program.wanted: first}
        self.islands = IslandTurns(first, self.members, self.state)
        self._plan = Plan.parse(program.plan)
        self._calls = Calls(program, lambda: self.programs.values())
        varies = len(self.programs) > 1 or (program.recipe and choices.most_programs > 1)
        asks = choices.most_programs > 1 or len(self.programs) > 1
        self.calls_alike = SameCalls(asks, guard.tensors, guard.agreement.ask)
        self._same = self.calls_alike.choice if varies else None
        self._turns = MicrobatchesOfIsland.here(program)
        turns = self._turns is not None
        self._batch = CommonBatch(program, self.programs, choices, in_turns=turns)
        self._runs = CountedRuns(first, self.islands, guard, self.calls_alike)

    # asked -----------------------------------------------------------------------------------
    @property
    def mode_now(self) -> Mode:
        """The mode that the user has asked for, or else the one that was compiled."""
        return self.state.mode or self.first.program.wanted.mode

    @property
    def is_one_model(self) -> bool:
        """Whether islands, if there are any, share the gradients of every step."""
        return any((self._plan.stale, self._plan.uneven, self._plan.servers))

    @property
    def infers(self) -> bool:
        """Whether a call of the stage gives what the model returns, without gradients."""
        return self.state.mode == "eval" or self.first.role.is_inference

    def scale_in(self, named: dict[str, Any]) -> Any:
        """Take ``scale`` from the arguments of a step, unless it is the name of an input."""
        arguments = self.first.program.arguments.each
        if any(a.name == "scale" for a in arguments):
            return None
        return check_scale(named.pop("scale", None))

    def step(self, args: Sequence[Any], named: Mapping[str, Any], device: str) -> Ready | None:
        """A training step, ready to run; None for a batch that is dropped."""
        if self.first.role.is_inference:
            raise no_gradients(self.first.program)
        if self.gives_out:
            raise loss_is_scripts("step")
        if self.state.mode == "eval":
            raise step_in_eval()
        found = self._ready("step", self.mode_now, args, named, device)
        if found is None:
            return None
        member, run = found
        returned = member.returned
        return Ready(lambda: returned.loss(run()), returned.whole, member.role.is_half)

    @property
    def gives_out(self) -> bool:
        """Whether its steps give out results, of which the script computes the loss."""
        return waits(self.first.run)

    def halfway(
        self, args: Sequence[Any], named: Mapping[str, Any], device: str
    ) -> tuple[Halfway, Callable[[Mapping[str, Tensor]], Any], dict[str, Tensor]] | None:
        """A step that has given out its results, what makes of these what the model returns, and
        the inputs that wait for a gradient, by name.
        """
        found = self._ready("step", self.mode_now, args, named, device)
        if found is None:
            return None
        every = self._calls.tensors("step", args, named)[0]
        given = zip(self.first.program.inputs, every, strict=True)
        waiting_for = {n: x for n, x in given if x.requires_grad and torch.is_grad_enabled()}
        return found[1](), found[0].returned.given_out, waiting_for

    def loss(self, args: Sequence[Any], named: Mapping[str, Any], device: str) -> Any:
        """The loss in eval mode, with the extras if there are any."""
        if self.gives_out:
            raise loss_is_scripts("eval_step")
        found = self._ready("loss", "eval", args, named, device)
        return None if found is None else found[0].returned.of_results(found[1]())

    def forward(self, args: Sequence[Any], named: Mapping[str, Any], device: str) -> Any:
        """What the model returns."""
        found = self._ready("forward", self.mode_now, args, named, device)
        return found and results_of(evaluated(found[1](), args, named), found[0].program.returns)

    # chosen ----------------------------------------------------------------------------------
    @of_other_ranks("step")
    def _ready(
        self, kind: Kind, mode: Mode, args: Sequence[Any], named: Mapping[str, Any], device: str
    ) -> tuple[Member, Run] | None:
        """The program that all ranks take for this batch, with its inputs."""
        autocast = autocast_now(device)  # which the program has in its text
        waiting().begin(_CALLED[kind])
        found = None
        try:
            with without(autocast):
                found = self._chosen(kind, mode, args, named, device, autocast)
        finally:
            if found is None:
                waiting().end()
        return found and (found[0], run_without(autocast, found[1]))

    def _chosen(
        self, kind: Kind, mode: Mode, args: Sequence[Any], named: Mapping[str, Any], device: str,
        autocast: str,
    ) -> tuple[Member, Run] | None:  # fmt: skip
        """The same where no autocast is open; ``autocast`` is the one around the call."""
        try:
            if autocast and self._same is None:
                raise inside_autocast(autocast)
            inputs, form = self._calls.tensors(kind, args, named)
            if self.gives_out:
                self._check_input_grads(kind, inputs)
            else:
                tell_of_input_grads(self._plan, kind, [*self.first.program.inputs], inputs)
            inputs = plain_inputs(inputs, self.first.role, known=not form)
            turn = self._turns.first(inputs) if self._turns and kind == "step" else None
        except PartcError:
            self._refuse()
            raise
        seen = inputs if turn is None else turn  # what is computed at once
        asked = replace(Wanted.of(kind, mode, seen, form), autocast=autocast)
        wanted = self.state.varied(self._batch.pieces.whole(asked), self.programs)
        if self._same is not None:
            said = self._said(wanted)
            each = self._same.differing(said.as_text(), self._stepped(kind))
            whole = self._batch.together(each)
            if whole is not None:
                whole = replace(whole, variant=wanted.variant)
                return self._with_all_rows(whole, [Wanted.parse(text) for text in each], inputs)
            wanted = replace(self._batch.agreed(said, each), variant=wanted.variant)
            if kind != "forward" and not self._batch.may_differ(wanted):
                self.first.checks.checked(seen, device)
            even = self._batch.even(wanted)
            if even is None:
                return None
            wanted = even
            if turn is None:
                inputs = fill(inputs, self._batch.pieces.mine(wanted), self._batch.values(wanted))
        else:
            self.calls_alike.check(_CALLED[kind], self._stepped(kind))
        member = self._member(wanted)
        with alone_by_choice(self.choices.most_programs):
            taken = member.checks.taken(inputs, device, turn)
        return member, partial(self._runs.run, member, taken)

    def _check_input_grads(self, kind: Kind, inputs: Sequence[Tensor]) -> None:
        """RunError for an input whose gradient the script's backward would hand on."""
        if kind == "step" and torch.is_grad_enabled():
            names = [*self.first.program.inputs]
            given = {note.split(":")[0].removeprefix(EXTRA) for note in self._plan.notes}
            for name, x in zip(names, inputs, strict=False):
                if x.requires_grad and gradient_of(name) not in given:
                    raise no_input_gradient(name)

    def _said(self, wanted: Wanted) -> Wanted:
        """What other ranks are told: a call under ``no_grad`` is no half of a step, whose other
        half is a backward of all ranks; and another loss may take a batch of the same shapes.
        """
        alone = wanted.kind == "step" and self.gives_out and not torch.is_grad_enabled()
        told = "_".join(filter(None, (self._told, NO_GRAD if alone else "")))
        return replace(wanted, variant=told) if told and not wanted.variant else wanted

    def _stepped(self, kind: Kind) -> int:
        """By which numbers optimizers have stepped, which are alike on all ranks but for those of
        other stages and islands.
        """
        return number_by_now(self.guard.agreement.shown().values()) if kind == "step" else 0

    def meet(self, call: str, most: int = 0) -> None:
        """RunError on all ranks if some of them run something else than this call, which is one of
        all ranks. ``most``: only so many times, of a call that every step makes; 0 always.
        """
        self.calls_alike.meet(call, most)

    def _refuse(self) -> None:
        """Tell the other ranks, which would wait for this one, that it does not run."""
        if (choice := self.calls_alike.choice) is not None:
            choice.differing(REFUSED)
        else:
            self.first.checks.refuse()

    def _with_all_rows(
        self, whole: Wanted, each: Sequence[Wanted], inputs: Sequence[Tensor]
    ) -> tuple[Member, Run]:
        """The program of the whole batch, which gives back this rank's rows of its results."""
        uneven = self._batch.uneven
        assert uneven is not None
        cuts = self._cuts_of_results(whole)
        check_numbers(self._shared(whole).returns, whole.kind)
        member = self._member(whole)
        taken = member.checks.taken(uneven.gathered(inputs, each), self._tensors.device.type)
        run = partial(self._runs.run, member, taken)
        return member, lambda: uneven.own_rows(run, each, cuts)

    def _cuts_of_results(self, whole: Wanted) -> Results:
        """How results are cut where ranks share the rows, of a program with these arguments."""
        results = self._shared(whole).results
        if any(outer > 1 for cuts in results.values() for *_, outer in cuts):  # of its length
            results = self._member(self._example(whole)).program.results
        return results

    def _shared(self, whole: Wanted) -> Program:
        """A program with these arguments whose rows ranks share."""
        if whole.kind != "forward":
            return self.first.program
        shared = [w for w in self.programs if (w.kind, w.form) == (whole.kind, whole.form)]
        wanted = next((w for w in shared if not w.replicated), None)
        return self._member(wanted or self._example(whole)).program

    def _example(self, whole: Wanted) -> Wanted:
        assert self._batch.uneven is not None
        return self._batch.uneven.example(whole)

    # made ------------------------------------------------------------------------------------
    def _member(self, wanted: Wanted) -> Member:
        first = self.first.program.wanted
        told = (wanted.kind, wanted.mode, wanted.autocast)
        if self._same is None and told == (first.kind, first.mode, first.autocast):
            return self.first  # whose checks refuse another batch
        if wanted not in self.programs:  # variants are of the first shape alone
            wanted = replace(wanted, variant="")
        if wanted not in self.members:
            program = self.programs.get(wanted) or self._compiled(wanted)
            check_agreement(program, self._tensors.device)
            self.members[wanted] = Member.over(program, self._mesh, self._tensors, self.guard)
            self.programs[wanted] = program
        return self.members[wanted]

    def _compiled(self, wanted: Wanted) -> Program:
        recipe = self.first.program.recipe
        if recipe is None:
            raise no_recipe(wanted, self.programs)
        if len(self.programs) >= self.choices.most_programs:
            raise too_many(wanted, self.choices.most_programs)
        begun = perf_counter()
        tell_first("partc compiles a program for another batch or call: %s", wanted)
        with torch.inference_mode(False):  # where scripts evaluate; the trace needs a graph
            program = recipe.program(wanted, self.first.program)
        tell_first(
            "partc compiled it in %.1f s (program %d of at most %d of this stage)",
            perf_counter() - begun, len(self.programs) + 1, self.choices.most_programs,
        )  # fmt: skip
        return program

    # changed ---------------------------------------------------------------------------------
    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow ``.to()`` and alike, once the stage's tensors have followed it."""
        for member in self.members.values():
            if member is not self.first:
                member.apply(fn)
                member.link(self._tensors)

    def follow(self, other: Family) -> None:
        """Take mode, seed and compiled programs of another stage's family."""
        self.state.mode, self.state.seed = other.state.mode, other.state.seed
        self.state.num_evaluations, self.state.met = other.state.num_evaluations, other.state.met
        self.programs |= other.programs
