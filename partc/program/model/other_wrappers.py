"""What scripts ask of DDP, FSDP, DeepSpeed and others: what to write for a stage in its place."""

from __future__ import annotations

from partc.errors import UsageError

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
