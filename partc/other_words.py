"""Words of other libraries, and entries of plans, that somebody takes for an argument: where partc
is told what they say.
"""

from __future__ import annotations

# Arguments that calls of other libraries have, and where partc is told what they say.
_TOLD = {
    "device": "program.module(device=...) says where ranks compute",
    "dtype": "cast the model before, or compute its loss inside of torch.autocast",
    "rank": "torchrun says which rank a process is",
    "world_size": 'the mesh says how many ranks there are, mesh="dp=4"',
    "batch_size": "the example inputs say how many rows a step takes",
    "step": "a checkpoint is named by its folder, checkpoints/step-00000100",
    "optimizer": "an optimizer is made over stage.parameters(), and steps behind stage.step(...)",
    "scheduler": "a scheduler is made over the optimizer, and steps behind optimizer.step()",
    "lr": "it is an argument of the optimizer, which is made over stage.parameters()",
    "loss_scale": "each step is told the factor of its gradients, stage.step(..., scale=...)",
    "seed": "stage.seed(1234) decides on the random numbers of the steps that follow",
    "precision": "compute the loss inside of torch.autocast, or cast the model before",
    "max_grad_norm": "gradients are clipped behind a step, stage.clip_grad_norm_(1.0)",
    "local_batch": 'batch="local" says that a step takes this rank\'s own rows',
    "gradient_accumulation_steps": "microbatches=4 computes a batch in four pieces, one after the "
    "other; gradients add up over steps until optimizer.zero_grad()",
    "checkpointing": 'recompute="block" computes activations again in the backward',
    "strategy": 'plan="fsdp" says how tensors are sharded, and mesh="dp=4" over how many ranks',
}
_ALSO = {  # other words for these
    "amp": "precision", "mixed_precision": "precision", "autocast": "precision",
    "bf16": "precision", "fp16": "precision", "precision_dtype": "precision",
    "grad_clip": "max_grad_norm", "clip_grad": "max_grad_norm", "clip_grad_norm": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm", "gradient_checkpointing": "checkpointing",
    "activation_checkpointing": "checkpointing", "checkpoint_activations": "checkpointing",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "gradient_accumulation": "gradient_accumulation_steps",
    "grad_accumulation": "gradient_accumulation_steps",
    "grad_accum_steps": "gradient_accumulation_steps",
    "num_microbatches": "gradient_accumulation_steps",
    "micro_batches": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "grad_accum": "gradient_accumulation_steps",
    "sharding": "strategy", "sharding_strategy": "strategy", "parallelism": "strategy",
    "lr_scheduler": "scheduler", "learning_rate": "lr", "grad_scale": "loss_scale",
    "num_processes": "world_size", "num_gpus": "world_size", "num_ranks": "world_size",
    "devices": "world_size", "gpus": "world_size", "local": "local_batch",
}  # fmt: skip
_OF_REPORTS = "what it gives compares with one: partc.verify(...).check(tolerance=...)"
_INSTEAD = {  # the same, where one call has another word for it
    ("load", "mesh"): "a program is that of one mesh, and partc.compile makes one for another",
    ("load", "plan"): "a program is that of one plan, and partc.compile makes one for another",
    (
        "plan",
        "gradient_accumulation_steps",
    ): "microbatches = 4 computes a batch in four pieces, one "
    "after the other; gradients add up over steps until optimizer.zero_grad()",
    ("plan", "checkpointing"): 'recompute = "block" computes activations again in the backward',
    ("plan", "strategy"): 'preset = "fsdp" says how tensors are sharded, and [mesh] dp = 4 over '
    "how many ranks",
    ("plan", "world_size"): "[mesh] dp = 4 says how many ranks there are, and along which axes",
    ("plan", "batch_size"): "the example inputs of the compile say how many rows a step takes",
    ("plan", "local_batch"): 'batch = "local" says that a step takes each rank\'s own rows',
    **{
        ("Checkpoints", word): "keep_latest_k=3 keeps the last three"
        for word in ("keep", "keep_last", "max_to_keep", "save_total_limit", "total_limit")
    },
    **{
        ("Checkpoints", word): "interval=100 says after how many steps one is saved"
        for word in ("every", "save_every", "every_n_steps", "save_steps", "frequency", "freq")
    },
    ("verify", "tol"): _OF_REPORTS,
    ("verify", "tolerance"): _OF_REPORTS,
    ("sampler", "batch_size"): "rows_per_step=... counts the rows of all data ranks together, and "
    "left out it is as many as were compiled",
}
_OF_PLANS = (  # entries of a plan that are no arguments of compile
    "allow", "backend", "bucket_mb", "early_sums", "gather", "grad_parts",
    "hierarchical", "hooks", "messages", "overlap_pieces", "params", "preset", "profiler_ranges",
    "reduce", "scatter", "sends", "stages", "values",
)  # fmt: skip
_TABLES_OF_PLANS = {  # to be allowed
    "compress": 'wire = "int8"', "local_steps": "period = 16", "stale": "steps = 1",
    "uneven": "microbatches = [11, 5]", "servers": "count = 1",
    "compress_weights": 'wire = "int8"',
}  # fmt: skip
_READ = {"Mesh": 'Mesh.of("dp=2,tp=4") reads axes from a text'}


def told_elsewhere(name: str, unknown: str) -> str:
    """Where partc is told what an argument says that a call has not; "" if nowhere.

    Other words for it are those of training: ``Mesh.load(gpus=8)`` means something else.
    """
    if name == "compile" and unknown in _OF_PLANS:
        return f"it is an entry of a plan, plan=partc.Plan(..., {unknown}=...)"
    if name == "compile" and unknown in _TABLES_OF_PLANS:
        entry = _TABLES_OF_PLANS[unknown]
        return (
            f'it is a table of a plan, which has to be allowed, plan=\'preset = "ddp"\\n'
            f'allow = ["{unknown}"]\\n[{unknown}]\\n{entry}\''
        )
    word = unknown if "." in name else _ALSO.get(unknown, unknown)
    return _INSTEAD.get((name, word)) or _TOLD.get(word) or _READ.get(name, "")
