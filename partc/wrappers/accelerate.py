"""An ``Accelerator`` whose models train under a plan: accelerate's, with a mesh and a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType, DynamoBackend
from torch import Tensor, nn
from torch.utils.data import DataLoader

from partc.errors import RunError, UsageError
from partc.plan.mesh import Mesh, MeshLike
from partc.program.choices import check_fillers
from partc.program.ranks.handshake import check_world, world_size
from partc.trace.no_model import check_model
from partc.users_line import warn
from partc.wrappers.dealing import DataRanks, dealt, drawn_seed, in_one_order
from partc.wrappers.how import How
from partc.wrappers.optimizer import Optimizer, Scheduler
from partc.wrappers.prepared import Prepared
from partc.wrappers.ranks import OnMesh
from partc.wrappers.said import (
    check_compiles_once,
    check_known,
    check_loss,
    check_no_plugins,
    check_outputs,
    check_said,
    in_our_words,
)
from partc.wrappers.stray import not_prepared, trained_beside
from partc.wrappers.undivided import Watched
from partc.wrong_calls import as_path, check_whole_number, known_arguments, quoted

OTHER_WAYS = ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "deepspeed_plugins")
_NO_FLOAT16 = (
    'partc: mixed_precision="fp16" says nothing on CPUs: accelerate has float16 on GPUs alone, and '
    'the steps are computed in float32. Take mixed_precision="bf16", TrainingArguments(bf16=True), '
    "or leave it out"
)
KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Accelerator(OnMesh):
    """As accelerate's, with models compiled for a mesh by a plan.

    Args:
        mesh: the axes of ranks, as for ``partc.compile``; none is left open.
        plan: as for ``partc.compile``.
        loss: ``loss(model, *inputs)``, for models that do not return it. The script then calls
            ``loss = model(*inputs)``.
        outputs: what training steps return of the model's results beside the loss.
        pad: by the name of an input the number that fills it up to the longest of all ranks.
        options: further arguments of ``partc.compile``, such as ``{"microbatches": 4}``.
        named: as for accelerate's.

    Raises:
        UsageError: another way to distribute or to compile was configured too.

    Example::

        accelerator = Accelerator(mesh="dp=2,tp=2", plan="fsdp+megatron")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    divides = False  # a loss, while ``backward`` runs

    @known_arguments
    def __init__(
        self, *, mesh: MeshLike, plan: Any = "auto", loss: Callable[..., Any] | None = None,
        outputs: Sequence[str] = (), pad: Mapping[str, float] | None = None,
        options: Mapping[str, Any] | None = None, **named: Any,
    ) -> None:  # fmt: skip
        check_known("Accelerator", named, type(self), Accelerator, {})
        check_said("Accelerator", mesh, plan, options)
        check_loss("Accelerator", loss)
        check_outputs("Accelerator", outputs, loss)
        check_fillers("Accelerator", pad)
        plugin = getattr(named.get("dynamo_plugin"), "backend", DynamoBackend.NO)
        compiling = {**named, "dynamo_plugin": plugin != DynamoBackend.NO}
        check_compiles_once("Accelerator", compiling, ("dynamo_backend", "dynamo_plugin"))
        check_no_plugins("Accelerator", named, lambda name: name in OTHER_WAYS)
        steps = named.get("gradient_accumulation_steps", 1)
        check_whole_number(steps, "Accelerator(gradient_accumulation_steps=...)", 1)
        self.how = How(mesh, plan, loss, outputs, pad or {}, options or {})
        self.ranks = DataRanks.of(mesh)
        self._prepared: WeakSet[Prepared] = WeakSet()
        with in_our_words("Accelerator()", "Correct the argument: it is one of accelerate's own."):
            super().__init__(**named)
        if self.state.num_processes == 1 < world_size():
            raise _uncounted(world_size())
        check_world(Mesh.of(mesh), self.state.num_processes)
        backend = self.state.dynamo_plugin.backend
        if self.distributed_type not in KINDS or backend != DynamoBackend.NO:
            raise _other_ways(self.distributed_type.value, backend.value)
        if self.mixed_precision == "fp16" and not self.native_amp:
            warn(_NO_FLOAT16)

    # prepare ---------------------------------------------------------------------------------
    def prepare(self, *args: Any, **named: Any) -> Any:
        """As accelerate's; a model is compiled when it is called first."""
        _check_prepared(args)
        found = super().prepare(*args, **named)
        for optimizer in self._optimizers:
            optimizer.find(self._prepared)
        for scheduler in self._schedulers:
            scheduler.check(self._optimizers)
        return found

    def prepare_model(self, model: nn.Module, *args: Any, **named: Any) -> nn.Module:
        """A model that is called as this one, and becomes a stage."""
        check_model(model, "prepare")
        known = next((p for p in self._prepared if model is p or model is p._whole), None)
        if known is None:
            super().prepare_model(model, device_placement=False, evaluation_mode=True)
            self._models.pop()
            known = Watched(model, self.how, self.device.type, self)
            self._prepared.add(known)
        if not any(each is known for each in self._models):
            self._models.append(known)
        return known

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        if isinstance(optimizer, Optimizer):
            return super().prepare_optimizer(optimizer)
        self._optimizers.append(Optimizer(optimizer, device_placement=False, scaler=self.scaler))
        return self._optimizers[-1]

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As accelerate's: it steps as often as there are pieces of a batch."""
        if not isinstance(scheduler, Scheduler):
            made = super().prepare_scheduler(scheduler)
            self._schedulers[-1] = scheduler = Scheduler(made, self.num_processes)
        return scheduler

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **named: Any) -> Any:
        """A loader of this rank's rows, in one order on all ranks."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader)
        seedable, data_seed = self.use_seedable_sampler, self.dataloader_config.data_seed
        seed = self.of_first(torch.initial_seed() if seedable else drawn_seed())
        if not seedable:
            in_one_order(data_loader, seed)
        loader = prepare_data_loader(
            dealt(data_loader, self.ranks, self.process_index, self.split_batches), self.device,
            1, 0, put_on_device=True, dispatch_batches=False,
            use_seedable_sampler=seedable, data_seed=seed if data_seed is None else data_seed,
            non_blocking=self.non_blocking, use_stateful_dataloader=self.use_stateful_dataloader,
        )  # fmt: skip
        self._dataloaders.append(loader)
        return loader

    # the loop --------------------------------------------------------------------------------
    def backward(self, loss: Tensor, **named: Any) -> None:
        """As accelerate's; RunError for a loss of eval mode, which has no gradients."""
        if not isinstance(loss, Tensor):
            raise UsageError(
                where="backward", what=f"the loss is {quoted(loss)}", why="it is a tensor",
                do="Pass what the model returned: accelerator.backward(outputs.loss).",
            )  # fmt: skip
        if not loss.requires_grad:
            raise _no_gradient()
        stray = trained_beside(loss, self._prepared)
        if stray is not None:
            raise not_prepared(stray)
        self.divides = True
        try:
            super().backward(loss, **named)
        finally:
            self.divides = False

    def save_state(self, *args: Any, **named: Any) -> Any:
        """As accelerate's; UsageError for a folder where nothing can be written."""
        do = "Name a folder where you may write, with room on its disk."
        with in_our_words(f"save_state({', '.join(map(quoted, args))})", do):
            return super().save_state(*args, **named)

    def save_model(self, model: Any, save_directory: Any, *args: Any, **named: Any) -> Any:
        """As accelerate's; UsageError for a folder where nothing can be written."""
        do = "Name a folder where you may write, with room on its disk."
        with in_our_words(f"save_model({quoted(save_directory)})", do):
            return super().save_model(model, save_directory, *args, **named)

    def load_state(self, input_dir: Any = None, *args: Any, **named: Any) -> None:
        """As accelerate's; UsageError for a folder that ``save_state`` did not write."""
        if input_dir is not None:
            as_path(input_dir, "load_state")
        do = "Name the folder that save_state wrote, of the same models and optimizers."
        with in_our_words(f"load_state({quoted(input_dir)})", do):
            super().load_state(input_dir, *args, **named)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """As accelerate's, over all ranks' pieces and all stages of a pipeline."""
        if isinstance(parameters, nn.Module):
            raise UsageError(
                where="clip_grad_norm_", what=f"it is given {quoted(parameters)}",
                why="it takes parameters", do="Pass model.parameters().",
            )  # fmt: skip
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for prepared in self._prepared:
            stage, mine = prepared._stage, {id(p) for p in prepared.parameters()}
            if stage is not None and mine == {id(p) for p in given}:
                self.unscale_gradients()
                return stage.clip_grad_norm_(max_norm, norm_type)
        return super().clip_grad_norm_(given, max_norm, norm_type)

    def unwrap_model(self, model: Any, *args: Any, **named: Any) -> Any:
        """A prepared model as it is: it has the attributes and the whole state dict of its own."""
        return model if isinstance(model, Prepared) else super().unwrap_model(model, *args, **named)


def _check_prepared(given: tuple[Any, ...]) -> None:
    """UsageError for nothing, and for a class in the place of a model."""
    wrong = next((quoted(x) for x in given if isinstance(x, type)), "" if given else "nothing")
    if wrong:
        raise UsageError(
            where="prepare", what=f"it is given {wrong}",
            why="it takes models, optimizers, loaders and schedulers that were made",
            do="Write model, optimizer, loader = accelerator.prepare(model, optimizer, loader).",
        )  # fmt: skip


def _other_ways(distributed: str, backend: str) -> UsageError:
    compiling = f"torch.compile by {backend}, by ACCELERATE_DYNAMO_BACKEND or its file"
    is_known = distributed in [kind.value for kind in KINDS]
    return UsageError(
        where="Accelerator",
        what=f"accelerate is configured for {compiling if is_known else distributed}",
        why="the plan says how tensors are sharded and what is compiled",
        do="Leave this out of accelerate's configuration (accelerate env shows it); "
        'plan="fsdp" shards as FSDP, options={"compile": "inductor"} compiles.',
    )


def _uncounted(started: int) -> RunError:
    return RunError(
        where="Accelerator()",
        what=f"accelerate counts one process, where {started} were started",
        why="without GPUs it counts them only where it is told that they compute on CPUs, when "
        "anything of it is first made",
        do="Say Accelerator(..., cpu=True); with a Trainer TrainingArguments(..., use_cpu=True).",
    )


def _no_gradient() -> RunError:
    return RunError(
        where="accelerator.backward(loss)",
        what="the loss has no gradients",
        why="the model was called in eval mode, in which from_pretrained returns it",
        do="Call model.train() before.",
    )
