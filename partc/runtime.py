"""A program inside torchrun: this rank's ``nn.Module``, under the user's names."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from partc.clip import clip_gradients
from partc.dtensors import DTensors
from partc.errors import RunError
from partc.handshake import check_agreement, check_world, device_mesh, world_size
from partc.holders import Holders, from_first
from partc.mesh import PP, Mesh
from partc.program import Program
from partc.role import Role, Shard, dtype_name
from partc.weights import Source, check_names, check_shapes, match, whole_tensors


class Unmatched(NamedTuple):
    """What ``load_state_dict`` returns, as in torch."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def start_stage(program: Program, device: str = "cpu", mesh: DeviceMesh | None = None) -> Stage:
    """Join the run and build this rank's Stage; all ranks call this together."""
    check_world(program.mesh, world_size())
    here = _device_of(device)
    if not dist.is_initialized():
        _join(here)
    check_agreement(program, here)
    mesh = mesh or device_mesh(program.mesh, here.type)
    if mesh is not None and Mesh.of(mesh) != program.mesh:
        raise RunError(
            where=f"mesh {Mesh.of(mesh)}",
            what="is not the mesh of this program",
            why=f"it was compiled for {program.mesh}",
            do="Pass a DeviceMesh with these axes in this order, or none.",
        )
    return Stage(program, mesh, here)


class Stage(nn.Module):
    """One rank's share of a training step.

    Parameters and buffers are this rank's pieces, under their names in the user's model; a pipeline
    rank has those of its own stages. ``train`` and ``eval`` change nothing: the mode was compiled
    in.
    """

    _rank_step: Any  # the role's own module
    _held: dict[str, Tensor]  # every tensor of this rank by its name in the user's model

    def __init__(self, program: Program, mesh: DeviceMesh | None, device: torch.device) -> None:
        super().__init__()
        self._model, self.mesh = program.fingerprint, program.mesh
        self._role: Role = program.role(dist.get_rank())
        self._holders = Holders.of(program)
        self._groups = {n: mesh.get_group(n) for n in program.mesh.names} if mesh else {}
        self.coords = program.mesh.coords(dist.get_rank())
        self._dtensors = _dtensors(program.mesh, mesh, self.coords)
        # not registered as a child: its keys are not the user's names
        object.__setattr__(self, "_rank_step", self._role.build(mesh, device))
        self._aside = {
            name: torch.zeros(shard.shape, dtype=shard.dtype, device=device)
            for name, shard in self._holders.aside.items()
        }
        own = {shard.name: shard for shard in self._role.shards}
        self._shards = {**own, **self._holders.aside}
        self._show_tensors()
        self._set({n: t for n, t in program.constants.items() if n in self._shards})

    # running ---------------------------------------------------------------------------------
    def step(self, *inputs: Tensor) -> Tensor:
        """Global batch in, loss out; every parameter's ``.grad`` grows by its gradient."""
        self._check_inputs(inputs)
        loss: Tensor = self._rank_step.step(*inputs)
        return loss

    def forward(self, *inputs: Tensor) -> Any:
        """The loss, ready for ``.backward()``; of an inference program its results by name.

        A training program computes its gradients here already and hands them to autograd; under
        ``torch.no_grad()`` they are dropped. RunError if it has several pipeline stages.
        """
        if self._role.is_inference:
            self._check_inputs(inputs)
            with torch.no_grad():
                return self._rank_step(*inputs)
        self._check_one_stage()
        params = [p for p in self.parameters() if p.requires_grad]
        apply: Any = _LossOfStep.apply
        return apply(lambda: self._fresh_grads(params, inputs), *params)

    def seed(self, seed: int) -> None:
        """Seed dropout: equal on copies, different on pieces and stages; all ranks pass the same
        number."""
        if hasattr(self._rank_step, "seed"):
            self._rank_step.seed(seed)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` on the whole model; returns the norm before."""
        held = self._held
        params = [(held[s.name], self.is_first_copy(s)) for s in self._role.params]
        groups = list(self._groups.values())
        return clip_gradients(params, groups, max_norm, norm_type, error_if_nonfinite)

    # whole tensors ---------------------------------------------------------------------------
    def load_full(self, source: Source, *, strict: bool = True) -> None:
        """Take this rank's pieces from whole tensors: a model, a state dict, or safetensors files.

        A tied tensor may come under any of its names. Buffers that a model's state dict leaves out
        come from a model, otherwise they keep what was known when compiling.
        """
        self._load(whole_tensors(source), strict, self.shards)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the model's own state dict, whole, on the CPU; all ranks together.

        The names of a tied tensor have one tensor.
        """
        names = list(self._saved(self.shards))
        firsts = dict.fromkeys(map(self._first, names))
        whole = {first: self._whole(first).to("cpu", copy=True) for first in firsts}
        return {name: whole[self._first(name)] for name in names}

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors are."""
        return next(iter(self._held.values())).device

    @property
    def shards(self) -> Mapping[str, Shard]:
        """How every tensor is cut that some rank holds, by name."""
        return self._holders.shards

    @property
    def pipeline(self) -> Any:
        """The process group of the ranks with the other stages; None if there is none."""
        return self._groups.get(PP)

    def pieces(self) -> dict[str, tuple[Shard, Tensor]]:
        """Every tensor that this rank holds by name, with how it is cut from the whole."""
        held = self._held
        return {name: (shard, held[name]) for name, shard in self._shards.items()}

    def is_first_copy(self, shard: Shard) -> bool:
        """Whether this rank is the first of all that hold the same piece of this tensor."""
        return self._holders.is_first_copy(shard, self.coords)

    def is_first_stage(self, shard: Shard) -> bool:
        """Whether this rank is one of the first pipeline rank that holds this tensor."""
        return self._holders.is_first_stage(shard, self.coords)

    # checkpoints -----------------------------------------------------------------------------
    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """DTensors under the user's names, for torch.distributed.checkpoint; all ranks together.

        A pipeline rank gives its own stages' tensors, on the mesh without ``pp``. They share memory
        with the parameters, except those that ``partc.dtensors`` has to gather.
        """
        state = {} if destination is None else destination
        held = self._held
        for name in self._saved(self._shards):
            shard = self._shards[self._first(name)]
            state[prefix + name] = self._dtensors.make(
                shard, held[shard.name].detach(), self._gather
            )
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Unmatched:
        """Take values from whole tensors, or from DTensors of any mesh and placements."""
        return self._load(state_dict, strict, self._shards)

    # inside ----------------------------------------------------------------------------------
    def _load(self, given: Mapping[str, Any], strict: bool, needed: Collection[str]) -> Unmatched:
        """Check all names that some rank holds, so that all ranks agree, and take this rank's."""
        matched = match(given, list(self.shards), self._holders.aliases, self._model)
        matched = replace(matched, missing=[n for n in matched.missing if n in needed])
        if strict:
            check_names(matched)
        check_shapes(given, matched, {s.name: s.shape for s in self.shards.values()})
        self._set({name: given[key] for name, key in matched.found.items()})
        return Unmatched(matched.missing, matched.unexpected)

    @torch.no_grad()
    def _set(self, given: Mapping[str, Tensor]) -> None:
        """Copy this rank's pieces of whole tensors, or of DTensors, into place."""
        held = self._held
        for name, value in given.items():
            shard = self._shards.get(name)
            if shard is None:
                if isinstance(value, DTensor):
                    value.full_tensor()  # for the ranks that hold it: they cannot gather it alone
            elif isinstance(value, DTensor):
                held[name].copy_(self._dtensors.piece(shard, value))
            else:
                held[name].copy_(shard.take(value, self.mesh, self.coords))

    def _whole(self, name: str) -> Tensor:
        """A tensor joined by the first pipeline rank that holds it, on all of them."""
        shard, first = self.shards[name], self._holders.first[name]
        joined = None
        if self.is_first_stage(shard):
            joined = shard.join(self._held[name].detach(), self._gather)
        if self.pipeline is None:
            assert joined is not None
            return joined
        return from_first(joined, shard, first, self.pipeline, self.device)

    def _gather(self, piece: Tensor, axis: str) -> list[Tensor]:
        """What every rank along an axis holds."""
        piece = piece.contiguous()
        pieces = [torch.empty_like(piece) for _ in range(self.mesh.size(axis))]
        dist.all_gather(pieces, piece, group=self._groups[axis])
        return pieces

    def _fresh_grads(
        self, params: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The loss and the gradients of one step, while every ``.grad`` stays as it was."""
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Stage:
        """``.to()`` and its like act on the rank's module; the view by the user's names follows."""
        self._check_dtypes_stay(fn)
        self._rank_step._apply(fn, recurse)
        self._aside = {name: fn(tensor) for name, tensor in self._aside.items()}
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
        for dtype in dict.fromkeys(tensor.dtype for tensor in self._held.values()):
            new = fn(torch.empty(0, dtype=dtype, device=self.device)).dtype
            if new != dtype:
                raise RunError(
                    where=f".to({new})",
                    what=f"the program holds {dtype_name(dtype)}",
                    why="what its stages send each other was compiled with these dtypes",
                    do="Convert the model and compile it again; another device is fine.",
                )

    def _show_tensors(self) -> None:
        """Register the rank's tensors in a tree of the user's module names."""
        for registered in (self._modules, self._parameters, self._buffers):
            registered.clear()
        self._held = {**self._role.tensors(self._rank_step), **self._aside}
        held, saved = self._held, set(self._saved(self._shards))
        seconds = {n: f for n, f in self._holders.aliases.items() if f in held}
        for name, first in {**{n: n for n in self._shards}, **seconds}.items():
            _register(self, name, held[first], name in saved)

    def _first(self, name: str) -> str:
        return self._holders.aliases.get(name, name)

    def _saved(self, held: Collection[str]) -> Iterator[str]:
        """The names of the model's own state dict for what is held, in the model's order."""
        return (n for n in self._model.saved_names() if self._first(n) in held)


class _LossOfStep(torch.autograd.Function):
    """A step whose gradients are computed with its loss and handed out on ``backward``."""

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
    """Put a tensor at a dotted name; straight into the tables, as our methods own some names."""
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


def _typed(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> str:
    return f"{dtype_name(dtype)}{list(shape)} on {device}"


def _dtensors(mesh: Mesh, devices: DeviceMesh | None, coords: Mapping[str, int]) -> DTensors:
    """Tensors are cut over the axes without ``pp``."""
    cutting = mesh.without_pipeline()
    if devices is not None and cutting != mesh:
        devices = devices[cutting.names] if cutting.names else None
    return DTensors(cutting, devices, coords)


def _device_of(device: str) -> torch.device:
    """``"cuda"`` means this process's own GPU."""
    here = torch.device(device)
    if here.type == "cuda" and here.index is None:
        here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if here.type == "cuda":
        torch.cuda.set_device(here)
    return here


def _join(device: torch.device) -> None:
    """Start the default process group; a single process needs no launcher."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
