"""A transformers ``Trainer`` that trains under a plan of partc.

``from partc.wrappers.trainer import Trainer`` stands where ``from transformers import Trainer``
stood; it takes the mesh and the plan besides. It trains with partc's ``Accelerator``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from partc.errors import UsageError
from partc.plan.mesh import MeshLike
from partc.trace.no_model import check_model
from partc.wrappers.accelerate import Accelerator
from partc.wrappers.results import no_loss_of_trainer
from partc.wrappers.said import check_compiles_once, check_known, check_no_plugins, check_said
from partc.wrappers.whole_files import WholeFiles
from partc.wrong_calls import known_arguments, quoted

PADDED = {"attention_mask": 0, "token_type_ids": 0, "labels": -100}  # as collators fill up
_IN_ARGUMENTS = {
    each.name: f"It is one of TrainingArguments({each.name}=...)."
    for each in fields(transformers.TrainingArguments)
}


class Trainer(WholeFiles):
    """As transformers' Trainer, over a mesh by a plan.

    The model is compiled at the first batch, with ``compute_loss`` as it is, also where a subclass
    has its own. Batches are one data rank's, of ``per_device_train_batch_size`` rows.

    Args:
        args: as for transformers' Trainer.
        mesh: the axes of ranks, as for ``partc.compile``; none is left open.
        plan: as for ``partc.compile``.
        pad: by the name of an input the number that fills it up to the longest of all ranks. Left
            out, what the tokenizer's collators fill up with.
        options: further arguments of ``partc.compile``, such as ``{"microbatches": 4}``.
        named: as for transformers' Trainer.

    Example::

        trainer = Trainer(model, args, train_dataset=rows, mesh="dp=2,tp=2", plan="fsdp+megatron")
        trainer.train()
    """

    args: Any

    @known_arguments
    def __init__(
        self, *args: Any, mesh: MeshLike, plan: Any = "auto",
        pad: Mapping[str, float] | None = None, options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:  # fmt: skip
        check_known("Trainer", named, type(self), Trainer, _IN_ARGUMENTS)
        check_said("Trainer", mesh, plan, options)
        of = _said_by(named.get("args") or (args[1] if len(args) > 1 else None))
        _check_loss_function(named.get("compute_loss_func"))
        check_no_plugins("TrainingArguments", of, lambda name: name in ("fsdp", "deepspeed"))
        check_compiles_once("TrainingArguments", of, ("torch_compile",))
        model = args[0] if args else named.get("model")
        if model is not None:
            check_model(model, "Trainer")
        self._how: dict[str, Any] = {"mesh": mesh, "plan": plan, "options": options}
        super().__init__(*args, **named)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        number = getattr(tokenizer, "pad_token_id", None)
        known = {} if number is None else {"input_ids": number, **PADDED}
        how = self.accelerator.how
        how.pad = known if pad is None else pad
        how.inputs |= {*known}  # which a model need not have
        self.args = copy.copy(self.args)
        self.args.average_tokens_across_devices = False  # a step's loss is that of all ranks
        if self.args.train_sampling_strategy == "batch_rebalance":
            raise _rebalanced()
        if getattr(self.args, "predict_with_generate", False):
            raise _generates()
        self._check_best_model()

    def _build_accelerator_args(self, **named: Any) -> dict[str, Any]:
        self._of_accelerator: dict[str, Any] = super()._build_accelerator_args(**named)
        return dict(self._of_accelerator)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        own = {**self._how, "loss": self._compiled_loss}
        self.accelerator = Accelerator(**own, **self._of_accelerator)
        self.gather_function = self.accelerator.gather_for_metrics

    def _compiled_loss(self, model: nn.Module, **inputs: Any) -> Any:
        num_items = inputs.pop("num_items_in_batch", None)
        try:
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items)
        except ValueError as error:
            if "did not return a loss" not in str(error):
                raise
            names = str(error).partition("following keys: ")[2].partition(". ")[0]
            raise no_loss_of_trainer(type(model).__name__, names.replace(",", ", ")) from error
        if isinstance(loss, Tensor) and loss.dim():
            shape = f"a tensor of shape {[*loss.shape]}"
            raise no_loss_of_trainer(type(model).__name__, shape)
        return loss

    # training --------------------------------------------------------------------------------
    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        self.model_wrapped = self.accelerator.prepare_model(model)
        return self.model_wrapped

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The stage lies on the device, not the model."""

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """As transformers': the loss, detached; gradients are added."""
        model.train()
        inputs = dict(self._prepare_inputs(inputs))
        if num_items_in_batch is not None:
            inputs["num_items_in_batch"] = num_items_in_batch
        loss: Tensor = model(**inputs)
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = counted or self.compute_loss_func is not None
        if not scaled:
            loss = loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()

    def _get_num_items_in_batch(self, batch_samples: Any, device: torch.device) -> Any:
        """The items of all data ranks."""
        num = super()._get_num_items_in_batch(batch_samples, device)
        return self.accelerator.reduce(num, "sum") if isinstance(num, Tensor) else num

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the stage clips over all its meshes

    def get_total_train_batch_size(self, args: Any) -> int:
        pieces = self.accelerator.num_processes
        return int(self._train_batch_size * args.gradient_accumulation_steps * pieces)

    def floating_point_ops(self, inputs: Any) -> Any:
        """Those of this rank, which shares its rows with the others along tp and pp."""
        ranks, pieces = self.accelerator.state.num_processes, self.accelerator.num_processes
        return super().floating_point_ops(inputs) * pieces // ranks

    # evaluation ------------------------------------------------------------------------------
    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """As transformers'; the loss is that of all ranks' rows."""
        own = type(self).compute_loss is not transformers.Trainer.compute_loss
        if not (own or self.compute_loss_func or self.label_smoother):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        labeled = self.label_names and all(inputs.get(n) is not None for n in self.label_names)
        loss = logits = labels = None
        if labeled:
            given = dict(self._prepare_inputs(inputs))
            num_items = self._get_num_items_in_batch([inputs], self.args.device)
            if num_items is not None:
                given["num_items_in_batch"] = num_items
            loss = model.eval_loss(**given)
        if not prediction_loss_only:
            _, logits, labels = super().prediction_step(model, inputs, False, ignore_keys)
        return loss, logits, labels


def _said_by(args: Any) -> Mapping[str, Any]:
    """The values of TrainingArguments; UsageError for what are none."""
    if args is not None and not isinstance(args, transformers.TrainingArguments):
        raise UsageError(
            where="Trainer(args=...)", what=f"it is {quoted(args)}",
            why="it says how to train", do="Pass transformers.TrainingArguments(folder, ...).",
        )  # fmt: skip
    return vars(args) if args is not None else {}


def _check_loss_function(function: Any) -> None:
    """UsageError for a ``compute_loss_func`` that does not take what transformers passes."""
    if function is None:
        return
    wrong = "" if callable(function) else quoted(function)
    if not wrong:
        try:
            signature(function).bind(None, None, num_items_in_batch=None)
        except TypeError as error:
            wrong = str(error)
    if wrong:
        raise UsageError(
            where="Trainer(compute_loss_func=...)", what=f"it cannot be called: {wrong}",
            why="a Trainer calls it with outputs, labels and num_items_in_batch",
            do="Write def loss(outputs, labels, num_items_in_batch=None).",
        )  # fmt: skip


def _rebalanced() -> UsageError:
    return UsageError(
        where='TrainingArguments(train_sampling_strategy="batch_rebalance")',
        what="it deals out rows to all processes",
        why="ranks that differ along tp or pp read the same rows",
        do='Take "group_by_length" or "random".',
    )


def _generates() -> UsageError:
    return UsageError(
        where="Seq2SeqTrainingArguments(predict_with_generate=True)",
        what="this Trainer evaluates by the model's forward, and generates nothing",
        why="compute_metrics would be given the scores of a forward that reads the labels, as with "
        "transformers' own Trainer",
        do="Leave it out. To generate, load the trained weights into a copy of the model, on all "
        "ranks: copy.load_state_dict(trainer.model_wrapped.full_state_dict()), then "
        "copy.generate(...).",
    )
