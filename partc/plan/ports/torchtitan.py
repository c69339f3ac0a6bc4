"""Keys of torchtitan's configurations in TOML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partc.plan.ports.common import (
    CHECKPOINT,
    CLIPPING,
    DATA,
    LAUNCH,
    NEVER_CHANGES,
    OPTIMIZER,
    OUTPUT,
    SCHEDULER,
    offload,
    precision,
)  # fmt: skip
from partc.plan.ports.draft import Draft, Table, flag, whole

P, T, A = "parallelism.", "training.", "activation_checkpoint."
SCHEDULES = {  # those of torch's pipelining
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved-1f1b",
    "interleavedzerobubble": "", "zbvzerobubble": "zb-v", "dualpipev": "dualpipe-v",
    "loopedbfs": "looped-bfs",
}  # fmt: skip
REST = -1  # of data_parallel_shard_degree: all ranks that are left


def before(keys: Mapping[str, Any], draft: Draft) -> None:
    """FSDP over what is left of the ranks; tensor parallelism that cuts sequences too."""
    draft.data, draft.tensor = "fsdp", "megatron-sp"


def _shard(value: Any, draft: Draft) -> str:
    if value == REST:
        return "[mesh] dp: what the other axes leave of the devices"
    draft.is_open = False
    draft.data = "ddp" if whole(value) == 1 else draft.data
    return draft.axis("dp_shard", value)


def _reshard(value: Any, draft: Draft) -> str:
    if str(value) not in ("default", "always", "never"):
        raise ValueError("it is default, always or never")
    if value == "never":
        draft.data = "zero2"
        return 'preset = "zero2"'
    return f'preset = "{draft.data}"; in a pipeline "always" and "default" are the same'


def _schedule(value: Any, draft: Draft) -> str:
    word = SCHEDULES.get(str(value).lower())
    if not word:
        return draft.leave(f"schedule {value}", "`schedule` may be a CSV file of its rows")
    return draft.set("schedule", word)


def _csv(value: Any, draft: Draft) -> str:
    return draft.set("schedule", str(value)) if value else "no line: none is named"


def _split(value: Any, draft: Draft) -> str:
    return draft.set("stages", list(value)) if value else "no line: stages are cut by cost"


def _other(name: str) -> Any:
    def said(value: Any, draft: Draft) -> str:
        if value == 1:
            return "no line: one rank is no axis"
        return draft.leave(name, "no preset cuts along it; pin [inputs] and [values] for it")

    return said


def _recompute(value: Any, draft: Draft) -> str:
    words = {"none": "none", "full": "block", "selective": "attention"}
    if str(value) not in words:
        return draft.leave(f"activation_checkpoint.mode {value}", "see `recompute`")
    return draft.set("recompute", words[str(value)])


def _compile(value: Any, draft: Draft) -> str:
    return draft.set("compile", "inductor" if flag(value) else "none")


def _loss_parallel(value: Any, draft: Draft) -> str:
    return "no line: [params] of the head says whether the vocabulary is sharded"


KEYS: Table = {
    f"{P}data_parallel_replicate_degree": lambda v, draft: draft.axis("dp_replicate", v),
    f"{P}data_parallel_shard_degree": _shard, f"{P}fsdp_reshard_after_forward": _reshard,
    f"{P}tensor_parallel_degree": lambda value, draft: draft.axis("tp", value),
    f"{P}disable_loss_parallel": _loss_parallel,
    f"{P}enable_async_tensor_parallel": "no line: `overlap_pieces` is chosen by cost",
    f"{P}pipeline_parallel_degree": lambda value, draft: draft.axis("pp", value),
    f"{P}pipeline_parallel_schedule": _schedule, f"{P}pipeline_parallel_split_points": _split,
    f"{P}module_fqns_per_model_part": "no line: `stages` names the first module of each stage",
    f"{P}pipeline_parallel_schedule_csv": _csv,
    f"{P}pipeline_parallel_microbatch_size": "no line: `microbatches` counts them",
    f"{P}pipeline_parallel_layers_per_stage": "no line: `virtual_stages`, or `stages` by name",
    f"{P}pipeline_parallel_first_stage_less_layers": "no line: stages are cut by cost",
    f"{P}pipeline_parallel_last_stage_less_layers": "no line: stages are cut by cost",
    f"{P}context_parallel_degree": _other("context parallelism"),
    f"{P}context_parallel_rotate_method": "no line: there is no axis cp",
    f"{P}expert_parallel_degree": _other("expert parallelism"),
    f"{P}expert_tensor_parallel_degree": _other("expert tensor parallelism"),
    f"{P}enable_compiled_autograd": NEVER_CHANGES,
    f"{T}local_batch_size": DATA, f"{T}global_batch_size": DATA, f"{T}batch_size": DATA,
    f"{T}seq_len": DATA, f"{T}steps": DATA, f"{T}dataset": DATA, f"{T}dataset_path": DATA,
    f"{T}max_norm": CLIPPING, f"{T}seed": "no line: stage.seed(...)",
    f"{T}deterministic": NEVER_CHANGES, f"{T}gc_freq": NEVER_CHANGES, f"{T}gc_debug": NEVER_CHANGES,
    f"{T}enable_cpu_offload": offload,
    f"{T}dtype": "no line: the model's own dtypes count", f"{T}mixed_precision_param": precision,
    f"{T}mixed_precision_reduce": "no line: [compress] says in which dtype gradients are sent",
    f"{T}compile": _compile, "compile.enable": _compile, "compile.*": NEVER_CHANGES,
    f"{A}mode": _recompute, f"{A}*": "no line: `recompute` has fewer kinds",
    "optimizer.*": OPTIMIZER, "lr_scheduler.*": SCHEDULER, "checkpoint.*": CHECKPOINT,
    "metrics.*": OUTPUT, "profiling.*": OUTPUT, "comm.*": LAUNCH, "memory_estimation.*": OUTPUT,
    "job.*": OUTPUT, "model.*": "no line: the model that you compile", "experimental.*": DATA,
    "fault_tolerance.*": LAUNCH, "validation.*": DATA, "debug.*": NEVER_CHANGES,
    "float8.*": "no line: cast the model before it is compiled",
    "quantize.*": "no line: cast the model before it is compiled",
}  # fmt: skip
