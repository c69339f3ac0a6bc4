"""``partc.parallelize``: a model that is called as DDP's is, and compiled at its first step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from partc.errors import TraceError, UsageError
from partc.imported_again import check_not_imported_again
from partc.plan.mesh import Mesh, MeshLike
from partc.program import Program
from partc.program.choices import check_fillers
from partc.program.model.habits import tell_first
from partc.program.model.other_wrappers import is_zero, of_zero
from partc.program.ranks.handshake import check_world, world_size
from partc.program.ranks.missing import said_if_waiting
from partc.program.stage.runtime import Stage
from partc.program.start import device_of, join
from partc.recipe import Recipe
from partc.trace.arguments import Arguments, Given
from partc.trace.no_model import check_model
from partc.trace.trees import tensors_of
from partc.whole_batch import axes_open
from partc.wrappers.as_model import AsModel
from partc.wrappers.forms import Forms
from partc.wrappers.how import How
from partc.wrappers.kept import Kept, attributes_of_copies, check_not_stepping, warn_of_dynamo
from partc.wrappers.longest import check_names_of_pad, warn_of_pad
from partc.wrappers.moved import move, optimizers_over
from partc.wrappers.prepared import FIRST_CALL
from partc.wrappers.results import returned_loss
from partc.wrappers.said import check_loss, check_outputs, check_said
from partc.wrong_calls import known_arguments, quoted

_NO_LOSS = (
    "No loss= was given to parallelize, so the model is called with all inputs, and returns the "
    "loss. Name one: loss=loss_of, of def loss_of(model, x, y): return criterion(model(x), y)."
)
_CALLED = (
    "Call it with all inputs of the loss: in train mode model(x, y) and model.step(x, y) give the "
    "loss; in eval mode model(x) gives what the model returns."
)


@known_arguments
def parallelize(
    model: nn.Module, mesh: MeshLike, *, loss: Callable[..., Any] | None = None,
    plan: Any = "auto", batch: str = "local", device: str | None = None,
    pad: Mapping[str, float] | None = None, outputs: Sequence[str] = (), **options: Any,
) -> Parallel:  # fmt: skip
    """A model on a mesh of ranks, which stands in a script where DistributedDataParallel stood.

    It is compiled for the batch of its first step, so that no example is needed. Optimizers that
    were made over its parameters before then follow: their parameters are this rank's pieces from
    then on. All ranks call this together, as all that follows.

    Args:
        model: the ordinary single-device model; its weights are those of rank 0.
        mesh: the axes of ranks, as for ``partc.compile``: ``"dp=4"``.
        loss: ``loss(model, *inputs)`` gives the scalar to train on, or ``(loss, extras)``. None:
            the model returns it, or a result with a ``.loss``, as models of transformers do; or
            the script computes it of what the model returns, ``criterion(model(x), y).backward()``.
        plan: as for ``partc.compile``.
        batch: what a step takes: ``"local"``, this rank's own rows, or ``"global"``, all ranks'.
        device: where ranks compute; None: where the model's parameters are.
        pad: by the name of an input (``"batch.ids"`` in a dict) the number that fills it up to the
            longest of all ranks.
        outputs: without ``loss``, what a step returns of the model's results beside the loss.
        options: further arguments of ``partc.compile``, such as ``microbatches=4`` and
            ``cache="build/cache"``.

    Returns:
        An ``nn.Module``: ``step(*batch)`` trains, and a call is as of a ``Stage``.

    Raises:
        UsageError: an option is none of ``partc.compile``'s.
        RunError: the mesh has another number of ranks than there are.

    Example::

        model = partc.parallelize(model, "dp=4", loss=loss_of, plan="fsdp")
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in loader:
            optimizer.zero_grad()
            loss = model.step(x, y)
            optimizer.step()
    """
    check_not_imported_again("parallelize")
    check_model(model, "parallelize")
    if not isinstance(batch, str):
        raise UsageError(
            where="parallelize(batch=...)", what=f"it is {quoted(batch)}",
            why="it says what a step takes, 'local' or 'global'; the first step compiles for the "
            "batch that it is given",
            do="Leave it out; or compile at once: model.compile_for(*batch).",
        )  # fmt: skip
    check_said("parallelize", mesh, plan, {"batch": batch, **options}, deals=False)
    check_loss("parallelize", loss)
    check_outputs("parallelize", outputs, loss)
    check_fillers("parallelize", pad)
    if not (at := Mesh.of(mesh)).is_open:
        check_world(at, world_size())
    elif batch == "local":
        raise axes_open(at)
    how = How(mesh, plan, loss, outputs, pad or {}, {"batch": batch, **options})
    return Parallel(model, how, device)


class Parallel(AsModel):
    """A model whose ``stage`` is made at its first step; before, it is the model as it was.

    ``program`` is what was compiled, once there is a stage. Parameters, modules and attributes are
    those of the model, or of the stage once there is one, under their names in the model.
    """

    def __init__(self, model: nn.Module, how: How, device: str | None) -> None:
        super().__init__(model, how, "cpu" if device is None else device)
        self._device = device
        self._losses: dict[Any, Forms] = {}  # by a loss of the script, what steps by it
        self._moved.append(_follow)

    # steps -----------------------------------------------------------------------------------
    @_disable_dynamo
    def step(self, *inputs: Any, **named: Any) -> Any:
        """One training step, as ``Stage.step``; the first compiles."""
        return self._stepped(self._how.loss, inputs, named)

    def eval_step(self, *inputs: Any, **named: Any) -> Any:
        """The loss in eval mode, as ``Stage.eval_step``."""
        stage = self._of_loss(self._how.loss, inputs, named)
        args, known = self._filled(inputs, named, self._how.loss)
        return self._alone(stage.eval_step(*args, **known))

    @_disable_dynamo
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """In train mode the loss, ready for ``backward``; in eval mode what the model returns."""
        return super().forward(*inputs, **named)

    @known_arguments
    def also(self, loss: Callable[..., Any]) -> AlsoLoss:
        """Another loss of the same model, such as that of a GAN's critic; its first step compiles.

        Example::

            critic = model.also(critic_loss)
            critic.step(real, noise)
        """
        check_loss("also", loss)
        return AlsoLoss(self, loss)

    def compile_for(self, *inputs: Any, **named: Any) -> None:
        """Compile now, for a batch of these shapes, what the first step does else.

        For what needs the stage before a step: ``partc.load_checkpoint``, ``model.loader``.
        """
        self._trained(inputs, named)

    def no_sync(self) -> AbstractContextManager[None]:
        """As of DistributedDataParallel: gradients of several steps are summed in any case."""
        return nullcontext()

    # inside ----------------------------------------------------------------------------------
    def _stepped(self, loss: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """A step by a loss; a ``scale`` that is no input of it is not compiled."""
        mine = _takes_scale(loss or self._whole.forward)
        scale = {n: x for n, x in named.items() if n == "scale" and not mine}
        given = {n: x for n, x in named.items() if n not in scale}
        stage = self._of_loss(loss, inputs, given)
        args, known = self._filled(inputs, given, loss)
        return self._alone(stage.step(*args, **known, **scale))

    def _of_loss(self, loss: Any, args: Any, named: Any) -> Any:
        """What steps by a loss: the stage itself, or a program that shares its tensors.

        There is one for each form of the arguments: ``model(x)`` and ``model(x, action)``.
        """
        key = loss if loss is not None else self._differentiated(args, named)
        forms = self._losses.setdefault(key, Forms())
        found = forms.stepping(args, named)
        if found is None:
            compiled = self._own_loss(key) if loss is None else loss
            found = forms.refusing(self._form(args, named, compiled) if forms else None)
        if found is None:
            forms.check_room()
            found = forms.add(*self._stepping(args, named, compiled))
        return found

    def _form(self, args: Any, named: Any, loss: Callable[..., Any]) -> Arguments | None:
        """The form of a call's arguments; None of what the loss does not take."""
        try:
            return Given.of_call(self._whole, args, named, loss).arguments.form
        except TraceError:
            return None

    def _stepping(self, args: Any, named: Any, loss: Callable[..., Any]) -> tuple[Any, Arguments]:
        """What steps by a loss that has no program for these arguments, and what it takes."""
        if self._stage is None:
            stage = self._begun(args, named, loss)
            return stage, self.program.arguments
        self._stage.check_together("the first call with these arguments")
        begun = perf_counter()
        tell_first("partc compiles another loss of the model, or another form of its arguments")
        program = self._as_now().also(self._given(args, named, loss), loss=loss)
        tell_first("partc compiled it in %.1f s", perf_counter() - begun)
        self._know_batch(program)
        return self._stage.share(program), program.arguments

    def _differentiated(self, args: Any, named: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of inputs that wait for a gradient, where the script computes the loss."""
        every = tensors_of([*args, *named.values()])
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in every):
            return ()
        given = Given.of_call(self._whole, args, named, self._loss_of)
        pairs = zip(given.names, given.tensors, strict=True)
        return tuple(name for name, x in pairs if x.requires_grad)

    def _own_loss(self, inputs: tuple[str, ...]) -> Callable[..., Any]:
        """The loss of a model without ``loss=``; ``inputs`` get gradients, too."""
        if not inputs:
            own: Callable[..., Any] = self._loss_of
            return own
        loss_of: Any = returned_loss(self._whole, self._how.outputs, inputs)
        loss_of.__signature__ = inspect.signature(self._loss_of)
        loss_of.inputs = inputs
        found: Callable[..., Any] = loss_of
        return found

    def _as_now(self) -> Program:
        """The program, to compile another loss by which trains what the script trains now: a part
        may have been frozen during the first step, as a GAN's critic is.
        """
        program, stage = self.program, self._stage
        assert stage is not None
        recipe, shown = program.recipe, dict(stage.named_parameters())
        if not isinstance(recipe, Recipe) or stage.stand_ins():
            return program
        names = [name for name, _ in recipe.model.named_parameters()]
        now = tuple(
            (name in shown and shown[name].requires_grad) or (before and not stage.trains(name))
            for name, before in zip(names, recipe.trained, strict=True)
        )
        return replace(program, recipe=replace(recipe, trained=now))

    def _begun(self, args: Any, named: Any, loss: Callable[..., Any]) -> Stage:
        if self._stage is None:
            known = {*self._how.inputs, *named}
            check_names_of_pad(self._how.pad, known)
            warn_of_pad(self._how.pad, known)
        return super()._begun(args, named, loss)

    def _trained(self, args: Any, named: Any) -> Any:
        return self._of_loss(self._how.loss, args, named)

    def _compiled(self, args: Any, named: Any, loss: Callable[..., Any] | None) -> Stage:
        first = next(self._whole.parameters(), None)
        here = "cpu" if first is None or first.is_meta else first.device.type
        self._device_type = here if self._device is None else self._device
        with said_if_waiting(FIRST_CALL):
            join(device_of(self._device_type))
        return super()._compiled(args, named, loss)

    def _given(self, args: Any, named: Any, loss: Callable[..., Any] | None) -> Given:
        try:
            return super()._given(args, named, loss)
        except TraceError as error:
            if loss is None or error.where.startswith("input "):  # which says what to pass
                raise
            do = _NO_LOSS if self._how.loss is None else _CALLED
            raise TraceError(
                where=error.where, what=error.what, why=error.why, do=do
            ) from None  # fmt: skip

    def _keep(self, program: Program, loss: Callable[..., Any] | None) -> None:
        if loss is not None:
            self.program = program

    def _leave_model(self, stage: Stage) -> None:
        """Let the model go, which the script has no more use for."""
        kept = Kept(self._whole)
        shown = {**stage.stand_ins(), **dict(stage.named_parameters())}
        kept.follow(shown, stage.like_model)
        for held in attributes_of_copies(self._whole, self._how):
            held["_whole"] = stage.like_model
        warn_of_dynamo()
        object.__setattr__(self, "_whole", stage.like_model)
        kept.leave()

    def _alone(self, found: Any) -> Any:
        """What a step returns: without ``loss`` the loss alone, where no other output is asked."""
        return found[0] if self._how.loss is None and isinstance(found, tuple) else found


class AlsoLoss:
    """Another loss of a model that ``parallelize`` gave; its gradients add to the model's."""

    def __init__(self, model: Parallel, loss: Callable[..., Any]) -> None:
        self._model, self._loss = model, loss
        model._how.know(loss, of_loss=True)

    def step(self, *inputs: Any, **named: Any) -> Any:
        """One training step by this loss, as ``Stage.step``; the first compiles."""
        return self._model._stepped(self._loss, inputs, named)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """In train mode the loss, ready for ``backward``; in eval mode what the model returns."""
        stage = self._model._of_loss(self._loss, inputs, named)
        taken = self._loss if self._model.training else None
        args, known = self._model._filled(inputs, named, taken)
        return stage(*args, **known)

    def eval_step(self, *inputs: Any, **named: Any) -> Any:
        """This loss in eval mode, without gradients."""
        stage = self._model._of_loss(self._loss, inputs, named)
        args, known = self._model._filled(inputs, named, self._loss)
        return stage.eval_step(*args, **known)


def _follow(stage: Stage, names: Mapping[int, str]) -> None:
    """Let the optimizers over a model's parameters follow them into its stage."""
    every = optimizers_over(names)
    if any(map(is_zero, every)):
        raise of_zero()
    for optimizer in every:
        check_not_stepping(optimizer)
        move(optimizer, stage, names)


def _takes_scale(call: Callable[..., Any]) -> bool:
    return "scale" in inspect.signature(call).parameters
