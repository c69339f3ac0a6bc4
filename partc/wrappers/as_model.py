"""A prepared model with the parameters, modules and attributes of the model, or of its stage."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from partc.data.same_rows import watch_samplers
from partc.data.share import Division
from partc.errors import RunError, UsageError
from partc.plan.batch import data_axes
from partc.plan.mesh import ISLAND, Mesh
from partc.plan.sharding import cut
from partc.program import Program
from partc.program.model.other_wrappers import (
    HABITS,
    check_not_wrapped,
    of_another_wrapper,
    wrapped_again,
)
from partc.program.not_a_stage import no_stage_yet
from partc.program.optimizer.optimizers import check_is_optimizer
from partc.program.optimizer.state_form import check_state
from partc.program.reading import division_of, rank_or_own
from partc.program.stage.runtime import Stage
from partc.program.tensors.copies import copied
from partc.program.tensors.elsewhere import other_weights
from partc.wrappers.prepared import Prepared, is_other_weight
from partc.wrong_calls import check_whole_number, known_arguments

_OWN = (
    "module", "training", "program", "_whole", "_how", "_device_type", "_stage", "_evaluated",
    "_moved", "_draws", "_losses", "_batch_dims", "_seen", "_device", "_called", "_unstepped",
)  # fmt: skip


class AsModel(Prepared):
    """What a script asks of a model that is wrapped: of the model before its first step, and of its
    stage behind it. ``program`` is what was compiled, from the first step on.
    """

    program: Program

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        watch_samplers()  # which the script begins to read before the first step

    @property
    def module(self) -> Any:  # type: ignore[override]
        """This model itself, as scripts for DDP have it: ``model.module.state_dict()``."""
        return self

    @property
    def data_world(self) -> int:
        """DistributedSampler's ``num_replicas``: into how many pieces ranks divide the batch."""
        division = self._division()
        return division.world * division.mesh.islands

    @property
    def data_rank(self) -> int:
        """DistributedSampler's ``rank``: the number of this rank's piece."""
        return self._division().rank(rank_or_own(None))

    def _division(self) -> Division:
        """As the program divides its batch; before there is one, over all axes of data."""
        if "program" in vars(self):
            return division_of(self.program)
        mesh = Mesh.of(self._how.mesh)
        if mesh.is_open:
            raise _open(mesh)
        return Division(mesh, {axis: cut(0) for axis in data_axes(mesh) if axis != ISLAND})

    def state_dict(self, **named: Any) -> OrderedDict[str, Any]:  # type: ignore[override]
        """The model's own state dict, whole; all ranks call this together.

        Behind the first step its tensors are copies, of which writes are noticed.
        """
        found = super().state_dict(**named)
        if self._stage is None:
            return found
        self._stage.writes.check()
        pairs = ((name, copied(x, name, self._stage.writes)) for name, x in found.items())
        return OrderedDict(pairs)

    @known_arguments
    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's state dict with whole tensors, as of a ``Stage``."""
        return super().state_dict()

    @known_arguments
    def full_optim_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state as of one process, as of a ``Stage``."""
        check_is_optimizer(optimizer)
        if self._stage is None:
            return optimizer.state_dict()
        return dict(self._stage.full_optim_state_dict(optimizer))

    @known_arguments
    def load_full_optim_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Take a state as of one process, as of a ``Stage``."""
        check_is_optimizer(optimizer)
        check_state(state_dict, "load_full_optim_state_dict")
        if self._stage is None:
            optimizer.load_state_dict(state_dict)
        else:
            self._stage.load_full_optim_state_dict(optimizer, state_dict)

    @known_arguments
    def step_on_pieces(self, optimizer: Optimizer) -> Optimizer:
        """As of a ``Stage``; an optimizer that follows the model steps so by itself."""
        check_is_optimizer(optimizer)
        return optimizer if self._stage is None else self._stage.step_on_pieces(optimizer)

    def seed(self, seed: int, step: int = 0) -> None:
        """Decide the steps' random numbers, as of a ``Stage``."""
        self._draws = check_whole_number(seed, "seed", -(2**63)), step
        if self._stage is not None:
            self._stage.seed(seed, step)

    def train(self, mode: bool = True) -> Self:
        self._held.train(mode)
        self.training = mode
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        self._held.apply(fn)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self._held._apply(fn, recurse)
        return self

    def named_parameters(self, *args: Any, **named: Any) -> Any:
        check_not_wrapped()
        return self._held.named_parameters(*args, **named)

    def named_buffers(self, *args: Any, **named: Any) -> Any:
        return self._held.named_buffers(*args, **named)

    def named_modules(self, *args: Any, **named: Any) -> Any:
        check_not_wrapped()
        return self._held.named_modules(*args, **named)

    def named_children(self) -> Any:
        check_not_wrapped()
        return self._held.named_children()

    def __getitem__(self, key: Any) -> Any:
        return self._held[key]  # type: ignore[index]

    def __setitem__(self, key: Any, value: Any) -> None:
        held: Any = self._held
        held[key] = value

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            self._unstepped.check(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_ddp_"):  # which DistributedDataParallel asks for first
                raise wrapped_again("DistributedDataParallel") from None
            if name == "program" or (
                self._stage is None and not name.startswith("_") and hasattr(Stage, name)
            ):
                raise no_stage_yet(name) from None
            if self._stage is None and name in HABITS:
                raise of_another_wrapper(name) from None
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes of the model are set in it, or in the stage, which says what it thinks."""
        if name in _OWN or "_modules" not in vars(self):
            super().__setattr__(name, value)
        elif name in self._held._parameters and is_other_weight(value):
            raise other_weights(name, type(self._whole).__name__)
        else:
            setattr(self._held, name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._held.register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        self._held.register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._held.add_module(name, module)

    def _replicate_for_data_parallel(self) -> Any:
        raise wrapped_again("DataParallel")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the stage, of which averages are made; all ranks call this together."""
        if self._stage is None:
            raise no_stage_yet("a deep copy")
        return copy.deepcopy(self._stage, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._stage is not None:
            return self._stage.__reduce_ex__(protocol)
        raise RunError(
            where="pickle of a model that parallelize gave",
            what="it cannot be pickled",
            why="it is made for the ranks of this job; the model that it was given can be",
            do="Save model.state_dict(), or behind its first step model.full_state_dict() on all "
            "ranks; partc.save_checkpoint saves the optimizer, too.",
        )


def _open(mesh: Mesh) -> UsageError:
    return UsageError(
        where=f"mesh {mesh}", what="its axes are open",
        why="into how many pieces ranks divide the batch follows from axes that the first step "
        "chooses",
        do='Give the mesh axes, as "dp=8"; or compile at once: model.compile_for(*batch).',
    )  # fmt: skip
