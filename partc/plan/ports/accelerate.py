"""Keys of Accelerate's config, as ``accelerate config`` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partc.plan.ports.common import (
    CLIPPING,
    DATA,
    LAUNCH,
    NEVER_CHANGES,
    compiler,
    microbatches,
    offload,
    precision,
    recompute,
)  # fmt: skip
from partc.plan.ports.deepspeed import zero_stage
from partc.plan.ports.draft import Draft, Table, flag, whole

KINDS = {
    "NO": "", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "",
    "MEGATRON_LM": "ddp",
}  # fmt: skip
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
WORDS = ("fsdp", "zero2", "ddp", "hsdp", "hsdp")
FSDP, MEGATRON = "fsdp_config.fsdp_", "megatron_lm_config.megatron_lm_"
PARALLEL = "parallelism_config.parallelism_config_"
BLOCKS = "no line: partc finds the blocks, and gathers each for itself"


def before(keys: Mapping[str, Any], draft: Draft) -> None:
    """The number of ranks, which other keys divide."""
    draft.data = "ddp"
    if draft.devices is None and "num_processes" in keys:
        draft.devices = whole(keys["num_processes"])


def _kind(value: Any, draft: Draft) -> str:
    word = str(value).upper()
    if word not in KINDS:
        return draft.leave(f"distributed_type {word}", "partc compiles for CPUs and GPUs")
    draft.data = KINDS[word] or draft.data
    return f'preset = "{KINDS[word]}"' if KINDS[word] else "no line by itself"


def _strategy(value: Any, draft: Draft) -> str:
    word = str(value).upper()
    word = STRATEGIES[int(word) - 1] if word in "12345" else word
    if word not in STRATEGIES:
        raise ValueError(f"known are {', '.join(STRATEGIES)}")
    draft.data = WORDS[STRATEGIES.index(word)]
    if word == "HYBRID_SHARD_ZERO2":
        return draft.leave("HYBRID_SHARD_ZERO2", "it becomes hsdp, which gathers again (ZeRO-3)")
    return f'preset = "{draft.data}"'


def _reshard(value: Any, draft: Draft) -> str:
    if str(value).upper() in STRATEGIES:
        return _strategy(value, draft)
    if not flag(value) and draft.data == "fsdp":
        draft.data = "zero2"
    return f'preset = "{draft.data}"'


def _checkpointing(value: Any, draft: Draft) -> str:
    return recompute(value, draft) if flag(value) else "no line: partc recomputes what is cheap"


def _sequence(value: Any, draft: Draft) -> str:
    draft.tensor = "megatron-sp" if flag(value) else draft.tensor
    return f'preset = "... + {draft.tensor}"' if flag(value) else "no line: it is off"


def _tensor(value: Any, draft: Draft) -> str:
    draft.tensor = draft.tensor or "megatron"
    return draft.axis("tp", value)


def _zero1(value: Any, draft: Draft) -> str:
    draft.data = "zero1" if flag(value) else draft.data
    return f'preset = "{draft.data}"'


def _machines(value: Any, draft: Draft) -> str:
    draft.machines = whole(value)
    return "no line: torchrun --nnodes; HYBRID_SHARD has a copy on each machine"


def _other(name: str) -> Any:
    def said(value: Any, draft: Draft) -> str:
        if str(value) in ("1", "None"):
            return "no line: one rank is no axis"
        return draft.leave(name, "no preset cuts along it; pin [inputs] and [values] for it")

    return said


KEYS: Table = {
    "compute_environment": LAUNCH, "debug": NEVER_CHANGES, "distributed_type": _kind,
    "downcast_bf16": NEVER_CHANGES, "enable_cpu_affinity": LAUNCH, "gpu_ids": LAUNCH,
    "machine_rank": LAUNCH, "main_process_ip": LAUNCH, "main_process_port": LAUNCH,
    "main_training_function": LAUNCH, "num_machines": _machines,
    "num_processes": "the number of ranks that [mesh] divides", "rdzv_backend": LAUNCH,
    "same_network": LAUNCH, "use_cpu": "no line: program.module(device=...)", "tpu_env": LAUNCH,
    "tpu_use_cluster": LAUNCH, "tpu_use_sudo": LAUNCH, "mixed_precision": precision,
    "gradient_accumulation_steps": microbatches,
    "dynamo_config.dynamo_backend": compiler, "dynamo_config.*": NEVER_CHANGES,
    f"{FSDP}version": NEVER_CHANGES, f"{FSDP}sharding_strategy": _strategy,
    f"{FSDP}reshard_after_forward": _reshard, f"{FSDP}auto_wrap_policy": BLOCKS,
    f"{FSDP}transformer_layer_cls_to_wrap": BLOCKS, f"{FSDP}min_num_params": BLOCKS,
    f"{FSDP}backward_prefetch": "no line: `prefetch` is chosen by cost",
    f"{FSDP}backward_prefetch_policy": "no line: `prefetch` is chosen by cost",
    f"{FSDP}forward_prefetch": "no line: `prefetch` is chosen by cost",
    f"{FSDP}offload_params": offload, f"{FSDP}use_orig_params": NEVER_CHANGES,
    f"{FSDP}cpu_ram_efficient_loading": "no line: stage.load_full(...) reads pieces",
    f"{FSDP}sync_module_states": "no line: weights are compared at the first step",
    f"{FSDP}state_dict_type": "no line: stage.full_state_dict() or state_dict(), as you call",
    f"{FSDP}activation_checkpointing": _checkpointing,
    f"{PARALLEL}dp_replicate_size": lambda value, draft: draft.axis("dp_replicate", value),
    f"{PARALLEL}dp_shard_size": lambda value, draft: draft.axis("dp_shard", value),
    f"{PARALLEL}tp_size": _tensor, f"{PARALLEL}cp_size": _other("context parallelism"),
    f"{PARALLEL}sp_size": _other("sequence parallelism of Ulysses"),
    f"{PARALLEL}cp_comm_strategy": "no line: there is no axis cp",
    f"{MEGATRON}tp_degree": _tensor, f"{MEGATRON}sequence_parallelism": _sequence,
    f"{MEGATRON}pp_degree": lambda value, draft: draft.axis("pp", value),
    f"{MEGATRON}num_micro_batches": microbatches, f"{MEGATRON}gradient_clipping": CLIPPING,
    f"{MEGATRON}recompute_activations": _checkpointing,
    f"{MEGATRON}use_distributed_optimizer": _zero1,
    "deepspeed_config.zero_stage": zero_stage, "deepspeed_config.gradient_clipping": CLIPPING,
    "deepspeed_config.gradient_accumulation_steps": microbatches,
    "deepspeed_config.offload_optimizer_device": offload,
    "deepspeed_config.offload_param_device": offload,
    "deepspeed_config.zero3_init_flag": "no line: the model may be on the meta device",
    "deepspeed_config.zero3_save_16bit_model": "no line: stage.full_state_dict(), as you call",
    "deepspeed_config.deepspeed_config_file": "no line: read that file, with `partc plan --from`",
    "deepspeed_config.deepspeed_hostfile": LAUNCH,
    "deepspeed_config.deepspeed_multinode_launcher": LAUNCH,
    "deepspeed_config.deepspeed_exclusion_filter": LAUNCH,
    "deepspeed_config.deepspeed_inclusion_filter": LAUNCH,
    "deepspeed_config.deepspeed_moe_layer_cls_names": BLOCKS,
    "even_batches": DATA, "dispatch_batches": DATA, "split_batches": DATA,
}  # fmt: skip
