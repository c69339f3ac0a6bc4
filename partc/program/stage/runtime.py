"""Run a program inside torchrun: this rank's ``nn.Module``, with the user's parameter names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from partc.plan import Plan
from partc.plan.mesh import ISLAND
from partc.plan.wires import is_residual
from partc.program import Program
from partc.program.checkpoints import residuals
from partc.program.choices import NO_CHOICES, Choices
from partc.program.cpp_compiler import check_compiler
from partc.program.model.lent_flags import take_flags
from partc.program.model.raw_model import RawModel, take_weights
from partc.program.model.read_numbers import ReadNumbers
from partc.program.model.user_modules import UserModules
from partc.program.optimizer.clip import check_clip, clip_gradients
from partc.program.optimizer.loaded_states import serve_loads
from partc.program.optimizer.no_gradients import expect_none
from partc.program.optimizer.optimizer_states import Form
from partc.program.optimizer.stage_optimizers import StageOptimizers
from partc.program.optimizer.whole_states import WholeStates
from partc.program.origin import Origin
from partc.program.ranks.agreement import Agreement
from partc.program.ranks.forks import leave_garbage_to_ranks
from partc.program.ranks.other_ranks import of_other_ranks
from partc.program.reading import loader
from partc.program.role import Role, Shard
from partc.program.stage.family import Family
from partc.program.stage.members import Member
from partc.program.stage.run_state import Guard, RunState
from partc.program.stage.several_programs import SeveralPrograms
from partc.program.stage.stage_islands import StageIslands
from partc.program.step.step_checks import can_be_moved
from partc.program.tensors.assigned_data import serve_assignments
from partc.program.tensors.copies import Writes, copied
from partc.program.tensors.elsewhere import freeze_alike, say_elsewhere, stand_ins
from partc.program.tensors.loaded import Loaded
from partc.program.tensors.rank_tensors import RankTensors, Unmatched
from partc.program.tensors.shown import Shown, register_at
from partc.program.tensors.stand_in import StandIn
from partc.program.tensors.whole_states import given_whole
from partc.program.weights import Source, named_state, whole_tensors
from partc.trace.default_dtype import float32_default
from partc.wrong_calls import check_flag, check_whole_number, known_arguments

FIRST_CLIPS = 3  # calls of clip_grad_norm_ that make sure all ranks are in one


class Stage(UserModules, StageOptimizers, WholeStates, StageIslands, SeveralPrograms):
    """One rank's part of a training step, as an nn.Module.

    Its parameters are DTensors over the memory of this rank's pieces, under their names in the
    user's model, so that optimizers and other tools see whole tensors; its buffers are this rank's
    pieces. A pipeline rank has those of its own stages. In eval mode, and for other shapes, it runs
    other programs over the same tensors (``family.py``).
    """

    _rank_step: Any  # the role's own module
    loader = loader

    def __init__(
        self, program: Program, mesh: DeviceMesh | None, device: torch.device,
        choices: Choices = NO_CHOICES, like: nn.Module | None = None,
        read: ReadNumbers | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        leave_garbage_to_ranks()
        serve_assignments()
        self._role: Role = program.role(dist.get_rank())
        check_compiler(self._role)
        self._tensors = RankTensors(program, self._role, mesh, device)
        self._shown: dict[str, Shown] = {}  # by the tensor's first name
        self.away: dict[str, StandIn] = {}  # what stands for tensors of other pipeline ranks
        self._forms: WeakKeyDictionary[Any, Form] = WeakKeyDictionary()  # of optimizers' states
        self._program, self._device_mesh = replace(program, origin=Origin()), mesh
        self.writes = Writes()  # into copies that state_dict() gave
        self.mesh, self.coords = self._tensors.mesh, self._tensors.coords
        # not registered as a child: its keys are not the user's names
        object.__setattr__(self, "_rank_step", self._role.build(mesh, device))
        model = program.origin.release()
        read = ReadNumbers.of(model, program.numbers) if read is None else read
        self.begin_modules(like if model is None else model, read)
        self._show_tensors()
        loaded = Loaded(self._tensors.held, [shard.name for shard in self._role.shards])
        object.__setattr__(self, "_loaded", loaded)  # a model may have a tensor of this name
        known = program.constants.items()
        self._tensors.fill({n: tensor for n, tensor in known if n in self._tensors.shards})
        residuals.begin(self._tensors.held)
        loaded.are_there = take_weights(self._tensors, model, program.fingerprint)
        names = sorted(shard.name for shard in self._tensors.all_shards.values())
        unread = self._tensors.holders.aside
        take_flags(model, self._shown, names, device, program.plan, unread, self.away)
        raw = RawModel(model, self._shown, self._tensors)
        agreement = Agreement(
            self._tensors.holders,
            self._tensors.sources,
            lambda: {name: shown.param for name, shown in self._shown.items()},
            draws=bool(program.draws) or residuals.draws(program.plan),
            own_rows=Plan.parse(program.plan).batch == "local",
        )
        object.__setattr__(self, "agreement", agreement)
        guard = Guard(
            self._tensors, self._loaded, raw, agreement, self.check_modules, RunState(),
            dist.group.WORLD,
        )  # fmt: skip
        first = Member(self._program, self._role, self._rank_step, {}, guard)
        self._begin(Family(first, mesh, choices, guard))
        agreement.drain = self._own.islands.drain
        serve_loads(self)

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
    def step(self, *inputs: Any, **named: Any) -> Any:
        """One training step; every parameter's ``.grad`` grows by the gradient.

        Args:
            inputs: on this rank's device, as the compiled loss takes them behind the model (or the
                model does): ``step(x, y)``, ``step(batch)`` with a dict or a dataclass,
                ``step(**batch)``. Tensors have the shapes and dtypes that were compiled, of the
                whole batch on every rank, or of a program with ``batch="local"`` of this rank's
                piece; all else is what it was.
            named: those that are given by name. ``scale``, where no input has that name, multiplies
                this step's gradients, but not the loss: ``1 / 4`` for the mean over 4 steps,
                ``scaler.get_scale()`` for a GradScaler; a number, or a tensor ``f32[]``.

        Returns:
            The loss of the global batch, ``f32[]``, the same on every rank; or ``(loss, extras)``
            as the compiled loss returns them, the extras detached. The plan's notes say what each
            extra is.

        Raises:
            RunError: an input is missing, unknown, or has another shape, dtype or device; the
                script has changed a number of the model since it was compiled in this process; or
                ranks differ in what they must hold alike (``agreement.py``).
        """
        scale = self._own.scale_in(named)
        return self._stepped(self._own, inputs, named, scale)

    @_disable_dynamo
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """In train mode the loss, ready for ``.backward()``; in eval mode what the model returns.

        A training program, which takes the arguments of ``step``, computes the gradients already
        here; ``loss.backward()`` hands them out, and ``torch.no_grad()`` drops them. In eval mode
        ``model(*inputs)`` runs without gradients: each rank gathers the weights of a block when it
        needs them, and all ranks get the whole result.
        """
        return self._called(self._own, inputs, named)

    @known_arguments
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
        seed = check_whole_number(seed, "seed", -(2**63))
        step = check_whole_number(step, "seed(step=...)")
        if step != self._own.state.seed[1]:
            self._own.state.met = -1  # what other steps did is no meeting behind these
        self._own.state.seed = seed, step
        if hasattr(self._rank_step, "seed"):
            self._rank_step.seed(seed, step)

    def go_on(self, seeded: tuple[int, int], loaded: Collection[str], met: int) -> None:
        """Go on from a checkpoint.

        ``seeded``: the seed, and how many steps were taken. ``loaded``: the names of its tensors.
        ``met``: behind how many steps islands had met last.
        """
        residuals.begin(self._tensors.held, loaded)
        self._loaded.are_there = True
        self.seed(*seeded)
        self._own.state.met = met

    @property
    def gives_out(self) -> bool:
        """Whether a call in train mode gives what the model returns, for a loss of the script's."""
        return self._own.gives_out

    @property
    def seeded(self) -> tuple[int, int]:
        """The seed of the random numbers, and how many steps have been taken since it was set."""
        return self._own.state.seed

    @known_arguments
    @of_other_ranks("clip_grad_norm_")
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` on the whole model; returns the norm before."""
        check_clip(max_norm, norm_type, self._tensors.has_directions)
        self._own.meet("clip_grad_norm_", FIRST_CLIPS)
        held = self._tensors.held
        for shown in self._shown.values():
            shown.read()
        params = [(held[s.name], self.is_first_copy(s)) for s in self._role.params]
        groups: list[Any] = list(self._tensors.groups.values())
        groups += [self._tensors.island] if self.owners else []  # gradients are on owners alone
        zero = self._tensors.zero()
        norm = clip_gradients(params, groups, max_norm, norm_type, error_if_nonfinite, zero=zero)
        for shown in self._shown.values():
            shown.write_back()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; the program's gradients are gone too, not only when a step begins."""
        super().zero_grad(set_to_none)
        for shown in self._shown.values():
            if shown.trained:
                shown.read()

    # whole tensors ---------------------------------------------------------------------------
    @known_arguments
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
        check_flag(strict, "load_full(strict=...)")
        # islands begin when they are there; what has no values yet is refused at the next step
        if self._loaded.are_there and ISLAND not in self._program.mesh.names:
            self.check_together("load_full")
        self._begin_loading()
        self._tensors.load(whole_tensors(source), strict, self.shards)

    @known_arguments
    @of_other_ranks("full_state_dict")
    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's own state dict with whole tensors on the CPU; all ranks call this together.

        All names of a tied tensor refer to one tensor. Of islands it is the mean of their copies.
        """
        self.writes.check()
        self.check_together("full_state_dict")
        names = self.saved_names()
        firsts = dict.fromkeys(names.values())
        whole = {first: self._tensors.whole(first).to("cpu", copy=True) for first in firsts}
        return given_whole({name: whole[first] for name, first in names.items()})

    def saved_names(self) -> dict[str, str]:
        """The names of the model's own state dict, whichever ranks hold them, in its order; each
        with the first name of its tensor, which is another one where it is tied.
        """
        tensors = self._tensors
        return {name: tensors.first_name(name) for name in tensors.saved_names(self.shards)}

    @property
    def sums(self) -> Mapping[str, Any]:
        """Of which gradients this stage's rounded sums are, which its checkpoints have to say."""
        return residuals.of_sums(self._program.plan, self._program.mesh)

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        return self._tensors.device

    @property
    def shards(self) -> Mapping[str, Shard]:
        """How each tensor of the model is sharded, by name, whichever rank holds it."""
        return self._tensors.all_shards

    def trains(self, name: str) -> bool:
        """Whether a program of this stage computes the gradient of a parameter."""
        first = self._tensors.first_name(name)
        return first in self._shown and self._shown[first].trained

    def stand_ins(self) -> dict[str, nn.Parameter]:
        """What stands for each parameter that other pipeline ranks have, by name."""
        if self._tensors.pipeline is None:
            return {}
        return dict(stand_ins(self, self._tensors.holders))

    @known_arguments
    def pieces(self) -> dict[str, tuple[Shard, Tensor]]:
        """This rank's shards by name, each with its cuts from the whole tensor."""
        self._own.islands.drain()
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
        share memory with the parameters, except those that ``tensors/dtensors.py`` gathers, and
        those of islands: these are the mean of all copies.
        """
        self.writes.check()
        state = {} if destination is None else destination
        for name in self._tensors.saved_names(self._tensors.shards):
            state[prefix + name] = self._tensors.as_dtensor(name)
            if not self._tensors.shares_memory(name):
                state[prefix + name] = copied(state[prefix + name], name, self.writes)
        self._own.islands.drain()
        for name in filter(is_residual, self._tensors.shards):
            state[prefix + name] = self._tensors.as_dtensor(name)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Unmatched:
        """Copy this rank's shards from whole tensors, or DTensors of any mesh and placements."""
        check_flag(strict, "load_state_dict(strict=...)")
        self._begin_loading()
        return self._tensors.load(named_state(state_dict), strict, self._tensors.shards)

    # inside ----------------------------------------------------------------------------------
    def _begin_loading(self) -> None:
        """Gradients that are under way belong to the weights that were there before."""
        self.writes.forget()
        self._own.islands.drain()
        self._own.state.met = -1

    @float32_default()
    def __deepcopy__(self, memo: dict[int, Any]) -> Stage:
        """A stage of the same program with tensors of its own; all ranks call this together."""
        self.check_together("copy.deepcopy")
        choices = self._own.choices
        twin = memo[id(self)] = Stage(
            self._program, self._device_mesh, self.device, choices, self.like_model,
            self.read_numbers,
        )  # fmt: skip
        self._own.islands.settle()
        held = twin._tensors.held
        for name, tensor in self._tensors.held.items():
            held[name].data = tensor.detach().clone()
        twin._loaded.watch(twin._tensors.held, self._loaded.missing(self._tensors.held))
        twin._loaded.are_there = self._loaded.are_there
        twin._follow(self)
        twin._own.guard.casts = self._own.guard.casts
        twin._show_tensors()
        for name, shown in self._shown.items():
            twin._shown[name].param.requires_grad_(shown.param.requires_grad)
        freeze_alike(self.away, twin._tensors.holders, twin)
        return twin

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Stage:
        """Apply ``.to()`` and alike to the rank's own module, then register its tensors again."""
        missing = self._loaded.missing(self._tensors.held)
        self._own.islands.drain()
        with can_be_moved(fn):
            self._rank_step._apply(fn, recurse)
        self._tensors.apply(fn)
        self._show_tensors()
        self._loaded.watch(self._tensors.held, missing)
        self._own.guard.casts = self._tensors.casts()
        self._apply_to_families(fn)
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
        expect_none(self._rank_step, self._shown.values(), self._tensors)
        if self._tensors.pipeline is not None:
            say_elsewhere(self, self._tensors.holders)
        self.keep_modules()
