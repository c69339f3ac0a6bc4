"""The part of a stage that runs several programs: modes, shapes, other losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from partc.errors import UsageError
from partc.program import Program
from partc.program.model.habits import LOG, once, tell_of_no_grad, without_inference
from partc.program.optimizer.cleared import awaits_backward, gave_gradients
from partc.program.optimizer.divided import took_step
from partc.program.optimizer.no_gradients import gives_late
from partc.program.ranks.same_factor import SameFactor
from partc.program.ranks.same_model import check_same_model
from partc.program.stage.family import Family, Ready
from partc.program.stage.family_errors import late_gradients, untrained
from partc.program.stage.members import Member
from partc.program.stage.one_thread import OneThread
from partc.program.step.loss_backward import loss_with_backward, scaled_step
from partc.program.step.script_backward import results_with_backward
from partc.program.step.step_loss import dropped, of_step
from partc.program.tensors.copies import Writes
from partc.program.tensors.exported import check_not_exported
from partc.program.tensors.loaded import Loaded
from partc.program.tensors.rank_tensors import RankTensors
from partc.program.tensors.shown import Shown, begin_all, end_all
from partc.trace.default_dtype import float32_default
from partc.users_line import warn
from partc.wrong_calls import known_arguments, quoted


class SeveralPrograms(nn.Module):
    """A module whose programs share its tensors.

    The first family of programs is that of the stage's own loss; ``share`` adds others.
    """

    _families: list[Family]
    _factors: SameFactor
    _turn: OneThread
    _shown: dict[str, Shown]
    _tensors: RankTensors
    _loaded: Loaded
    _device_mesh: DeviceMesh | None
    check_no_hooks: Callable[[], None]  # of a Stage
    check_served: Callable[[], None]
    writes: Writes
    begin_mode: Callable[[bool], None]

    # modes and losses ------------------------------------------------------------------------
    def train(self, mode: bool = True) -> Self:
        """From now on ``step`` trains in train mode; with ``mode=False`` as ``eval``.

        In eval mode a call gives what the model returns, without gradients, and ``step`` is
        refused. The mode of the model that was compiled decides nothing from here on.
        """
        if not isinstance(mode, bool):
            raise UsageError(
                where=f"stage.train({quoted(mode)})", what="the mode is no boolean",
                why="train(True) trains, train(False) evaluates",
                do="Call stage.train() or stage.eval().",
            )  # fmt: skip
        self._own.state.mode = "train" if mode else "eval"
        return super().train(mode)

    def eval_step(self, *inputs: Any, **named: Any) -> Any:
        """The loss in eval mode, without gradients, whatever the mode of the stage.

        Args:
            inputs: as for ``step``.
            named: those that are given by name.

        Returns:
            The loss of the global batch, ``f32[]``, the same on every rank, or ``(loss, extras)``
            as of ``step``; None for a partial batch that is left out.
        """
        self.writes.check()
        with self._turn.of("eval_step"):
            return self._own.loss(inputs, named, self._device_type)

    @known_arguments
    @float32_default()
    def share(self, program: Program) -> SharedProgram:
        """Another loss of the same model over this stage's weights, gradients and buffers.

        Args:
            program: what ``also`` of the stage's program gave; all ranks call this together.

        Returns:
            It has ``step`` and ``eval_step``, and is called, as a stage.

        Raises:
            RunError: the program stores a parameter otherwise than the stage, or needs one that
                the stage does not have.

        Example::

            critic = stage.share(program.also(real, noise, loss=critic_loss))
            critic.step(real, noise)
        """
        if not isinstance(program, Program):
            raise UsageError(
                where="stage.share", what=f"the program is {quoted(program)}",
                why="another loss over the same weights is a program of its own",
                do="Pass stage.share(program.also(inputs, loss=loss)).",
            )  # fmt: skip
        own = self._own
        check_same_model(own.first.program, program)
        if own.first.is_late:
            raise late_gradients()
        member = Member.over(program, self._device_mesh, self._tensors, own.guard)
        for name in member.trained:
            if name not in self._shown:
                raise untrained(name)
            self._shown[name].train()
        number = len(self._families)
        self._families.append(Family(member, self._device_mesh, own.choices, own.guard, number))
        return SharedProgram(self, self._families[-1])

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """New memory, which has no values until it is loaded; as of any module."""
        super().to_empty(device=device, recurse=recurse)
        self._loaded.empty(self._tensors.held)
        return self

    # inside ----------------------------------------------------------------------------------
    def check_together(self, call: str, most: int = 0) -> None:
        """RunError on all ranks if some of them run something else than this call of all ranks.
        ``most``: only so many times, of a call that every step makes; 0 always.
        """
        self._own.meet(call, most)

    def check_alike(self) -> None:
        """RunError on all ranks if some of them hold other weights than others must have too."""
        guard, tensors = self._own.guard, self._tensors
        role = self._own.first.role
        guard.agreement.compare_weights(role, tensors.held, guard.state.seed, tensors.device)

    @property
    def _own(self) -> Family:
        """The programs of the stage's own loss."""
        return self._families[0]

    @property
    def _device_type(self) -> str:
        return self._tensors.device.type

    def _begin(self, family: Family) -> None:
        """Run these programs, in the mode in which the first was compiled."""
        mesh, device = self._tensors.mesh, self._tensors.device
        own = {
            "_families": [family], "_turn": OneThread(mesh.num_ranks),
            "_factors": SameFactor(mesh, device, is_one_model=family.is_one_model),
        }  # fmt: skip
        for name, part in own.items():  # a model may have tensors of these names
            object.__setattr__(self, name, part)
        self._tensors.met_by(family.meet)
        self.begin_mode(family.mode_now == "train")

    def _follow(self, other: SeveralPrograms) -> None:
        """Take mode, seed and compiled programs of another stage of the same program."""
        self._own.follow(other._own)
        self.begin_mode(other.training)

    def _stepped(
        self, family: Family, inputs: Sequence[Any], named: dict[str, Any],
        scale: float | Tensor | None = None,
    ) -> Any:  # fmt: skip
        """A training step by one of the families; gradients are multiplied by ``scale``."""
        check_not_exported()
        self.writes.check()
        self._tell_of_habits()
        self.check_served()
        self.check_no_hooks()
        for each in self._shown.values():
            each.check_no_hooks()
        with self._turn.of("step"):
            ready = family.step(inputs, named, self._device_type)
            if ready is None:
                return None
            with without_inference():
                loss = self._run(ready, scale)
                if not gives_late(self._tensors, self._rank_step):
                    gave_gradients(self)
                took_step(scaled=scale is not None)
                return ready.whole(of_step(loss, is_half=ready.is_half))

    def _run(self, ready: Ready, scale: float | Tensor | None) -> Tensor:
        """The loss of a step, whose gradients are then in every ``.grad``."""
        if scale is not None:
            shown = list(self._shown.values())
            return scaled_step(shown, ready.run, scale, self._factors.check, is_half=ready.is_half)
        begin_all(self._shown.values())
        try:
            loss: Tensor = ready.run()
            return loss
        finally:
            end_all(self._shown.values())

    def _tell_of_habits(self) -> None:
        """Tell, once, of a step whose gradients nobody wants, and of one that has none."""
        trains = any(each.param.requires_grad for each in self._shown.values())
        alone = self._shown and self._tensors.pipeline is None
        if not trains and alone and once("frozen"):
            warn(
                "partc: no parameter has requires_grad, so that a step trains nothing. Unfreeze "
                "what is to be trained, stage.requires_grad_(True), or take stage.eval_step(...)"
            )
        if not torch.is_grad_enabled() and once("no_grad"):
            LOG.warning(
                "partc: stage.step computes gradients under torch.no_grad() too. The loss alone, "
                "in eval mode, is stage.eval_step(...)"
            )

    def _called(self, family: Family, inputs: Sequence[Any], named: dict[str, Any]) -> Any:
        """A call of one of the families: results in eval mode, else the loss for ``backward``."""
        check_not_exported()
        self.writes.check()
        with self._turn.of("forward"):
            if family.infers:
                return family.forward(inputs, named, self._device_type)
            if family.gives_out:
                return self._given_out(family, inputs, named)
            ready = family.step(inputs, named, self._device_type)
            return None if ready is None else ready.whole(self._with_backward(ready))

    def _given_out(self, family: Family, inputs: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the model returns, of which the script computes the loss, ready for ``backward``."""
        tell_of_no_grad(trains=any(each.param.requires_grad for each in self._shown.values()))
        shown = list(self._shown.values())
        with without_inference():
            begin_all(shown)
            try:
                found = family.halfway(inputs, named, self._device_type)
            finally:
                end_all(shown)
            if found is None:
                return None
            half, whole, given = found
            awaits_backward(self)
            return whole(results_with_backward(shown, half, given))

    def _with_backward(self, ready: Ready) -> Tensor:
        """The loss of a step that is ready, whose ``backward`` hands out gradients."""
        shown = list(self._shown.values())
        with without_inference():
            loss = loss_with_backward(shown, ready.run, self._factors.check, is_half=ready.is_half)
        if not loss.requires_grad:
            return dropped(loss)
        if not gives_late(self._tensors, self._rank_step):
            awaits_backward(self)
        return loss

    def _apply_to_families(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Let all programs follow ``.to()``, once the stage's tensors have."""
        for family in self._families:
            family.apply(fn)


class SharedProgram:
    """Another loss over a stage's weights; it follows the mode of the stage.

    Its gradients add to those of the stage's parameters.
    """

    def __init__(self, stage: SeveralPrograms, family: Family) -> None:
        self._stage, self._family = stage, family

    def step(self, *inputs: Any, **named: Any) -> Any:
        """One training step by this loss, as ``Stage.step``."""
        scale = self._family.scale_in(named)
        return self._stage._stepped(self._family, inputs, named, scale)

    @property
    def gives_out(self) -> bool:
        """Whether its steps give what the model returns, of which the script computes the loss."""
        return self._family.gives_out

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """In train mode the loss, ready for ``.backward()``; in eval mode the model's result."""
        return self._stage._called(self._family, inputs, named)

    def eval_step(self, *inputs: Any, **named: Any) -> Any:
        """This loss in eval mode, without gradients, as ``Stage.eval_step``."""
        with self._stage._turn.of("eval_step"):
            return self._family.loss(inputs, named, self._stage._device_type)
