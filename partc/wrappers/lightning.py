"""``Trainer(strategy=Strategy("dp=2", plan="fsdp"))``: a LightningModule trained by a program.

In: the mesh and the plan. Out: a strategy for ``lightning.pytorch``, or ``pytorch_lightning`` where
the script has imported that.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from inspect import signature
from typing import Any

import torch

from partc.api import compile as compile_program
from partc.errors import RunError
from partc.plan.field_kinds import check_fields
from partc.plan.mesh import Mesh, MeshLike
from partc.program.optimizer.optimizers import check_of_stage
from partc.program.ranks.group_backend import group_backend
from partc.wrappers.lightning_errors import (
    check_devices,
    default_dtype,
    manual,
    other_division,
    warn_of_unfreezing,
)
from partc.wrappers.lightning_module import Compiled
from partc.wrappers.lightning_served import ServedByStage
from partc.wrappers.lightning_step import loss_of, replay
from partc.wrappers.read_ahead import draws_kept
from partc.wrappers.said import check_said
from partc.wrong_calls import known_arguments

if "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules:
    from lightning.pytorch.utilities.seed import isolate_rng
else:
    from pytorch_lightning.utilities.seed import isolate_rng


class Strategy(ServedByStage):
    """Trains a LightningModule by a program of partc; validation runs inside of it too.

    Args:
        mesh: as of ``partc.compile``, with as many ranks as the trainer has processes.
        plan: as of ``partc.compile``.
        batch: ``"local"``: each data rank's loader gives its own rows, as under DDP; ``"global"``:
            the loaders of all ranks give the whole batch, as in one process.
        options: others of ``partc.compile`` (``microbatches``, ``recompute``, ...).

    Example::

        trainer = Trainer(devices=4, strategy=Strategy("dp=2,tp=2", plan="fsdp+megatron"))
        trainer.fit(module, loader)
    """

    restore_checkpoint_after_setup = True

    @known_arguments
    def __init__(
        self, mesh: MeshLike, plan: Any = "auto", *, batch: str = "local", **options: Any
    ) -> None:
        check_said("Strategy", mesh, plan, {"batch": batch, **options})
        check_fields({"batch": batch}, "Strategy")
        super().__init__(Mesh.of(mesh), is_whole=batch == "global")
        self._options = {"plan": plan, "batch": batch, **options}
        self._failed = False

    # begun and ended -------------------------------------------------------------------------
    def setup(self, trainer: Any) -> None:
        self.share_rows(trainer)
        if trainer.state.fn != "fit":
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        self.model_to_device()
        self._begin(trainer)
        self.setup_optimizers(trainer)
        for optimizer in self.optimizers:
            check_of_stage(optimizer, self._stage.parameters())
            with suppress(RunError):  # of one that is not elementwise: it steps on DTensors
                self._stage.step_on_pieces(optimizer)
        self.setup_precision_plugin()
        clip = self._stage.clip_grad_norm_
        self.precision_plugin.clip_grad_by_norm = lambda optimizer, value: clip(value)

    def _begin(self, trainer: Any) -> None:
        """Compile the step for the first batch, and give the module the stage's parameters."""
        if not self.lightning_module.automatic_optimization:
            raise manual(self.lightning_module)
        check_devices(self._mesh, self.world_size)
        precision = str(self.precision_plugin.precision)
        if precision.endswith("-true") and precision != "32-true":
            raise default_dtype(precision)
        warn_of_unfreezing(trainer.callbacks, self.lightning_module)
        inputs = self._example(trainer)
        autocast = self.precision_plugin.forward_context
        compiled, loss = Compiled(self.lightning_module, autocast), loss_of(autocast)
        with compiled.compiling() as model:
            options = {"backend": group_backend(self.root_device.type), **self._options}
            program = compile_program(model, self._mesh, inputs, loss=loss, **options)
            partial: Any = "replicate" if self._is_whole else None
            self._stage = program.module(str(self.root_device), partial=partial)
        if not self._is_whole and program.data_world != self._rows.world:
            raise other_division(program.data_world, self._rows.world)
        self._num_programs = 0
        self.check_notes()
        self._stage.seed(int(os.environ.get("PL_GLOBAL_SEED", "0")))
        compiled.show(self._stage.like_model)
        self._compiled = compiled

    def _example(self, trainer: Any) -> tuple[Any, ...]:
        """The arguments of the first step; the loaders are made again when training begins."""
        loop, module = trainer.fit_loop, self.lightning_module
        with isolate_rng(), draws_kept(loop._data_source.instance):
            loop.setup_data()
            batch, *_ = next(iter(loop._combined_loader))
            loop._combined_loader = None
        batch = self.batch_to_device(module._on_before_batch_transfer(batch))
        named = signature(module.training_step).parameters
        return (batch, torch.tensor(0)) if len(named) > 1 else (batch,)

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True  # other ranks may be elsewhere: nothing is gathered any more
        super().on_exception(exception)

    def teardown(self) -> None:
        """The module has whole weights again, those of the last step, as any tool expects."""
        module = self.lightning_module
        if self._compiled is not None:
            self._compiled.give_back(None if self._failed else self._stage.full_state_dict())
        self._compiled = self._stage = None
        if self._failed:
            self._lightning_module = None  # without weights it cannot be moved
        super().teardown()
        self._lightning_module, self._failed = module, False

    # steps -----------------------------------------------------------------------------------
    def training_step(self, batch: Any, *place: int) -> Any:
        assert self._compiled is not None
        self._compiled.check_modes()
        with self._compiled.compiling():
            loss, extras = self._stage(batch, *map(torch.tensor, place))
        self.check_notes()
        return replay(self.lightning_module, loss, extras)
