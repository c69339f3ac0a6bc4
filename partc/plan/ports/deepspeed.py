"""Keys of DeepSpeed's config, ``ds_config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partc.plan.ports.common import (
    ALWAYS,
    CHECKPOINT,
    CLIPPING,
    DATA,
    NEVER_CHANGES,
    OPTIMIZER,
    OUTPUT,
    SCHEDULER,
    microbatches,
    offload,
)  # fmt: skip
from partc.plan.ports.draft import Draft, Table, flag, megabytes, whole

STAGES = ("ddp", "zero1", "zero2", "fsdp")
ZERO = "zero_optimization."
BY_BLOCK = "no line: partc gathers block by block"


def before(keys: Mapping[str, Any], draft: Draft) -> None:
    """Data parallelism without ZeRO, unless a key says more."""
    draft.data = "ddp"


def zero_stage(value: Any, draft: Draft) -> str:
    """A stage of ZeRO as a preset."""
    stage = whole(value, least=0)
    if stage >= len(STAGES):
        raise ValueError("ZeRO has the stages 0 to 3")
    draft.data = STAGES[stage]
    return f'preset = "{draft.data}"'


def _inner(value: Any, draft: Draft) -> str:
    """ZeRO++: parameters sharded over a part of the ranks."""
    if whole(value) == 1:
        return "no line: all ranks share the parameters"
    return draft.leave("zero_hpz_partition_size", "hsdp also keeps the optimizer in each part")


def _quantized(value: Any, draft: Draft) -> str:
    if not flag(value):
        return "no line: nothing is quantized"
    return draft.leave("quantized transfers", "it changes the numbers: say so in [compress]")


def _half(name: str) -> Any:
    def said(value: Any, draft: Draft) -> str:
        if not flag(value):
            return "no line: it is off"
        return draft.leave(name, "compute the loss inside of torch.autocast; partc records casts")

    return said


def _buckets(value: Any, draft: Draft) -> str:
    return f"{draft.set('bucket_mb', megabytes(value))}, of float32"


def _tensor(value: Any, draft: Draft) -> str:
    draft.tensor = "megatron"
    return draft.axis("tp", value)


def _sequence(value: Any, draft: Draft) -> str:
    if whole(value) == 1:
        return "no line: one rank is no axis"
    return draft.leave("sequence_parallel_size", "no preset cuts along it; pin [inputs] for it")


KEYS: Table = {
    "train_batch_size": DATA, "train_micro_batch_size_per_gpu": DATA,
    "gradient_accumulation_steps": microbatches, "gradient_clipping": CLIPPING,
    "optimizer.*": OPTIMIZER, "scheduler.*": SCHEDULER, "prescale_gradients": NEVER_CHANGES,
    "gradient_predivide_factor": NEVER_CHANGES, "sparse_gradients": NEVER_CHANGES,
    "communication_data_type": "no line: [compress] says in which dtype gradients are sent",
    "data_types.*": "no line: gradients add up in the parameters' dtype",
    f"{ZERO}stage": zero_stage, f"{ZERO}overlap_comm": ALWAYS,
    f"{ZERO}reduce_bucket_size": _buckets, f"{ZERO}allgather_bucket_size": _buckets,
    f"{ZERO}allgather_partitions": NEVER_CHANGES, f"{ZERO}reduce_scatter": NEVER_CHANGES,
    f"{ZERO}contiguous_gradients": NEVER_CHANGES, f"{ZERO}round_robin_gradients": NEVER_CHANGES,
    f"{ZERO}sub_group_size": NEVER_CHANGES, f"{ZERO}ignore_unused_parameters": NEVER_CHANGES,
    f"{ZERO}load_from_fp32_weights": CHECKPOINT, f"{ZERO}elastic_checkpoint": CHECKPOINT,
    f"{ZERO}stage3_prefetch_bucket_size": BY_BLOCK,
    f"{ZERO}stage3_param_persistence_threshold": BY_BLOCK,
    f"{ZERO}stage3_max_live_parameters": BY_BLOCK, f"{ZERO}stage3_max_reuse_distance": BY_BLOCK,
    f"{ZERO}stage3_gather_16bit_weights_on_model_save": CHECKPOINT,
    f"{ZERO}stage3_gather_fp16_weights_on_model_save": CHECKPOINT,
    f"{ZERO}zero_hpz_partition_size": _inner, f"{ZERO}zero_quantized_weights": _quantized,
    f"{ZERO}zero_quantized_gradients": _quantized, f"{ZERO}cpu_offload": offload,
    f"{ZERO}offload_param.device": offload, f"{ZERO}offload_optimizer.device": offload,
    f"{ZERO}offload_param.*": "no line: nothing is offloaded",
    f"{ZERO}offload_optimizer.*": "no line: nothing is offloaded",
    "bf16.enabled": _half("bf16"), "fp16.enabled": _half("fp16"), "amp.enabled": _half("amp"),
    "fp16.*": "no line: stage.step(..., scale=...) and torch's GradScaler", "bf16.*": NEVER_CHANGES,
    "amp.*": NEVER_CHANGES,
    "tensor_parallel.autotp_size": _tensor, "sequence_parallel_size": _sequence,
    "activation_checkpointing.*": 'no line: `recompute = "block"`, if the model calls it',
    "steps_per_print": OUTPUT, "wall_clock_breakdown": OUTPUT, "dump_state": OUTPUT,
    "memory_breakdown": OUTPUT, "comms_logger.*": OUTPUT, "flops_profiler.*": OUTPUT,
    "tensorboard.*": OUTPUT, "wandb.*": OUTPUT, "csv_monitor.*": OUTPUT, "checkpoint.*": CHECKPOINT,
    "zero_allow_untested_optimizer": NEVER_CHANGES, "zero_force_ds_cpu_optimizer": NEVER_CHANGES,
    "dataloader_drop_last": DATA, "data_efficiency.*": DATA,
}  # fmt: skip
