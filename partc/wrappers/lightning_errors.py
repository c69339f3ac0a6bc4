"""What a strategy of Lightning refuses, and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from partc.errors import RunError, TraceError, UsageError
from partc.plan.mesh import Mesh
from partc.users_line import warn


def manual(module: Any) -> UsageError:
    return UsageError(
        where=f"{type(module).__name__}, automatic_optimization = False",
        what="manual optimization is not served",
        why="training_step would call optimizers and backward in the middle of what is one program",
        do="Return the loss from training_step; or write the loop without a Trainer, with model = "
        "partc.parallelize(model, mesh) for each model (a GAN's generator and its critic) in the "
        "place of DistributedDataParallel.",
    )


def ended_fit() -> UsageError:
    """The refusal of a checkpoint with optimizers whose states went with the ranks' shards."""
    return UsageError(
        where="trainer.save_checkpoint", what="the fit is over, and with it the optimizer's states",
        why="these are of the shards that ranks had; the module has whole weights again",
        do="Let ModelCheckpoint(save_last=True) save while the fit runs, or save in on_train_end; "
        "the weights alone are trainer.save_checkpoint(path, weights_only=True).",
    )  # fmt: skip


def check_devices(mesh: Mesh, world: int) -> None:
    """RunError unless a Trainer has started as many processes as the mesh has ranks."""
    if not mesh.is_open and world != mesh.num_ranks:
        raise RunError(
            where=f"Strategy, mesh {mesh}",
            what=f"the Trainer runs {world} processes, and the mesh has {mesh.num_ranks} ranks",
            why="each process is one rank",
            do=f"Write Trainer(devices={mesh.num_ranks}), or on several machines devices times "
            f"num_nodes; or a mesh of {world}.",
        )  # fmt: skip


def default_dtype(precision: str) -> UsageError:
    made = "module.double()" if precision.startswith("64") else "module.to(torch.bfloat16)"
    return UsageError(
        where=f"Trainer(precision={precision!r})",
        what="a precision that changes torch's default dtype is not served",
        why="a program runs where the default is float32, and tensors that a step makes without a "
        "dtype would have another one",
        do=f"Leave precision= out, train {made} on batches of that dtype, and name the dtypes of "
        'tensors that training_step makes; or take precision="bf16-mixed".',
    )


def other_division(cut: int, read: int) -> UsageError:
    return UsageError(
        where="the plan's [inputs]",
        what=f"they cut the batch into {cut} pieces, and loaders deal out {read}",
        why="loaders follow from the mesh, before there is a plan",
        do='Leave the batch to the data axes, or take Strategy(..., batch="global").',
    )


def warn_of_unfreezing(callbacks: Iterable[Any], module: Any) -> None:
    """Warn of a callback that has frozen what it is to train later: the refusal comes with the
    first step behind that, epochs later.
    """
    frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
    for each in callbacks if frozen else ():
        if any(kind.__name__ == "BaseFinetuning" for kind in type(each).__mro__):
            warn(
                f"partc: {type(each).__name__} has frozen {len(frozen)} parameters "
                f"({frozen[0]}, ...) before the step is compiled, so that the program has no "
                "gradients of them, and a step that is to train them later is refused. Freeze "
                "them in on_train_start, which comes behind the compile, in the place of "
                "freeze_before_training"
            )


def part_alone(path: str) -> RunError:
    return RunError(
        where=f"validation_step, {path or 'the module'}",
        what="it is computed without modules at which pipeline stages begin",
        why="all stages take part in a forward",
        do="Compute the whole model in one call: write it as forward, and call self(x).",
    )


def sets(module: Any, name: str) -> RunError:
    return RunError(
        where=f"{type(module).__name__}.{name}",
        what="a step sets it, and a program does not",
        why="a program computes tensors and runs no Python of the model",
        do=f'Return it beside the loss ({{"loss": loss, "{name}": ...}}), and set it in '
        "on_train_batch_end, which is given what training_step returns.",
    )


def logged_number(line: str, module: str) -> TraceError | None:
    """The refusal of a line that logs the value of a tensor, and not the tensor; None of others."""
    logs = re.search(r"\b(log|log_dict|print)\(", line)
    if not logs or not re.search(r"\.(item|tolist|numpy)\(|\b(float|int)\(|:[.\d]+f\}", line):
        return None
    return TraceError(
        where=f"{module}.training_step ({line})",
        what="it logs the value of a tensor, which a step has when it is over",
        why="a program is the same in every step, and no Python of training_step runs in it",
        do="Log the tensor itself, self.log('loss', loss): its value is logged behind the step; "
        "print in on_train_batch_end.",
    )
