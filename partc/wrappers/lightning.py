"""``Trainer(strategy=Strategy("dp=2", plan="fsdp"))``: a LightningModule trained by a program.

In: the mesh and the plan. Out: a strategy for ``lightning.pytorch``, or ``pytorch_lightning`` where
the script has imported that.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import Metric

from partc.api import compile as compile_program
from partc.data.share import Division
from partc.errors import PlanError, RunError, UsageError
from partc.plan import Plan
from partc.plan.batch import data_axes
from partc.plan.mesh import PP, Mesh, MeshLike
from partc.plan.sharding import cut
from partc.program.optimizers import check_of_stage
from partc.wrappers.lightning_module import Compiled, logging
from partc.wrappers.lightning_step import loss_of, replay

if "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules:
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities.seed import isolate_rng
else:
    from pytorch_lightning.strategies import DDPStrategy
    from pytorch_lightning.utilities.seed import isolate_rng

SEEDED = (
    "partc_seeded"  # in a checkpoint: the seed of random numbers, and how many steps were taken
)


class Strategy(DDPStrategy):  # type: ignore[misc]
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

    def __init__(
        self, mesh: MeshLike, plan: Any = "auto", *, batch: str = "local", **options: Any
    ) -> None:
        super().__init__()
        self._mesh, self._options = Mesh.of(mesh), {"plan": plan, "batch": batch, **options}
        self._rows = Division(self._mesh, {axis: cut(0) for axis in data_axes(self._mesh)})
        self._partial: Any = "replicate" if batch == "global" else None
        self._compiled: Compiled | None = None
        self._stage: Any = None
        self._failed, self._num_programs = False, 0

    # begun and ended -------------------------------------------------------------------------
    def setup(self, trainer: Any) -> None:
        if self._options["batch"] == "global":  # in the order of one process
            trainer._accelerator_connector.use_distributed_sampler = False
            torch.set_rng_state(self.broadcast(torch.get_rng_state()))
        self._share_metrics()
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
            raise _manual(self.lightning_module)
        inputs, is_whole = self._example(trainer), self._options["batch"] == "global"
        autocast = self.precision_plugin.forward_context
        compiled, loss = Compiled(self.lightning_module, autocast), loss_of(autocast)
        with compiled.compiling() as model:
            program = compile_program(model, self._mesh, inputs, loss=loss, **self._options)
            self._stage = program.module(str(self.root_device), partial=self._partial)
        if not is_whole and program.data_world != self._rows.world:
            raise _other_division(program.data_world, self._rows.world)
        self._num_programs = 0
        self._check_notes()
        self._stage.seed(int(os.environ.get("PL_GLOBAL_SEED", "0")))
        compiled.show(self._stage.like_model)
        self._compiled = compiled

    def _example(self, trainer: Any) -> tuple[Any, ...]:
        """The arguments of the first step; the loaders are made again when training begins."""
        loop, module = trainer.fit_loop, self.lightning_module
        with isolate_rng():
            loop.setup_data()
            batch, *_ = next(iter(loop._combined_loader))
            loop._combined_loader = None
        batch = self.batch_to_device(module._on_before_batch_transfer(batch))
        named = signature(module.training_step).parameters
        return (batch, torch.tensor(0)) if len(named) > 1 else (batch,)

    def _check_notes(self) -> None:
        """RunError if a step sets an attribute of the module, which no program does."""
        programs = [*self._stage._own.programs.values()][self._num_programs :]
        self._num_programs += len(programs)
        for note in (note for each in programs for note in Plan.parse(each.plan).notes):
            if found := re.match(r"the step sets model\.(\w+);", note):
                raise _sets(self.lightning_module, found[1])

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

    # data ------------------------------------------------------------------------------------
    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self._rows.world, "rank": self._rows.rank(self.global_rank)}

    def process_dataloader(self, dataloader: Any) -> Any:
        """RunError for rows that an evaluation would count twice, to give all ranks as many."""
        sampler = getattr(dataloader, "sampler", None)
        if isinstance(sampler, DistributedSampler) and not self.lightning_module.trainer.training:
            dataset: Any = sampler.dataset
            rows = len(dataset)
            if sampler.total_size > rows:
                raise _counted_twice(rows, sampler.num_replicas)
        return dataloader

    def _copies(self) -> int:
        """How many ranks are given the same rows."""
        world: int = self.world_size
        return world // (1 if self._options["batch"] == "global" else self._rows.world)

    def _share_metrics(self) -> None:
        """Let torchmetrics join the rows of one rank of each piece of the batch, at steps too."""
        metrics = [part for part in self.lightning_module.modules() if isinstance(part, Metric)]
        ranks, is_whole = range(self.world_size), self._options["batch"] == "global"
        pieces = [0 if is_whole else self._rows.rank(rank) for rank in ranks]
        copies = [pieces[:rank].count(pieces[rank]) for rank in ranks]  # ranks before with the same
        for copy in sorted({*copies}) if metrics else ():
            group = dist.new_group([rank for rank in ranks if copies[rank] == copy])
            if copies[self.global_rank] == copy:
                for metric in metrics:
                    metric.process_group, metric.dist_sync_on_step = group, not is_whole

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As of DDP; in a sum rows count once, however many ranks are given them."""
        result = super().reduce(tensor, group, reduce_op)
        whole = isinstance(tensor, Tensor) and group is None and reduce_op == "sum"
        return result / self._copies() if whole else result

    # steps -----------------------------------------------------------------------------------
    def training_step(self, batch: Any, *place: int) -> Any:
        assert self._compiled is not None
        self._compiled.check_modes()
        with self._compiled.compiling():
            loss, extras = self._stage(batch, *map(torch.tensor, place))
        self._check_notes()
        return replay(self.lightning_module, loss, extras)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is None:
            return self._evaluated(super().validation_step, args, kwargs)
        state = self._stage._own.state
        before, state.mode = state.mode, "eval"
        try:
            with self._compiled.computing(self._part), self.precision_plugin.val_step_context():
                return self._evaluated(self.lightning_module.validation_step, args, kwargs)
        finally:
            state.mode = before
            self._check_notes()

    def _part(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """What a part of the model computes, by the stage's program."""
        try:
            return self._stage(path, *args, **kwargs)
        except PlanError as error:
            raise _part_alone(path) if PP in self._mesh.names else error from error

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().test_step, args, kwargs)

    def _evaluated(self, step: Any, args: Any, kwargs: Any) -> Any:
        with logging(self.lightning_module, of_all=self._options["batch"] == "local"):
            return step(*args, **kwargs)

    # checkpoints -----------------------------------------------------------------------------
    def lightning_module_state_dict(self) -> Any:
        if self._stage is None:
            return super().lightning_module_state_dict()
        return self._stage.full_state_dict()

    def optimizer_state(self, optimizer: Any) -> Any:
        return self._stage.full_optim_state_dict(getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if self._stage is not None:
            checkpoint[SEEDED] = list(self._stage.seeded)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if self._stage is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        self._stage.load_full(checkpoint["state_dict"], strict=strict)
        self._stage.seed(*checkpoint.get(SEEDED, self._stage.seeded))

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._stage.load_full_optim_state_dict(optimizer, state)


def _manual(module: Any) -> UsageError:
    return UsageError(
        where=f"{type(module).__name__}, automatic_optimization = False",
        what="manual optimization is not served",
        why="training_step would call optimizers and backward in the middle of what is one program",
        do="Return the loss from training_step, or write the loop with partc.compile.",
    )


def _other_division(cut: int, read: int) -> UsageError:
    return UsageError(
        where="the plan's [inputs]",
        what=f"they cut the batch into {cut} pieces, and loaders deal out {read}",
        why="loaders follow from the mesh, before there is a plan",
        do='Leave the batch to the data axes, or take Strategy(..., batch="global").',
    )


def _part_alone(path: str) -> RunError:
    return RunError(
        where=f"validation_step, {path or 'the module'}",
        what="it is computed without modules at which pipeline stages begin",
        why="all stages take part in a forward",
        do="Compute the whole model in one call: write it as forward, and call self(x).",
    )


def _sets(module: Any, name: str) -> RunError:
    return RunError(
        where=f"{type(module).__name__}.{name}",
        what="a step sets it, and a program does not",
        why="a program computes tensors and runs no Python of the model",
        do=f'Return it beside the loss ({{"loss": loss, "{name}": ...}}), and set it in '
        "on_train_batch_end, which is given what training_step returns.",
    )


def _counted_twice(rows: int, ranks: int) -> UsageError:
    return UsageError(
        where="a loader that validates or tests",
        what=f"its {rows} rows cannot be shared evenly by {ranks} data ranks",
        why="DistributedSampler reads some twice then, and metrics would not be those of the data",
        do='Take Strategy(..., batch="global"), where every rank reads all rows and computes its '
        "own, or a sampler of your own.",
    )
