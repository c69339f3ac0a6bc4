"""Run a program inside torchrun: this rank's ``nn.Module``, with the user's parameter names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from partc.errors import RunError
from partc.program import Program
from partc.program.clip import clip_gradients
from partc.program.cpp_compiler import check_compiler
from partc.program.loaded import Loaded
from partc.program.loss_backward import loss_with_backward, scaled_step
from partc.program.optimizer_states import Form, OptimizerStates
from partc.program.optimizers import (
    OnPieces,
    OnWhole,
    SavedMoments,
    Stepping,
    check_of_stage,
)
from partc.program.origin import Origin
from partc.program.rank_tensors import RankTensors, Unmatched
from partc.program.raw_model import RawModel, take_weights
from partc.program.role import Role, Shard
from partc.program.shown import Shown, begin_all, end_all, register_at
from partc.program.step_checks import StepChecks, check_default_dtype, check_world_stands
from partc.program.try_optimizer import check_elementwise, check_per_tensor
from partc.program.user_modules import UserModules
from partc.program.weights import Source, whole_tensors
from partc.program.whole_states import WholeStates

Stepped = TypeVar("Stepped", bound=torch.optim.Optimizer)


class Stage(UserModules, WholeStates):
    """One rank's part of a training step, as an nn.Module.

    Its parameters are DTensors over the memory of this rank's pieces, under their names in the
    user's model, so that optimizers and other tools see whole tensors; its buffers are this rank's
    pieces. A pipeline rank has those of its own stages. ``train`` and ``eval`` change nothing, as
    the program was compiled for one of the two modes.
    """

    _rank_step: Any  # the role's own module
    _drawn: tuple[int, int] = 0, 0  # the seed, and how many steps have drawn from it

    def __init__(
        self, program: Program, mesh: DeviceMesh | None, device: torch.device,
        like: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._role: Role = program.role(dist.get_rank())
        check_compiler(self._role)
        check_default_dtype()
        self._tensors = RankTensors(program, self._role, mesh, device)
        self._shown: dict[str, Shown] = {}  # by the tensor's first name
        self._forms: WeakKeyDictionary[Any, Form] = WeakKeyDictionary()  # of optimizers' states
        self._program, self._device_mesh = replace(program, origin=Origin()), mesh
        self._world = dist.group.WORLD
        self.mesh, self.coords = self._tensors.mesh, self._tensors.coords
        # not registered as a child: its keys are not the user's names
        object.__setattr__(self, "_rank_step", self._role.build(mesh, device))
        model = program.origin.release()
        self.begin_modules(like if model is None else model)
        self._show_tensors()
        self._loaded = Loaded(self._tensors.held, [shard.name for shard in self._role.shards])
        known = program.constants.items()
        self._tensors.fill({n: tensor for n, tensor in known if n in self._tensors.shards})
        take_weights(self._tensors, model, program.fingerprint)
        self._raw = RawModel(model, self._shown, self._tensors)
        self._checks = StepChecks(self._role, program.numbers, self._check_begin)

    @property
    def groups(self) -> Mapping[str, Any]:
        """This rank's process group of every axis of the mesh, by axis."""
        return self._tensors.groups

    @property
    def rank_step(self) -> nn.Module:
        """The module of the program's own text."""
        step: nn.Module = self._rank_step
        return step

    # running ---------------------------------------------------------------------------------
    @_disable_dynamo  # torch.compile(stage) runs the program as it is
    def step(self, *inputs: Tensor, scale: float | Tensor | None = None) -> Tensor:
        """One training step; every parameter's ``.grad`` grows by the gradient.

        Args:
            inputs: the whole global batch on every rank, on this rank's device, with the shapes
                and dtypes that were compiled; each rank computes its own piece of it.
            scale: multiplies this step's gradients, but not the loss: ``1 / 4`` for the mean over
                4 steps, ``scaler.get_scale()`` for a GradScaler. A number, or a tensor ``f32[]``.

        Returns:
            The loss of the global batch, ``f32[]``, the same on every rank.

        Raises:
            RunError: an input has another shape, dtype or device; autocast is on; or the script
                has changed a number of the model since it was compiled in this process.
        """
        self.check_no_hooks()
        self._checks.check(inputs, self.device.type)
        if scale is not None:
            run = lambda: self._counted(self._rank_step.step, inputs)  # noqa: E731
            return scaled_step(list(self._shown.values()), run, scale, is_half=self._role.is_half)
        begin_all(self._shown.values())
        try:
            loss: Tensor = self._counted(self._rank_step.step, inputs)
            return loss
        finally:
            end_all(self._shown.values())

    @_disable_dynamo
    def forward(self, *inputs: Tensor) -> Any:
        """The loss, ready for ``.backward()``; of an inference program the results by name.

        A training program computes the gradients already here; ``loss.backward()`` hands them out,
        and ``torch.no_grad()`` drops them.
        """
        if self._role.is_inference:
            self._checks.check(inputs, self.device.type)
            with torch.no_grad():
                return self._counted(self._rank_step, inputs)
        self._checks.check(inputs, self.device.type)
        run = self._rank_step.step
        return loss_with_backward(
            list(self._shown.values()),
            lambda: self._counted(run, inputs),
            is_half=self._role.is_half,
        )

    def seed(self, seed: int, step: int = 0) -> None:
        """Decide every random number of the steps that follow; all ranks pass the same.

        The numbers of a draw follow from this seed, from how many steps were taken, from the
        microbatch, from the place in the model (``h.3.attn.dropout``), and from this rank's
        coordinates on the mesh axes that cut what is drawn. So ranks with copies of a value draw
        the same, ranks with different pieces others; what the backward computes again, or another
        pipeline stage reads, is drawn the same again. What the process seeds elsewhere
        (``torch.manual_seed``) does not matter.

        Args:
            seed: any whole number; a stage that is never seeded has 0.
            step: how many steps count as taken already, for a training that goes on.
                ``load_checkpoint`` sets both to what they were when the checkpoint was saved.

        Example::

            stage.seed(1234)
        """
        self._drawn = seed, step
        if hasattr(self._rank_step, "seed"):
            self._rank_step.seed(seed, step)

    @property
    def seeded(self) -> tuple[int, int]:
        """The seed of the random numbers, and how many steps have been taken since it was set."""
        return self._drawn

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` on the whole model; returns the norm before."""
        held = self._tensors.held
        for shown in self._shown.values():
            shown.read()
        params = [(held[s.name], self.is_first_copy(s)) for s in self._role.params]
        groups = list(self._tensors.groups.values())
        zero = self._tensors.zero()
        return clip_gradients(params, groups, max_norm, norm_type, error_if_nonfinite, zero=zero)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; the program's gradients are gone too, not only when a step begins."""
        super().zero_grad(set_to_none)
        for shown in self._shown.values():
            if shown.trained:
                shown.read()

    # optimizers ------------------------------------------------------------------------------
    def step_on_pieces(self, optimizer: Stepped) -> Stepped:
        """Let an elementwise optimizer (SGD, Adam, ...) step on this rank's plain pieces.

        That is as fast as on one device; on DTensors each op costs some 0.1 ms more. Its state
        dict has DTensors all the same, so it loads under any mesh; all ranks call that together.

        Args:
            optimizer: one over ``stage.parameters()``, in groups as you like.

        Returns:
            The same optimizer.

        Raises:
            RunError: tried on small tensors and on the shapes of its parameters, of up to a
                million elements, its steps on pieces are not those on whole tensors (Adafactor,
                Muon, LBFGS), or it has parameters that are not the stage's.
        """
        check_of_stage(optimizer, self.parameters())
        shown, tensors = list(self._shown.values()), self._tensors
        check_elementwise(optimizer, {s.param: s.shard for s in shown}, tensors.piece)
        self._set_form(optimizer, "pieces")
        Stepping(optimizer, shown, OnPieces())
        SavedMoments(optimizer, shown, tensors.portable, tensors.piece)
        return optimizer

    def step_on_whole(self, optimizer: Stepped) -> Stepped:
        """Let any optimizer step on whole tensors, which each step gathers on every rank.

        For what DTensor cannot compute (Adafactor). Its states are whole on every rank, and so
        are parameters and gradients during a step. All ranks step together.

        Args:
            optimizer: one over ``stage.parameters()``, in groups as you like.

        Returns:
            The same optimizer.

        Raises:
            RunError: the program has several pipeline stages and the optimizer joins parameters
                (LBFGS), or it has parameters that are not the stage's.
        """
        if self.pipeline is not None:
            check_per_tensor(optimizer)
        self._set_form(optimizer, "whole")
        tensors = self._tensors
        Stepping(optimizer, self._shown.values(), OnWhole(tensors.join, tensors.piece))
        return optimizer

    def states_of(self, optimizer: torch.optim.Optimizer) -> OptimizerStates:
        """What the states of an optimizer over this stage's parameters are."""
        return OptimizerStates(self._tensors, self._forms.get(optimizer, "dtensors"))

    def _set_form(self, optimizer: torch.optim.Optimizer, form: Form) -> None:
        check_of_stage(optimizer, self.parameters())
        if optimizer in self._forms:
            raise RunError(
                where=f"stage.step_on_{form}({type(optimizer).__name__})",
                what=f"it steps on {self._forms[optimizer]} already",
                why="its states are of one kind",
                do="Call one of stage.step_on_pieces and stage.step_on_whole, once.",
            )
        states = self.states_of(optimizer)  # made already, by the optimizer or by steps
        for name, shown in self._shown.items():
            for field, value in optimizer.state.get(shown.param, {}).items():
                if isinstance(value, Tensor):
                    optimizer.state[shown.param][field] = states.in_form(name, value, form)
        self._forms[optimizer] = form

    # whole tensors ---------------------------------------------------------------------------
    def load_full(self, source: Source, *, strict: bool = True) -> None:
        """Take this rank's pieces of parameters and buffers from whole tensors.

        Args:
            source: a model, a state dict, or the path of safetensors files, under the names of the
                user's model. A tied tensor may come under any of its names. Buffers that a state
                dict leaves out keep what was known when compiling.
            strict: refuse names that are missing or of no tensor of the model.

        Raises:
            LoadError: a name is missing or unknown, or a tensor has another shape.
        """
        self._tensors.load(whole_tensors(source), strict, self.shards)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's own state dict with whole tensors on the CPU; all ranks call this together.

        All names of a tied tensor refer to one tensor.
        """
        tensors = self._tensors
        names = list(tensors.saved_names(self.shards))
        firsts = dict.fromkeys(map(tensors.first_name, names))
        whole = {first: tensors.whole(first).to("cpu", copy=True) for first in firsts}
        return {name: whole[tensors.first_name(name)] for name in names}

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        return self._tensors.device

    @property
    def shards(self) -> Mapping[str, Shard]:
        """How each tensor of the model is sharded, by name, whichever rank holds it."""
        return self._tensors.all_shards

    @property
    def pipeline(self) -> Any:
        """The process group of the ranks with the other stages; None if there is none."""
        return self._tensors.pipeline

    def pieces(self) -> dict[str, tuple[Shard, Tensor]]:
        """This rank's shards by name, each with its cuts from the whole tensor."""
        held = self._tensors.held
        return {name: (shard, held[name]) for name, shard in self._tensors.shards.items()}

    def is_first_copy(self, shard: Shard) -> bool:
        """Whether this rank is the first of all ranks that hold the same shard of a tensor."""
        return self._tensors.holders.is_first_copy(shard, self.coords)

    def is_first_stage(self, shard: Shard) -> bool:
        """Whether this rank belongs to the first pipeline rank that holds a tensor."""
        return self._tensors.holders.is_first_stage(shard, self.coords)

    # checkpoints -----------------------------------------------------------------------------
    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """DTensors by the user's names, for torch.distributed.checkpoint; all ranks call together.

        A pipeline rank returns the tensors of its own stages, on the mesh without ``pp``. They
        share memory with the parameters, except those that ``program/dtensors.py`` gathers.
        """
        state = {} if destination is None else destination
        for name in self._tensors.saved_names(self._tensors.shards):
            state[prefix + name] = self._tensors.as_dtensor(name)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Unmatched:
        """Copy this rank's shards from whole tensors, or DTensors of any mesh and placements."""
        return self._tensors.load(state_dict, strict, self._tensors.shards)

    # inside ----------------------------------------------------------------------------------
    def _check_begin(self) -> None:
        """Before a step of any kind: every tensor has values, and the model is as it was."""
        check_world_stands(self._world)
        self.check_modules(self._checks.num_steps)
        self._loaded.check(self._tensors.held, self.device)
        self._raw.begin_step()

    def _counted(self, run: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        """What a step returns; the step counts as taken."""
        result = run(*inputs)
        seed, step = self._drawn
        self._drawn = seed, step + 1
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Stage:
        """A stage of the same program with tensors of its own; all ranks call this together."""
        twin = memo[id(self)] = Stage(
            self._program, self._device_mesh, self.device, self.like_model
        )
        held = twin._tensors.held
        for name, tensor in self._tensors.held.items():
            held[name].data = tensor.detach().clone()
        twin._loaded.watch(twin._tensors.held, self._loaded.missing(self._tensors.held))
        twin.seed(*self._drawn)
        twin._checks.casts = self._checks.casts
        twin._show_tensors()
        for name, shown in self._shown.items():
            twin._shown[name].param.requires_grad_(shown.param.requires_grad)
        return twin.train(self.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Stage:
        """Apply ``.to()`` and alike to the rank's own module, then register its tensors again."""
        missing = self._loaded.missing(self._tensors.held)
        self._rank_step._apply(fn, recurse)
        self._tensors.apply(fn)
        self._show_tensors()
        self._loaded.watch(self._tensors.held, missing)
        self._checks.casts = self._tensors.casts()
        return self

    def _show_tensors(self) -> None:
        """Register this rank's tensors as parameters and buffers under the user's dotted names."""
        self.clear_modules()
        self._tensors.read(self._rank_step)
        layouts = self._tensors.layouts()
        for name, tensor in self._tensors.held.items():
            if not isinstance(tensor, nn.Parameter):
                continue
            if name in self._shown:
                self._shown[name].renew(tensor)
            else:
                self._shown[name] = Shown(self._tensors.shards[name], tensor, layouts)
        for name, first, saved in self._tensors.named():
            tensor = self._tensors.held[first]
            shown = self._shown[first].param if first in self._shown else tensor
            register_at(self, name, shown, saved)
        self.keep_modules()
