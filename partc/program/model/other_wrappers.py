"""What scripts ask of DDP, FSDP, DeepSpeed and others: what to write for a stage in its place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from partc.errors import RunError, UsageError

_WRAPPERS = {  # modules of torch that walk through what they are to wrap: the wrapper
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp._init_utils": "FullyShardedDataParallel",
}
_COMPOSED = "torch.distributed._composable.contract"  # of fully_shard and its like
_FSDP = "torch.distributed.fsdp."
OF_PARALLELIZE = "a model that partc.parallelize has made"
CALL_IT = "call the model that parallelize gave"
_NEAR = 6  # callers that are asked

HABITS = {  # what scripts ask of other wrappers: what to do with a stage
    "generate": "Write the loop over stage(ids) behind stage.eval(), as docs/how-to/"
    "shapes-and-modes.md does; or load stage.full_state_dict() into the model, and generate there.",
    "clip_grad_value_": "Call torch.nn.utils.clip_grad_value_(stage.parameters(), value).",
    "loss": "Take loss = stage.step(*batch), which computes the gradients too; the loss alone is "
    "stage.eval_step(*batch).",
    "train_step": "Take loss = stage.step(*batch), and optimizer.step() behind it.",
    "optimizer": "A script makes its own: torch.optim.AdamW(stage.parameters()).",
    "load": "Weights go through stage.load_full(model, a state dict, or files); a checkpoint is "
    "read by partc.load_checkpoint(folder, stage, optimizer).",
    "load_checkpoint": "Call partc.load_checkpoint(folder, stage, optimizer).",
    "save": "Call partc.save_checkpoint(folder, stage, optimizer); stage.full_state_dict() gives "
    "the weights alone, and program.save(folder) writes the program.",
    "save_checkpoint": "Call partc.save_checkpoint(folder, stage, optimizer).",
    "backward": "Leave it out: stage.step(...) has computed the gradients.",
    "module": "Leave .module out: a stage is no wrapper, and has the model's attributes itself.",
    "no_sync": "Leave it out: gradients add up until zero_grad(); or compile with microbatches=.",
    "register_comm_hook": "What is sent stands in the plan: [compress] rounds gradients, or thins "
    "them out (docs/reference/plan.md).",
    "join": "Leave it out: model.loader(dataset) deals out all rows, and partial= says what "
    "becomes of a batch with fewer (docs/how-to/shapes-and-modes.md).",
    "join_hook": "Leave Join out: model.loader(dataset) deals out all rows, and partial= says "
    "what becomes of a batch with fewer (docs/how-to/shapes-and-modes.md).",
    "summon_full_params": "Read whole tensors from full_state_dict(), which all ranks call; a "
    "parameter is param.full_tensor().",
    "unshard": "Leave it out: the program gathers weights where it needs them; [gather] in the "
    "plan says for how long.",
    "reshard": "Leave it out: [gather] in the plan says how long gathered weights live.",
    "set_requires_gradient_sync": "Leave it out: gradients add up until zero_grad(); or compile "
    "with microbatches=.",
    "set_is_last_backward": "Leave it out: every backward adds up the gradients of all ranks.",
}


class NoAttributeError(UsageError, AttributeError):
    """A stage was asked for what neither it nor its model has; ``hasattr`` says no."""


def of_another_wrapper(name: str) -> NoAttributeError:
    """The refusal of a method of DDP or FSDP on a model that ``parallelize`` has made."""
    return NoAttributeError(
        where=name, what="a model that partc.parallelize has made has no such method",
        why="it is of another way to train on several ranks", do=HABITS[name],
    )  # fmt: skip


class NotWrapped(nn.Module):
    """A module that refuses torch's other ways to train on several ranks, before they change it."""

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        check_not_wrapped("a stage, which partc has made", "call the stage itself")
        return super().named_parameters(*args, **named)

    def named_modules(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Module]]:
        check_not_wrapped("a stage, which partc has made", "call the stage itself")
        found: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **named)
        return found

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        check_not_wrapped("a stage, which partc has made", "call the stage itself")
        return super().named_children()


def check_not_wrapped(given: str = OF_PARALLELIZE, do: str = CALL_IT) -> None:
    """RunError where DDP, FSDP or fully_shard asks for the tensors or modules of what is given."""
    frame: Any = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is None:
            return
        asks = frame.f_globals.get("__name__", "")
        if asks in _WRAPPERS:
            raise wrapped_again(_WRAPPERS[asks], given, do)
        if frame.f_code.co_name == "set_state_dict_type" and asks.startswith(_FSDP):
            raise _no_type_of_states(given)
        if asks == _COMPOSED:
            raise wrapped_again(
                getattr(frame.f_locals.get("func"), "__name__", "fully_shard"), given, do
            )
        frame = frame.f_back


def wrapped_again(wrapper: str, given: str = OF_PARALLELIZE, do: str = CALL_IT) -> RunError:
    """The refusal of a wrapper of torch's around a model that partc has made."""
    return RunError(
        where=wrapper, what=f"it is given {given}",
        why="its steps run on all ranks and add up their gradients already",
        do=f"Leave {wrapper} out, and {do}.",
    )  # fmt: skip


def _no_type_of_states(given: str) -> RunError:
    return RunError(
        where="FullyShardedDataParallel.state_dict_type",
        what=f"it is given {given}",
        why="FSDP has not sharded it, and knows no other form of its states",
        do="Leave it out: model.full_state_dict() on all ranks gives whole weights, and "
        "model.full_optim_state_dict(optimizer) the optimizer's states.",
    )


def of_zero() -> RunError:
    """The refusal of torch's optimizer whose states are in pieces."""
    return RunError(
        where="ZeroRedundancyOptimizer",
        what="it is made over the parameters of a model that partc has made",
        why="it gives whole parameters to ranks, and sends them from one to all; a plan shards "
        "the states of any optimizer",
        do='Make the optimizer itself, torch.optim.AdamW(model.parameters()), with plan="zero1".',
    )


def is_zero(optimizer: object) -> bool:
    """Whether an optimizer is torch's ZeroRedundancyOptimizer, which may not be importable."""
    return type(optimizer).__name__ == "ZeroRedundancyOptimizer"


def asks_zero() -> bool:
    """Whether that optimizer runs now."""
    frame: Any = sys._getframe(1)
    while frame is not None and not is_zero(frame.f_locals.get("self")):
        frame = frame.f_back
    return frame is not None
