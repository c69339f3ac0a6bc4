"""Run a program inside torchrun: this rank's ``nn.Module``, with the user's parameter names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from partc.errors import RunError
from partc.plan.sharding import dtype_name
from partc.program import Program
from partc.program.clip import clip_gradients
from partc.program.cpp_compiler import check_compiler
from partc.program.rank_tensors import RankTensors, Unmatched
from partc.program.role import Role, Shard
from partc.program.weights import Source, whole_tensors

FIRST_STEPS = 3  # that look at all numbers of the model


class Stage(nn.Module):
    """One rank's part of a training step, as an nn.Module.

    Parameters and buffers are this rank's shards, under their names in the user's model. A pipeline
    rank has those of its own stages. ``train`` and ``eval`` change nothing, as the program was
    compiled for one of the two modes.
    """

    _rank_step: Any  # the role's own module
    _drawn: tuple[int, int] = 0, 0  # the seed, and how many steps have drawn from it

    def __init__(self, program: Program, mesh: DeviceMesh | None, device: torch.device) -> None:
        super().__init__()
        self._role: Role = program.role(dist.get_rank())
        check_compiler(self._role)
        _check_default_dtype()
        self._tensors = RankTensors(program, self._role, mesh, device)
        self.mesh, self.coords = self._tensors.mesh, self._tensors.coords
        # not registered as a child: its keys are not the user's names
        object.__setattr__(self, "_rank_step", self._role.build(mesh, device))
        self._show_tensors()
        known = program.constants.items()
        self._tensors.fill({n: tensor for n, tensor in known if n in self._tensors.shards})
        self._numbers, self._steps = program.numbers, 0

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
    def step(self, *inputs: Tensor) -> Tensor:
        """One training step; every parameter's ``.grad`` grows by its piece of the gradient.

        Args:
            inputs: the whole global batch on every rank, on this rank's device, with the shapes
                and dtypes that were compiled; each rank computes its own piece of it.

        Returns:
            The loss of the global batch, ``f32[]``, the same on every rank.

        Raises:
            RunError: an input has another shape, dtype or device; autocast is on; or the script
                has changed a number of the model since it was compiled in this process.
        """
        self._check_inputs(inputs)
        self._check_numbers()
        loss: Tensor = self._counted(self._rank_step.step, inputs)
        return loss

    def forward(self, *inputs: Tensor) -> Any:
        """The loss, ready for ``.backward()``; of an inference program the results by name.

        A training program computes the gradients already here; ``loss.backward()`` hands them out,
        and ``torch.no_grad()`` drops them. RunError for several pipeline stages.
        """
        if self._role.is_inference:
            self._check_inputs(inputs)
            self._check_numbers()
            with torch.no_grad():
                return self._counted(self._rank_step, inputs)
        self._check_one_stage()
        params = [p for p in self.parameters() if p.requires_grad]
        apply: Any = _LossOfStep.apply
        return apply(lambda: self._fresh_grads(params, inputs), *params)

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
        params = [(held[s.name], self.is_first_copy(s)) for s in self._role.params]
        groups = list(self._tensors.groups.values())
        zero = self._tensors.zero()
        return clip_gradients(params, groups, max_norm, norm_type, error_if_nonfinite, zero=zero)

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
    def _counted(self, run: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        """What a step returns; the step counts as taken."""
        result = run(*inputs)
        seed, step = self._drawn
        self._drawn = seed, step + 1
        return result

    def _fresh_grads(
        self, params: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The loss and the gradients of one step; every ``.grad`` keeps its value."""
        before = [p.grad for p in params]
        try:
            for p in params:
                p.grad = None
            loss = self.step(*inputs)
            return loss, [p.grad for p in params]
        finally:
            for p, grad in zip(params, before, strict=True):
                p.grad = grad

    def _check_inputs(self, inputs: Sequence[Tensor]) -> None:
        device = self.device.type
        _check_casts(device)
        wanted = [(shape, dtype, device) for shape, dtype in self._role.inputs.values()]
        given = [(tuple(x.shape), x.dtype, x.device.type) for x in inputs]
        if given == wanted:
            return
        names = list(self._role.inputs)
        expected = [f"{n}: {_typed(*w)}" for n, w in zip(names, wanted, strict=True)]
        got = [_typed(*each) for each in given]
        raise RunError(
            where="step",
            what=f"expected ({', '.join(expected)}), got ({', '.join(got)})",
            why="the program was compiled for one global batch",
            do="Pass the whole batch on every rank, or compile for this shape.",
        )

    def _check_numbers(self) -> None:
        """Look whether the script has changed a number that the model was compiled with.

        All of them at the first steps, later some at each step, so that it takes no time.
        """
        first = self._steps < FIRST_STEPS
        changes = self._numbers.all_changes() if first else self._numbers.changes()
        self._steps += 1
        if changes:
            raise RunError(
                where="step",
                what="; ".join(changes[:4]),
                why="a program has the numbers of the model as they were when it was compiled",
                do="Compile again, make it an input of the step, or a buffer.",
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Stage:
        """Apply ``.to()`` and alike to the rank's own module, then register its tensors again."""
        self._check_dtypes_stay(fn)
        self._rank_step._apply(fn, recurse)
        self._tensors.apply(fn)
        self._show_tensors()
        return self

    def _has_stages(self) -> bool:
        """Whether the program has several pipeline stages, on this rank or on others."""
        return self.pipeline is not None or len(getattr(self._rank_step, "stages", ())) > 1

    def _check_one_stage(self) -> None:
        if self._has_stages():
            raise RunError(
                where="stage(...)",
                what="a program with several pipeline stages has no loss.backward()",
                why="its schedule mixes forward and backward of the microbatches",
                do="Call stage.step(...): it returns the loss and adds to every .grad.",
            )

    def _check_dtypes_stay(self, fn: Callable[[Tensor], Tensor]) -> None:
        if not self._has_stages():
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in self._tensors.held.values()):
            new = fn(torch.empty(0, dtype=dtype, device=self.device)).dtype
            if new != dtype:
                raise RunError(
                    where=f".to({new})",
                    what=f"the program holds {dtype_name(dtype)}",
                    why="what its stages send each other was compiled with these dtypes",
                    do="Convert the model and compile it again; another device is fine.",
                )

    def _show_tensors(self) -> None:
        """Register this rank's tensors as parameters and buffers under the user's dotted names."""
        for registered in (self._modules, self._parameters, self._buffers):
            registered.clear()
        self._tensors.read(self._rank_step)
        for name, tensor, saved in self._tensors.named():
            _register(self, name, tensor, saved)


class _LossOfStep(torch.autograd.Function):
    """Computes a step's gradients together with the loss, and returns them in ``backward``."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], tuple[Tensor, list[Any]]], *params: Tensor) -> Tensor:
        loss, ctx.grads = run()
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Any, ...]:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RunError(
                where="loss.backward()",
                what="was called a second time",
                why="a step's gradients are handed out once, to save memory",
                do="Call the stage again.",
            )
        return None, *(None if g is None else g.mul_(d_loss.to(g.dtype)) for g in grads)


def _register(root: nn.Module, name: str, tensor: Tensor, saved: bool) -> None:
    """Register a tensor at a dotted name.

    Written into the tables directly, since ``register_parameter`` refuses names that Stage has as
    attributes (``step``).
    """
    *path, leaf = name.split(".")
    for part in path:
        child = root._modules.get(part)
        root._modules[part] = root = child if child is not None else nn.Module()
    if isinstance(tensor, nn.Parameter):
        root._parameters[leaf] = tensor
        return
    root._buffers[leaf] = tensor
    if not saved:
        root._non_persistent_buffers_set.add(leaf)


def _check_casts(device: str) -> None:
    """RunError where a program's ops would get other dtypes than they were compiled with."""
    _check_default_dtype()
    if torch.is_autocast_enabled(device):
        raise RunError(
            where="step",
            what=f'it runs inside of torch.autocast("{device}")',
            why="the casts of a program are those that its loss made when it was compiled",
            do="Enter autocast in the loss that is compiled, and call step outside of it.",
        )


def _check_default_dtype() -> None:
    """RunError where tensors of a program that name no dtype would not be float32."""
    default = torch.get_default_dtype()
    if default != torch.float32:
        raise RunError(
            where="torch.get_default_dtype()",
            what=f"the default dtype is {default}",
            why="the program was compiled with float32 as the default of what names no dtype",
            do="Call torch.set_default_dtype(torch.float32) before it is loaded and run.",
        )


def _typed(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> str:
    return f"{dtype_name(dtype)}{list(shape)} on {device}"
