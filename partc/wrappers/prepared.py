"""A model as ``prepare`` returns it: compiled at its first call, for the arguments of that call."""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

import partc
from partc.errors import RunError
from partc.plan import Plan
from partc.program import Program
from partc.program.model.habits import tell_first
from partc.program.model.lent_whole import lent_whole
from partc.program.model.raw_model import empty_model
from partc.program.ranks.farewell import tell_at_exit
from partc.program.ranks.group_backend import group_backend
from partc.program.ranks.other_ranks import of_other_ranks
from partc.program.ranks.waiting import waiting
from partc.program.stage.runtime import Stage
from partc.program.step.batch_fit import Rows
from partc.program.tensors.elsewhere import other_weights
from partc.program.tensors.exported import check_not_exported, no_export
from partc.program.weights import check_known_names
from partc.trace.arguments import Given
from partc.wrappers.how import How
from partc.wrappers.longest import check_names_of_pad, filled, largest
from partc.wrappers.results import called_as, returned_loss
from partc.wrappers.trained_alone import TrainedAlone
from partc.wrappers.unread import unpacked_by

FIRST_CALL = "the first call of the model"


class Outputs(dict[str, Any]):
    """A training step's results: ``outputs.loss``, ready for ``backward``, and those asked for."""

    def __iter__(self) -> Iterator[str]:
        """The names; RunError for ``loss, logits = model(x, y)``, which would be given these."""
        if unpacked_by(sys._getframe(1)):
            raise _no_tuple(list(self.keys()))
        return super().__iter__()

    def __getattr__(self, name: str) -> Any:
        if name not in self and hasattr(Tensor, name):
            raise _no_tensor(name, list(self))
        return self[name]

    def __getitem__(self, key: Any) -> Any:
        found = list(self)[key] if isinstance(key, int) and key < len(self) else key
        if found not in self:
            raise _not_returned(key)
        return super().__getitem__(found)


class Prepared(nn.Module):
    """A model that trains and evaluates by partc's programs, called as the model is.

    ``module`` is the model until the first training step, then this rank's ``Stage``. ``moved`` are
    called with the stage and the model's names of its old parameters, by their ids.
    """

    def __init__(self, model: nn.Module, how: How, device: str) -> None:
        super().__init__()
        tell_at_exit()
        if dist.is_initialized():
            waiting()  # others may wait for this rank before its first call
        self.module = model
        # not registered: the stage takes its place
        object.__setattr__(self, "_whole", model)
        self._how, self._device_type, self._called = how, device, called_as(model)
        # what is compiled: the script's loss, or (loss, {"logits": ...}) of what the model returns
        loss_of = returned_loss(model, how.outputs) if how.loss is None else how.loss
        object.__setattr__(self, "_loss_of", loss_of)  # a loss may be a module, which is no part
        how.know(model.forward, of_loss=False)
        if how.loss is not None:
            how.know(how.loss, of_loss=True)
        self._stage: Stage | None = None
        self._evaluated: Stage | None = None  # forwards of a model that has not been trained yet
        self._seen: list[int] = []  # versions of the model's tensors that it has
        self._moved: list[Callable[[Stage, Mapping[int, str]], None]] = []
        self._batch_dims: dict[str, int] = {}  # the dims of inputs that data ranks cut
        self._draws: tuple[int, int] | None = None  # the stage's seed and number of steps
        self._unstepped = TrainedAlone(model)
        self.training = model.training

    @of_other_ranks("a call of the model")
    def forward(self, *args: Any, **named: Any) -> Any:
        """In train mode the step's loss, ready for ``backward``; in eval mode what the model
        returns, without gradients, for this rank's rows.
        """
        check_not_exported()
        if not self.training:
            stage = self._evaluating(args, named)
            args, named = self._filled(args, named)
            return stage(*args, **named)
        stage = self._trained(args, named)
        args, named = self._filled(args, named, self._how.loss)
        found = stage(*args, **named)
        if self._how.loss is not None or isinstance(found, Tensor) or stage.gives_out:
            return found
        extras = {name: _without_gradient(x, name) for name, x in found[1].items()}
        return Outputs(loss=found[0], **extras)

    def __prepare_scriptable__(self) -> NoReturn:
        raise no_export("torch.jit.script")

    @of_other_ranks("a call of the model")
    def eval_loss(self, *args: Any, **named: Any) -> Any:
        """The loss in eval mode of all ranks' rows, without gradients."""
        stage = self._trained(args, named)
        args, named = self._filled(args, named, self._how.loss)
        found = stage.eval_step(*args, **named)
        return found[0] if self._how.loss is None and isinstance(found, tuple) else found

    # compiled --------------------------------------------------------------------------------
    def _trained(self, args: Any, named: Any) -> Any:
        """The stage, which is made of the first step's arguments."""
        return self._begun(args, named, self._loss_of) if self._stage is None else self._stage

    @of_other_ranks(FIRST_CALL)
    def _begun(self, args: Any, named: Any, loss: Callable[..., Any]) -> Stage:
        """A stage that trains by this loss; it takes the model's place."""
        self._evaluated = None
        self._unstepped.check("the first step")
        with torch.inference_mode(False), torch.enable_grad(), self._training():
            made = self._compiled(args, named, loss)
        names = {id(p): name for name, p in self._whole.named_parameters()}
        self.module = made
        object.__setattr__(self, "_stage", made)  # is registered once
        self._unstepped.end()
        made.seed(*(self._draws or (_first_seed(made), 0)))
        for move in self._moved:
            move(made, names)
        self._leave_model(made)
        if made.training != self.training:  # else parts may have a mode of their own
            made.train(self.training)
        return made

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Have the model in train mode, in which alone a step runs, though the script evaluates
        first. A model that trains keeps the modes of its parts.
        """
        evaluates = not self.training
        try:
            if evaluates:
                self._whole.train()
            yield
        finally:
            if evaluates:
                self._whole.eval()

    def _leave_model(self, stage: Stage) -> None:
        """Let go of the model, whose weights are trained no more."""
        empty_model(self._whole)

    def _evaluating(self, args: Any, named: Any) -> Stage:
        """The stage, or one of forwards alone as long as nothing is trained."""
        if self._stage is not None:
            return self._stage
        check_own_weights(self._whole)
        if self._evaluated is None:
            with torch.inference_mode(False), torch.no_grad():
                self._evaluated = self._compiled(args, named, None)
        elif self._versions() != self._seen:
            self._evaluated.load_full(self._whole)
        self._seen = self._versions()
        return self._evaluated

    def _versions(self) -> list[int]:
        return [x._version for x in (*self._whole.parameters(), *self._whole.buffers())]

    @of_other_ranks(FIRST_CALL)
    def _compiled(self, args: Any, named: Any, loss: Callable[..., Any] | None) -> Stage:
        check_own_weights(self._whole)
        how = self._how if loss is not None else self._how.of_forwards()
        like = self._given(args, named, loss)
        options = {"backend": group_backend(self._device_type), "batch": "local", **how.options}
        begun = perf_counter()
        tell_first("partc compiles %s for its first batch", type(self._whole).__name__)
        program = partc.compile(self._whole, how.mesh, like, loss=loss, plan=how.plan, **options)
        tell_first("partc compiled it in %.1f s: %s", perf_counter() - begun, program.mesh)
        self._keep(program, loss)
        self._know_batch(program)
        return program.module(self._device_type, partial="replicate")

    def _know_batch(self, program: Program) -> None:
        """Take which dims of its inputs are the batch, as nothing else is filled up there."""
        rows = Rows.of(Plan.parse(program.plan), program.mesh, program.inputs)
        self._batch_dims.update(rows.batch_dims())

    def _keep(self, program: Program, loss: Callable[..., Any] | None) -> None:
        """What is to be done with a program before it runs."""

    def _given(self, args: Any, named: Any, loss: Callable[..., Any] | None) -> Given:
        """The arguments of a call as an example to compile for, the largest of all ranks'."""
        check_names_of_pad(self._how.pad, {*self._how.inputs, *named})
        if self._how.loss is None and loss is self._loss_of:
            Given.of_call(self._whole, args, named)  # says what the model, not the loss, takes
        given = Given.of_call(self._whole, args, named, loss)
        shapes = largest([[*x.shape] for x in given.tensors], self._device_type)
        pairs = zip(shapes, given.tensors, strict=True)
        return given.with_tensors([torch.empty(s, dtype=x.dtype, device="meta") for s, x in pairs])

    def _filled(
        self, args: Any, named: Mapping[str, Any], loss: Callable[..., Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """The arguments of a loss, or of the model, those that ``pad`` names filled up. A program
        tells which dim is the batch, so this comes behind the compile.
        """
        check_names_of_pad(self._how.pad, {*self._how.inputs, *named})
        called = self._called if loss is None else loss
        return filled(
            self._whole, called, args, named, self._how.pad, self._device_type, self._batch_dims
        )

    # as of the model -------------------------------------------------------------------------
    def train(self, mode: bool = True) -> Prepared:
        """The mode of the model and of its programs."""
        self._whole.train(mode)
        super().train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all programs."""
        self._held.zero_grad(set_to_none)

    def state_dict(self, **named: Any) -> OrderedDict[str, Any]:  # type: ignore[override]
        """The model's own state dict, whole; all ranks call this together.

        It is an ``OrderedDict``, as of any module: of those alone accelerate writes a tied tensor
        once, where a dict with two names of one tensor cannot be saved.
        """
        if self._stage is None:
            return OrderedDict(self._whole.state_dict(**named))
        return OrderedDict(self._stage.full_state_dict())

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take whole tensors under the model's names."""
        try:
            return self._held.load_state_dict(state_dict, strict, assign)
        except RuntimeError:
            if self._stage is None:
                check_known_names(self._whole, state_dict)
            raise

    def save_pretrained(self, folder: Any, state_dict: Any = None, **named: Any) -> None:
        """As of a model of transformers: whole files, by one rank; all ranks call this."""
        state = Prepared.state_dict(self) if state_dict is None else state_dict
        write: Any = self._whole.save_pretrained
        with nullcontext() if self._stage is None else lent_whole(self._whole, state):
            written_by_one(write, folder, state, named)

    @property
    def _held(self) -> nn.Module:
        """The model, or its stage."""
        found = self._modules["module"]
        assert found is not None
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def written_by_one(
    write: Callable[..., Any], folder: Any, state: Any, named: dict[str, Any]
) -> None:
    """Let one rank write. A writer that does not ask whether it is that one is called there alone,
    and one that takes no state has the whole tensors in its model.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    takes = inspect.signature(write).parameters
    named.pop("is_main_process", None)
    if "state_dict" in takes or any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        named["state_dict"] = state
    if "is_main_process" in takes:
        write(folder, is_main_process=first, **named)
    elif first:
        write(folder, **named)


def is_other_weight(value: object) -> bool:
    """Whether it is a tensor that a call puts where a parameter stands."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def check_own_weights(model: nn.Module) -> None:
    """RunError where other tensors stand for a model's parameters while it is called."""
    for name, tensor in model.named_parameters():
        if is_other_weight(tensor):
            raise other_weights(name, type(model).__name__)


class _Refused(torch.autograd.Function):
    """A value through which a loss cannot train: it is told in ``backward``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, name: str, anchor: Tensor) -> Tensor:
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise _not_returned(ctx.name)


def _without_gradient(value: Any, name: str) -> Any:
    """A result of a step, which is computed when its gradients are too."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    apply: Any = _Refused.apply
    return apply(value, name, torch.zeros((), requires_grad=True))


def _first_seed(stage: Stage) -> int:
    """What ``torch.manual_seed`` was given on the first rank: it decides dropout."""
    seed = torch.tensor([torch.initial_seed() % 2**62], device=stage.device)
    dist.broadcast(seed, src=0)
    return int(seed)


def _no_tuple(known: Sequence[str]) -> RunError:
    return RunError(
        where="loss, ... = model(...)",
        what=f"a training step returns its results by name: {', '.join(known)}",
        why="the model returns its loss first, and what is not asked for is not kept",
        do="Write loss = model(...)[0]. For further results let forward return (logits, loss), "
        'which a script gets as it is, or {"loss": loss, "logits": logits} with '
        'outputs=["logits"].',
    )


def _no_tensor(name: str, known: Sequence[str]) -> RunError:
    return RunError(
        where=f"outputs.{name}", what="a training step returns its results by name, and no tensor",
        why=f"it returns {', '.join(known)}", do=f"Take one of them: outputs.{known[0]}.{name}.",
    )  # fmt: skip


def _not_returned(name: Any) -> RunError:
    said = name if isinstance(name, str) else "logits"  # results are asked for by their names
    return RunError(
        where=f"outputs[{name!r}]",
        what="a training step does not return it with gradients, and only where outputs names it",
        why="the gradients are computed together with the loss, so that a loss which a script "
        "computes from it would train nothing",
        do=f"To look at it, say outputs=[{said!r}]; to train on it, give loss=fn(model, *inputs) "
        "and compute the loss there.",
    )
